"""sparsedp: train image classifiers under differential privacy, sparsely.

Modules in the order in which data flows: `config`, `recipes` (values) -> `data`, `models` -> `dp` (the auditor's folder) ->
`engines` -> `private` (a loop of one's own), `training` (a whole run) -> `outputs`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sparsedp.config import Data, Mechanism, Model, Optim, Run, Runtime, Sparsity
    from sparsedp.dp.ledger import Ledger
    from sparsedp.engines import explain
    from sparsedp.errors import BudgetError, UsageError
    from sparsedp.private import Private, attach
    from sparsedp.recipes import recipe
    from sparsedp.training import train

_HOMES = {
    "Data": "config", "Mechanism": "config", "Model": "config", "Optim": "config", "Run": "config", "Runtime": "config", "Sparsity": "config",
    "recipe": "recipes", "train": "training", "attach": "private", "Private": "private", "explain": "engines", "Ledger": "dp.ledger",
    "UsageError": "errors", "BudgetError": "errors",
}  # fmt: skip
__all__ = [
    "BudgetError", "Data", "Ledger", "Mechanism", "Model", "Optim", "Private", "Run", "Runtime", "Sparsity", "UsageError", "attach",
    "explain", "recipe", "train",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Names are imported when first used, so that the command line starts without torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'sparsedp' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"sparsedp.{_HOMES[name]}"), name)
