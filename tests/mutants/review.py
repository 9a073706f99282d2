"""Mutants of what a review found."""

from __future__ import annotations

from tests.mutants.core import of
from tests.mutants.values import Mutant

MUTANTS = (
    Mutant("B12z", "on the grid a record that makes the loss raise ends the run", [
        ("dp/clipping.py", "unless_it_raises(_one_on_grid, model, loss, unit, masks, clip, grid)", "_one_on_grid(model, loss, unit, masks, clip, grid)"),
    ], of("dp/test_clipping", "test_on_the_grid_a_unit_that_makes_the_loss_raise_counts_zero_and_short_memory_does_not")),
    Mutant("B12y", "DP-SNIP ends at a record that makes the loss raise", [("pruning.py", "sheltered(data.engine(connected))", "data.engine(connected)")],
           of("test_pruning", "test_a_unit_that_makes_the_loss_raise_counts_as_zero")),
    Mutant("C11z", "a file that cannot be read for a while counts as zero", [("data/lazy.py", 'raise machine_fault("An image", str(found))', "pass")],
           of("data/test_folder", "test_a_file_that_is_gone_after_the_check_is_an_error_that_does_not_name_it")),
    Mutant("C11y", "a record that the system does not give counts as zero", [("sources.py", "isinstance(error, OSError) or out_of_memory(error)", "False")],
           of("test_broken_records", "test_what_the_machine_fails_to_read_stops_the_step_and_is_never_a_zero")),
    Mutant("C11x", "a record of another kind is put among the others", [("sources.py", "return pair if self._kind_of(pair) == self._kind else None", "return pair")],
           of("test_sources", "test_a_record_that_becomes_unlike_the_others_changes_nothing_of_them")),
    Mutant("C11w", "the first record alone decides which others count", [("sources.py", "for unit in range(self.num_units):", "for unit in range(1):")],
           of("test_sources", "test_rows_that_differ_from_the_start_are_told_in_one_sentence")),
    Mutant("E8zb", "a mask made with a known key makes a private run", [("pruning.py", "return self.key_given and self.criterion in FROM_DATA", "return False")],
           of("test_training", "test_a_mask_made_with_a_key_of_ones_own_makes_no_private_run")),
    Mutant("E10zb", "how long the run took is told exactly", [("outputs.py", "plan, seconds = setting.plan, rounded_up(seconds)", "plan = setting.plan")],
           of("test_outputs", "test_the_summary_tells_no_exact_time")),
    Mutant("A10zb", "by the paper's rule DP-SNIP and training of all units are one part",
           [("dp/accounting.py", 'named_parts(spent) if accountant == "paper"', 'named_parts(spent.event() if isinstance(spent, Ledger) else spent) if accountant == "paper"')],
           of("dp/test_accounting", "test_the_papers_rule_sums_the_parts_where_every_unit_takes_part")),
    Mutant("D4zb", "noise too small for floating point costs nothing", [("dp/parts.py", "inner.noise_multiplier < _NO_NOISE", "inner.noise_multiplier == 0")],
           of("dp/test_accounting", "test_noise_too_small_for_floating_point_is_none")),
    Mutant("A9zb", "DP-SNIP is charged before exact arithmetic refuses it", [("dp/mechanism.py", "    if settings.exact:\n        _grid(settings, model, settings.pruned)\n", "")],
           of("dp/test_mechanism", "test_what_exact_arithmetic_cannot_do_is_not_charged")),
    Mutant("B14zb", "under autocast the gain's gradient is read off an output of eight bits", [("engines/tracing.py", " and made_in_full(output):", ":")],
           of("engines/test_rounding", "test_standardised_filters_of_few_bits_do_not_lengthen_a_unit")),
    Mutant("B14zc", "the fast engine takes norms and sums of gradients of eight bits", [("engines/fast.py", "tensor = tensor.to(wide(tensor.dtype))", "pass")],
           of("engines/test_rounding", "test_standardised_filters_of_few_bits_do_not_lengthen_a_unit")),
    Mutant("B16zb", "a model that mixes examples in large batches alone passes", [("engines/choice.py", "    check_many(model, loss", "    str((model, loss"),
           ("engines/choice.py", 'own_plan.micro_batch or most_rows(torch.device("cpu")))', 'own_plan.micro_batch or most_rows(torch.device("cpu"))))')],
           of("engines/test_fitness", "test_what_mixes_in_large_batches_alone_is_seen")),
    Mutant("B20zb", "complex parameters train in their real part", [("models/preparation.py", "parameter.requires_grad and parameter.is_complex()", "False")],
           of("models/test_preparation", "test_complex_parameters_are_refused_by_name")),
)  # fmt: skip
