"""The best of a random number of trials: what it costs, by figures and by the theorems themselves, and that its draws have their law."""

from __future__ import annotations

import itertools
import json
import math

import dp_accounting as dp
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import optimize, stats

from sparsedp.dp import tuning
from sparsedp.dp.accounting import Spent, epsilon
from sparsedp.dp.calibration import calibrate_noise
from sparsedp.dp.ledger import Ledger, gaussian_event
from sparsedp.dp.randomness import Key
from sparsedp.dp.tradeoff import profile
from sparsedp.errors import UsageError
from tests.distributions import chi_squared_p, mean_p

DELTA = 1e-5
BASE = Ledger().append("train", gaussian_event(0.08192, 10.0), 875)
ORDERS = [1 + x / 10 for x in range(1, 100)] + [*range(11, 64), 128, 256, 512, 1024]


def key(number: int) -> Key:
    return Key(number.to_bytes(32, "big"), given=True)


def cost(law: str, mean: float, trial: Ledger = BASE, noise: float | None = None) -> float:
    return epsilon(tuning.search(trial, law, mean, noise), DELTA, "rdp").epsilon


def plain(sigma: float) -> Ledger:
    return Ledger().append("release", gaussian_event(1.0, sigma))


@pytest.mark.parametrize(
    ("law", "mean", "expected"),
    [("geometric", 100, 2.6546), ("poisson", 10, 2.2898), ("poisson", 100, 8.1238), ("logarithmic", 10, 1.7422), ("geometric", 10, 2.1025)],
)  # fmt: skip
def test_known_searches(law: str, mean: float, expected: float) -> None:
    """Sigma 10, rate 0.08192, 875 steps: 0.988 by itself (RDP)."""
    assert cost(law, mean) == pytest.approx(expected, abs=1e-4)


def test_ten_runs_that_are_all_told_cost_more_than_a_search_among_ten() -> None:
    ten = Ledger().append("train", gaussian_event(0.08192, 10.0), 8750)
    assert epsilon(ten, DELTA, "pld").epsilon == pytest.approx(3.2394, abs=2e-3)


def converted(rdp: dict[float, float], delta: float) -> float:
    """From Renyi divergences to epsilon (Canonne, Kamath and Steinke 2020, proposition 12)."""
    return min(r + math.log1p(-1 / a) - math.log(delta * a) / (a - 1) for a, r in rdp.items())


@pytest.mark.parametrize(("law", "mean", "sigma"), list(itertools.product(tuning.LAWS, (2.0, 10.0, 100.0), (2.0, 7.0))))
def test_the_accountant_says_what_the_theorems_say(law: str, mean: float, sigma: float) -> None:
    """Papernot and Steinke 2022, theorems 2 and 6, written anew for one Gaussian release."""
    one = {a: a / (2 * sigma**2) for a in ORDERS}
    if law == "poisson":
        found = {}
        for a, r in one.items():
            at = math.log1p(1 / (a - 1))
            missing = math.exp(min(0.0, *((b - 1) * (s - at + math.log1p(-1 / b)) - math.log(b) for b, s in one.items())))
            found[a] = r + mean * missing + math.log(mean) / (a - 1)
    else:
        shape = tuning.LAWS[law]
        gamma = 1 / mean if shape == 1 else 1 - logarithmic(mean)
        best = min((1 - 1 / b) * s - math.log(gamma) / b for b, s in one.items())
        found = {a: r + (1 + shape) * best + math.log(mean) / (a - 1) for a, r in one.items()}
    assert cost(law, mean, plain(sigma)) == pytest.approx(converted(found, DELTA), rel=2e-3)
    assert cost(law, mean, plain(sigma)) <= converted(found, DELTA) * (1 + 1e-9), (
        "the library also knows that divergences ascend"
    )


@given(st.sampled_from(sorted(tuning.LAWS)), st.floats(1.01, 400), st.floats(0.7, 60), st.none() | st.floats(0.5, 50))
def test_never_below_one_trial(law: str, mean: float, sigma: float, noise: float | None) -> None:
    """Guarantee: a search costs at least as much as one of its trials, its score included."""
    once = plain(sigma) if noise is None else plain(sigma).append("score", gaussian_event(1.0, noise))
    assert cost(law, mean, plain(sigma), noise) >= epsilon(once, DELTA, "rdp").epsilon


