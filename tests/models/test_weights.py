"""Public weights: what is loaded, what is left new, and what is refused. Nothing in a file is executed."""

from __future__ import annotations

import pickle
import random
import time
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from sparsedp.config import Model
from sparsedp.errors import UsageError
from sparsedp.models import WSConv2d, build, load_weights
from sparsedp.models.weights import read_state


def network(seed: int, classes: int = 4) -> nn.Module:
    return build(Model(name="wrn_10_1"), (3, 8, 8), classes, torch.Generator().manual_seed(seed))


def saved(model: nn.Module, path: Path, kind: str = "safetensors") -> Path:
    state = model.state_dict()
    if kind == "safetensors":
        save_file({n: t.contiguous() for n, t in state.items()}, path)
    elif kind == "nested":
        torch.save({"epoch": 3, "state_dict": {f"module.{n}": t for n, t in state.items()}}, path)
    elif kind == "legacy":
        torch.save(state, path, _use_new_zipfile_serialization=False)
    else:
        torch.save(state, path)
    return path


def same(model: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), other.state_dict().values(), strict=True))


@pytest.mark.parametrize("kind", ["safetensors", "torch", "legacy", "nested"])
def test_weights_are_loaded_whatever_the_file_is_called(tmp_path: Path, kind: str):
    public, model = network(0), network(1)
    report = load_weights(model, saved(public, tmp_path / "weights.bin", kind))
    assert same(model, public)
    assert set(report.loaded) == set(model.state_dict())
    assert report.replaced == ()
    assert str(report) == f"{len(report.loaded)} tensors loaded"


def test_the_classifier_stays_new_when_the_classes_differ_and_that_is_said(tmp_path: Path):
    public, model = network(0, classes=7), network(1)
    fresh = model.classifier.weight.detach().clone()
    report = load_weights(model, saved(public, tmp_path / "w"))
    assert torch.equal(model.classifier.weight, fresh)
    assert torch.equal(model.stem.weight, public.stem.weight)
    assert report.replaced == ("classifier.bias", "classifier.weight")
    assert "new: classifier.bias, classifier.weight (classifier.bias is 7 in the file and 4 in the model)" in str(report)


def test_a_classifier_is_replaced_whole(tmp_path: Path):
    """Its bias fits, but belongs to the weight that does not."""
    state, model = network(0).state_dict(), network(1)
    state["classifier.weight"] = torch.zeros(4, 32)
    state["classifier.bias"] = torch.ones(4)
    torch.save(state, tmp_path / "w")
    assert load_weights(model, tmp_path / "w").replaced == ("classifier.bias", "classifier.weight")
    assert torch.equal(model.classifier.bias, torch.zeros(4))


def test_a_file_without_a_classifier_will_do(tmp_path: Path):
    public, model = network(0), network(1)
    state = {n: t for n, t in public.state_dict().items() if not n.startswith("classifier")}
    torch.save(state, tmp_path / "w")
    assert load_weights(model, tmp_path / "w").reason == "the file has no classifier"


def test_all_other_mismatches_are_named_at_once_and_nothing_is_changed(tmp_path: Path):
    state = network(0).state_dict()
    model, untouched = network(1), network(1)
    del state["norm.bias"]
    state["stem.weight"] = torch.zeros(16, 1, 3, 3)
    state["extra.weight"] = torch.zeros(2)
    state["stem.gain"] = torch.full((16,), float("nan"))
    state["stem.bias"] = torch.zeros(16, dtype=torch.int64)
    torch.save(state, tmp_path / "w.pt")
    with pytest.raises(UsageError) as raised:
        load_weights(model, tmp_path / "w.pt")
    for part in (
        "norm.bias is missing from the file",
        "stem.weight is 16 x 1 x 3 x 3 in the file and 16 x 3 x 3 x 3 in the model",
        "extra.weight is in the file, but not in the model",
        "stem.gain has values in the file that are not finite",
        "stem.bias is torch.int64 in the file and torch.float32 in the model",
    ):
        assert part in str(raised.value)
    assert same(model, untouched)


