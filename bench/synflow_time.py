"""How long SynFlow's 100 rounds take: wall clock, processor time, and how busy the machine was meanwhile.

    python bench/synflow_time.py wrn_28_10 2

Model name and number of threads. A wall clock means something on an idle machine only (load about the number of threads).
"""

from __future__ import annotations

import os
import sys
import time

import torch

from sparsedp import keys, models
from sparsedp.config import Model, Sparsity
from sparsedp.pruning import prune

SHAPES = {"nf_resnet50": (3, 224, 224)}


def main(name: str, threads: int) -> None:
    """One pruning at rate 0.7."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    shape = SHAPES.get(name, (3, 32, 32))
    model = models.build(Model(name=name), shape, 10)
    wall, busy = time.perf_counter(), time.process_time()
    pruned = prune(model, Sparsity(prune="synflow", prune_rate=0.7), keys.fresh(), input_shape=shape)
    wall, busy = time.perf_counter() - wall, time.process_time() - busy
    kept = sum(int(mask.sum()) for mask in pruned.masks.values())
    print(f"{name}: {kept:,} kept, wall {wall:.1f} s, processor {busy:.1f} s, {threads} threads, load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
