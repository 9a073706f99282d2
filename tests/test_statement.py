"""The privacy statement: every field is there, and true by another source than the code that wrote it."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import dp_accounting as dp
import numpy as np
import pytest
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant
from safetensors.numpy import load_file
from scipy import stats

import sparsedp
from sparsedp import cli, keys, statement
from sparsedp.audit import Report, add_to_statement
from sparsedp.config import Data, Mechanism, Model, Run, Runtime, Sparsity
from sparsedp.dp import accounting
from sparsedp.dp.ledger import Ledger, gaussian_event, snip_event
from sparsedp.dp.randomness import Key
from sparsedp.dp.tradeoff import profile
from sparsedp.errors import UsageError
from sparsedp.statement_page import _runs, page
from tests.data.pictures import made_up, save_folder
from tests.whole_runs import STEPS, UNITS, go, images, stopped, tiny


@pytest.mark.parametrize(
    ("every", "naked", "total", "said"),
    [
        (1, 0, 3.9, "counts 1 run on these data, epsilon 3.9 at delta 1e-05."),
        (2, 0, 3.9, "counts 2 runs on these data, together epsilon 3.9 at delta 1e-05."),
        (
            3,
            2,
            3.9,
            "counts 1 run on these data, epsilon 3.9 at delta 1e-05, and 2 runs that are not private, for which no epsilon holds.",
        ),
        (1, 1, 0.0, "counts 1 run that is not private, for which no epsilon holds."),
        (2, 0, math.inf, "counts 2 runs on these data, together more than any epsilon can tell."),
    ],
)
def test_the_budget_is_told_in_words(every: int, naked: int, total: float, said: str) -> None:
    told = _runs({"runs_on_this_data": every, "runs_not_private": naked, "epsilon_of_all": total}, 1e-5)
    assert told == f" The operator's budget file {said}"


SCRIPT = Path(__file__).parents[1] / "examples" / "recompute_epsilon.py"
SNIP = Sparsity(prune="dp-snip", prune_rate=0.5, snip_noise_multiplier=2.0, snip_clip=0.5, drop="magnitude", drop_rate=0.4)
KINDS: dict[str, dict[str, Any]] = {
    "dense": {},
    "snip": {"sparsity": SNIP},
    "rdp": {"mechanism": {"accountant": "rdp"}},
    "paper": {"mechanism": {"accountant": "paper"}, "sparsity": SNIP},
    "replace-one": {"mechanism": {"neighbouring": "replace-one"}},
    "everyone": {"mechanism": {"batch_size": UNITS, "noise_multiplier": 4.0}},
    "wide-delta": {"mechanism": {"delta": 0.05}},
    "views": {"data": {"augment": "crop-flip", "views": 3, "pad": 2, "normalise": "0.2;0.4", "evaluation": "none"}},
    "exact": {"mechanism": {"arithmetic": "exact", "steps": 2, "batch_size": 4}, "model": Model(train="head")},
    "synflow": {"sparsity": Sparsity(prune="synflow", prune_rate=0.7, drop="random", drop_rate=0.3, granularity="filter")},
    "given-key": {"runtime": {"key": "open sesame"}},
    "no-noise": {"mechanism": Mechanism(private=False, steps=2, batch_size=16)},
    "snip-not-private": {"sparsity": Sparsity(prune="snip-not-private", prune_rate=0.5)},
    "fresh-key": {},
    "mask-file": {"sparsity": Sparsity(prune="none", prune_rate=0.0, mask_file="from another run")},
    "units": {},
}  # fmt: skip
PRIVATE = [kind for kind in KINDS if kind not in ("given-key", "no-noise", "snip-not-private")]


@dataclass(frozen=True)
class Finished:
    """A finished run and what it states."""

    run: Run
    path: Path
    secrets: tuple[bytes, ...]

    @property
    def stated(self) -> dict[str, Any]:
        return json.loads((self.path / "public" / "privacy.json").read_text())

    @property
    def page(self) -> str:
        return (self.path / "public" / "privacy.md").read_text()

    def file(self, name: str) -> Path:
        return self.path / "public" / name


class Runs:
    """Runs of each kind, trained when first asked for."""

    def __init__(self, place: Path, patched: pytest.MonkeyPatch) -> None:
        self.place, self._known = place, {}
        self._secrets: list[bytes] = []
        images(place / "data")
        fresh = keys.fresh

        def remembered() -> Key:
            made = fresh()
            self._secrets.append(made.secret)
            return made

        patched.setattr(keys, "fresh", remembered)

    def __call__(self, kind: str) -> Finished:
        if kind not in self._known:
            changes = {"runtime": {"key": None}, **KINDS[kind]}
            if kind == "mask-file":
                changes["sparsity"] = Sparsity(mask_file=str(self("snip").file("mask.safetensors")))
            run = patients(self.place) if kind == "units" else tiny(self.place / "data", **changes)
            if kind == "fresh-key":
                stopped(run, self.place / kind, 3)
                (self.place / kind / "private" / "key").unlink()
            go(run, self.place / kind)
            given = (keys.chosen("open sesame").secret,)
            self._known[kind] = Finished(run, self.place / kind, (*self._secrets, *given))
        return self._known[kind]


def patients(place: Path) -> Run:
    """Twenty training images of five patients."""
    pixels, labels = made_up(20, side=14, channels=1, classes=2)
    save_folder(place / "patients", pixels, labels, ("ill", "well"))
    rows = [f"{('ill', 'well')[y]}/{i:05d}.png,{('ill', 'well')[y]},patient {i // 4},train" for i, y in enumerate(labels)]
    (place / "patients" / "manifest.csv").write_text("\n".join(["path,label,unit,split", *rows]) + "\n")
    return Run(
        data=Data(name="manifest", dir=str(place / "patients" / "manifest.csv"), size=14, channels=1, evaluation="none"),
        mechanism=Mechanism(noise_multiplier=1.0, steps=3, batch_size=2, delta=1e-3), runtime=Runtime(engine="functional"),
    )  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    with pytest.MonkeyPatch.context() as patched:
        yield Runs(tmp_path_factory.mktemp("statements"), patched)


# --- Every field, against another source -----------------------------------------------------------------------------------

FIELDS = {
    1: ("setting",), 2: ("covered", "not_covered"), 3: ("unit", "units", "copies"), 4: ("neighbouring", "others"),
    5: ("epsilon", "delta", "one_over_n", "profile"), 6: ("events", "mechanism"), 7: ("accountant", "others"), 8: ("sampling", "keys"),
    9: ("arithmetic",), 10: ("tuning",), 11: ("public_data",), 12: ("preprocessing",), 13: ("records_that_break",), 14: ("resumed",),
    15: ("selection",), 16: ("software", "config", "config_sha256", "files"), 17: ("audit",), 18: ("void_if",), 19: ("stamp", "warnings"),
}  # fmt: skip
"""The nineteen fields of a privacy statement that docs of the field ask for, and where each stands."""


@pytest.mark.parametrize("kind", KINDS)
def test_every_field_is_there(runs: Runs, kind: str) -> None:
    found = runs(kind).stated
    assert found.keys() == {name for names in FIELDS.values() for name in names}
    for names in FIELDS.values():
        for name in names:
            empty = found[name] in (None, "", [], {})
            unsaid = name in ("audit", "public_data", "warnings") or name in ("epsilon", "profile") and kind not in PRIVATE
            assert not empty or unsaid, name


@pytest.mark.parametrize("kind", KINDS)
def test_the_mechanism_is_the_configured_one(runs: Runs, kind: str) -> None:
    done = runs(kind)
    m, told = done.run.mechanism, done.stated["mechanism"]
    count = 5 if kind == "units" else UNITS
    assert (told["num_units"], done.stated["units"], done.stated["one_over_n"]) == (count, count, 1 / count)
    assert (told["steps"], told["batch_size"], told["views"]) == (m.steps, m.batch_size, done.run.data.views)
    assert told["sampling_rate"] == m.batch_size / count
    assert told["clip"] == (m.clip if m.private else None)
    assert told["noise_multiplier"] == (m.noise_multiplier if m.private else 0)
    assert told["divisor"] == "the expected batch size" + (" and the clipping norm" if m.private else "")
    snip = {"clip": 0.5, "noise_multiplier": 2.0, "batch_size": UNITS} if kind in ("snip", "paper") else None
    assert told["dp_snip"] == snip


@pytest.mark.parametrize("kind", KINDS)
def test_the_hashes_are_those_of_the_files(runs: Runs, kind: str) -> None:
    done = runs(kind)
    bound = done.stated["files"]
    weights = {p.name for p in done.file("").iterdir() if p.suffix == ".safetensors"}
    assert weights | {"ledger.json", "config.json"} == set(bound) and "model.safetensors" in bound
    for name, told in bound.items():
        assert told == hashlib.sha256(done.file(name).read_bytes()).hexdigest() and f"- {name}: {told}" in done.page
    config = json.loads(done.file("config.json").read_text())
    assert done.stated["config"] == config
    assert done.stated["config_sha256"] == hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()
    assert done.stated["events"] == json.loads(done.file("ledger.json").read_text())


def test_the_software_is_what_runs(runs: Runs) -> None:
    told = runs("dense").stated["software"]
    for name in ("torch", "numpy", "dp-accounting", "safetensors", "sparsedp"):
        assert told[name] == metadata.version(name)
    assert told["python"] == sys.version.split()[0]
    root, digest = Path(sparsedp.__file__).parent, hashlib.sha256()
    names = [str((Path(place) / name).relative_to(root)) for place, _, found in os.walk(root) for name in found]
    for name in sorted((n for n in names if n.endswith(".py")), key=lambda n: n.split("/")):
        content = (root / name).read_bytes()
        digest.update(name.encode() + b"\0" + str(len(content)).encode() + b"\0" + content)
    assert told["source_sha256"] == digest.hexdigest()
    assert runs("dense").stated["accountant"]["version"] == metadata.version("dp-accounting")


EVENTS = {
    "dense": [("train", (16 / 60, 1.0), STEPS)],
    "snip": [("dp-snip", (1.0, 2.0), 1), ("train", (16 / 60, 1.0), STEPS)],
    "everyone": [("train", (1.0, 4.0), STEPS)],
    "units": [("train", (2 / 5, 1.0), 3)],
    "mask-file": [("mask from a file, made by dp-snip", (1.0, 2.0), 1), ("train", (16 / 60, 1.0), STEPS)],
}


@pytest.mark.parametrize("kind", EVENTS)
def test_the_events_are_every_access_in_order(runs: Runs, kind: str) -> None:
    events = []
    for entry in runs(kind).stated["events"]:
        inner = entry["event"]
        rate = inner.pop("sampling_probability", 1.0)
        inner = inner.get("event", inner)
        assert inner["type"] == "GaussianDpEvent"
        events.append((entry["what"], (rate, inner["noise_multiplier"]), entry["count"]))
    assert events == EVENTS[kind]
    for place, (what, (rate, sigma), count) in enumerate(events, 1):
        sampled = "" if rate == 1 else f"a Poisson sample at rate {rate:.6g} of "
        assert f"  {place}. {count} x {what}: {sampled}a Gaussian release with noise multiplier {sigma:g}." in runs(kind).page


def accountant(kind: str, relation: str = "ADD_OR_REMOVE_ONE") -> PLDAccountant:
    """dp_accounting's own, on a grid of its own."""
    found = PLDAccountant(dp.NeighboringRelation[relation], value_discretization_interval=1e-4)
    for _, (rate, sigma), count in EVENTS[kind]:
        found.compose(dp.PoissonSampledDpEvent(rate, dp.GaussianDpEvent(sigma)), count)
    return found


