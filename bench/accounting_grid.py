"""Epsilon of `sparsedp` against four other computations, over random settings and the paper's.

    python bench/accounting_grid.py --settings 500 --json bench/results/accounting_grid.json

The others: dp_accounting's PLD and RDP accountants called plainly, prv_accountant (an interval and an estimate), and Opacus'
RDP accountant. It also measures, against the Gaussian's closed form, how far the Fourier transform's rounding moves delta.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import platform
import time
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Any

import dp_accounting as dp
import numpy as np
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant

from sparsedp.dp.accounting import epsilon, first_grid, loss_distribution, parts_of, rounding, training_event
from sparsedp.dp.calibration import calibrate_noise
from sparsedp.dp.tradeoff import gaussian_delta

PAPER = [(4096 / 50000, 10.0, 875), (4096 / 50000, 6.0, 1125), (4096 / 50000, 4.0, 2000), (16384 / 50000, 21.1, 250)]
Setting = tuple[float, float, int, float]


def settings(count: int, seed: int) -> list[Setting]:
    """(q, sigma, T, delta): the paper's, and log-uniform ones whose RDP epsilon lies in [0.05, 20]."""
    draw = np.random.default_rng(seed)
    chosen: list[Setting] = [(*setting, 1e-5) for setting in PAPER]
    while len(chosen) < count:
        rate, sigma = 10 ** draw.uniform(-3, 0), 10 ** draw.uniform(-0.2, 1.7)
        steps, delta = int(10 ** draw.uniform(0, 3.7)), float(draw.choice([1e-5, 1e-6, 1e-8]))
        if 0.05 <= plain_rdp(rate, sigma, steps, delta) <= 20:
            chosen.append((rate, sigma, steps, delta))
    return chosen


def plain_rdp(rate: float, sigma: float, steps: int, delta: float) -> float:
    return float(RdpAccountant().compose(dp.PoissonSampledDpEvent(rate, dp.GaussianDpEvent(sigma)), steps).get_epsilon(delta))


def plain_pld(rate: float, sigma: float, steps: int, delta: float) -> float:
    return float(PLDAccountant().compose(dp.PoissonSampledDpEvent(rate, dp.GaussianDpEvent(sigma)), steps).get_epsilon(delta))


def opacus_rdp(rate: float, sigma: float, steps: int, delta: float) -> float:
    from opacus.accountants import RDPAccountant

    accountant = RDPAccountant()
    accountant.history = [(sigma, rate, steps)]
    return float(accountant.get_epsilon(delta))


def prv(rate: float, sigma: float, steps: int, delta: float, near: float) -> tuple[float, float, float]:
    """(low, estimate, high); asked again for a tenth of the error where its estimate and `near` differ by more than 1e-3."""
    wide = max(0.01, 0.02 * near)
    answer = prv_interval(rate, sigma, steps, delta, wide, delta / 100)
    if abs(answer[1] - near) <= 1e-3:
        return answer
    try:
        return prv_interval(rate, sigma, steps, delta, wide / 10, delta / 100)
    except RuntimeError:  # "Discrete mean differs from continuous mean significantly"
        return answer


def prv_interval(
    rate: float, sigma: float, steps: int, delta: float, error: float, delta_error: float
) -> tuple[float, float, float]:
    from prv_accountant import PoissonSubsampledGaussianMechanism, PRVAccountant

    mechanism = PoissonSubsampledGaussianMechanism(sampling_probability=rate, noise_multiplier=sigma)
    accountant = PRVAccountant([mechanism], max_self_compositions=[steps], eps_error=error, delta_error=delta_error)
    low, estimate, high = accountant.compute_epsilon(delta, [steps])
    return float(low), float(estimate), float(high)


def compare(setting: Setting) -> dict[str, Any]:
    """One row: our numbers, theirs, and the seconds that ours took."""
    rate, sigma, steps, delta = setting
    event = training_event(rate, sigma, steps)
    start = time.perf_counter()
    ours = epsilon(event, delta)
    seconds = time.perf_counter() - start
    row: dict[str, Any] = {
        "rate": rate,
        "sigma": sigma,
        "steps": steps,
        "delta": delta,
        "ours": ours.epsilon,
        "slack": ours.slack,
    }
    row |= {"seconds": seconds, "ours_rdp": epsilon(event, delta, "rdp").epsilon}
    row |= {"plain_rdp": plain_rdp(*setting), "plain_pld": plain_pld(*setting), "opacus_rdp": opacus_rdp(*setting)}
    try:
        row["prv"] = prv(*setting, near=ours.epsilon)
    except (ValueError, RuntimeError) as error:
        row["prv_refused"] = str(error)[:100]
    return row


