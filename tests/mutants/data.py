"""Mutants of what the data are read for: constants, copies, broken records, and code in files."""

from __future__ import annotations

from tests.mutants.core import of
from tests.mutants.values import Mutant

CHECK, RESTRICTED, LOADING = "data/check.py", "data/restricted.py", "data/loading.py"
NEIGHBOURS = ["tests/test_training.py::test_neighbours_publish_the_same_bytes_under_frozen_noise[random]"]
CONSTANTS = "normalisation_of(data.name, data.normalise, train.shape[0]))"
LEFT_OUT = "            return None\n\n    def _alone("

MUTANTS = (
    Mutant("C5", "copies of an image under several units are not counted", [(CHECK, "found[owners > 1]", "found[owners > 2]")], of("data/test_check", "test_copies_are_counted_across_units_only"), sample=True),
    Mutant("C8", "images are normalised by their own mean", [
        (LOADING, CONSTANTS, "replace(" + CONSTANTS[:-1] + ", mean=(float(train.pixels.float().mean()) / 255,) * train.shape[0]))"),
    ], NEIGHBOURS),
    Mutant("C9a", "metrics tell how many units were in the batch", [
        ("outputs.py", '        "step": private.taken,\n', '        "step": private.taken,\n        "units": len(participants(private.key, private.taken - 1, private.settings.num_units, private.settings.sampling_rate)),\n'),
        ("outputs.py", "from sparsedp.dp.ledger import Ledger\n", "from sparsedp.dp.ledger import Ledger\nfrom sparsedp.dp.sampling import participants\n"),
    ], of("test_outputs", "test_public_numbers_have_these_names_and_no_others")),
    Mutant("C9b", "the summary tells how many training images each class has", [
        ("outputs.py", '        "num_units": plan.num_units,\n', '        "num_units": setting.dataset.train.labels.bincount().tolist(),\n'),
    ], of("test_training", "test_neighbours_publish_the_same_bytes_under_frozen_noise[random]")),
    Mutant("C10", "evaluation images may be trained on", [(CHECK, "if report.overlap and not (", "if False and (")], of("data/test_check", "test_evaluation_images_that_are_trained_on_are_an_error_but_in_published_sets")),
    Mutant("C11a", "a broken record is passed over for the next one", [("sources.py", LEFT_OUT, LEFT_OUT.replace("return None", "return self._usable(unit + 1)"))],
           of("test_broken_records", "test_a_record_that_breaks_counts_as_zero_in_silence")),
    Mutant("C11b", "a broken record counts as a black image", [("images.py", "        inputs[~valid] = torch.nan\n", "")],
           of("test_images", "test_a_record_that_cannot_be_read_counts_as_zero_in_silence")),
    Mutant("E13a", "an error shows the record that caused it", [("sources.py", LEFT_OUT, LEFT_OUT.replace("return None", 'raise UsageError(f"row {unit}: {error}") from error'))],
           of("test_broken_records", "test_a_record_that_breaks_counts_as_zero_in_silence")),
    Mutant("E13b", "the check quotes labels", [(CHECK, 'f"row {row} of {split} has a label that is not one of the classes; mend or remove it." for row in bad', 'f"row {row} of {split} has the label {_labels(images)[row].tolist()}; mend or remove it." for row in bad')],
           of("data/test_check", "test_classes_without_images_and_labels_out_of_range_are_named_together")),
    Mutant("E15a", "public weights are unpickled", [("models/weights.py", "weights_only=True)", "weights_only=False)")], of("models/test_weights", "test_a_pickle_payload_is_refused_and_not_run")),
    Mutant("E15b", "a data set's pickle may call what it names", [
        (RESTRICTED, "        if (module, name) not in NAMES:\n            raise _Refused\n", "        if (module, name) not in NAMES:\n            return super().find_class(module, name)\n"),
    ], of("data/test_restricted", "test_code_in_a_pickle_is_not_executed")),
)  # fmt: skip
