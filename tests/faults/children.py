"""A training run in a forked process that tells its parent, over a pipe, what it is doing; and how it ended."""

from __future__ import annotations

import hashlib
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparsedp import disk
from sparsedp.dp import mechanism, noise
from sparsedp.errors import UsageError

Work = Callable[[], Any]


@dataclass(frozen=True)
class Noised:
    """One call of the noise function, by digests: under which key and for which step, and what the sum was."""

    key: str
    purpose: str
    step: int
    total: str

    @property
    def place(self) -> tuple[str, str, int]:
        return self.key, self.purpose, self.step


@dataclass(frozen=True)
class Ended:
    """How a child ended: "done" (with what the work answered, if it did), "said" (one sentence), "raised" (anything else, with its
    traceback) or "killed"."""

    how: str
    text: str
    noised: tuple[Noised, ...]
    inside_checkpoint: bool
    """It died while a checkpoint was being written."""


class Child:
    """One forked process that does `work`; the pipe holds at most 64 KiB, which is more than a run has to tell."""

    def __init__(self, work: Work) -> None:
        self._read, write = os.pipe()
        self.process = os.fork()
        if self.process == 0:
            os.close(self._read)
            _work(work, write)
        os.close(write)
        self._heard = b""

    def wait_for(self, word: bytes, times: int = 1, seconds: float = 60.0) -> bool:
        """Whether the child said the word so many times before it ended."""
        until = time.monotonic() + seconds
        while self._heard.count(word) < times and time.monotonic() < until:
            if select.select([self._read], [], [], 0.5)[0]:
                more = os.read(self._read, 65536)
                if not more:
                    return False
                self._heard += more
        return self._heard.count(word) >= times

    def kill(self) -> None:
        os.kill(self.process, signal.SIGKILL)

    def ended(self) -> Ended:
        """Wait for its end."""
        while more := os.read(self._read, 65536):
            self._heard += more
        os.close(self._read)
        status = os.waitpid(self.process, 0)[1]
        return _understood(self._heard.decode(), status)


def run(work: Work) -> Ended:
    """Do it in a child, to whatever end."""
    return Child(work).ended()


def _work(work: Work, pipe: int) -> None:
    code = 1
    try:
        sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115, PTH123 - open until the process ends
        _overheard(pipe)
        try:
            answer = work()
            _say(pipe, f"done {answer}" if isinstance(answer, int | str) else "done")
        except UsageError as error:
            _say(pipe, f"said {error!s}")
        code = 0
    except BaseException:  # noqa: BLE001 - told to the parent, which judges it
        _say(pipe, f"raised {traceback.format_exc()[-3500:]}")
    finally:
        os._exit(code)


def _say(pipe: int, text: str) -> None:
    os.write(pipe, text.replace("\n", "\r").encode()[:4000] + b"\n")


def _overheard(pipe: int) -> None:
    """Tell the parent of every sum that is noised, before it is, and of the begin and end of every checkpoint's write."""
    replace = disk._replace

    def add_noise(total: Any, noise_multiplier: float, masks: Any, key: Any, purpose: str, step: int) -> Any:
        digest = hashlib.sha256()
        for name, tensor in sorted(total.tensors.items()):
            digest.update(name.encode() + tensor.detach().cpu().contiguous().numpy().tobytes())
        mark = hashlib.sha256(key.secret).hexdigest()[:12]
        _say(pipe, f"noise {mark} {purpose} {step} {digest.hexdigest()[:16]}")
        return noise.add_noise(total, noise_multiplier, masks, key, purpose, step)

    def watched(path: Path, content: bytes, mode: int) -> None:
        if path.suffix != ".state":
            return replace(path, content, mode)
        _say(pipe, "checkpoint begins")
        replace(path, content, mode)
        return _say(pipe, "checkpoint ends")

    mechanism.add_noise = add_noise  # type: ignore[attr-defined]
    disk._replace = watched


def _understood(heard: str, status: int) -> Ended:
    lines = heard.split("\n")
    noised = tuple(
        Noised(key, purpose, int(step), total)
        for key, purpose, step, total in (line.split()[1:] for line in lines if line.startswith("noise "))
    )
    inside = heard.count("checkpoint begins") > heard.count("checkpoint ends")
    for how in ("done", "said", "raised"):
        for line in lines:
            if line == how or line.startswith(f"{how} "):
                return Ended(how, line[len(how) + 1 :].replace("\r", "\n"), noised, inside)
    word = f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else f"exit code {os.WEXITSTATUS(status)}"
    return Ended("killed" if os.WIFSIGNALED(status) else "raised", word, noised, inside)
