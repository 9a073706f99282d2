"""The command line: few verbs, each a dataclass whose fields are its options. Nothing heavy is imported on the way to --help."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from tyro.constructors import PrimitiveConstructorSpec

from sparsedp.arguments import respelt
from sparsedp.config import Run
from sparsedp.errors import UsageError, unknown
from sparsedp.recipes import RECIPES, recipe

# Exit codes: an error that was explained; a run that was asked to stop, by a signal or from the keyboard, and can be resumed.
SAID, STOPPED, INTERRUPTED = 2, 143, 130


@dataclass(frozen=True, kw_only=True)
class Train:
    """Train as a recipe says, with overrides; writes a run folder with a part that may be published and one that may not."""

    run_dir: Path | None = None
    """Where the run goes; the folder of an unfinished run takes it up again. Left out: runs/RECIPE-1, -2, .."""
    dry_run: bool = False
    """Say what would be done and what it would cost, and stop before any data is used."""
    json: bool = False
    """Print the result as JSON."""
    run: Annotated[Run, tyro.conf.arg(name="")]


@dataclass(frozen=True, kw_only=True)
class Tune:
    """Try settings at random and keep the best run; epsilon is that of the whole search."""

    tries: Annotated[tuple[str, ...], tyro.conf.arg(name="try", metavar="FIELD=VALUE,VALUE"), tyro.conf.UseAppendAction] = ()
    """A setting and the values to draw from, such as --try optim.lr=1,2,4; may be given several times."""
    score: Literal["public", "held-out"] | None = None
    """public: accuracy on the evaluation split, which is declared public; held-out: on units kept from training, noised and charged."""
    trials_mean: float = 10.0
    """How many trials there are on average. How many there are is drawn, cannot be chosen, and is not published."""
    distribution: Literal["geometric", "logarithmic", "poisson"] = "geometric"
    """The law of the number of trials: what each costs is in docs/tuning.md. Only poisson can say none."""
    held_out: float = 0.1
    """The share of the training units that are scored on instead."""
    score_noise: float | None = None
    """Deviation of the noise on that count. Left out: half the square root of the number of held-out units."""
    keep_trials: bool = False
    """Keep all trials in private/. Stamps the result: not covered."""
    run_dir: Path | None = None
    """Where the search goes; the folder of an unfinished search takes it up again. Left out: runs/RECIPE-1, -2, .."""
    dry_run: bool = False
    """Say what would be done and what it would cost, and stop before any data is used."""
    json: bool = False
    """Print the result as JSON."""
    run: Annotated[Run, tyro.conf.arg(name="")]


@dataclass(frozen=True, kw_only=True)
class Evaluate:
    """Evaluate a finished run again, on its evaluation data."""

    run: tyro.conf.Positional[Path]
    average: bool = False
    """The moving average instead of the last iterate."""
    dir: str | None = None
    """Where the data are now, if they were moved."""
    model: str | None = None
    """The run's own package.module:function, if it has one: a run's folder may come from anybody, and code in it runs only if named."""
    json: bool = False


@dataclass(frozen=True, kw_only=True)
class Predict:
    """Classify image files with a finished run's model."""

    run: tyro.conf.Positional[Path]
    images: tyro.conf.Positional[tuple[Path, ...]]
    average: bool = False
    model: str | None = None
    """The run's own package.module:function, if it has one: a run's folder may come from anybody, and code in it runs only if named."""
    json: bool = False


def _whole(words: list[str]) -> int:
    number = float(words[0])
    if not number.is_integer():
        raise ValueError(f"{words[0]} is not a whole number")
    return int(number) if "e" in words[0].lower() or "." in words[0] else int(words[0])


Whole = Annotated[
    int,
    PrimitiveConstructorSpec(
        nargs=1, metavar="INT", instance_from_str=_whole, is_instance=lambda value: isinstance(value, int),
        str_from_instance=lambda value: [str(value)],
    ),
]  # fmt: skip
"""A whole number that may be written as 1e5."""


@dataclass(frozen=True, kw_only=True)
class Account:
    """What private training costs: of batch size, noise multiplier, steps and epsilon, the one left out is solved for."""

    num_examples: Whole
    batch_size: Whole | None = None
    noise_multiplier: float | None = None
    steps: Whole | None = None
    epsilon: float | None = None
    delta: float = 1e-5
    accountant: Literal["pld", "rdp", "paper"] = "pld"
    neighbouring: Literal["add-remove", "replace-one"] = "add-remove"
    prune_noise_multiplier: float | None = None
    """Noise multiplier of a DP-SNIP release over the whole data set before training."""
    plot: Path | None = None
    """Draw epsilon against steps into this file."""
    json: bool = False


@dataclass(frozen=True, kw_only=True)
class Prune:
    """Pre-prune a recipe's model, print what is left of each layer, and save the mask."""

    criterion: Literal["random", "synflow", "dp-snip", "snip-not-private"] | None = None
    """Short for --sparsity.prune. Left out: the recipe's."""
    rate: float | None = None
    """The fraction dropped, short for --sparsity.prune-rate. Left out: the recipe's."""
    out: Path = Path("mask.safetensors")
    plot: Path | None = None
    """Draw the densities into this file."""
    json: bool = False
    run: Annotated[Run, tyro.conf.arg(name="")]


@dataclass(frozen=True, kw_only=True)
class Explain:
    """Say which engine serves which layer of a recipe's model, by which method, and what it costs."""

    json: bool = False
    run: Annotated[Run, tyro.conf.arg(name="")]