def test_one_classifier_tensor_alone_missing_is_a_mismatch(tmp_path: Path):
    state = network(0).state_dict()
    del state["classifier.bias"]
    torch.save(state, tmp_path / "w")
    with pytest.raises(UsageError, match="classifier.bias is missing"):
        load_weights(network(1), tmp_path / "w")


class Payload:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return (Path.touch, (self.path,))


@pytest.mark.parametrize("how", ["torch", "pickle", "nested"])
def test_a_pickle_payload_is_refused_and_not_run(tmp_path: Path, how: str):
    trace = tmp_path / "executed"
    content: object = Payload(trace)
    if how == "nested":
        content = {"state_dict": {"stem.weight": Payload(trace)}}
    path = tmp_path / "evil.pt"
    if how == "pickle":
        path.write_bytes(pickle.dumps(content))
    else:
        torch.save(content, path)
    with pytest.raises(UsageError, match="nothing in a file is executed"):
        load_weights(network(0), path)
    assert not trace.exists()
    pickle.loads(pickle.dumps(Payload(trace)))  # noqa: S301 (the payload does work where pickles are run)
    assert trace.exists()


@pytest.mark.parametrize("zipped", [True, False])
def test_numbers_that_collide_are_refused_at_once(tmp_path: Path, zipped: bool):
    """As the keys of a dictionary, each would be compared with all before it: minutes for a small file."""
    numbers = ((place + 1) * (2**61 - 1) for place in range(60_000))
    content = b"\x80\x02}(" + b"".join(b"\x8a\x0a" + n.to_bytes(10, "little") + b"N" for n in numbers) + b"u."
    if zipped:
        with zipfile.ZipFile(tmp_path / "w", "w") as archive:
            archive.writestr("archive/data.pkl", content)
            archive.writestr("archive/version", b"3\n")
    else:
        (tmp_path / "w").write_bytes(content)
    began = time.process_time()
    with pytest.raises(UsageError, match="damaged"):
        read_state(tmp_path / "w")
    assert time.process_time() - began < 5


def test_a_compressed_archive_is_refused_before_it_is_unpacked(tmp_path: Path):
    """torch compresses nothing; four gigabytes of zeros fit into four megabytes."""
    torch.save(network(0).state_dict(), tmp_path / "plain")
    assert read_state(tmp_path / "plain")
    with zipfile.ZipFile(tmp_path / "plain") as plain, zipfile.ZipFile(tmp_path / "w", "w", zipfile.ZIP_DEFLATED) as packed:
        for name in plain.namelist():
            packed.writestr(name, plain.read(name))
    with pytest.raises(UsageError, match="damaged") as raised:
        read_state(tmp_path / "w")
    assert str(raised.value.__cause__) == "compressed"


def test_names_from_a_file_stay_on_their_line_and_are_not_endless(tmp_path: Path):
    state = network(0).state_dict() | {f"\x1b[2J\n{number}" + "x" * 9999: torch.zeros(1) for number in range(1000)}
    save_file(state, tmp_path / "w")
    with pytest.raises(UsageError) as raised:
        load_weights(network(1), tmp_path / "w")
    title, *lines = str(raised.value).split("\n")
    assert len(lines) == 21 and lines[-1] == "  - 980 more like these." and max(map(len, lines)) < 200
    assert all(line.isprintable() and line.endswith(".") for line in lines)


@pytest.mark.parametrize("kind", ["safetensors", "torch", "legacy"])
@pytest.mark.parametrize("share", [0.0, 0.001, 0.5, 0.99])
def test_truncated_files_are_refused(tmp_path: Path, kind: str, share: float):
    path = saved(network(0), tmp_path / "w", kind)
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])
    with pytest.raises(UsageError, match="weights is .*(fetch it again|damaged)"):
        load_weights(network(1), path)