@pytest.mark.parametrize("kind", ["snip", "units"])
def test_epsilon_and_the_profile_are_those_of_dp_accounting(runs: Runs, kind: str) -> None:
    told, own = runs(kind).stated, accountant(kind)
    assert told["epsilon"] == pytest.approx(own.get_epsilon(told["delta"]), rel=3e-3)
    others = told["others"]["epsilon"]
    assert told["others"]["delta"] == told["delta"] == 1e-3
    assert others["pld, add-remove"] == told["epsilon"]
    assert others["pld, replace-one"] == pytest.approx(accountant(kind, "REPLACE_ONE").get_epsilon(1e-3), rel=3e-3)
    renyi = RdpAccountant()
    for _, (rate, sigma), count in EVENTS[kind]:
        renyi.compose(dp.PoissonSampledDpEvent(rate, dp.GaussianDpEvent(sigma)), count)
    assert others["rdp, add-remove"] == pytest.approx(renyi.get_epsilon(1e-3))
    table = told["profile"]["delta_at_epsilon"]
    assert len(table) > 15 and table[0][0] == 0
    for e, d in table:
        assert 0.99 * (exact := own.get_delta(e)) <= d <= 1.02 * exact + 1e-9
        assert d <= statement_gaussian(e, told["profile"]["mu_gdp"]["mu"]) * (1 + 1e-9)
    deltas = [(e, own.get_delta(e)) for e in np.linspace(0, 9, 60).tolist()]
    for attack in told["profile"]["best_attack"]:
        alpha = attack["false_positive_rate"]
        missed = max(max(1 - d - math.exp(e) * alpha, math.exp(-e) * (1 - d - alpha)) for e, d in deltas)
        assert attack["true_positive_rate_at_most"] == pytest.approx(1 - missed, abs=3e-3)


