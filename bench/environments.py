"""Environments of the peers' own, made when first needed, with fixed versions."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
HOME = ROOT / ".bench"
REQUIREMENTS = Path(__file__).parent / "requirements"


class NoEnvironment(Exception):
    """An environment could not be made; the message says why in a line."""


def python(name: str) -> Path:
    """The interpreter of an environment: this one's for `own`, else of one made from requirements/NAME.txt."""
    if name == "own":
        return Path(sys.executable)
    wanted = (REQUIREMENTS / f"{name}.txt").read_text()
    folder = HOME / name
    made = folder / "made-from.txt"
    if not (made.exists() and made.read_text() == wanted):
        _make(folder, REQUIREMENTS / f"{name}.txt")
        made.write_text(wanted)
    return folder / "bin" / "python"


def _make(folder: Path, requirements: Path) -> None:
    for command in (
        [sys.executable, "-m", "venv", "--clear", str(folder)],
        [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--requirement", str(requirements)],
    ):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            reasons = [line for line in done.stderr.splitlines() if "ERROR" in line] or ["no reason given"]
            raise NoEnvironment(f"{' '.join(command[1:4])} failed: {reasons[-1].strip()[:200]}")
