"""Mutants of whole runs: models that mix examples, engines, optimisers, resumption, and what is published."""

from __future__ import annotations

from tests.mutants.core import MECHANISM, NOISED, REPLAY, TOTAL, of
from tests.mutants.data import NEIGHBOURS
from tests.mutants.values import Mutant

PREPARATION, GUARD, STATE, TRAINING = "models/preparation.py", "optimisers.py", "state.py", "training.py"
FAST, CHECKPOINT, PRIVATE = "engines/fast.py", "checkpoint.py", "private.py"
STEPPED = "        learner.optimizer.step()\n"
ON_TRAINING = (
    "        from sparsedp.private_metrics import _training_images\n        found = evaluate(learner.model, _training_images(setting), "
    "len(setting.dataset.classes), setting.dataset.multilabel)\n        learner.model.train()\n"
)  # fmt: skip
WRITTEN = (
    "        self._on_spend(ledger)  # first: what could not be written down was not charged, and must not be read either\n"
)
ANY_STEP = "test_stopping_at_any_step_changes_nothing"

_learning = [
    Mutant("B15a", "the fast engine's norms leave out biases", [(FAST, "            total += squared_norms(tensor)\n", "            total += squared_norms(tensor) if tensor.ndim > 2 else 0.0\n")],
           of("engines/test_equality", "test_fast_equals_reference")),
    Mutant("B15b", "a weight that is used twice counts once", [(FAST, "self.gradients[name] + tensor if name in self.gradients else tensor", "tensor")],
           of("engines/test_equality", "test_fast_equals_reference")),
    Mutant("B16a", "BatchNorm is not looked for", [(PREPARATION, "    if isinstance(module, _BatchNorm) and (module.training or module.running_mean is None):\n", "    if False:\n")],
           of("models/test_preparation", "test_modules_that_mix_or_collect_are_named_with_a_remedy"), sample=True),
    Mutant("B16b", "examples that change each other's outputs are not seen", [(PREPARATION, '    if not _same(one, other, ""):\n', "    if False:\n")],
           of("models/test_preparation", "test_the_trial_finds_a_module_that_mixes_examples_by_hand")),
    Mutant("B16c", "losses that depend on other rows are not seen", [("engines/fitness.py", "    if not torch.allclose(first[:kept], second[:kept], rtol=1e-4, atol=1e-6, equal_nan=True):\n", "    if False:\n")],
           of("engines/test_fitness", "test_what_happens_in_training_mode_only_is_seen")),
    Mutant("B17a", "the optimiser moves dropped coordinates", [(GUARD, "                p.copy_(torch.where(keep, p, value))\n", "")], of("test_optimisers", "test_what_is_dropped_stays_to_the_bit")),
    Mutant("B17b", "the state of dropped coordinates moves", [(GUARD, "                    tensor.copy_(torch.where(keep, tensor, before))\n", "                    pass\n")],
           of("test_optimisers", "test_what_is_dropped_stays_to_the_bit")),
    Mutant("B18", "momentum is built from the sum before the noise", [
        (MECHANISM, NOISED, NOISED + "    if total.grid is None:\n        before = _RAW if step else {}\n"
         "        noised = Released({n: t + 0.9 * before[n].to(t) if n in before else t for n, t in noised.tensors.items()}, noised.origin)\n        _RAW.update(total.tensors)\n"),
        (MECHANISM, "Read = Callable", "_RAW: dict = {}\nRead = Callable"),
    ], REPLAY),
    Mutant("B20", "weight decay is added to the sum before it is divided", [
        (MECHANISM, TOTAL, TOTAL + "    for n, p in participating(model).items() if total.grid is None else ():\n        total.tensors[n].add_(p.detach(), alpha=0.01)\n"),
    ], of("dp/test_mechanism", "test_the_divisor_is_the_expected_batch")),
]  # fmt: skip