def statement_gaussian(epsilon: float, mu: float) -> float:
    """Delta of a Gaussian mechanism, from its definition."""
    return stats.norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * stats.norm.cdf(-mu / 2 - epsilon / mu)


def test_where_there_is_a_closed_form_the_odds_are_its_own(runs: Runs) -> None:
    """Six steps of everyone are one Gaussian mechanism: the trade-off curve is known exactly, and nothing stated lies below it."""
    found, mu = runs("everyone").stated["profile"], math.sqrt(STEPS) / 4
    assert mu <= found["mu_gdp"]["mu"] <= 1.002 * mu and found["mu_gdp"]["down_to_delta"] == pytest.approx(1e-10)
    assert [a["false_positive_rate"] for a in found["best_attack"]] == [0.001, 0.01, 0.1]
    for attack in found["best_attack"]:
        exact = stats.norm.cdf(stats.norm.ppf(attack["false_positive_rate"]) + mu)
        assert exact <= attack["true_positive_rate_at_most"] <= exact * 1.003
    even = stats.norm.cdf(mu / 2)
    assert even - 1e-12 <= found["right_at_even_odds_at_most"] <= even + 1e-4


@pytest.mark.parametrize(("snip", "mu"), [(False, 0.2451), (True, 0.2472)])
def test_the_figures_of_the_papers_run(snip: bool, mu: float) -> None:
    ledger = Ledger().append("dp-snip", snip_event(30.75)) if snip else Ledger()
    ledger = ledger.append("train", gaussian_event(0.08192, 10.0), 875)
    found = statement.curve(profile(ledger))
    assert found["mu_gdp"] == {"mu": pytest.approx(mu, abs=2e-4), "down_to_delta": pytest.approx(1e-10, rel=0.01)}
    beyond = accounting.epsilon(ledger, 1e-13).epsilon
    assert statement_gaussian(beyond, found["mu_gdp"]["mu"]) < 0.7e-13, "it is no bound below the delta that it names"
    rates = [a["true_positive_rate_at_most"] for a in found["best_attack"]]
    assert rates == pytest.approx([0.0022, 0.019, 0.15], rel=0.04)


