"""The compiled engine gives the reference's sums, whatever the batch leaves in its last, filled-up chunk."""

from __future__ import annotations

import shutil

import pytest

from sparsedp.engines import choose_engine
from tests.engines import zoo
from tests.engines.test_choice import small
from tests.engines.test_equality import all_masks, assert_same, images

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("g++") is None and shutil.which("gcc") is None, reason="needs a C++ compiler"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch"),
]


def test_compiled_equals_reference_and_broken_records_count_zero() -> None:
    model, like = small(), images([2, 2])
    chosen = choose_engine("compiled", model, zoo.cross_entropy, like)
    assert chosen.plan.engine == "compiled" and (chosen.plan.micro_batch or 0) % 2 == 0
    rows = images([2, 2, 2])
    rows.inputs[3] = float("nan")
    for masks in all_masks(model).values():
        assert_same(chosen, model, rows, masks)


def test_a_recorded_plan_keeps_its_shape() -> None:
    model, like = small(), images([1, 1])
    plan = choose_engine("compiled", model, zoo.cross_entropy, like).plan
    again = choose_engine("auto", model, zoo.cross_entropy, like, plan=plan)
    assert again.name == "compiled" and again.plan.micro_batch == plan.micro_batch
