"""Audits of the privacy claim: attacks on the code that trains, and what their success proves about epsilon.

`bounds`, `one_run_bounds` are pure statistics; `trial`, `gradient` many small jobs with a canary; `one_run` the real job with
many; `snip` DP-SNIP's release; `checks` what must hold exactly; `report` the page.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from sparsedp import keys
from sparsedp.assembly import assemble, load_data
from sparsedp.audit.checks import canary_checks, clip_checks, setting_checks
from sparsedp.audit.gradient import Finding, canary_audit
from sparsedp.audit.one_run import Job, one_run_audit, shortened
from sparsedp.audit.report import Report, add_to_statement
from sparsedp.audit.snip import snip_audit
from sparsedp.audit.trial import Trial, own_key, powers
from sparsedp.config import Run, Sparsity
from sparsedp.dp.randomness import Key
from sparsedp.errors import UsageError
from sparsedp.planning import budget, snip_batch
from sparsedp.prune_run import before_training
from sparsedp.rundir import describe

__all__ = ["Report", "add_to_statement", "attack", "canary_cells", "variants"]

Tick = Callable[[str], None]
"""Told, now and then, what is being done."""


def attack(
    run: Run,
    *,
    runs: int = 1000,
    every: bool = False,
    real_job: bool = True,
    steps: int | None = None,
    canaries: int | None = None,
    key: Key | None = None,
    tick: Tick = lambda what: None,
) -> Report:
    """Attack what `run` describes. Small jobs with its sparsity, views, clip and arithmetic, `runs` of each world; DP-SNIP's
    release if it has one; and, with `real_job`, its own training once (or its first `steps` steps), with canaries.

    `every` adds small jobs of every other criterion, granularity and number of views. Nothing is written, and nothing that
    depends on the training data is kept.
    """
    if not run.mechanism.private:
        raise UsageError("The run is not private, so there is no claim to audit; set mechanism.private.")
    key = key or keys.fresh()
    cells = [("as the recipe has it", run), *(variants(run) if every else [])]
    count = 2 * len(cells) + 1 + (run.sparsity.prune == "dp-snip") + every
    dataset = load_data(run)
    plan = shortened(budget(run, dataset.train.num_units, before_training(run)), steps)
    job = Job.of(assemble(run, dataset, key), plan, key)
    checks = [*setting_checks(run, plan, job.settings, key), *canary_checks(run, key), *clip_checks(job)]
    findings, notes = list(canary_cells(cells, runs, key, count, tick)), []
    findings += _snip(run, job, key, count, every, tick)
    if real_job and job.settings.exact:
        notes.append("The one-run audit needs arithmetic 'float'; it was left out.")
    elif real_job:
        findings.append(one_run_audit(job, own_key(key, "one run"), canaries, count, lambda: tick("one run")))
    described = describe(run)
    recipe = {"sparsity": described["sparsity"], "mechanism": described["mechanism"]}
    return Report(recipe=recipe, findings=tuple(findings), checks=tuple(checks), notes=tuple(notes))


def canary_cells(cells: list[tuple[str, Run]], runs: int, key: Key, family: int, tick: Tick) -> Iterator[Finding]:
    """Two small jobs of each cell: all units in every step, and half of them."""
    for name, run in cells:
        for words, power in powers(run):
            own = own_key(key, name, words)
            trial = Trial(run, power, own)
            yield canary_audit(f"canary, {name}, {words}", trial, runs, run.mechanism.delta, own, family,
                               tick=lambda what=name: tick(what))  # fmt: skip


def _snip(run: Run, job: Job, key: Key, family: int, every: bool, tick: Tick) -> Iterator[Finding]:
    s, delta = run.sparsity, run.mechanism.delta
    sigma = job.plan.snip_noise_multiplier
    if sigma is None and not every:
        return
    tick("DP-SNIP")
    rate = snip_batch(s, job.plan.num_units) / job.plan.num_units
    yield snip_audit(sigma or 30.75, rate, s.snip_clip, s.granularity, delta, own_key(key, "snip"), family)


def variants(run: Run) -> list[tuple[str, Run]]:
    """The same run, dense, pre-pruned by each criterion, with either way of dropping, by filter, with views."""
    dp_snip = Sparsity(prune="dp-snip", prune_rate=0.5, snip_noise_multiplier=30.75)
    named = {
        "dense": Sparsity(),
        "pre-pruned at random": Sparsity(prune="random", prune_rate=0.5),
        "pre-pruned by SynFlow": Sparsity(prune="synflow", prune_rate=0.5),
        "pre-pruned by DP-SNIP": dp_snip,
        "random dropping": Sparsity(drop="random", drop_rate=0.5),
        "magnitude dropping": Sparsity(drop="magnitude", drop_rate=0.5),
        "SynFlow and random, by filter": Sparsity(prune="synflow", prune_rate=0.25, drop="random", drop_rate=0.3, granularity="filter"),
        "magnitude, by filter": Sparsity(drop="magnitude", drop_rate=0.5, granularity="filter"),
        "DP-SNIP, by filter": replace(dp_snip, granularity="filter"),
    }  # fmt: skip
    cells = [(name, replace(run, sparsity=s)) for name, s in named.items()]
    views = replace(run, data=replace(run.data, views=4, augment="crop"), sparsity=named["random dropping"])
    return [*cells, ("random dropping, 4 views", views)]