@pytest.mark.parametrize("kind", PRIVATE)
def test_odds_in_words_are_the_numbers_rounded_up(runs: Runs, kind: str) -> None:
    done = runs(kind)
    said = re.findall(
        r"accuses ([\d.]+) of 1000 \w+ that were not .* at most ([\d.]+) of 1000 .*finds ([\d.]+) of 1000", done.page
    )
    attacks = done.stated["profile"]["best_attack"]
    assert len(said) == len(attacks) == 3
    for (wrong, right, blind), attack in zip(said, attacks, strict=True):
        assert float(wrong) == float(blind) == 1000 * attack["false_positive_rate"]
        assert 0 <= float(right) - 1000 * attack["true_positive_rate_at_most"] < 0.1 + 1e-6
    even = re.search(r"is right at most ([\d.]+) of 1000 times \(a coin: 500\)", done.page)
    assert even and 0 <= float(even[1]) - 1000 * done.stated["profile"]["right_at_even_odds_at_most"] < 0.1 + 1e-6
    factor = re.search(r"by at most ([\d,.]+)\. Lower", done.page)
    assert factor and 0 <= float(factor[1].replace(",", "")) - math.exp(done.stated["epsilon"]) <= 0.01 + 1e-9


@pytest.mark.parametrize("kind", ["snip", "synflow", "mask-file"])
def test_kept_counts_are_those_of_the_mask(runs: Runs, kind: str) -> None:
    told = runs(kind).stated["selection"]["pre_pruning"]
    masks = load_file(runs(kind).file("mask.safetensors"))
    assert told["kept"] == {name: int(np.unpackbits(bits).sum()) for name, bits in masks.items()} and len(masks) > 1
    total, kept = sum(told["of"].values()), sum(told["kept"].values())
    assert 0 < kept < total and f"keeps {kept} of {total} {told['granularity']}s" in runs(kind).page
    assert (told["rate"], told["criterion"]) == ((0.7, "synflow") if kind == "synflow" else (0.5, "dp-snip"))