@pytest.mark.parametrize("law", tuning.LAWS)
def test_more_trials_and_less_noise_cost_more(law: str) -> None:
    by_mean = [cost(law, mean, plain(8.0)) for mean in (1.5, 3, 10, 30, 100)]
    by_noise = [cost(law, 10, plain(sigma)) for sigma in (2.0, 4.0, 8.0, 16.0)]
    by_score = [cost(law, 10, plain(8.0), noise) for noise in (None, 100.0, 10.0, 1.0)]
    assert by_mean == sorted(set(by_mean))
    assert by_noise == sorted(set(by_noise), reverse=True)
    assert by_score == sorted(set(by_score))


def test_other_accountants_answer_by_renyi_or_not_at_all() -> None:
    searched = tuning.search(BASE, "geometric", 10)
    by_pld: Spent = epsilon(searched.append("train", gaussian_event(0.1, 5.0), 3), DELTA, "pld")
    assert by_pld.accountant == "rdp" and by_pld.grid is None
    assert by_pld.epsilon > cost("geometric", 10)
    with pytest.raises(UsageError, match="replace-one"):
        epsilon(searched, DELTA, "pld", "replace-one")
    with pytest.raises(UsageError, match="add-remove alone"):
        profile(searched, "replace-one")


def test_a_search_over_nothing_private_is_free_and_over_bare_data_infinite() -> None:
    assert cost("poisson", 10, Ledger().append("masks", dp.NoOpDpEvent())) == 0
    for accountant in ("pld", "rdp"):
        bare = tuning.search(Ledger().append("train", gaussian_event(0.1, 0.0)), "poisson", 10)
        assert epsilon(bare, DELTA, accountant).epsilon == math.inf  # type: ignore[arg-type]


def test_its_profile_holds_its_epsilon() -> None:
    searched = tuning.search(BASE, "geometric", 10)
    claim = profile(searched)
    assert list(claim.deltas) == sorted(claim.deltas, reverse=True)
    assert profile(searched, epsilons=[cost("geometric", 10)]).deltas[0] == pytest.approx(DELTA, rel=1e-3)


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
@pytest.mark.parametrize("law", tuning.LAWS)
def test_noise_is_found_for_the_whole_search(law: str, accountant: str) -> None:
    found = calibrate_noise(
        lambda sigma: tuning.search(Ledger().append("train", gaussian_event(0.1, sigma), 50), law, 10, 20.0), 3.0, DELTA, accountant  # type: ignore[arg-type]
    )  # fmt: skip
    assert 3.0 * (1 - 2e-4) <= found.spent.epsilon <= 3.0


@pytest.mark.parametrize("law", tuning.LAWS)
def test_a_ledger_with_a_search_survives_being_written_down(law: str) -> None:
    searched = tuning.search(BASE.append("masks", dp.NoOpDpEvent()), law, 10, 3.0)
    back = Ledger.from_json(json.loads(json.dumps(searched.to_json(), allow_nan=False)))
    assert back == searched and len({back.entries[0].event, searched.entries[0].event}) == 1


@pytest.mark.parametrize(
    "change", [{"mean": 0.5}, {"mean": "infinity"}, {"shape": -1.0}, {"shape": "wide"}, {"shape": None}, {"event": 1}]
)
def test_a_damaged_search_is_refused(change: dict[str, object]) -> None:
    rows = tuning.search(BASE, "geometric", 10).to_json()
    rows[0]["event"].update(change)
    with pytest.raises(UsageError):
        Ledger.from_json(rows)


@pytest.mark.parametrize(
    ("law", "mean"), [("binomial", 10), ("geometric", 1), ("poisson", 0), ("poisson", 501), ("geometric", math.nan)]
)
def test_what_is_no_search_is_refused(law: str, mean: float) -> None:
    with pytest.raises(UsageError, match="distribution|trials_mean"):
        tuning.search(BASE, law, mean)


# --- The draws ----------------------------------------------------------------------------------------------------------


def logarithmic(mean: float) -> float:
    """scipy's parameter of the logarithmic law with this mean."""
    return float(optimize.brentq(lambda p: stats.logser.mean(p) - mean, 1e-9, 1 - 1e-9, xtol=1e-15))


def law_of(law: str, mean: float) -> object:
    return {
        "geometric": lambda: stats.geom(1 / mean), "poisson": lambda: stats.poisson(mean), "logarithmic": lambda: stats.logser(logarithmic(mean)),
    }[law]()  # fmt: skip


