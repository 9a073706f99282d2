"""Mutants of a search among runs: how many there are, what they cost, how they are scored, and what is told of them."""

from __future__ import annotations

from tests.mutants.core import of
from tests.mutants.values import Mutant

TUNE, SEARCH, HOLDOUT, OUTPUTS, TUNING = "tune.py", "search.py", "holdout.py", "tuned_outputs.py", "dp/tuning.py"
DRAWN = '    drawn, below, count = float(uniform(key, 1, "number of trials")[0]), 0.0, 0\n'
COPIED = '    metrics = best / "metrics.jsonl"\n'

MUTANTS = (
    Mutant("D11b", "the number of trials is not drawn, but its mean", [(TUNING, DRAWN, "    return round(mean)\n" + DRAWN)],
           of("dp/test_tuning", "test_numbers_of_trials_follow_their_law_and_no_other", "test_how_many_trials_there_are_is_settled_by_the_key")),
    Mutant("D11c", "a search is charged as one of its trials", [(TUNING, "    return search_event(once.event(), mean, LAWS[law])\n", "    return once.event()\n")],
           of("test_search", "test_the_whole_search_is_charged")),
    Mutant("D11d", "the scores on held-out units are not charged", [(SEARCH, "tuning.search(trial, self.distribution, self.trials_mean, noise)", "tuning.search(trial, self.distribution, self.trials_mean)")],
           of("test_search", "test_the_whole_search_is_charged")),
    Mutant("D11e", "a target is met by one trial, not by the search", [(SEARCH, "before_training(run), whole)\n    mechanism", "before_training(run))\n    mechanism")],
           of("test_search", "test_a_target_is_that_of_the_whole_search")),
    Mutant("D11f", "trials may cost more than the one that is charged", [(SEARCH, "!= expected:\n", "!= expected and False:\n")],
           of("test_search", "test_what_is_no_search_is_refused_before_anything_is_read", "test_masks_from_files_must_fit_and_cost_the_same")),
    Mutant("D11g", "a search is charged when it has ended", [(TUNE, "            self.folder.write_ledger(p.ledger)  # before the first trial reads anything\n", ""),
                                                          (TUNE, "            account.spent(p.ledger)\n", "            account.spent(p.ledger)\n            self.folder.write_ledger(p.ledger)\n")],
           of("test_tune", "test_the_ledger_and_the_budget_are_written_before_the_first_trial")),
    Mutant("D11h", "the number of trials is in the summary", [(OUTPUTS, "    one = disk.read_json(best", "    facts = replace(facts, settings={**facts.settings, \"trials\": len(list(best.parents[1].iterdir()))})\n    one = disk.read_json(best"),
                                                             (OUTPUTS, "from dataclasses import dataclass\n", "from dataclasses import dataclass, replace\n")],
           of("test_tune", "test_more_trials_that_lose_change_no_published_byte")),
    Mutant("D11i", "a run may take up a search, and write its own ledger there", [("rundir.py", "        if not search and self.settings.exists():\n", "        if False:\n")],
           of("test_tune", "test_a_search_and_a_run_do_not_take_each_other_up")),
    Mutant("E11b", "units that scores are made on are trained on too", [(HOLDOUT, "replace(dataset, train=part_of(whole, ~chosen))", "dataset")],
           of("test_tune", "test_held_out_units_train_nothing")),
    Mutant("E11c", "the score of a trial has no noise", [(TUNING, "    return (int(shares.sum()) + drawn) / SCALE\n", "    return int(shares.sum()) / SCALE\n")],
           of("test_tune", "test_scores_are_noised_counts_of_units_that_were_held_out")),
    Mutant("E11d", "all trials are scored with the same noise", [(TUNING, 'discrete_gaussian(noise, key, 0, 1, "score", trial)', 'discrete_gaussian(noise, key, 0, 1, "score", 0)')],
           of("test_tune", "test_scores_are_noised_counts_of_units_that_were_held_out")),
    Mutant("E11e", "the scores of all trials are published", [(OUTPUTS, COPIED, '    scores = [json.loads(p.read_text())["accuracy"] for p in sorted(best.parents[1].glob("*/public/summary.json"))]\n'
                                                               '    disk.write_json(public / "search.json", {**facts.settings, "scores": scores})\n' + COPIED)],
           of("test_tune", "test_more_trials_that_lose_change_no_published_byte")),
    Mutant("E11f", "a unit with several rows counts once for each", [(TUNING, "    shares = right.clamp(max=whole) * SCALE // whole\n", "    shares = right.clamp(max=whole) * SCALE\n")],
           of("test_holdout", "test_one_unit_moves_the_count_by_at_most_one")),
    Mutant("E11g", "the losing trials are left where they were", [("rundir.py", "                disk.erase_all(self.trials)\n", "                pass\n")],
           of("test_tune", "test_what_is_published_stands_alone")),
    Mutant("E11h", "trials of one search may see different data", [(TUNE, '    elif disk.read_json(path, "the checksum of the data") != found:\n', "    elif False:\n")],
           of("test_tune", "test_all_trials_see_the_same_data")),
)  # fmt: skip