# --- What is said where -------------------------------------------------------------------------------------------------------


def test_selection_says_why_it_costs_nothing(runs: Runs) -> None:
    found = {kind: runs(kind).stated["selection"] for kind in ("dense", "snip", "synflow", "mask-file", "snip-not-private")}
    assert found["dense"]["pre_pruning"] is None and found["dense"]["dropping"]["why_free"] == "nothing is dropped"
    assert "noised release that is among the events" in found["snip"]["pre_pruning"]["why"]
    assert found["snip"]["dropping"] == {
        "criterion": "magnitude", "rate": 0.4, "granularity": "weight",
        "why_free": "chosen before the batch is drawn, computed from weights that are released already: no cost",
    }  # fmt: skip
    assert "without looking at the data" in found["synflow"]["pre_pruning"]["why"]
    assert "fresh coins" in found["synflow"]["dropping"]["why_free"]
    source = found["mask-file"]["pre_pruning"]
    assert source["source"].startswith("a file of masks")
    assert source["source_sha256"] == hashlib.sha256(runs("snip").file("mask.safetensors").read_bytes()).hexdigest()
    assert found["snip"]["pre_pruning"]["source"] == "this run"
    assert "nothing that uses it is private" in found["snip-not-private"]["pre_pruning"]["why"]


def test_sampling_is_said_as_it_was_done(runs: Runs) -> None:
    assert runs("dense").stated["sampling"]["done"].startswith("Poisson: every unit joins every step by a coin of its own")
    assert runs("everyone").stated["sampling"]["done"] == "every unit takes part in every step"
    named = Path(__file__).parents[1] / re.findall(r"\((tests/.*?)\)", runs("dense").stated["sampling"]["evidence"])[0]
    assert "def test_the_rate_over_ten_million_coins" in named.read_text()


