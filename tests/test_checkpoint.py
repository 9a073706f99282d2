"""Checkpoints: what comes back is what was put away, to the bit, or nothing is."""

from __future__ import annotations

import errno
import os
import pickle
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparsedp import checkpoint
from sparsedp.errors import UsageError
from tests.replay import assert_same_bits

STATE: dict[str, Any] = {
    "tensors": {"a": torch.arange(6.0).reshape(2, 3), "b": torch.tensor(2.5, dtype=torch.float64), "none": torch.zeros(0, 3)},
    "kinds": [torch.zeros(2, dtype=d) for d in (torch.bool, torch.uint8, torch.int64, torch.float16)],
    "numbers": {0: 1, 1: -2.5, "inf": float("inf"), "nan": float("nan")},
    "nested": [1, (2, [3, {"x": None}]), "text", (), [], {}],
    "tied": [torch.ones(3)] * 2,
    "view": torch.arange(12.0).reshape(3, 4).t()[1:],
    "exact": 0.1 + 0.2,
}


def test_everything_comes_back_to_the_bit() -> None:
    assert_same_bits(STATE, checkpoint.decode(checkpoint.encode(STATE), "it"), "state")


def test_bfloat16_comes_back() -> None:
    value = torch.tensor([1.0, -0.0, float("nan"), 3e38], dtype=torch.bfloat16)
    back = checkpoint.decode(checkpoint.encode({"x": value}), "it")["x"]
    assert back.dtype == torch.bfloat16
    assert torch.equal(back.view(torch.int16), value.view(torch.int16))


plain = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
trees = st.recursive(
    plain, lambda inner: st.lists(inner, max_size=3) | st.tuples(inner, inner) | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=3)
)  # fmt: skip


@given(trees)
def test_any_nesting_comes_back(value: Any) -> None:
    assert_same_bits({"x": value}, checkpoint.decode(checkpoint.encode({"x": value}), "it"), "state")


def test_what_cannot_be_kept_is_a_fault_of_ours() -> None:
    with pytest.raises(AssertionError, match="a set cannot be kept"):
        checkpoint.encode({"x": {1, 2}})


def test_optimisers_and_schedulers_of_torch_come_back() -> None:
    model = torch.nn.Linear(3, 2)
    for name in ("SGD", "Adam", "NAdam", "Rprop", "Adagrad", "Adafactor"):
        optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        state = {"optimizer": optimizer.state_dict(), "scheduler": schedule.state_dict()}
        assert_same_bits(state, checkpoint.decode(checkpoint.encode(state), "it"), name)


def test_every_changed_byte_is_seen() -> None:
    whole = checkpoint.encode({"a": torch.arange(20.0), "b": [1, "x"]})
    assert len(whole) < 600
    for place in range(len(whole)):
        for flip in (0x01, 0x80):
            broken = bytearray(whole)
            broken[place] ^= flip
            with pytest.raises(UsageError, match=r"^it is (damaged|not a checkpoint)"):
                checkpoint.decode(bytes(broken), "it")


def test_every_truncation_and_every_appended_byte_is_seen() -> None:
    whole = checkpoint.encode({"a": torch.arange(20.0)})
    for end in range(len(whole)):
        with pytest.raises(UsageError, match=r"^it is (damaged|not a checkpoint)"):
            checkpoint.decode(whole[:end], "it")
    with pytest.raises(UsageError, match="damaged"):
        checkpoint.decode(whole + b"\0", "it")


def signed(block: bytes) -> bytes:
    import hashlib

    return checkpoint.MAGIC + hashlib.sha256(block).digest() + block


@pytest.mark.parametrize("block", [
    b"", b"\0" * 8, b"\xff" * 64, (10**9).to_bytes(8, "little") + b"{}", (2).to_bytes(8, "little") + b"{}",
    (40).to_bytes(8, "little") + b'{"__metadata__":{"nesting":"[[[[[[[[["}}', (33).to_bytes(8, "little") + b'{"__metadata__":{"nesting":"[1]"}}'[:33],
], ids=range(7))  # fmt: skip
def test_a_well_signed_file_of_nonsense_is_refused(block: bytes) -> None:
    with pytest.raises(UsageError, match="^it is not a checkpoint"):
        checkpoint.decode(signed(block), "it")


@pytest.mark.parametrize("nesting", ['{"tensor": "9"}', '{"dict": [[1]]}', '{"code": "x"}', "{}", '{"dict": 3}', '{"list": {}, "dict": []}', "3",
                                     '{"dict": [[{"list": []}, 1]]}', "[" * 5000 + "]" * 5000, '{"tensor": []}'])  # fmt: skip
