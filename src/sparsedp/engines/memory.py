"""How many rows fit: what a row needs, and what is free."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

MOST_ROWS = {"cpu": 64}
"""Beyond this, more rows at once gain no speed on a CPU: its caches are full long before."""

MOST_ROWS_ELSEWHERE = 512
SHARE = 0.5
"""How much of the free memory a pass may plan to use."""

MORE = 1.2
"""How many times the memory of ordinary training on that many rows a pass may plan to use."""

_CGROUPS = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),
)


class Saved(torch.autograd.graph.saved_tensors_hooks):
    """Counts the bytes that autograd keeps for the backward pass, each storage once."""

    def __init__(self) -> None:
        self._seen: set[int] = set()
        self.bytes = 0
        super().__init__(self._pack, lambda t: t)

    def __enter__(self) -> Self:
        super().__enter__()
        return self

    def _pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._seen:
            self._seen.add(storage.data_ptr())
            self.bytes += storage.nbytes()
        return tensor


def micro_batch(activations: float, more: float, rows_per_unit: int, device: torch.device, free: int | None = None) -> int:
    """Rows at a time: as many as are fast, and fit into half of what is free, in whole units, one at least.

    `activations` are the bytes per row that ordinary training keeps as well, `more` what clipping keeps besides.
    """
    most = most_rows(device)
    each = max(activations + more, 1.0)
    fit = int(min(SHARE * (free_bytes(device) if free is None else free), MORE * most * max(activations, 1.0)) / each)
    return max(min(most, fit) // rows_per_unit, 1) * rows_per_unit


def most_rows(device: torch.device) -> int:
    """How many rows at once a device gains from."""
    return MOST_ROWS.get(device.type, MOST_ROWS_ELSEWHERE)


def free_bytes(device: torch.device) -> int:
    """Memory that can still be had on a device, within the limits of the container."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    known = [_available(), *(_left_in_cgroup(Path("/sys/fs/cgroup"), *names) for names in _CGROUPS)]
    return min((b for b in known if b is not None), default=2**31)


def _available(file: Path = Path("/proc/meminfo")) -> int | None:
    with contextlib.suppress(OSError, ValueError):
        for line in file.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return None


def _left_in_cgroup(root: Path, limit: str, used: str, reclaimable: str) -> int | None:
    with contextlib.suppress(OSError, ValueError):  # "max" is not a number: no limit
        stat = (root / limit).with_name("memory.stat").read_text().split()
        cache = int(stat[stat.index(reclaimable) + 1]) if reclaimable in stat else 0
        return max(int((root / limit).read_text()) - int((root / used).read_text()) + cache, 0)
    return None
