"""An engine put to a trial: what it sums, to the bit, so that a run that is taken up again knows whether it still sums the same."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn

from sparsedp.dp.clipping import Engine, Loss, Rows, row_losses
from sparsedp.dp.masks import Masks
from sparsedp.engines.fitness import shaken
from sparsedp.engines.made_up import made_up_rows
from sparsedp.engines.self_check import UNITS, cuda_devices

UNCLIPPED = 1e30


def checksum_of_sums(engine: Engine, model: nn.Module, loss: Loss, rows_like: Rows, masks: Masks) -> str:
    """SHA-256 of the losses and the unclipped sum of made-up units, a little way from the model's weights.

    It is another one where the loss, the model's code, a library's kernels, the processor or the engine's methods are others.
    """
    rows, digest = made_up_rows(rows_like, UNITS), hashlib.sha256()
    with torch.random.fork_rng(cuda_devices(model)), shaken(model):
        torch.manual_seed(0)
        with torch.no_grad():
            digest.update(_bytes(row_losses(model, loss, rows.inputs, rows.targets)))
        torch.manual_seed(0)
        for name, total in sorted(engine(model, loss, rows, masks, UNCLIPPED).items()):
            digest.update(name.encode() + b"\0" + _bytes(total))
    return digest.hexdigest()


def _bytes(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
