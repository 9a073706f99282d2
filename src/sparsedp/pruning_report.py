"""What pre-pruning did, layer by layer: as a table, as JSON, and as a plot."""

from __future__ import annotations

import io
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparsedp.dp.ledger import Ledger
from sparsedp.errors import missing_extra

if TYPE_CHECKING:
    from sparsedp.pruning import Pruned


@dataclass(frozen=True)
class LayerDensity:
    """One layer: its weight's shape, and how many of its coordinates (output channels under `filter`) were kept."""

    name: str
    shape: tuple[int, ...]
    unit: str
    kept: int
    total: int

    @property
    def fraction(self) -> float:
        return self.kept / self.total


@dataclass(frozen=True)
class PruningReport:
    """Public facts: everything here follows from the masks, which are released."""

    title: str
    private: bool
    criterion: str
    rate: float
    granularity: str
    ledger: list[dict[str, Any]]
    layers: tuple[LayerDensity, ...]

    @staticmethod
    def of(pruned: Pruned) -> PruningReport:
        """The report on some masks."""
        rows = []
        for layer in pruned.layers:
            mask = pruned.masks.get(layer.name)
            total = layer.shape[0] if layer.by_filter else layer.size
            kept = total if mask is None else int(mask.sum())
            rows.append(LayerDensity(layer.name, layer.shape, "channels" if layer.by_filter else "weights", kept, total))
        title = f"{pruned.criterion}, prune rate {pruned.rate:g} by {pruned.granularity}"
        return PruningReport(
            title, pruned.private and not pruned.noise_known, pruned.criterion, pruned.rate, pruned.granularity,
            Ledger().append(f"pruning by {pruned.criterion}", pruned.event).to_json(), tuple(rows),
        )  # fmt: skip

    def text(self, width: int = 100) -> str:
        """A table for a terminal."""
        from rich import box
        from rich.console import Console
        from rich.table import Table

        table = Table(title=self._heading, title_justify="left", box=box.SIMPLE_HEAD, show_footer=True)
        table.add_column("layer", "all", overflow="fold")
        table.add_column("shape")
        for heading, footer in (("kept", f"{self._kept:,}"), ("of", f"{self._total:,}"), ("fraction", self._fraction)):
            table.add_column(heading, footer, justify="right")
        for row in self.layers:
            shape = "x".join(map(str, row.shape)) + (" (channels)" if row.unit == "channels" else "")
            table.add_row(row.name, shape, f"{row.kept:,}", f"{row.total:,}", f"{row.fraction:.4f}")
        out = io.StringIO()
        Console(file=out, width=width, color_system=None).print(table)
        return out.getvalue()

    def to_json(self) -> dict[str, Any]:
        """The same as plain values."""
        return {
            "criterion": self.criterion,
            "private": self.private,
            "rate": self.rate,
            "granularity": self.granularity,
            "ledger": self.ledger,
            "layers": [
                {
                    "name": r.name,
                    "shape": list(r.shape),
                    "unit": r.unit,
                    "kept": r.kept,
                    "total": r.total,
                    "fraction": r.fraction,
                }
                for r in self.layers
            ],
        }

    def plot(self, path: str | Path) -> Path:
        """A bar per layer: the fraction kept, on a logarithmic axis where the layers differ widely. Needs matplotlib."""
        try:
            from matplotlib.figure import Figure
        except ImportError:
            raise missing_extra("matplotlib", "plots", "Drawing densities") from None
        densities = [row.fraction for row in self.layers]
        figure = Figure(figsize=(max(4.0, 0.22 * len(densities) + 1.5), 3.6), layout="constrained")
        axes = figure.subplots()
        axes.bar(range(len(densities)), densities, color="#4477aa")
        axes.axhline(1 - self.rate, color="#cc6677", linewidth=1, label=f"1 - rate = {1 - self.rate:g}")
        axes.set_xticks(range(len(densities)), [row.name for row in self.layers], rotation=90, fontsize=6)
        if min(densities) < 0.05 * max(densities):
            axes.set_yscale("log")
        axes.set_ylabel("fraction kept")
        axes.set_title(self._heading, fontsize=9)
        axes.legend(fontsize=7)
        figure.savefig(path, dpi=110)
        return Path(path)

    @property
    def _heading(self) -> str:
        return f"{self.title}{'' if self.private else ' [NOT PRIVATE]'}"

    @property
    def _kept(self) -> int:
        return sum(row.kept for row in self.layers)

    @property
    def _total(self) -> int:
        return sum(row.total for row in self.layers)

    @property
    def _fraction(self) -> str:
        return f"{self._kept / self._total:.4f}" if self._total else f"{math.nan}"
