"""Mutants of the accountant, of calibration, and of the ledger and the budget that it is asked about."""

from __future__ import annotations

from tests.mutants.core import of
from tests.mutants.values import Mutant

ACCOUNTING, CALIBRATION, LEDGER = "dp/accounting.py", "dp/calibration.py", "dp/ledger.py"
SINGLE = "    # The library raises the size of a sparse distribution to the power"
FACTS = "dp/test_accounting"


def _one_way(row: str, kept: str) -> Mutant:
    return Mutant(
        row, f"only the direction {kept.removeprefix('_pmf_')!r} of neighbouring is composed",
        [(ACCOUNTING, SINGLE, f"    single = PrivacyLossDistribution(single.{kept}, single.{kept})\n" + SINGLE)],
        of(FACTS, "test_both_directions_are_covered"),
    )  # fmt: skip


MUTANTS = (
    Mutant("D1", "replace-one is claimed with the numbers of add/remove", [(ACCOUNTING, '"replace-one": dp.NeighboringRelation.REPLACE_ONE,', '"replace-one": dp.NeighboringRelation.ADD_OR_REMOVE_ONE,')],
           of(FACTS, "test_replace_one_costs_about_twice_and_says_so"), sample=True),
    Mutant("D2", "Renyi accounting answers for replace-one", [(ACCOUNTING, '    _refuse_replacement("rdp", neighbouring)\n', "")], of(FACTS, "test_rdp_and_paper_refuse_replace_one")),
    Mutant("D3a", "losses are rounded to the nearest, not to the private side", [(ACCOUNTING, "pessimistic_estimate=True", "pessimistic_estimate=False")],
           of(FACTS, "test_the_grid_rounds_to_the_private_side", "test_both_directions_are_covered")),
    Mutant("D3b", "the rounding of the Fourier transform is not paid for", [(ACCOUNTING, "allowed = delta - rounding(parts)\n    grid", "allowed = delta\n    grid")],
           of(FACTS, "test_the_fourier_transform_never_claims_too_little")),
    Mutant("D4a", "any delta above zero is answered for", [(ACCOUNTING, "require(SMALLEST_DELTA <= delta < 1,", "require(0 < delta < 1,")], of(FACTS, "test_delta_outside_its_range_is_refused")),
    Mutant("D4b", "a delta of one record is not warned of", [(ACCOUNTING, "found.delta >= 1 / num_examples:", "found.delta > 1:")], of(FACTS, "test_delta_that_is_not_below_one_in_n_is_warned_of")),
    Mutant("D5a", "the grid is not refined", [(ACCOUNTING, "_REFINEMENTS = 3", "_REFINEMENTS = 0")], of(FACTS, "test_grids_are_refined_until_they_settle")),
    Mutant("D5b", "one grid for every noise", [(ACCOUNTING, "return float(2.0 ** round(math.log2(max(fine, coarse, 2.0**-40))))", "return 2.0**-13")],
           of(FACTS, "test_grids_follow_the_noise")),
    _one_way("D6a", "_pmf_remove"),
    _one_way("D6b", "_pmf_add"),
    Mutant("D7a", "calibration stops a little above its target", [(CALIBRATION, "        if spent <= target:\n", "        if spent <= target * 1.002:\n")],
           of("dp/test_calibration", "test_the_specifications_noise", "test_noise_never_passes_its_target")),
    Mutant("D7b", "noise multipliers are rounded to the nearest", [(CALIBRATION, "math.ceil(noise / 10.0 ** (decade - 4) - 1e-6)", "round(noise / 10.0 ** (decade - 4))")],
           of("dp/test_calibration", "test_noise_is_rounded_up_to_five_digits")),
    Mutant("D9a", "events of one name are charged at the first one's noise", [(LEDGER, "(last.what, last.event) == (what, event):", "last.what == what:"),
                                                                            (LEDGER, "Entry(what, event, last.count + count)", "Entry(what, last.event, last.count + count)")],
           of("dp/test_ledger", "test_append_never_loses_an_entry")),
    Mutant("D9b", "a schedule is charged at its last setting", [("dp/parts.py", "        counts[dp.NonPrivateDpEvent() if _is_bare(event) else event] += count",
                                                                "        event = dp.NonPrivateDpEvent() if _is_bare(event) else event\n        same = [e for e in counts if type(e) is type(event)]\n"
                                                                "        counts[event] += count + sum(counts.pop(e) for e in same if e != event)")],
           of(FACTS, "test_a_schedule_is_charged_step_by_step")),
    Mutant("D11", "the data set's budget is that of its last run", [("budget_file.py", "for entry in self.runs().values():", "for entry in list(self.runs().values())[-1:]:")],
           of("test_budget_file", "test_runs_add_up_jointly_and_the_operator_is_told")),
    Mutant("D12a", "a run may go on past its last step", [("private.py", "        if self.steps is not None and self.taken >= self.steps:\n", "        if self.steps is None:\n")],
           of("test_private", "test_epsilon_and_steps_give_the_noise_and_the_target_is_never_passed")),
    Mutant("D12b", "a run that is taken up again begins an empty ledger", [("private.py", "self.taken, self.ledger, self._charged, self.plans = taken, ledger, charged, dict(plans)", "self.taken, self.ledger, self._charged, self.plans = taken, Ledger(), charged, dict(plans)")],
           of("test_training", "test_stopping_at_any_step_changes_nothing", "test_an_old_ledger_is_refused")),
)  # fmt: skip