def test_arithmetic_and_keys_are_said(runs: Runs) -> None:
    assert "integer grid, discrete Gaussian" in runs("exact").page and "not claimed" not in runs("exact").page
    assert "not claimed: safety against attacks on the rounding" in runs("dense").page
    assert "256 bits from the operating system; erased when the run ended" in runs("dense").page
    assert not (runs("dense").path / "private" / "key").exists()
    given = runs("given-key")
    assert "chosen by the user" in given.stated["keys"] and given.stated["profile"] is None
    assert given.stated["epsilon"] == runs("dense").stated["epsilon"], "computed, and not claimed"


def test_what_the_pixels_went_through_is_said(runs: Runs) -> None:
    default, own = runs("dense").stated["preprocessing"], runs("views").stated["preprocessing"]
    assert (default["mean"], default["std"], default["shape"]) == ([0.1307], [0.3081], [1, 28, 28])
    assert default["origin"].startswith("public constants")
    assert (own["mean"], own["std"], own["augmentation"], own["views"]) == ([0.2], [0.4], "crop-flip", 3)
    assert own["origin"].startswith("numbers given by the operator")
    assert "averaged over its 3 augmented views" in runs("views").page


def test_evaluation_data_are_not_protected_and_that_is_said(runs: Runs) -> None:
    assert "The evaluation data: accuracy and the other figures on them are published without noise" in runs("dense").page
    assert "evaluation data" not in runs("views").page, "there were none"


def test_units_are_said(runs: Runs) -> None:
    told = runs("units")
    assert told.stated["unit"] == "all training rows with one unit number" and "There are 5 of them" in told.page
    assert "different unit numbers" in told.page and "whether any one unit was" in told.page
    assert runs("dense").stated["unit"].startswith("one training record") and "different unit numbers" not in runs("dense").page


def test_a_delta_that_is_not_below_one_in_n_is_warned_of(runs: Runs) -> None:
    assert runs("wide-delta").page.startswith("# Privacy statement\n\n**Beware:** delta 0.05 is not below 1/N = 0.017")
    assert "it is not below one in the number of records" in runs("wide-delta").page
    assert "Beware" not in runs("dense").page and "it is below one in" in runs("dense").page


def test_replace_one_is_said(runs: Runs) -> None:
    told = runs("replace-one")
    assert told.stated["neighbouring"]["relation"] == "replace-one" and "replaced by anything else" in told.page
    assert told.stated["epsilon"] == told.stated["others"]["epsilon"]["pld, replace-one"] > runs("dense").stated["epsilon"]
    assert f"a record is emptied or added, by PLD, {runs('dense').stated['epsilon']:.4g}" in told.page
    assert f"a record is replaced by another, by PLD, {told.stated['epsilon']:.4g}" in runs("dense").page


def test_the_papers_rule_states_the_delta_that_it_proves(runs: Runs) -> None:
    told = runs("paper")
    assert told.stated["delta"] == 2e-3 and "at delta 0.002" in told.page and "2 parts prove only delta 0.002" in told.page
    assert told.stated["accountant"]["delta"] == told.stated["others"]["delta"] == 1e-3
    assert runs("rdp").stated["accountant"]["name"] == "rdp" and "Renyi" in runs("rdp").page


def test_a_resumption_under_a_fresh_key_is_said(runs: Runs) -> None:
    told = runs("fresh-key")
    assert "steps are charged again" in told.stated["resumed"] and told.stated["resumed"] in told.page
    assert any("fresh noise" in e["what"] for e in told.stated["events"])
    assert runs("dense").stated["resumed"].startswith("no step was charged twice")


def test_public_weights_are_named_with_their_checksum(runs: Runs, tmp_path: Path) -> None:
    weights = runs("dense").file("model.safetensors")
    go(tiny(runs.place / "data", model=Model(weights=str(weights))), tmp_path / "run")
    told = json.loads((tmp_path / "run" / "public" / "privacy.json").read_text())["public_data"]
    assert told["weights"] == weights.name and told["weights_sha256"] == hashlib.sha256(weights.read_bytes()).hexdigest()
    assert "not checked" in told["overlap"]


