"""One entry of a comparison, and the process that it lives in while the comparison lasts."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench import environments

KEEP_MEMORY = {"MALLOC_TRIM_THRESHOLD_": str(2**31 - 1), "MALLOC_MMAP_THRESHOLD_": str(2**31 - 1)}
"""What `sparsedp.environment.keep_memory` asks of glibc, asked for everybody: workers that are not Python's torch included."""


@dataclass(frozen=True, kw_only=True)
class Contender:
    """What runs: a worker module, in an environment, with a specification that the module understands."""

    name: str
    worker: str
    spec: dict[str, Any]
    environment: str = "own"


class Failed(Exception):
    """A worker ended, or never began; the message is its last word."""


@dataclass
class Worker:
    """A contender's process. It works only between a question and its answer."""

    contender: Contender
    threads: int
    errors: Path
    """What it writes to standard error."""
    ready: dict[str, Any] = field(default_factory=dict)

    def start(self) -> None:
        """Start it and wait until it has warmed up."""
        try:
            program = environments.python(self.contender.environment)
        except environments.NoEnvironment as error:
            raise Failed(str(error)) from error
        command = [str(program), "-m", "bench.workers.serve", self.contender.worker, json.dumps(self.contender.spec)]
        with self.errors.open("w") as errors:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, cwd=environments.ROOT,
                env=surroundings(self.threads),
            )  # fmt: skip
        self.ready = self._answer()

    def step(self) -> dict[str, Any]:
        """One step; what the worker says about it."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write("step\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise Failed(self._last_word()) from error
        return self._answer()

    def close(self) -> None:
        """End the process."""
        if not hasattr(self, "_process"):
            return
        self._process.kill()
        self._process.communicate()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise Failed(self._last_word())
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _last_word(self) -> str:
        code = self._process.wait()
        lines = [line.strip() for line in self.errors.read_text(errors="replace").splitlines() if line.strip()]
        return f"ended with {code}: {lines[-1][:200] if lines else 'no word'}"


def surroundings(threads: int) -> dict[str, str]:
    """The environment variables of every worker: the same threads, and memory that is kept."""
    xla = f"--xla_cpu_multi_thread_eigen={'true' if threads > 1 else 'false'} intra_op_parallelism_threads={threads}"
    places = [str(environments.ROOT / "src"), str(environments.ROOT), os.environ.get("PYTHONPATH")]
    own = {
        "PYTHONPATH": os.pathsep.join(filter(None, places)), "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads), "NPROC": str(threads), "XLA_FLAGS": xla, "PYTHONWARNINGS": "ignore",
    }  # fmt: skip
    return {**os.environ, **KEEP_MEMORY, **own}
