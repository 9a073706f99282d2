"""What is measured: the parts of the whole comparison, each a list of contenders that run in alternation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bench.contender import Contender

Shape = tuple[int, int, int]
Layouts = tuple[tuple[str, int], ...]
"""Memory layout and batch size of plain SGD."""

ALL_LAYOUTS: Layouts = tuple((layout, rows) for layout in ("channels_last", "contiguous") for rows in (32, 64, 128))
SLOW = ("functional", "reference")
OPACUS = ("hooks", "ghost", "functorch")


@dataclass(frozen=True, kw_only=True)
class Part:
    """One comparison. Contenders differ from plain SGD in what they add, never in model, input or machine."""

    name: str
    model: str = "wrn_16_4"
    shape: Shape = (3, 32, 32)
    batch: int = 64
    """Units of a step, each of `views` rows."""
    views: int = 1
    device: str = "cpu"
    rounds: int = 5
    baselines: Layouts = (("channels_last", 64),)
    """Plain SGD is tried with each; the fastest takes part. Empty: nothing is compared with it."""
    weight_rates: tuple[float, ...] = ()
    filter_rates: tuple[float, ...] = ()
    dense: bool = True
    slow_engines: tuple[str, ...] = ()
    peers: bool = False
    private: tuple[tuple[int, str, float], ...] = ()
    """Whole private steps: expected batch, granularity, drop rate."""
    examples: int | None = None
    """In the data set of whole private steps; as many as the expected batch, all of whom join, if left out."""
    operations: tuple[tuple[str, str, float], ...] = ()
    """Work that does not grow with the batch: criterion, granularity, drop rate."""

    def spec(self, **more: object) -> dict[str, object]:
        """What every worker of this part is told."""
        common = {
            "model": self.model,
            "shape": list(self.shape),
            "batch": self.batch,
            "views": self.views,
            "device": self.device,
        }
        return {**common, **more}


MAIN_RATES = (0.5, 0.9)
CURVE = (0.25, 0.5, 0.75, 0.9)
SCALE_SMALL, SCALE_WRN = (64, 256, 1024, 4096, 16384), (64, 256, 1024)

DEFAULT = (
    Part(name="k1", baselines=ALL_LAYOUTS, weight_rates=MAIN_RATES, filter_rates=MAIN_RATES, slow_engines=SLOW, peers=True),
    Part(name="k16", batch=8, views=16, baselines=ALL_LAYOUTS, weight_rates=MAIN_RATES, filter_rates=MAIN_RATES,
         slow_engines=SLOW, peers=True),
    Part(name="private", private=((512, "weight", 0.0), (512, "weight", 0.9), (512, "filter", 0.9))),
    Part(name="curve", weight_rates=CURVE, filter_rates=CURVE),
    Part(name="wrn_28_10", model="wrn_28_10", batch=16, baselines=(("channels_last", 16), ("contiguous", 16)),
         weight_rates=(0.9,), filter_rates=(0.9,)),
    Part(name="operations", model="wrn_28_10", baselines=(), dense=False,
         operations=(("none", "weight", 0.0), ("random", "weight", 0.9), ("magnitude", "weight", 0.9), ("random", "filter", 0.9))),
    Part(name="nf_resnet50", model="nf_resnet50", shape=(3, 224, 224), batch=8,
         baselines=(("channels_last", 8), ("contiguous", 8)), weight_rates=(0.9,), filter_rates=(0.9,)),
    Part(name="scaling_small_cnn", model="small_cnn", shape=(1, 28, 28), baselines=(), dense=False, examples=16384,
         private=tuple((size, "weight", 0.0) for size in SCALE_SMALL)),
    Part(name="scaling_wrn_16_4", baselines=(), dense=False, rounds=3, examples=4096,
         private=tuple((size, "weight", 0.0) for size in SCALE_WRN)),
)  # fmt: skip

BIG = (("channels_last", 512), ("contiguous", 512))
GPU = (
    Part(name="gpu_k1", device="cuda", batch=512, baselines=BIG, weight_rates=(0.9,), filter_rates=(0.9,), slow_engines=("functional", "compiled")),
    Part(name="gpu_k16", device="cuda", batch=32, views=16, baselines=BIG, weight_rates=(0.9,), filter_rates=(0.9,)),
)  # fmt: skip
"""By name only, where there is one."""


def plain(part: Part) -> list[Contender]:
    """Plain SGD in every layout; batches are in rows, and the fastest per row is the limit."""
    return [
        Contender(name=f"plain SGD, {layout}, batch {rows}", worker="plain", spec=part.spec(batch=rows, views=1, layout=layout))
        for layout, rows in part.baselines
    ]


def contenders(part: Part) -> list[Contender]:
    """Everything of a part but plain SGD."""
    independent = part.baselines and part.model.startswith("wrn_")
    return [
        *(_independent(part) if independent else ()), *_ours(part), *(_peers(part) if part.peers else ()),
        *_private(part), *_operations(part),
    ]  # fmt: skip


def _independent(part: Part) -> list[Contender]:
    rows = part.batch * part.views
    spec = part.spec(batch=rows, views=1)
    return [Contender(name=f"plain SGD, independent code, batch {rows}", worker="independent", spec=spec)]


def _ours(part: Part) -> list[Contender]:
    masks = [("dense", "weight", 0.0)] if part.dense else []
    masks += [(f"weight {rate}", "weight", rate) for rate in part.weight_rates]
    masks += [(f"filter {rate}", "filter", rate) for rate in part.filter_rates]
    made = [_engine(part, "fast", *mask) for mask in masks]
    return made + [_engine(part, name, "dense", "weight", 0.0) for name in part.slow_engines]


def _engine(part: Part, engine: str, label: str, granularity: str, rate: float) -> Contender:
    warm_up = 2 if engine == "fast" else 1
    spec = part.spec(engine=engine, granularity=granularity, rate=rate, warm_up=warm_up)
    return Contender(name=f"{engine}, {label}", worker="engine", spec=spec)


def _peers(part: Part) -> list[Contender]:
    modes: Sequence[str] = OPACUS if part.views == 1 else OPACUS[:1]
    made = [
        Contender(
            name=f"Opacus, {mode}", worker="opacus_peer", environment="opacus",
            spec=part.spec(mode=mode, warm_up=1, layout="contiguous"),
        )
        for mode in modes
    ]  # fmt: skip
    if part.model.startswith("wrn_"):
        for name, mode in (("JAX-Privacy, clipped_grad", "private"), ("JAX, plain SGD", "plain")):
            made.append(Contender(name=name, worker="jax_peer", environment="jax", spec=part.spec(mode=mode, warm_up=1)))
    return made


def _private(part: Part) -> list[Contender]:
    made = []
    for size, granularity, rate in part.private:
        label = f"private step, expected batch {size}" + (f", {granularity} {rate}" if rate else "")
        spec = part.spec(batch=size, examples=part.examples or size, granularity=granularity, rate=rate, warm_up=1)
        made.append(Contender(name=label, worker="private", spec=spec))
    return made


def _operations(part: Part) -> list[Contender]:
    made = []
    for drop, granularity, rate in part.operations:
        label = f"{drop}, {granularity} {rate}" if rate else "nothing dropped"
        spec = part.spec(drop=drop, granularity=granularity, rate=rate, warm_up=1)
        made.append(Contender(name=label, worker="operations", spec=spec))
    return made