@pytest.mark.parametrize("kind", ["given-key", "no-noise", "snip-not-private"])
def test_a_run_that_is_not_private_claims_nothing(runs: Runs, kind: str) -> None:
    told = runs(kind)
    assert told.stated["stamp"].startswith("not private") and f"**This model is {told.stated['stamp']}.**" in told.page
    assert told.stated["profile"] is None and "Nothing below is a guarantee" in told.page
    for claim in ("was trained with differential privacy", "at most", "Covered:", "no longer holds"):
        assert claim not in told.page.split("## For specialists")[0].replace("at most k", ""), claim
    assert told.stated["epsilon"] is None or kind == "given-key"


# --- The page -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", PRIVATE)
def test_the_page_is_a_page_and_explains_its_words(runs: Runs, kind: str) -> None:
    text = runs(kind).page
    front, details = text.split("## For specialists: what it rests on")
    assert len(front.split()) <= 540 and len(details.split()) <= 480, "a page has about five hundred words"
    assert not re.search(r"None|nan|\binf\b|\{|\}|\[|\.\.", text), "a value that slipped through"
    for word in ("**Epsilon** bounds", "**Delta** is roughly", "**What is protected:**", "**In words:**"):
        assert word in front
    assert not re.search(r"Poisson|Gaussian|SHAKE|RDP accountant|mu-GDP|gradient|hyperparameter", front)


def test_the_page_follows_from_the_values(runs: Runs) -> None:
    for kind in KINDS:
        assert page(runs(kind).stated) == runs(kind).page, kind


def test_an_audit_is_told_of_and_binds_nothing_anew(runs: Runs, tmp_path: Path) -> None:
    run = tiny(runs.place / "data", runtime={"key": None})
    go(run, tmp_path / "run")
    config = json.loads((tmp_path / "run" / "public" / "config.json").read_text())
    report = Report(recipe={part: config[part] for part in ("sparsity", "mechanism")}, findings=(), checks=())
    before = (tmp_path / "run" / "public" / "privacy.json").read_bytes()
    flip(tmp_path / "run" / "public" / "model.safetensors")
    with pytest.raises(UsageError, match=r"model.safetensors is not the file that privacy.json speaks of"):
        add_to_statement(report, tmp_path / "run")
    assert (tmp_path / "run" / "public" / "privacy.json").read_bytes() == before
    flip(tmp_path / "run" / "public" / "model.safetensors")
    add_to_statement(report, tmp_path / "run")
    assert "Nothing that was tried contradicts" in (tmp_path / "run" / "public" / "privacy.md").read_text()
    path = tmp_path / "run" / "public" / "privacy.json"
    stated = json.loads(path.read_text())
    for odd in ({"files": stated["files"]}, {**stated, "config": []}, {k: stated[k] for k in ("files", "config")}):
        path.write_text(json.dumps(odd))
        with pytest.raises(UsageError, match=r"^[^\n]*\.$"):
            add_to_statement(report, tmp_path / "run")
        assert json.loads(path.read_text()) == odd


# --- Bound to the files, computable again, and nothing else in it -----------------------------------------------------------


def flip(path: Path) -> None:
    """One bit of the last byte."""
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("name", ["model.safetensors", "average.safetensors", "mask.safetensors", "ledger.json", "config.json"])
def test_a_file_that_was_changed_is_noticed(runs: Runs, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    done = runs("snip")
    original = done.file(name).read_bytes()
    assert cli.main(["evaluate", str(done.path)]) == 0
    if name == "config.json":
        done.file(name).write_bytes(original.replace(b'"clip": 1.0', b'"clip": 2.0'))
    else:
        flip(done.file(name))
    try:
        for verb in (["evaluate"], ["doctor"], ["evaluate", "--average"]):
            capsys.readouterr()
            assert cli.main([verb[0], str(done.path), *verb[1:]]) == 2
            assert f"{name} is not the file that privacy.json speaks of" in capsys.readouterr().err
        done.file(name).unlink()
        with pytest.raises(UsageError, match="is not the file"):
            statement.check(done.file(""))
    finally:
        done.file(name).write_bytes(original)
    statement.check(done.file(""))


def test_a_statement_that_names_no_files_is_refused_and_none_at_all_is_not(tmp_path: Path) -> None:
    statement.check(tmp_path)
    (tmp_path / "privacy.json").write_text("{}")
    with pytest.raises(UsageError, match="names no files; restore it"):
        statement.check(tmp_path)


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "x" * 300, "a\nb", "key"])
def test_a_statement_that_names_files_of_others_is_refused_before_they_are_read(name: str, tmp_path: Path) -> None:
    public = tmp_path / "public"
    public.mkdir()
    (tmp_path / "secret").write_text("x")
    (public / "privacy.json").write_text(json.dumps({"files": {name: statement.digest(tmp_path / "secret")}}))
    with pytest.raises(UsageError, match=r"names files that no run writes; restore it\.$"):
        statement.check(public)