def fourier_error() -> list[dict[str, float]]:
    """The most by which a composed grid's delta falls below the closed form, as a part of what is allowed for."""
    rows = []
    for steps in (10, 100, 1_000, 10_000, 100_000, 1_000_000):
        worst = 0.0
        for mu in (0.3, 1.0, 3.0, 10.0):
            parts = parts_of(training_event(1 - 1e-15, math.sqrt(steps) / mu, steps))
            losses = loss_distribution(parts, "add-remove", first_grid(parts, "add-remove"))
            for k in range(2, 30):
                eps = mu * mu / 2 + mu * k / 4
                missing = gaussian_delta(eps, mu) - float(losses.get_delta_for_epsilon(eps))
                worst = max(worst, missing)
        rows.append({"steps": steps, "shortfall": worst, "allowed": rounding(parts), "part": worst / rounding(parts)})
    return rows


def calibrations(count: int, seed: int) -> dict[str, float]:
    """Random targets from 0.05 to 20: how many noise multipliers that were found cost more than their target, and how much less at most."""
    draw = np.random.default_rng(seed)
    parts, seconds = [], []
    for _ in range(count):
        target, rate, steps = 10 ** draw.uniform(-1.3, 1.3), 10 ** draw.uniform(-3, 0), int(10 ** draw.uniform(0, 4.3))
        start = time.process_time()
        found = calibrate_noise(lambda sigma, q=rate, t=steps: training_event(q, sigma, t), target, 1e-5)
        seconds.append(time.process_time() - start)
        parts.append(epsilon(training_event(rate, found.value, steps), 1e-5).epsilon / target)
    return {
        "count": count,
        "above_target": sum(part > 1 for part in parts),
        "least_part_of_target": min(parts),
        "median_cpu_seconds": float(np.median(seconds)),
        "largest_cpu_seconds": max(seconds),
    }


def summary(rows: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """The tolerances achieved."""
    ours = np.array([r["ours"] for r in rows])

    def relative(name: str, base: str = "ours") -> np.ndarray:
        return np.array([abs(r[base] - r[name]) / r[name] for r in rows])

    with_prv = [r for r in rows if "prv" in r]
    gaps = np.array([abs(r["ours"] - r["prv"][1]) for r in with_prv])
    outside = [r for r in with_prv if not r["prv"][0] <= r["ours"] <= r["prv"][2]]
    return [
        ("settings (prv_accountant answered)", f"{len(rows)} ({len(with_prv)})"),
        ("epsilon, smallest to largest", f"{ours.min():.3g} to {ours.max():.3g}"),
        ("ours against plain PLD (grid 1e-4), relative: median, largest", _pair(relative("plain_pld"))),
        ("ours above plain PLD by more than 1e-3 of it", str(sum(r["ours"] > r["plain_pld"] * 1.001 for r in rows))),
        ("ours above RDP", str(sum(r["ours"] > r["ours_rdp"] for r in rows))),
        ("our RDP against plain RDP, relative: median, largest", _pair(relative("plain_rdp", "ours_rdp"))),
        ("ours against prv_accountant's estimate by more than 1e-3", str(int((gaps > 1e-3).sum()))),
        (
            "our RDP above Opacus' RDP by more than 1e-6 of it",
            str(sum(r["ours_rdp"] > r["opacus_rdp"] * (1 + 1e-6) for r in rows)),
        ),
        ("the same, largest part of it", f"{max(r['ours_rdp'] / r['opacus_rdp'] - 1 for r in rows):.1e}"),
        (
            "our RDP below Opacus' (its orders end at 63) by more than 1e-6 of it",
            str(sum(r["ours_rdp"] < r["opacus_rdp"] * (1 - 1e-6) for r in rows)),
        ),
        ("ours outside prv_accountant's interval", str(len(outside))),
        ("ours against prv_accountant's estimate, absolute: median, largest", _pair(gaps)),
        (
            "seconds for one epsilon: median, largest",
            f"{np.median([r['seconds'] for r in rows]):.2f}, {max(r['seconds'] for r in rows):.2f}",
        ),
    ]


def _pair(values: np.ndarray) -> str:
    return f"{np.median(values):.1e}, {values.max():.1e}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--calibrations", type=int, default=0, help="only calibrate this often, and say what came out")
    parser.add_argument("--json", type=Path, default=None)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("absl").setLevel(logging.ERROR)
    if arguments.calibrations:
        print(json.dumps(calibrations(arguments.calibrations, arguments.seed)))
        return
    start = time.perf_counter()
    rows = [compare(setting) for setting in settings(arguments.settings, arguments.seed)]
    rounded = fourier_error()
    versions = {name: version(name) for name in ("dp-accounting", "prv-accountant", "opacus", "numpy", "scipy")}
    print("| compared | measured |\n|---|---|")
    for name, value in summary(rows):
        print(f"| {name} | {value} |")
    print("\n| steps | delta's shortfall | allowed for | part |\n|---|---|---|---|")
    for r in rounded:
        print(f"| {r['steps']:,} | {r['shortfall']:.1e} | {r['allowed']:.1e} | {r['part']:.3f} |")
    seconds = round(time.perf_counter() - start)
    print(f"\n{versions}, Python {platform.python_version()}, seed {arguments.seed}, {seconds} s")
    if arguments.json is not None:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        result = {"versions": versions, "seed": arguments.seed, "seconds": seconds, "rows": rows, "rounding": rounded}
        arguments.json.write_text(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