def test_a_safetensors_file_that_begins_like_a_pickle_is_read(tmp_path: Path):
    """A header of 640 bytes is written as 0x80 0x02, as pickles begin."""
    model = nn.Linear(2, 2)
    for length in range(400, 700):
        save_file(model.state_dict(), tmp_path / "w", {"note": "x" * length})
        if (tmp_path / "w").read_bytes()[:2] == b"\x80\x02":
            break
    else:
        pytest.fail("no such length was found")
    assert set(read_state(tmp_path / "w")) == {"weight", "bias"}


@pytest.mark.parametrize("kind", ["safetensors", "torch", "legacy"])
def test_damaged_files_are_read_or_refused_and_nothing_else(tmp_path: Path, kind: str):
    path = saved(nn.Linear(3, 4), tmp_path / "w", kind)
    content, chance = path.read_bytes(), random.Random(0)
    refused = 0
    for _ in range(300):
        damaged = bytearray(content)
        for _ in range(chance.choice((1, 2, 20))):
            place = chance.randrange(len(damaged))
            if chance.random() < 0.7 or len(damaged) < 80:
                damaged[place] = chance.randrange(256)
            else:
                del damaged[place : place + chance.randrange(1, 40)]
        path.write_bytes(bytes(damaged))
        try:
            read_state(path)
        except UsageError:
            refused += 1
    assert refused > 100


@pytest.mark.parametrize("content", [{}, {"a": 3}, [1, 2], {"state_dict": {"a": "text"}}])
def test_files_that_hold_no_tensors_are_refused(tmp_path: Path, content: object):
    torch.save(content, tmp_path / "w")
    with pytest.raises(UsageError, match="one tensor per name"):
        read_state(tmp_path / "w")


def test_a_missing_file_is_named(tmp_path: Path):
    with pytest.raises(UsageError, match="there is no such file"):
        load_weights(network(0), tmp_path / "absent.safetensors")


def test_half_precision_weights_are_widened(tmp_path: Path):
    public, model = network(0), network(1)
    torch.save({n: t.bfloat16() for n, t in public.state_dict().items()}, tmp_path / "w")
    load_weights(model, tmp_path / "w")
    assert model.stem.weight.dtype == torch.float32
    assert torch.equal(model.stem.weight, public.stem.weight.bfloat16().float())


def test_a_pruned_network_is_loaded_as_one(tmp_path: Path):
    public, model = network(0), network(1)
    kept = torch.rand(public.stem.weight.shape) < 0.5
    public.stem.prune(kept)
    report = load_weights(model, saved(public, tmp_path / "w"))
    assert isinstance(model.stem, WSConv2d)
    assert torch.equal(model.stem.kept, kept)
    assert "stem.kept" in report.loaded


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4, bias=False)
        self.second = nn.Linear(4, 4, bias=False)
        self.second.weight = self.first.weight
        self.classifier = nn.Linear(4, 2)


def test_tied_weights_may_be_in_the_file_once(tmp_path: Path):
    public, model = Tied(), Tied()
    save_file({n: t for n, t in public.state_dict().items() if n != "second.weight"}, tmp_path / "w")
    load_weights(model, tmp_path / "w")
    assert torch.equal(model.second.weight, public.first.weight)
    assert model.second.weight is model.first.weight


def test_batch_counters_may_be_missing(tmp_path: Path):
    public, model = (nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 2)) for _ in range(2))
    torch.save({n: t for n, t in public.state_dict().items() if "num_batches" not in n}, tmp_path / "w")
    load_weights(model, tmp_path / "w")
    assert same(model, public)


def test_a_model_without_a_linear_layer_needs_everything(tmp_path: Path):
    model = nn.Sequential(nn.Conv2d(1, 2, 3))
    torch.save(model.state_dict(), tmp_path / "w")
    assert load_weights(nn.Sequential(nn.Conv2d(1, 2, 3)), tmp_path / "w").replaced == ()
