"""The privacy statement as one page for people who are not privacy researchers, such as a data-protection officer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

Stated = Mapping[str, Any]


def page(stated: Stated) -> str:
    """The page that says in words what the statement says in values."""
    guarantee = stated["profile"] is not None
    head = [*_claim(stated), *_odds(stated)] if guarantee else _no_claim(stated)
    return "\n".join([*head, *_limits(stated, guarantee), *_basis(stated, guarantee), ""])


def _no_claim(stated: Stated) -> list[str]:
    return [
        "# Privacy statement", "", f"**This model is {stated['stamp']}.** Nothing below is a guarantee: treat the model as you would treat the "
        "data that it was trained on.", "",
    ]  # fmt: skip


def _claim(stated: Stated) -> list[str]:
    side = "below" if stated["delta"] < stated["one_over_n"] else "not below"
    return [
        "# Privacy statement",
        "",
        *[f"**Beware:** {warning}.\n" for warning in stated["warnings"]],
        f"This model was trained with differential privacy: epsilon {stated['epsilon']:.4g} at delta {stated['delta']:g}. Random noise was "
        f"added while it learnt, so much that nobody can tell from the released files, beyond the odds below, whether any one "
        f"{_unit(stated)} was among the training data.",
        "",
        f"**What is protected:** {stated['unit']}. There are {stated['units']} of them. {_sentence(stated['neighbouring']['words'])}.",
        "",
        f"**Epsilon** bounds what the files reveal: seeing them multiplies the odds of any suspicion about one {_unit(stated)} by at most "
        f"{_factor(stated['epsilon'])}. Lower is safer; up to 1 is called strong, up to 10 reasonable, more is weak (Ponomareva et al. 2023). "
        f"**Delta** is roughly the chance that the bound fails; it is {side} one in the number of {_unit(stated)}s.",
        "",
    ]


def _odds(stated: Stated) -> list[str]:
    odds = [
        f"- who wrongly accuses {per_thousand(a['false_positive_rate'])} {_unit(stated)}s that were not in the data finds at most "
        f"{per_thousand(a['true_positive_rate_at_most'])} that were (guessing blindly finds {per_thousand(a['false_positive_rate'])});"
        for a in stated["profile"]["best_attack"]
    ]
    others = [
        f"{_relation(name, _unit(stated))} {_number(value)}"
        for name, value in stated["others"]["epsilon"].items()
        if name != _own(stated)
    ]
    return [
        f"**In words:** suppose that an attacker sees the released files, knows everything else, and asks whether one particular {_unit(stated)} "
        "was trained on. Whatever they do, these are the odds:",
        "",
        *odds,
        f"- who thinks it as likely as not is right at most {per_thousand(stated['profile']['right_at_even_odds_at_most'])} times (a coin: 500).",
        "",
        f"Counted in other ways, at delta {stated['others']['delta']:g}, epsilon is: {'; '.join(others)}.",
        "",
    ]


def _limits(stated: Stated, guarantee: bool) -> list[str]:
    tuning = stated["tuning"]
    void = ["The statement no longer holds if:", "", *(f"- {line}." for line in stated["void_if"]), ""]
    return [
        "## What is not covered",
        "",
        *(f"- {_sentence(line)}." for line in stated["not_covered"]),
        f"- Tuning: {tuning['words']}.{_runs(tuning, stated['others']['delta'])}",
        *([f"- Copies: {stated['copies']['words']}."] if guarantee else []),
        "",
        *(void if guarantee else []),
    ]


def _runs(tuning: Mapping[str, Any], delta: float) -> str:
    """What the budget file of the data says, as one more sentence."""
    every, naked, total = tuning["runs_on_this_data"], tuning.get("runs_not_private") or 0, tuning["epsilon_of_all"]
    if every is None:
        return ""
    said = []
    if every > naked:
        bound = (
            "more than any epsilon can tell"
            if total is None or math.isinf(total)
            else f"epsilon {total:.4g} at delta {delta:g}"
        )
        said.append(f"{_count(every - naked)} on these data, {'together ' if every - naked > 1 else ''}{bound}")
    if naked:
        said.append(f"{_count(naked)} that {'is' if naked == 1 else 'are'} not private, for which no epsilon holds")
    return f" The operator's budget file counts {', and '.join(said)}."


def _count(runs: int) -> str:
    return "1 run" if runs == 1 else f"{runs} runs"


def _basis(stated: Stated, guarantee: bool) -> list[str]:
    a = stated["accountant"]
    events = [f"  {i}. {e['count']} x {e['what']}: {_event(e['event'])}." for i, e in enumerate(stated["events"], 1)]
    files = [f"  - {name}: {checksum}" for name, checksum in stated["files"].items()]
    return [
        "## For specialists: what it rests on",
        "",
        f"- Setting: {stated['setting']}.",
        *([f"- Covered: {', '.join(stated['covered'])}."] if guarantee else []),
        f"- Sampling: {stated['sampling']['done']} (rate {stated['mechanism']['sampling_rate']:.6g}, "
        f"{stated['mechanism']['batch_size']} expected of {stated['mechanism']['num_units']}).",
        f"- Noise: {_noise(stated)}.",
        f"- Selection of weights: {_selection(stated['selection'])}.",
        "- Every access to the private data, in order:",
        *events,
        f"- Accountant: {a['name']} ({a['library']} {a['version']}): {a['method']}.",
        f"- Keys: {stated['keys']}.",
        f"- Arithmetic: {stated['arithmetic']}.",
        f"- Broken records: {stated['records_that_break']}.",
        f"- Pixels are scaled by {stated['preprocessing']['origin']}.",
        f"- Public weights to start from: {_public(stated['public_data'])}.",
        f"- Interruptions: {stated['resumed']}.",
        f"- Audit: {'none was done' if stated['audit'] is None else stated['audit']['words']}.",
        "- All figures, settings and versions are in privacy.json. This page speaks of these files (SHA-256):",
        *files,
    ]


def _noise(stated: Stated) -> str:
    m = stated["mechanism"]
    if m["clip"] is None:
        return "none, and no clipping"
    views = f", averaged over its {m['views']} augmented views" if m["views"] > 1 else ""
    snip = m["dp_snip"]
    before = f"; DP-SNIP before it: length {snip['clip']:g}, noise multiplier {snip['noise_multiplier']:.6g}" if snip else ""
    return (
        f"in each of {m['steps']} steps the gradient of a {_unit(stated)}{views} is cut to length {m['clip']:g} at most; Gaussian noise "
        f"of {m['noise_multiplier']:.6g} times that length (the noise multiplier) is added on {m['noise_on']}; the sum is divided by "
        f"{m['divisor']}{before}"
    )


def _selection(selected: Mapping[str, Any]) -> str:
    before, at_steps = selected["pre_pruning"], selected["dropping"]
    first = "no weight is pruned before training"
    if before is not None:
        kept, of = sum(before["kept"].values()), sum(before["of"].values())
        first = f"before training, {before['criterion']} keeps {kept} of {of} {before['granularity']}s ({before['source']}), {before['why']}"
    if at_steps["criterion"] == "none":
        return f"{first}; at the steps {at_steps['why_free']}"
    return f"{first}; at every step {at_steps['criterion']} drops a part of {at_steps['rate']:g}, {at_steps['why_free']}"


def _public(data: Mapping[str, Any] | None) -> str:
    return "none" if data is None else f"{data['weights']}; overlap with the private data {data['overlap']}"


def _unit(stated: Stated) -> str:
    return "unit" if "unit number" in stated["unit"] else "record"


def _own(stated: Stated) -> str:
    return f"{stated['accountant']['name']}, {stated['neighbouring']['relation']}"


def _relation(name: str, unit: str) -> str:
    accountant, relation = name.split(", ")
    words = {"add-remove": f"a {unit} is emptied or added", "replace-one": f"a {unit} is replaced by another"}[relation]
    return f"where {words}, by {accountant.upper()},"


def _factor(epsilon: float) -> str:
    """e^epsilon, rounded up."""
    if epsilon > 20:
        return "a number so large that epsilon alone promises nothing"
    return f"{math.ceil(100 * math.exp(epsilon)) / 100:,.2f}"


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def per_thousand(rate: float) -> str:
    """A rate in words that need no mathematics, rounded up to a tenth: what is at most the rate is at most that."""
    return f"{math.ceil(round(10_000 * rate, 6)) / 10:g} of 1000"


def _event(event: Mapping[str, Any]) -> str:
    kind = event["type"]
    if kind == "PoissonSampledDpEvent":
        return f"a Poisson sample at rate {event['sampling_probability']:.6g} of {_event(event['event'])}"
    if kind == "GaussianDpEvent":
        return f"a Gaussian release with noise multiplier {event['noise_multiplier']:.6g}"
    if kind == "ComposedDpEvent":
        return ", then ".join(map(_event, event["events"]))
    if kind == "SelfComposedDpEvent":
        return f"{event['count']} x {_event(event['event'])}"
    if kind == "RepeatAndSelectDpEvent":
        return f"{event['mean']:g} trials on average (shape {event['shape']}), each: {_event(event['event'])}"
    return {"NoOpDpEvent": "no access", "NonPrivateDpEvent": "an access without noise, no guarantee"}.get(kind, kind)


def _number(value: float | None) -> str:
    if value is None:
        return "not known, since that accountant cannot count these events"
    return "without bound" if math.isinf(value) else f"{value:.4g}"
