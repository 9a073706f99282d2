"""Decoding many images, here or in worker processes that a bad image cannot take the run down with.

The workers are plain children fed through pipes: they end when this process does, however it ends; they share no memory
and no threads with it; and a user's script is never imported a second time.
"""

from __future__ import annotations

import contextlib
import json
import queue
import subprocess
import sys
import weakref
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path

import numpy as np

from sparsedp.data import decoding
from sparsedp.data.decoding import Pixels, Undecodable, Unreadable
from sparsedp.errors import UsageError, missing_extra

Encoded = str | bytes  # a path, or an image file's content
CRASHES = 2  # how often a file may take its worker with it


class Decoder:
    """Decodes to one channel count and size. `workers` processes share the work; 0 decodes in this one."""

    def __init__(self, channels: int, size: int, workers: int = 0) -> None:
        try:
            import PIL.Image  # noqa: F401
        except ImportError as error:
            raise missing_extra("pillow", "images", "reading image files") from error
        self.channels, self.size, self.workers = channels, size, workers
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        self._threads: ThreadPoolExecutor | None = None

    def decode(self, encoded: Iterable[Encoded]) -> Iterator[Pixels | Undecodable]:
        """The images in their order, each decoded or the reason why not: `Unreadable` where that is not the image's fault."""
        if self.workers == 0:
            yield from map(self._here, encoded)
            return
        threads, waiting = self._started(), iter(encoded)
        running = [threads.submit(self._there, one) for one in islice(waiting, 4 * self.workers)]
        while running:
            yield running.pop(0).result()
            running += [threads.submit(self._there, one) for one in islice(waiting, 1)]

    def _here(self, encoded: Encoded) -> Pixels | Undecodable:
        try:
            decode = decoding.decode_file if isinstance(encoded, str) else decoding.decode_image
            return decode(encoded, self.channels, self.size)  # type: ignore[operator]
        except Undecodable as error:
            return error

    def _there(self, encoded: Encoded) -> Pixels | Undecodable:
        worker = self._idle.get()
        try:
            for _ in range(CRASHES):
                if worker.is_dead:  # somebody killed it while it had nothing to do
                    worker.stop()
                    worker = _Worker()
                try:
                    return worker.decode(encoded, self.channels, self.size)
                except (OSError, EOFError, ValueError):  # ValueError: not an answer, or a pipe closed before
                    worker.stop()
            return Unreadable("the decoder crashed on it")
        finally:
            self._idle.put(worker)

    def _started(self) -> ThreadPoolExecutor:
        if self._threads is None:
            for _ in range(self.workers):
                self._idle.put(_Worker())
            self._threads = ThreadPoolExecutor(self.workers)
            weakref.finalize(self, _stop_all, self._threads, self._idle, self.workers)
        return self._threads


class _Worker:
    """One child process, one request at a time."""

    def __init__(self) -> None:
        command = [sys.executable, "-P", str(Path(decoding.__file__))]
        try:
            self._child = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
            )
        except OSError as error:
            raise UsageError(
                f"A process that decodes images cannot be started ({error.strerror}); free memory, allow more processes, or set "
                "runtime.workers to 0."
            ) from error

    def decode(self, encoded: Encoded, channels: int, size: int) -> Pixels | Undecodable:
        request: dict[str, object] = {"channels": channels, "size": size}
        request |= {"path": encoded} if isinstance(encoded, str) else {"bytes": len(encoded)}
        requests, answers = self._child.stdin, self._child.stdout
        assert requests is not None and answers is not None
        requests.write(json.dumps(request).encode() + b"\n" + (encoded if isinstance(encoded, bytes) else b""))
        requests.flush()
        line = answers.readline()
        if not line.endswith(b"\n"):
            raise EOFError
        head = json.loads(line)
        if "rule" in head:
            return (Unreadable if head["passing"] else Undecodable)(head["rule"])
        kind = np.uint16 if head["bits"] == 16 else np.uint8
        body = answers.read(channels * size * size * np.dtype(kind).itemsize)
        if len(body) < channels * size * size * np.dtype(kind).itemsize:
            raise EOFError
        return np.frombuffer(body, kind).reshape(channels, size, size)

    @property
    def is_dead(self) -> bool:
        return self._child.poll() is not None

    def stop(self) -> None:
        self._child.kill()
        self._child.wait()
        for pipe in (self._child.stdin, self._child.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):  # bytes that a dead worker never took
                pipe.close()


def _stop_all(threads: ThreadPoolExecutor, idle: queue.SimpleQueue[_Worker], count: int) -> None:
    threads.shutdown()
    for _ in range(count):
        idle.get().stop()
