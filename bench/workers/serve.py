"""A worker: one contender in a process of its own, which takes a step whenever the driver says so.

    python -m bench.workers.serve MODULE SPEC

MODULE has `load(spec) -> data` and `build(spec, data) -> step`, where `step() -> Took`. Lines of JSON go out on what was standard
output; whatever a library prints goes to standard error. Only the standard library is used here: each worker brings its own.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, TextIO

PACKAGES = ("torch", "numpy", "opacus", "jax", "jaxlib", "jax-privacy", "optax", "sparsedp")


@dataclass(frozen=True)
class Took:
    """One step: how many rows it worked on, and if asked for the seconds of its phases."""

    rows: int
    phases: dict[str, float] = field(default_factory=dict)


def main(module: str, spec: dict[str, Any]) -> None:
    """Build, report, and obey until standard input ends."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    kind = importlib.import_module(f"bench.workers.{module}")
    data = kind.load(spec)
    before = resident()
    began = time.perf_counter()
    step = kind.build(spec, data)
    for _ in range(spec.get("warm_up", 2)):
        step()
    forget_peak()
    device_memory = getattr(kind, "device_memory", lambda spec: None)
    tell(out, {"ready": time.perf_counter() - began, "versions": versions(), "notes": getattr(step, "notes", {})})
    for _ in sys.stdin:
        wall, busy = time.perf_counter(), time.process_time()
        took = step()
        wall, busy = time.perf_counter() - wall, time.process_time() - busy
        on_device = device_memory(spec)
        memory = peak() - before if on_device is None else on_device
        tell(out, {"seconds": wall, "processor": busy, "rows": took.rows, "phases": took.phases, "memory": memory})


def tell(out: TextIO, message: dict[str, Any]) -> None:
    """One line of JSON."""
    out.write(json.dumps(message) + "\n")


def versions() -> dict[str, str]:
    """Of those packages that are there."""
    found = {"python": sys.version.split()[0]}
    for name in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def resident() -> int:
    """Bytes of this process in memory now; the peak so far where the system does not say."""
    return _status("VmRSS") or _peak_ever()


def peak() -> int:
    """The most bytes that were in memory since `forget_peak`, or ever where the system cannot forget."""
    return _status("VmHWM") or _peak_ever()


def forget_peak() -> None:
    """What planning and compiling took is not counted; what they left behind in the process is."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def _status(name: str) -> int | None:
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(name + ":"):
                return int(line.split()[1]) * 1024
    return None


def _peak_ever() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


if __name__ == "__main__":
    # Run as a script, this file would be a second module beside the one that the workers import.
    from bench.workers import serve

    serve.main(sys.argv[1], json.loads(sys.argv[2]))
