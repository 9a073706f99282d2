"""python -m bench: measure what was not measured yet, part by part, then write tables and figures.

python -m bench                            # everything; a part that is done is not done again
python -m bench k1 k16 --again             # these parts anew
python -m bench gpu_k1 gpu_k16             # on a machine with a GPU
python -m bench report                     # only tables and figures, from what was measured
python -m bench custom --model wrn_40_4 --batch 32 --views 4 --rates 0.5 0.9 --device cuda
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import tyro

from bench import measuring, report
from bench.environments import ROOT
from bench.parts import DEFAULT, GPU, SLOW, Part


@dataclass(frozen=True, kw_only=True)
class Options:
    """Speed and memory of private training beside plain SGD and the peers."""

    parts: tyro.conf.Positional[tuple[str, ...]] = ()
    """Which parts; all by default. `report` measures nothing, `custom` is described by the options below."""
    again: bool = False
    """Measure parts that are done already."""
    rounds: int | None = None
    """Rounds of every part, in place of its own number."""
    threads: int = os.cpu_count() or 1
    results: Path = ROOT / "bench" / "results" / "speed"
    docs: Path = ROOT / "docs"

    model: str = "wrn_16_4"
    """Of the part `custom`, as all that follow."""
    side: int = 32
    batch: int = 64
    views: int = 1
    rates: tuple[float, ...] = (0.5, 0.9)
    device: str = "cpu"
    peers: bool = True


def main(options: Options) -> int:
    """Returns the exit code."""
    known = {p.name: p for p in (*DEFAULT, *GPU, custom(options))}
    unknown = [name for name in options.parts if name not in known and name != "report"]
    if unknown:
        print(f"There is no part {unknown[0]!r}; there are {', '.join([*known, 'report'])}.", file=sys.stderr)
        return 2
    chosen = [known[n] for n in options.parts if n != "report"] if options.parts else list(DEFAULT)
    began = time.perf_counter()
    for number, part in enumerate(chosen, 1):
        say(f"{part.name} ({number} of {len(chosen)}, {time.perf_counter() - began:.0f} s so far)")
        one_part(replace(part, rounds=options.rounds or part.rounds), options)
    report.write(options.results, options.docs)
    say(f"written: {options.docs / 'performance.md'}")
    return 0


def one_part(part: Part, options: Options) -> None:
    """Measure it, unless that was done, and print its table."""
    file = options.results / f"{part.name}.json"
    measured = measuring.load(file)
    if options.again or not measuring.is_done(measured, part, options.threads):
        measured = measuring.measure(part, options.threads, say)
        measuring.save(file, measured)
    elif measured is not None and measured["sources"] != measuring.sources():
        say("  measured before, with sources that have changed since; --again measures it anew")
    assert measured is not None
    say(report.table(measured))


def custom(options: Options) -> Part:
    """A part from the command line."""
    channels = 1 if options.model == "small_cnn" else 3
    rates = tuple(options.rates)
    return Part(
        name="custom", model=options.model, shape=(channels, options.side, options.side), batch=options.batch, views=options.views,
        device=options.device, weight_rates=rates, filter_rates=rates, slow_engines=SLOW, peers=options.peers,
        baselines=tuple((layout, options.batch * options.views) for layout in ("channels_last", "contiguous")),
    )  # fmt: skip


def say(text: str) -> None:
    """Progress, at once."""
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options, description=__doc__)))
