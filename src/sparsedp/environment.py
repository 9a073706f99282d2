"""The machine that a run is on: which device, which versions, and what must be equal for a step to repeat to the bit."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import platform
import secrets
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from sparsedp.errors import UsageError

_PROCESS = secrets.token_hex(8)


def pick_device(name: str) -> torch.device:
    """The device of that name; `auto` is the GPU if there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UsageError(
            f"device is {name!r}, but this machine has no such device ({str(error).splitlines()[0]}); use auto."
        ) from error
    return device


def versions() -> dict[str, str]:
    """Versions of what computes, for the summary and the statement."""
    names = ("sparsedp", "torch", "numpy", "dp-accounting", "safetensors")
    return {"python": platform.python_version(), **{name: metadata.version(name) for name in names}}


@functools.cache
def source() -> str:
    """SHA-256 of this package's own modules, names and contents: which code it was, whatever its version is called."""
    digest, here = hashlib.sha256(), Path(__file__).parent
    for path in sorted(here.rglob("*.py")):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(here).as_posix()}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


def fingerprint(device: torch.device) -> dict[str, Any]:
    """What a step's bits depend on beside its inputs. A step replayed where this differs takes fresh noise and is charged.

    A GPU adds in an order that it does not keep, so that no step is the same to the bit in another process.
    """
    return {
        "torch": torch.__version__,
        "numpy": metadata.version("numpy"),
        "sparsedp": source(),
        "machine": platform.machine(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        **({} if device.type == "cpu" else {"process": _PROCESS}),
    }


def keep_memory() -> None:
    """Ask glibc to keep freed memory instead of returning it: fresh pages cost as much as arithmetic (docs/performance.md).

    Elsewhere than on glibc nothing happens.
    """
    trim_threshold, mmap_threshold, most = -1, -3, 2**31 - 1
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if platform.system() == "Linux" else None
    if mallopt is not None:
        mallopt(trim_threshold, most)
        mallopt(mmap_threshold, most)
