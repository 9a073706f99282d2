"""What pre-pruning leaves: the figures of docs/pruning.md, with their numbers as JSON.

    python bench/pruning_plots.py docs/figures

1. the overlap of DP-SNIP's mask with plain SNIP's, against DP-SNIP's own epsilon (small_cnn, all of MNIST);
2. the share of outputs and of units that no unpruned path reaches, against the rate, per criterion;
3. the density of each layer of a WRN-16-4 under SynFlow.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from matplotlib.figure import Figure

from sparsedp import keys, recipes
from sparsedp.assembly import assemble, load_data
from sparsedp.config import Sparsity
from sparsedp.dp.calibration import calibrate_snip
from sparsedp.dp.masks import Masks
from sparsedp.dp.values import ClippedSum
from sparsedp.engines.functional import functional
from sparsedp.models.wrn import WideResNet
from sparsedp.pruning import PrivateData, prune
from sparsedp.reachability import unreachable_units
from sparsedp.sources import parts

EPSILONS = (0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 100.0)
OVERLAP_RATES = (0.5, 0.9)
RATES = (0.5, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.999)
DRAWS = 5
COLOURS = ("#4477aa", "#cc6677", "#228833", "#aa3377")


def main(folder: Path) -> None:
    """Draw all three, and write the numbers beside them."""
    folder.mkdir(parents=True, exist_ok=True)
    run = recipes.mnist()
    made = assemble(run, load_data(run), keys.chosen("pruning plots"))
    data = private_data(made)
    numbers = {"overlap": overlaps(made, data, folder / "pruning_overlap.png")}
    numbers["unreachable"] = reach(made, data, folder / "pruning_unreachable.png")
    torch.manual_seed(0)
    wrn = prune(WideResNet(16, 4, 10), Sparsity(prune="synflow", prune_rate=0.7), keys.fresh(), input_shape=(3, 32, 32))
    wrn.report.plot(folder / "pruning_densities.png")
    numbers["densities"] = wrn.report.to_json()["layers"]
    (folder / "pruning.json").write_text(json.dumps(numbers, indent=1) + "\n")


def private_data(made: Any) -> Callable[[float], PrivateData]:
    """DP-SNIP's access to the data at any noise. The clipped sum is the same for every noise, so it is worked out once a clip."""
    source, known = made.source(keys.fresh(), views=1), {}

    def at(sigma: float) -> PrivateData:
        kind = sigma > 0

        def reduce(total: ClippedSum) -> ClippedSum:
            return known.setdefault(kind, total)

        return PrivateData(
            num_units=made.dataset.train.num_units, loss=made.loss, noise_multiplier=sigma, engine=lambda connected: functional,
            read=lambda units: [] if kind in known else parts(source, units, 0, 512), reduce=reduce,
        )  # fmt: skip

    return at


def mask(made: Any, data: Callable[[float], PrivateData], name: Any, rate: float, sigma: float, draw: int) -> Masks:
    """One mask; `draw` names the key."""
    noise = {"snip_noise_multiplier": sigma} if name == "dp-snip" else {}
    sparsity = Sparsity(prune=name, prune_rate=rate, **noise)
    return prune(made.model, sparsity, keys.chosen(f"draw {draw}"), input_shape=made.shape, data=data(sigma)).masks


def overlaps(made: Any, data: Callable[[float], PrivateData], path: Path) -> list[dict[str, Any]]:
    """The part of plain SNIP's mask that DP-SNIP keeps too."""
    rows = []
    for rate in OVERLAP_RATES:
        plain = mask(made, data, "snip-not-private", rate, 0.0, 0)
        kept = sum(int(m.sum()) for m in plain.values())
        for epsilon in EPSILONS:
            sigma = calibrate_snip(1e-5, own=epsilon).value
            shares = []
            for draw in range(DRAWS):
                other = mask(made, data, "dp-snip", rate, sigma, draw)
                shares.append(sum(int((plain[n] & other[n]).sum()) for n in plain) / kept)
            rows.append(
                {"rate": rate, "epsilon": epsilon, "sigma": sigma, "overlap": fmean(shares), "deviation": stdev(shares)}
            )
    figure, axes = blank("DP-SNIP's own epsilon (delta 1e-5, one release over 60,000 images)", "overlap with SNIP's mask")
    for colour, rate in zip(COLOURS, OVERLAP_RATES, strict=False):
        own = [row for row in rows if row["rate"] == rate]
        axes.errorbar(
            [r["epsilon"] for r in own], [r["overlap"] for r in own], [r["deviation"] for r in own], color=colour, marker="o",
            markersize=3, label=f"prune rate {rate}",
        )  # fmt: skip
        axes.axhline(1 - rate, color=colour, linestyle=":", label=f"chance at {rate}")
    axes.set_ylim(0, 1.02)
    finish(figure, axes, path)
    return rows


def reach(made: Any, data: Callable[[float], PrivateData], path: Path) -> list[dict[str, Any]]:
    """Outputs and units that are cut off, by criterion and rate."""
    low_noise = calibrate_snip(1e-5, own=0.1).value
    rows = []
    for name in ("random", "synflow", "dp-snip", "snip-not-private"):
        for rate in RATES:
            draws = DRAWS if name in ("random", "dp-snip") else 1
            found = [
                unreachable_units(
                    made.model, mask(made, data, name, rate, low_noise if name == "dp-snip" else 0.0, d), made.shape
                )
                for d in range(draws)
            ]
            outputs, units = fmean(f.outputs for f in found), fmean(f.units for f in found)
            rows.append({"criterion": name, "rate": rate, "outputs": outputs, "units": units, "draws": draws})
    figure, axes = blank("fraction kept (1 - rate)", "share that no unpruned path reaches")
    for colour, name in zip(COLOURS, dict.fromkeys(r["criterion"] for r in rows), strict=True):
        own = [row for row in rows if row["criterion"] == name]
        label = f"{name} at epsilon 0.1" if name == "dp-snip" else name
        axes.plot(
            [1 - r["rate"] for r in own], [r["outputs"] for r in own], color=colour, marker="o", markersize=3, label=label
        )
        axes.plot([1 - r["rate"] for r in own], [r["units"] for r in own], color=colour, linestyle=":")
    axes.set_title("outputs (solid), units of all layers (dotted)", fontsize=8)
    axes.invert_xaxis()
    finish(figure, axes, path)
    return rows


def blank(across: str, up: str) -> tuple[Figure, Any]:
    """A small figure with one logarithmic axis."""
    figure = Figure(figsize=(5.6, 3.4), layout="constrained")
    axes = figure.subplots()
    axes.set_xscale("log")
    axes.set_xlabel(across, fontsize=8)
    axes.set_ylabel(up, fontsize=8)
    axes.grid(alpha=0.3)
    return figure, axes


def finish(figure: Figure, axes: Any, path: Path) -> None:
    """Legend and file."""
    axes.legend(fontsize=7)
    figure.savefig(path, dpi=100)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
