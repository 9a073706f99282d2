"""Mutants that the canary audit must notice by attacking, and mutants of the audit itself: one that cannot fail is worth nothing."""

from __future__ import annotations

from tests.mutants.core import MECHANISM, NOISE, NOISED, UNITS, of
from tests.mutants.values import Mutant

BOUNDS, ONE_RUN, SNIP, TRIAL = "audit/bounds.py", "audit/one_run_bounds.py", "audit/snip.py", "audit/trial.py"
ATTACK = of("audit/test_gradient", "test_right_code_is_consistent_and_half_of_its_claim_is_found")
CURVE = (
    "return any(one.miss < claim.miss_rate(one.false_alarm) or one.false_alarm < claim.miss_rate(one.miss) for one in found)"
)

_attacked = [
    Mutant("G8a", "noise of 0.71 of the charged size (seen by attack)", [(NOISE, "drawn = normal(key, 0, tensor.numel(), *place)", "drawn = 0.71 * normal(key, 0, tensor.numel(), *place)")], ATTACK),
    Mutant("G8b", "units join half as often again as is charged (seen by attack)", [(MECHANISM, UNITS, UNITS.replace("settings.sampling_rate)", "min(1.0, 1.5 * settings.sampling_rate))"))], ATTACK),
    Mutant("G8c", "every unit is read twice (seen by attack)", [(MECHANISM, UNITS, UNITS + "    units = units.repeat_interleave(2)\n")], ATTACK),
    Mutant("G8d", "one tensor gets no noise (seen by attack)", [(MECHANISM, NOISED, NOISED + "    noised = Released({**noised.tensors, **{n: t for n, t in total.tensors.items() if n.endswith('conv.weight')}}, noised.origin)\n")], ATTACK),
]  # fmt: skip

_audit = [
    Mutant("U1", "the audit compares with estimates instead of confidence limits", [(BOUNDS, "return 1.0 if count >= trials else float(stats.beta.ppf(1 - alpha, count + 1, trials - count))", "return count / trials")],
           of("audit/test_bounds", "test_the_upper_limit_is_where_so_few_become_improbable")),
    Mutant("U2", "the audit never calls a claim wrong", [(BOUNDS, CURVE, "return False")], of("audit/test_bounds", "test_violation_is_judged_on_the_whole_curve")),
    Mutant("U3", "the pilot that chose the thresholds is counted too", [(BOUNDS, "rest_out, rest_in = out[a:], inside[b:]", "rest_out, rest_in = out[:a], inside[:b]")],
           of("audit/test_bounds", "test_lower_bounds_are_as_large_as_expected_and_below_the_truth")),
    Mutant("U4", "thresholds are not paid for", [(BOUNDS, "alpha = (1 - confidence) / (2 * len(counts) * family)", "alpha = 1 - confidence")],
           of("audit/test_bounds", "test_limits_hold_as_often_as_they_say")),
    Mutant("U5", "the one-run bound forgets the price of delta", [(ONE_RUN, "beta + 2 * canaries * delta * steepest", "beta")],
           of("audit/test_bounds", "test_the_price_of_delta_is_the_steepest_chord")),
    Mutant("U6", "the one-run recursion counts a tail twice", [(ONE_RUN, "right += i / (guesses - i) * (wrong - before)", "right += (i + 1) / (guesses - i) * (wrong - before) + (wrong - before)")],
           of("audit/test_bounds", "test_the_recursion_never_rejects_randomised_response_too_often")),
    Mutant("U7", "the canary is in both worlds", [(TRIAL, "elif unit == 0 and canary is not None:", "elif unit == 0:\n                canary = canary or Canary()")], ATTACK),
    Mutant("U8", "the mean's shift is reported without its error", [(SNIP, "mu + special.ndtri(alpha) * error", "mu + 0 * error")],
           of("audit/test_one_run", "test_the_shift_of_the_mean_is_a_lower_limit_as_often_as_it_says")),
]  # fmt: skip

MUTANTS = (*_attacked, *_audit)
