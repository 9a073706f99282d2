"""Images as rows of a private step: views by the key, units, broken records, and made-up examples."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from sparsedp.config import Data
from sparsedp.data import DataSet, load
from sparsedp.data.augment import Augmentation, evaluation_view
from sparsedp.data.values import ArrayImages, Normalisation, UnitIndex
from sparsedp.dp.clipping import clipped_sum, reference
from sparsedp.images import ImageSource, plain_batches
from sparsedp.sources import parts
from tests.data.pictures import made_up, save_folder
from tests.made_up import KEY, OTHER_KEY
from tests.own_loop import cross_entropy

CPU = torch.device("cpu")
GREY = Normalisation((0.5,), (0.25,))


def data_of(units: list[int] | None = None, rows: int = 12, multilabel: bool = False) -> DataSet:
    pixels, labels = made_up(rows, side=8, channels=1, classes=3)
    held = torch.from_numpy(np.eye(3, dtype=np.float32)[labels]) if multilabel else torch.from_numpy(labels)
    index = None if units is None else UnitIndex.of(torch.tensor(units))
    images = ArrayImages(torch.from_numpy(pixels), held, 3, index)
    return DataSet("made up", images, images, ("a", "b", "c"), GREY, multilabel)


def source_of(data: DataSet, views: int = 1, kind: str = "crop-flip", key: object = KEY, plain: bool = False) -> ImageSource:
    return ImageSource(data, Augmentation(kind, GREY, 2), views, key, CPU, plain)  # type: ignore[arg-type]


def test_views_stand_together_and_count_as_one_unit() -> None:
    rows = source_of(data_of(), views=4).read(torch.tensor([2, 7, 11]), 5)
    assert rows.inputs.shape == (12, 1, 8, 8) and rows.units == 3
    assert rows.unit.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert rows.targets.tolist() == [2] * 4 + [1] * 4 + [2] * 4
    assert rows.inputs.is_contiguous(memory_format=torch.channels_last)
    assert len({v.numpy().tobytes() for v in rows.inputs[:4]}) > 1, "views differ"


def test_a_row_has_the_same_views_whatever_it_is_read_with() -> None:
    """Micro-batches, resumed runs and neighbouring data sets see the same bits."""
    source = source_of(data_of(), views=3)
    alone = source.read(torch.tensor([7]), 5).inputs
    assert torch.equal(source.read(torch.tensor([2, 7, 11]), 5).inputs[3:6], alone)
    assert torch.equal(source_of(data_of(), views=3).read(torch.tensor([7]), 5).inputs, alone)
    for other in (source.read(torch.tensor([7]), 6), source_of(data_of(), 3, key=OTHER_KEY).read(torch.tensor([7]), 5)):
        assert not torch.equal(other.inputs, alone)


def test_a_plain_source_shows_what_evaluation_sees() -> None:
    data = data_of()
    rows = source_of(data, plain=True).read(torch.arange(12), 3)
    batch = data.train.read(torch.arange(12))
    assert torch.equal(rows.inputs, evaluation_view(batch.pixels, Augmentation("crop-flip", GREY, 2)))


def test_units_of_several_images() -> None:
    source = source_of(data_of([0, 1, 0, 2, 1, 0, 3, 3, 3, 3, 4, 2]), views=2)
    assert source.num_units == 5
    assert source.rows_of(torch.arange(5)).tolist() == [6, 4, 4, 8, 2]
    rows = source.read(torch.tensor([0, 3]), 0)
    assert rows.unit.tolist() == [0] * 6 + [1] * 8
    assert [p.units for p in parts(source, torch.arange(5), 0, 10)] == [2, 1, 2]


def test_a_record_that_cannot_be_read_counts_as_zero_in_silence(tmp_path: Path) -> None:
    """After the check a file is damaged: its unit adds nothing, all others what they added before."""
    pixels, labels = made_up(6, side=8, channels=1, classes=2)
    save_folder(tmp_path / "train", pixels, labels, ("a", "b"))
    config = Data(name="folder", dir=str(tmp_path), size=8, channels=1, evaluation="none")
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 2))

    def total(units: torch.Tensor) -> dict[str, torch.Tensor]:
        data = load(config)
        source = ImageSource(data, Augmentation("none", data.normalisation), 1, KEY, CPU)
        assert source.num_units == 6
        return dict(clipped_sum(reference, model, cross_entropy, parts(source, units, 0, 4), {}, 1.0).tensors)

    files = load(config).train
    victim = Path(files.source.name(3))  # type: ignore[attr-defined]
    others = torch.tensor([0, 1, 2, 4, 5])
    before, all_of_them = total(others), total(torch.arange(6))
    victim.write_bytes(victim.read_bytes()[:40])
    after = total(torch.arange(6))
    assert all(torch.allclose(after[n], t, atol=1e-6) for n, t in before.items())
    assert any(not torch.allclose(after[n], t, atol=1e-2) for n, t in all_of_them.items())


def test_the_example_is_made_up() -> None:
    for multilabel in (False, True):
        data = data_of(multilabel=multilabel)
        example = source_of(data, views=3).example()
        real = source_of(data, views=3).read(torch.tensor([0]), 0)
        assert example.inputs.shape[1:] == real.inputs.shape[1:] and example.inputs.dtype == real.inputs.dtype
        assert example.targets.shape[1:] == real.targets.shape[1:] and example.targets.dtype == real.targets.dtype
        assert set(example.counts.tolist()) == {3}
        assert float(example.targets.max()) == (1.0 if multilabel else 2.0), "the highest class is public"


def test_an_example_reads_no_record() -> None:
    data = data_of()

    class Closed:
        def __getattr__(self, name: str) -> object:
            assert name in ("shape", "units", "num_units"), f"asked for {name}"
            return getattr(data.train, name)

    source_of(DataSet(data.name, Closed(), None, data.classes, data.normalisation), views=2).example()  # type: ignore[arg-type]


def test_plain_batches_are_all_rows_in_order() -> None:
    data = data_of()
    batches = list(plain_batches(data.train, Augmentation("crop-flip", GREY, 2), CPU, size=5))
    assert [len(x) for x, _ in batches] == [5, 5, 2]
    assert torch.cat([y for _, y in batches]).tolist() == data.train.read(torch.arange(12)).labels.tolist()