_resuming = [
    Mutant("E4a", "a run that is taken up again draws the first steps' noise once more", [
        (PRIVATE, "seeded(sheltered(engine), self.key, batch.step), self.key, batch.step, self._record,", "seeded(sheltered(engine), self.key, batch.step), self.key, batch.step - self._began, self._record,"),
        (PRIVATE, "        self._replayed = charged\n", "        self._replayed = charged\n        self._began = taken\n"),
        (PRIVATE, "        self.taken = 0\n", "        self.taken = 0\n        self._began = 0\n"),
    ], of("test_training", ANY_STEP)),
    Mutant("E4b", "after a change of machine the same noise is drawn", [(STATE, "return key if self.epoch == 0 else Key(raw(key, 32, \"epoch\", self.epoch), key.given)", "return key")],
           of("test_state", "test_every_fresh_key_is_another")),
    Mutant("E5", "the ledger is written after the step", [(PRIVATE, WRITTEN, ""), (PRIVATE, "        self.taken += 1\n        self._guard", "        self._on_spend(self.ledger)\n        self.taken += 1\n        self._guard")],
           of("test_broken_records", "test_a_ledger_that_cannot_be_written_charges_nothing_and_reads_nothing"), sample=True),
    Mutant("E6a", "steps done again on another machine cost nothing", [(STATE, "    return sorted(name for name in {*before, *now} if before.get(name) != now.get(name))", "    return []")],
           of("test_state", "test_where_bits_may_differ_steps_are_done_afresh_and_charged_again")),
    Mutant("E6b", "a key that was lost is not noticed", [("beginning.py", '        "key": mark,\n', "")],
           of("test_training", "test_a_key_that_was_lost_is_a_fresh_one_and_is_paid_for")),
    Mutant("E7a", "damaged checkpoints are read", [(CHECKPOINT, "    if hashlib.sha256(block).digest() != digest:\n", "    if False:\n")], of("test_checkpoint", "test_every_changed_byte_is_seen")),
    Mutant("E7b", "the run of another configuration is taken up", [("rundir.py", "        if differences:\n", "        if False:\n")], of("test_rundir", "test_another_configuration_is_refused_by_name")),
    Mutant("E7c", "the checkpoint of another model is taken up", [(STATE, "        self.model.load_state_dict(state[\"model\"])\n", "        self.model.load_state_dict(state[\"model\"], strict=False)\n")],
           of("test_state", "test_a_checkpoint_of_another_model_is_refused", "test_a_checkpoint_that_lacks_something_is_refused")),
]  # fmt: skip

_published = [
    Mutant("E8f", "the key is kept when the run has ended", [("rundir.py", '(self.private / "key", self.private / "plans.json")', '(self.private / "plans.json",)')],
           of("test_training", "test_a_finished_run_leaves_no_key_and_is_not_taken_up_again")),
    Mutant("E8g", "a key that the user chose is in the configuration", [("rundir.py", '        values["runtime"]["key"] = "chosen by the user"\n', "        pass\n")],
           of("test_training", "test_no_key_is_in_any_public_file")),
    Mutant("E9i", "the statement calls floating point exact", [("statement.py", '"arithmetic": ARITHMETIC[m.arithmetic],', '"arithmetic": ARITHMETIC["exact"],')],
           of("test_outputs", "test_the_statement_says_which_arithmetic_was_used")),
    Mutant("E10a", "metrics of training images are public", [("private_metrics.py", 'setting.folder.private / "metrics.jsonl"', 'setting.folder.public / "metrics.jsonl"')],
           of("test_training", "test_private_metrics_are_off_unless_asked_for_and_never_public")),
    Mutant("E6c", "another loss, model code or kernel goes unnoticed when a run is taken up", [("beginning.py", "_trial(setting, private),", '"",')],
           ["tests/test_training.py::test_another_loss_takes_fresh_noise"]),
    Mutant("E6d", "a plan that was lost is made anew, and steps are replayed under it", [("beginning.py", '{"the plan of the engine": "lost"}', "{}")],
           ["tests/test_training.py::test_a_plan_that_was_lost_takes_fresh_noise_once"]),
    Mutant("E10b", "metrics of training images are written unasked", [(TRAINING, "    if setting.run.runtime.unsafe_metrics:\n", "    if True:\n")],
           of("test_training", "test_private_metrics_are_off_unless_asked_for_and_never_public")),
    Mutant("E11a", "the learning rate follows the training loss", [(TRAINING, STEPPED, ON_TRAINING + '        learner.optimizer.param_groups[0]["lr"] *= found.loss or 1.0\n' + STEPPED)], NEIGHBOURS),
    Mutant("E12", "accuracy is measured on the training images", [(TRAINING, "images = setting.dataset.evaluation\n", "images = setting.dataset.train\n")], NEIGHBOURS),
    Mutant("E16a", "the statement is bound to no file", [("statement.py", "{name: digest(public / name) for name in BOUND", "{name: None for name in BOUND")],
           of("test_outputs", "test_the_statement_is_bound_to_the_files_that_it_speaks_of")),
    Mutant("E16b", "the statement does not say what would void it", [("statement_page.py", '*(f"- {line}." for line in stated["void_if"]), ""]', '""]')],
           of("test_outputs", "test_the_statement_is_bound_to_the_files_that_it_speaks_of")),
]  # fmt: skip

MUTANTS = (*_learning, *_resuming, *_published)