def test_well_formed_nonsense_is_refused(nesting: str) -> None:
    import safetensors.torch

    block = safetensors.torch.save({"0": torch.zeros(1)}, metadata={"nesting": nesting})
    with pytest.raises(UsageError, match="^it is not a checkpoint"):
        checkpoint.decode(signed(block), "it")


class Payload:
    def __reduce__(self) -> Any:
        return os.system, ("exit 1",)


def test_a_pickle_is_not_executed(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    monkeypatch.setattr(os, "system", ran.append)
    for content in (pickle.dumps(Payload()), signed(pickle.dumps(Payload())), checkpoint.MAGIC + pickle.dumps(Payload())):
        with pytest.raises(UsageError, match="^it is"):
            checkpoint.decode(content, "it")
    assert ran == []


@given(st.binary(max_size=300))
def test_arbitrary_bytes_are_refused(content: bytes) -> None:
    for whole in (content, checkpoint.MAGIC + content, signed(content)):
        with pytest.raises(UsageError):
            checkpoint.decode(whole, "it")


def test_another_version_is_named() -> None:
    whole = checkpoint.encode({"a": 1}).replace(b"sparsedp state 1", b"sparsedp state 2")
    with pytest.raises(UsageError, match="not a checkpoint of this version of sparsedp; use the version that wrote it"):
        checkpoint.decode(whole, "it")


def test_the_last_two_are_kept_for_the_owner_alone(tmp_path: Path) -> None:
    for step in (0, 5, 9, 100):
        checkpoint.save(tmp_path, step, {"step": step})
    found = checkpoint.load_latest(tmp_path)
    assert found is not None
    assert found[:2] == (100, {"step": 100})
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000009.state", "step-00000100.state"]
    assert all(stat.S_IMODE(p.stat().st_mode) == 0o600 for p in tmp_path.iterdir())


def test_a_damaged_file_falls_back_on_the_one_before(tmp_path: Path) -> None:
    for step in (3, 6):
        checkpoint.save(tmp_path, step, {"step": step})
    newest = tmp_path / "step-00000006.state"
    newest.write_bytes(newest.read_bytes()[:-1])
    found = checkpoint.load_latest(tmp_path)
    assert found is not None
    step, state, problems = found
    assert (step, state) == (3, {"step": 3})
    assert problems == ["step-00000006.state is damaged: its checksum does not match."]
    (tmp_path / "step-00000003.state").write_bytes(b"")
    with pytest.raises(
        UsageError, match=r"No checkpoint in .* is whole and of this run.*Start a new run; what this one spent stays spent"
    ):
        checkpoint.load_latest(tmp_path)


def test_one_that_is_not_ours_falls_back_on_the_one_before(tmp_path: Path) -> None:
    for step, run in ((3, "ours"), (6, "another")):
        checkpoint.save(tmp_path, step, {"run": run})
    found = checkpoint.load_latest(tmp_path, lambda state: state["run"] == "ours")
    assert found == (3, {"run": "ours"}, ["step-00000006.state is of another run."])
    with pytest.raises(UsageError, match=r"is whole and of this run: step-00000006.state is of another run\. step-00000003"):
        checkpoint.load_latest(tmp_path, lambda state: False)


def test_nothing_is_nothing(tmp_path: Path) -> None:
    assert checkpoint.load_latest(tmp_path) is None


def test_a_file_of_a_strange_name_is_no_checkpoint(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, 1, {"step": 1})
    (tmp_path / "step-x.state").write_bytes(checkpoint.encode({"step": 2}))
    found = checkpoint.load_latest(tmp_path)
    assert found == (1, {"step": 1}, ["step-x.state is not the name of a checkpoint."])


def test_a_folder_in_the_place_of_one_is_passed_over_and_named(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, 1, {"step": 1})
    (tmp_path / "step-00000002.state").mkdir()
    found = checkpoint.load_latest(tmp_path)
    assert found == (1, {"step": 1}, ["step-00000002.state cannot be read (Is a directory)."])


@pytest.mark.parametrize("call", ["fsync", "fdopen"])
def test_a_full_disk_never_loses_the_last_good_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    for step in (1, 2):
        checkpoint.save(tmp_path, step, {"step": step})

    def full(*_: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, call, full)
    with pytest.raises(UsageError, match="No space left on device.*nothing that was saved is lost"):
        checkpoint.save(tmp_path, 3, {"step": 3})
    monkeypatch.undo()
    found = checkpoint.load_latest(tmp_path)
    assert found is not None and found[1] == {"step": 2}
    assert len(list(tmp_path.iterdir())) == 2
