"""Mutants of pre-pruning: what DP-SNIP releases and pays for, and what the free criteria may see."""

from __future__ import annotations

from tests.mutants.core import MECHANISM, SNIP, of
from tests.mutants.values import Mutant

DP, PRUNING, CONNECTIVITY, ACCOUNTING = "dp/pruning.py", "pruning.py", "connectivity.py", "dp/accounting.py"
SNIP_TOTAL = "    total = reduce(_sum(settings, model, loss, read(units), settings.pruned, engine))\n"
AT_ONCE = "    whole = [Rows.make(r.inputs, r.targets, r.unit * 0) for r in read(units)]\n"
SUMMED = "    total = reduce(_sum(settings, model, loss, whole, settings.pruned, engine))\n"
NOISED_ONCE = SNIP.replace("return", "noised =").replace("    noised", "    noised", 1)
SNIP_REPLAY = of("test_record_replay", "test_dp_snip_leaks_nothing")
ONE_MORE = of("test_pruning", "test_one_more_unit_moves_the_release_by_at_most_the_clip")

MUTANTS = (
    Mutant("A5", "DP-SNIP clips the mean over the data, and scales it up again", [
        (MECHANISM, SNIP_TOTAL, AT_ONCE + SUMMED + "    for t in total.tensors.values():\n        t *= len(units)\n"),
    ], ONE_MORE),
    Mutant("A6", "DP-SNIP clips the gradient over all the data once, as the listing has it",
           [(MECHANISM, SNIP_TOTAL, AT_ONCE + SUMMED)], of("test_pruning", "test_the_mask_does_not_depend_on_micro_batches_or_the_engine")),
    Mutant("A7", "scores are divided by the sum of the raw scores", [
        (MECHANISM, SNIP, SNIP.replace("over(settings.batch_size)", "over(settings.batch_size * (1e-9 + float(sum(t.abs().sum() for t in total.tensors.values()))))")),
    ], SNIP_REPLAY),
    Mutant("A8", "the threshold is that of the raw scores", [
        (MECHANISM, SNIP, NOISED_ONCE + "    high = {n: t.abs() >= t.abs().double().mean() for n, t in total.tensors.items()}\n"
         "    return Released({n: t * high[n] for n, t in noised.tensors.items()}, noised.origin)\n"),
    ], SNIP_REPLAY),
    Mutant("A10a", "delta is used twice: two parts, each at the full delta, are claimed at one",
           [(ACCOUNTING, "proved = min(1.0, delta * max(1, several))", "proved = delta")],
           of("dp/test_accounting", "test_the_papers_rule_sums_the_parts_and_proves_only_twice_delta")),
    Mutant("A10b", "epsilons of parts are added up by the tight accountant too", [
        (ACCOUNTING, "    shortcut = _without_grid(parts, delta, neighbouring)\n",
         "    if len(parts) > 1:\n        each = [_by_pld({e: n}, delta, neighbouring).epsilon for e, n in parts.items()]\n"
         '        return Spent(sum(each), delta, "pld", neighbouring, "sum")\n    shortcut = _without_grid(parts, delta, neighbouring)\n'),
    ], of("dp/test_accounting", "test_joint_composition_is_not_a_sum_and_claims_one_delta")),
    Mutant("A11", "DP-SNIP's gradients are clipped to training's norm", [(PRUNING, "data, sigma, sparsity.snip_clip)", "data, sigma, 1.0)")],
           of("test_pruning", "test_record_and_replay"), sample=True),
    Mutant("A12", "two noised releases are averaged into one, and one is charged", [
        (MECHANISM, SNIP, NOISED_ONCE + '    again = add_noise(total, settings.noise_multiplier, settings.pruned, key, "dp-snip", 1).over(settings.batch_size)\n'
         "    return Released({n: (t + again.tensors[n]) / 2 for n, t in noised.tensors.items()}, noised.origin)\n"),
    ], of("test_pruning", "test_one_release_is_one_event_recorded_before_any_row_is_read")),
    Mutant("A13", "connection gradients are taken in training mode", [(CONNECTIVITY, "return super().train(False)", "return super().train(mode)"),
                                                                     (CONNECTIVITY, "        self.eval()\n", "        self.train()\n")],
           of("test_connectivity", "test_examples_never_see_each_other", "test_only_connectivity_variables_train_and_the_model_is_left_alone")),
    Mutant("A14", "SynFlow and random pruning look at a batch first",
           [(PRUNING, "        masks, event = FREE[name](public), _free(", "        list(data.read(range(data.num_units))) if data is not None else None\n        masks, event = FREE[name](public), _free(")],
           of("test_pruning", "test_free_criteria_touch_no_data_and_say_so")),
    Mutant("A9b", "the plan of a run leaves out what DP-SNIP costs", [("planning.py", "before = before or _before_training(s, num_units, snip_sigma)", "before = before or Ledger()")],
           of("test_planning", "test_dp_snip_is_composed_with_training")),
)  # fmt: skip