@dataclass(frozen=True, kw_only=True)
class Doctor:
    """Why is accuracy low? Looks at the private data of a run: its answers are for the operator and are not private."""

    run: tyro.conf.Positional[Path]
    dir: str | None = None
    examples: int = 256
    model: str | None = None
    """The run's own package.module:function, if it has one: a run's folder may come from anybody, and code in it runs only if named."""
    json: bool = False


@dataclass(frozen=True, kw_only=True)
class Audit:
    """Attack what a recipe describes, and print the epsilon that the attacks prove beside the claimed one."""

    runs: int = 1000
    """Small jobs with a canary, and as many without, for each attack."""
    every: bool = False
    """Also attack every other way of pruning and dropping, by weight and by filter, and several views."""
    real_job: bool = True
    """Also train the recipe itself once, with canaries among its data. Nothing of that run is kept."""
    steps: int | None = None
    """Of the recipe itself, train only the first so many steps."""
    canaries: int | None = None
    """How many units of the recipe itself become canaries. Left out: as many as are worth it."""
    statement: Path | None = None
    """The folder of a finished run of this configuration, whose privacy statement shall tell of the audit."""
    json: bool = False
    run: Annotated[Run, tyro.conf.arg(name="")]


VERBS: dict[str, type] = {
    "train": Train, "tune": Tune, "evaluate": Evaluate, "predict": Predict, "account": Account, "prune": Prune, "explain": Explain, "doctor": Doctor,
    "audit": Audit,
}  # fmt: skip
TAKES_RECIPE = ("train", "tune", "prune", "explain", "audit")
STOPPABLE = ("train", "tune")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line; returns the exit code. Errors that are the user's are one sentence on standard error."""
    args = list(sys.argv[1:] if argv is None else argv)
    try:
        if not args or args[0] in ("-h", "--help"):
            sys.stdout.write(overview())
            return 0 if args else SAID
        if args[0] in ("--version", "version"):
            sys.stdout.write(f"{_version()}\n")
            return 0
        if args[0] not in VERBS:
            raise unknown("the command", args[0], VERBS)
        return _dispatch(args[0], args[1:])
    except UsageError as error:
        sys.stderr.write(f"sparsedp: {error}\n")
        return SAID
    except BrokenPipeError:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115, PTH123 - the reader has gone; let nothing be flushed to it at exit
        return 141
    except KeyboardInterrupt:
        sys.stderr.write("sparsedp: interrupted; a run that was training goes on from its last checkpoint.\n")
        return INTERRUPTED


def overview() -> str:
    """The help of the whole program."""
    width = max(map(len, VERBS))
    verbs = "\n".join(f"  {name:{width}}  {(kind.__doc__ or '').splitlines()[0]}" for name, kind in VERBS.items())
    recipes = "\n".join(
        f"  {name:{max(map(len, RECIPES))}}  {(make.__doc__ or '').splitlines()[0]}" for name, make in RECIPES.items()
    )
    return (
        "sparsedp: train image classifiers under differential privacy, sparsely\n\n"
        f"usage: sparsedp COMMAND ...   ({', '.join(TAKES_RECIPE)} take a RECIPE first)\n\n"
        f"commands (sparsedp COMMAND --help for the options of each)\n{verbs}\n\nrecipes\n{recipes}\n"
    )


def _version() -> str:
    from importlib.metadata import version

    return f"sparsedp {version('sparsedp')}"


def _dispatch(verb: str, args: list[str]) -> int:
    kind = VERBS[verb]
    if verb not in TAKES_RECIPE:
        return _do(verb, _parse(kind, args, f"sparsedp {verb}"))
    if not args or args[0].startswith("-"):
        if args and args[0] in ("-h", "--help"):
            sys.stdout.write(f"{kind.__doc__}\n\nusage: sparsedp {verb} RECIPE [OPTIONS]\nrecipes: {', '.join(RECIPES)}\n"
                             f"sparsedp {verb} RECIPE --help lists the options with the recipe's values.\n")  # fmt: skip
            return 0
        raise UsageError(f"{verb} needs a recipe first; choose one of {', '.join(RECIPES)}.")
    return _do(verb, _parse(kind, respelt(verb, args[1:]), f"sparsedp {verb} {args[0]}", kind(run=recipe(args[0]))), args[0])


def _parse(kind: type, args: list[str], prog: str, default: Any = None) -> Any:
    try:
        return tyro.cli(kind, args=args, prog=prog, **({} if default is None else {"default": default}))
    except UsageError:
        raise
    except SystemExit as stop:
        if stop.code in (0, None):
            raise
        raise SystemExit(SAID) from None


def _do(verb: str, options: Any, name: str = "") -> int:
    from sparsedp import verbs

    logging.getLogger("absl").setLevel(
        logging.ERROR
    )  # dp_accounting says there which orders it leaves out, which is no news to users
    return _stoppable(verb, options, name) if verb in STOPPABLE else int(getattr(verbs, verb)(options))


def _stoppable(verb: str, options: Any, name: str) -> int:
    from sparsedp import verbs

    if options.dry_run:
        return verbs.dry_run(options)
    asked: list[int] = []

    def ask(number: int, _frame: Any) -> None:
        asked.append(number)
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            os.write(2, b"\nsparsedp: stopping after this step; a second Ctrl-C ends at once.\n")

    before = {number: signal.signal(number, ask) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        code = int(getattr(verbs, verb)(options, name, stop=lambda: bool(asked)))
        return INTERRUPTED if code == STOPPED and asked[0] == signal.SIGINT else code
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def print_json(value: Any) -> None:
    """A result for a program to read."""
    sys.stdout.write(json.dumps(value, indent=2) + "\n")


Stop = Callable[[], bool]
