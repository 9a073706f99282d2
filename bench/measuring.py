"""A part measured and written down: machine, versions, sources, every step of every contender."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import subprocess
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from bench.contender import Contender
from bench.environments import ROOT
from bench.parts import Part, contenders, plain
from bench.rounds import Result, Say, fastest, play

TRIALS = 3
"""Rounds in which the layouts of plain SGD compete before the comparison."""


def measure(part: Part, threads: int, say: Say) -> dict[str, Any]:
    """Choose plain SGD's layout, then let all run in alternation."""
    began, load = time.time(), os.getloadavg()[0]
    tried, limit = _limit(part, threads, say)
    results = play([*limit, *contenders(part)], part.rounds, threads, say)
    return {
        "part": plain_values(part), "threads": threads, "machine": machine(), "sources": sources(), "began": began,
        "seconds": time.time() - began, "load": [load, os.getloadavg()[0]], "layouts": [r.to_json() for r in tried],
        "results": [r.to_json() for r in results],
    }  # fmt: skip


def _limit(part: Part, threads: int, say: Say) -> tuple[list[Result], list[Contender]]:
    """Plain SGD at its fastest: what was tried, and the winner as a contender."""
    candidates = plain(part)
    if len(candidates) < 2:
        return [], [replace(c, name="plain SGD") for c in candidates]
    tried = play(candidates, TRIALS, threads, say)
    best = fastest(tried)
    return tried, [replace(c, name="plain SGD") for c in candidates if best is not None and c.name == best.name]


def plain_values(part: Part) -> dict[str, Any]:
    """The part as JSON holds it."""
    values: dict[str, Any] = json.loads(json.dumps(asdict(part)))
    return values


def load(file: Path) -> dict[str, Any] | None:
    """What was measured before, if anything."""
    return json.loads(file.read_text()) if file.exists() else None


def save(file: Path, measured: dict[str, Any]) -> None:
    """Whole or not at all."""
    file.parent.mkdir(parents=True, exist_ok=True)
    beside = file.with_suffix(".part")
    beside.write_text(json.dumps(measured, indent=1) + "\n")
    beside.replace(file)


def is_done(measured: dict[str, Any] | None, part: Part, threads: int) -> bool:
    """Whether a part need not be measured again: the same question was asked, with as many threads."""
    return measured is not None and measured["part"] == plain_values(part) and measured["threads"] == threads


def machine() -> dict[str, Any]:
    """What the numbers were measured on."""
    names = [line.split(":")[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    memory = [int(line.split()[1]) // 2**20 for line in _lines("/proc/meminfo") if line.startswith("MemTotal")]
    return {
        "processor": names[0] if names else platform.processor() or platform.machine(), "cores": os.cpu_count(),
        "memory_gib": memory[0] if memory else None, "system": platform.system(), "libc": "-".join(platform.libc_ver()),
        "gpu": _gpu(),
    }  # fmt: skip


def _gpu() -> str | None:
    """Its name, if there is one."""
    if shutil.which("nvidia-smi") is None:
        return None
    done = subprocess.run(
        ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"], capture_output=True, text=True, check=False
    )
    return done.stdout.strip().split("\n")[0] or None


def sources() -> str:
    """A checksum of the code that was measured."""
    files = sorted([*(ROOT / "src" / "sparsedp").rglob("*.py"), *(ROOT / "bench" / "workers").glob("*.py")])
    return hashlib.sha256(b"\0".join(f.read_bytes() for f in files)).hexdigest()[:16]


def _lines(path: str) -> Sequence[str]:
    file = Path(path)
    return file.read_text().splitlines() if file.exists() else []