@pytest.mark.parametrize(("law", "mean"), list(itertools.product(tuning.LAWS, (1.5, 10.0, 100.0))))
def test_the_chances_are_those_of_the_law(law: str, mean: float) -> None:
    counts, chances = (np.array(column) for column in zip(*tuning.chances(law, mean), strict=True))
    assert np.allclose(chances, law_of(law, mean).pmf(counts), rtol=1e-6, atol=1e-15)  # type: ignore[attr-defined]
    assert counts[0] == (0 if law == "poisson" else 1)
    assert chances.sum() == pytest.approx(1, abs=1e-12) and (counts * chances).sum() == pytest.approx(mean, rel=1e-9)


DRAWS, MEAN = 40_000, 3.0


@pytest.mark.parametrize("law", tuning.LAWS)
def test_numbers_of_trials_follow_their_law_and_no_other(law: str) -> None:
    """The probabilities are those of scipy; a mean that is 5 % off is seen."""
    drawn = np.array([tuning.number_of_trials(law, MEAN, key(i)) for i in range(DRAWS)])

    def p_value(mean: float) -> float:
        wanted = law_of(law, mean)
        cells = chi_squared_p(np.bincount(drawn, minlength=400), wanted.pmf(np.arange(400)))  # type: ignore[attr-defined]
        return min(cells, mean_p(drawn, mean, wanted.std()))  # type: ignore[attr-defined]

    assert p_value(MEAN) > 1e-3
    assert p_value(MEAN * 1.05) < 1e-6 and p_value(MEAN / 1.05) < 1e-6


def test_how_many_trials_there_are_is_settled_by_the_key() -> None:
    """Guarantee: the number of trials is a function of the law and the key alone."""
    drawn = {tuning.number_of_trials("geometric", 10.0, key(3)) for _ in range(3)}
    assert len(drawn) == 1
    assert len({tuning.number_of_trials("geometric", 10.0, key(i)) for i in range(50)}) > 10


def test_candidates_are_drawn_evenly_and_apart() -> None:
    drawn = np.array([[tuning.choice(6, key(i), trial) for trial in range(2)] for i in range(6000)])
    pairs = np.bincount(drawn[:, 0] * 6 + drawn[:, 1], minlength=36)
    assert stats.chisquare(pairs).pvalue > 1e-3
    assert tuning.choice(1, key(0), 5) == 0


def test_units_are_held_out_by_the_key_alone() -> None:
    parts = [tuning.held_out(20, 5, key(i)) for i in range(4000)]
    assert all(len(set(part.tolist())) == 5 and part.max() < 20 and (np.diff(part) > 0).all() for part in parts)
    often = np.bincount(np.concatenate(parts), minlength=20)
    assert stats.chisquare(often).pvalue > 1e-3
    assert (tuning.held_out(20, 5, key(7)) == parts[7]).all()


# --- The score ----------------------------------------------------------------------------------------------------------

units = st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), min_size=1, max_size=30)


@given(units, st.data())
def test_one_unit_counts_once(rows: list[tuple[int, int]], data: st.DataObject) -> None:
    """Guarantee: emptying one unit moves the count before the noise by at most one, however many rows the unit has."""
    place = data.draw(st.integers(0, len(rows) - 1))
    size = torch.tensor([n for n, _ in rows])
    right = torch.tensor([min(n, r) for n, r in rows])
    other = right.clone()
    other[place] = data.draw(st.integers(0, int(size[place])))
    first, second = (tuning.noised_count(r, size, 2.0, key(1), 0) for r in (right, other))
    assert abs(first - second) <= 1


def test_a_score_is_the_count_with_the_noise_that_is_charged(monkeypatch: pytest.MonkeyPatch) -> None:
    right, size = torch.tensor([1, 0, 1, 3]), torch.tensor([1, 1, 1, 4])
    asked: list[object] = []

    def discrete(scale: int, *where: object) -> np.ndarray:
        asked.append((scale, where))
        return np.array([-512])

    first, other = (tuning.noised_count(right, size, 3.0, key(1), trial) for trial in (0, 1))
    assert first != other and first != tuning.noised_count(right, size, 3.0, key(2), 0)
    monkeypatch.setattr(tuning, "discrete_gaussian", discrete)
    assert tuning.noised_count(right, size, 3.0001, key(1), 7) == 2.75 - 0.5
    assert asked == [(math.ceil(3.0001 * 1024), (key(1), 0, 1, "score", 7))], "never less noise than is charged"


@pytest.mark.parametrize("noise", [0.0, -1.0, 65537.0])
def test_a_score_has_noise(noise: float) -> None:
    with pytest.raises(UsageError, match="score_noise"):
        tuning.noised_count(torch.tensor([1]), torch.tensor([1]), noise, key(0), 0)