RECOMPUTED = ["snip", "rdp", "paper", "replace-one", "fresh-key"]


@pytest.mark.parametrize("kind", RECOMPUTED)
def test_a_third_party_computes_epsilon_again(runs: Runs, kind: str) -> None:
    done = subprocess.run(recompute(runs(kind).file("privacy.json")), capture_output=True, text=True, check=False)
    said = [line for line in done.stderr.splitlines() if not re.match("WARNING:absl:.* Excluding this order", line)]
    assert (done.returncode, said) == (0, [])
    words = re.fullmatch(r"differentially private: stated ([\d.]+), computed ([\d.]+)\n", done.stdout)
    assert words and abs(float(words[1]) - float(words[2])) <= 1e-4
    assert float(words[1]) == pytest.approx(runs(kind).stated["epsilon"], abs=1e-6)


def recompute(path: Path) -> list[str]:
    return [sys.executable, "-W", "error", str(SCRIPT), str(path)]


def test_the_script_notices_a_false_epsilon_and_a_run_without_one(runs: Runs, tmp_path: Path) -> None:
    told = runs("snip").stated
    (tmp_path / "privacy.json").write_text(json.dumps({**told, "epsilon": told["epsilon"] - 0.01}))
    assert subprocess.run(recompute(tmp_path / "privacy.json"), capture_output=True, check=False).returncode == 1
    done = subprocess.run(recompute(runs("no-noise").file("privacy.json")), capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "not private: no clipping and no noise: there is no epsilon to compute" in done.stderr


def test_the_script_needs_nothing_of_ours(runs: Runs) -> None:
    assert not re.search(r"^(import|from) (sparsedp|torch)", SCRIPT.read_text(), re.MULTILINE)


def test_the_statement_does_not_depend_on_who_was_in_which_batch(runs: Runs, tmp_path: Path) -> None:
    """Two keys draw other batches: only the checksums of the weights may tell."""
    one = runs("snip").stated
    go(runs("snip").run, tmp_path / "run")
    other = json.loads((tmp_path / "run" / "public" / "privacy.json").read_text())
    kept = ("selection", "files")
    assert {k: v for k, v in one.items() if k not in kept} == {k: v for k, v in other.items() if k not in kept}
    assert one["selection"]["dropping"] == other["selection"]["dropping"]
    assert one["files"]["ledger.json"] == other["files"]["ledger.json"]
    assert one["files"]["model.safetensors"] != other["files"]["model.safetensors"]


def test_no_key_is_in_anything_that_is_published(runs: Runs) -> None:
    for kind in ("dense", "snip", "given-key", "fresh-key", "no-noise"):
        done = runs(kind)
        files = [path for path in done.file("").rglob("*") if path.is_file()]
        assert len(files) >= 8 and done.secrets
        for secret in done.secrets:
            hidden = (
                secret,
                secret[:8],
                secret.hex().encode(),
                secret.hex()[:16].encode(),
                base64.b64encode(secret)[:16],
                b"sesame",
            )
            assert not [(p, h) for p in files for h in hidden if h in p.read_bytes()], kind
