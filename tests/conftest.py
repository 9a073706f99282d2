"""Settings of every test: one thread, so that sums are the same to the bit on any machine, and examples that do not vary by run."""

from __future__ import annotations

import os
from pathlib import Path

import hypothesis
import pytest
import torch

torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"  # and in the processes that tests start: several of them share the machine
for name, examples, derandomize in (("quick", 60, True), ("release", 4000, False)):
    hypothesis.settings.register_profile(
        name,
        max_examples=examples,
        derandomize=derandomize,
        deadline=None,
        database=None,
        suppress_health_check=[hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.data_too_large],
    )
unshrunk = [phase for phase in hypothesis.Phase if phase not in (hypothesis.Phase.shrink, hypothesis.Phase.explain)]
hypothesis.settings.register_profile("mutants", hypothesis.settings.get_profile("quick"), phases=unshrunk)
hypothesis.settings.load_profile(os.environ.get("SPARSEDP_TEST_PROFILE", "quick"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write the golden files of tests/test_cli.py anew")


@pytest.fixture(autouse=True)
def home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Budget files and caches of tests go to a folder of their own, new for every test."""
    place = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("SPARSEDP_HOME", str(place))
    return place
