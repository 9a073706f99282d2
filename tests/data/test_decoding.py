from __future__ import annotations

import errno
import io
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparsedp.data import decoding
from sparsedp.data.decoding import Undecodable, Unreadable, decode_image
from sparsedp.data.workers import Decoder, _Worker
from sparsedp.errors import UsageError

from . import pictures

Image = pytest.importorskip("PIL.Image")


def encoded(image, kind: str = "PNG", **options) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


@pytest.mark.parametrize("channels", [1, 3])
def test_an_image_of_the_right_size_keeps_its_pixels(channels):
    pixels = pictures.made_up(1, 20, channels)[0][0]
    found = decode_image(pictures.png(pixels), channels, 20)
    assert found.dtype == np.uint8
    assert np.array_equal(found, pixels)


def test_16_bits_stay_16_bits():
    values = np.random.default_rng(0).integers(0, 65536, (1, 8, 8), dtype=np.uint16)
    for content in (pictures.png(values), encoded(Image.fromarray(values[0]), "TIFF")):
        for channels in (1, 3):
            found = decode_image(content, channels, 8)
            assert found.dtype == np.uint16
            assert np.array_equal(found, np.repeat(values, channels, 0))
    flat = pictures.png(np.full((1, 9, 9), 60000, np.uint16))
    assert set(decode_image(flat, 1, 4).ravel()) == {60000}


def test_colour_and_grey_are_converted():
    red = Image.new("RGB", (6, 6), (255, 0, 0))
    assert set(decode_image(encoded(red), 1, 6).ravel()) == {76}
    assert decode_image(encoded(Image.new("L", (6, 6), 9)), 3, 6).tolist() == np.full((3, 6, 6), 9).tolist()
    for mode in ("RGBA", "LA", "P", "1", "L"):
        assert decode_image(encoded(Image.new(mode, (5, 5))), 3, 6).shape == (3, 6, 6)
    assert decode_image(encoded(Image.new("CMYK", (5, 5)), "JPEG"), 3, 6).shape == (3, 6, 6)


def test_the_central_square_is_resized():
    wide = np.zeros((10, 30, 3), np.uint8)
    wide[:, 10:20] = 200
    found = decode_image(encoded(Image.fromarray(wide)), 3, 5)
    assert set(found.ravel()) == {200}


PNG = pictures.png(pictures.made_up(1, 16)[0][0])
JPEG = encoded(Image.fromarray(pictures.made_up(1, 16)[0][0].transpose(1, 2, 0).copy()), "JPEG")
FAULTS = {
    "empty": (b"", "not an image of a known format"),
    "text": (b"%!PS-Adobe-3.0 EPSF-3.0\n(never run)", "not an image of a known format"),
    "cut short": (PNG[:200], "damaged or cut short"),
    "cut jpeg": (JPEG[:300], "damaged or cut short"),
    "32 bits": (encoded(Image.fromarray(np.full((4, 4), 70000, np.int32)), "TIFF"), "more than 16 bits"),
    "float": (encoded(Image.fromarray(np.zeros((4, 4), np.float32)), "TIFF"), "not whole numbers"),
    "huge": (b"P6 60000 60000 255\n", "claims more than 67108864 pixels"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_image_is_a_rule_that_it_breaks(fault):
    content, rule = FAULTS[fault]
    with pytest.raises(Undecodable, match=rule):
        decode_image(content, 3, 8)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_file_that_cannot_be_read_is_the_machines_fault_and_one_that_is_damaged_its_own(workers, tmp_path):
    (tmp_path / "damaged.png").write_bytes(PNG[:200])
    places = [str(tmp_path / "missing.png"), str(tmp_path), str(tmp_path / "damaged.png")]
    missing, folder, damaged = Decoder(3, 8, workers).decode(places)
    assert isinstance(missing, Unreadable) and str(missing) == "it cannot be read (No such file or directory)"
    assert isinstance(folder, Unreadable) and str(folder) == "it cannot be read (Is a directory)"
    assert isinstance(damaged, Undecodable) and not isinstance(damaged, Unreadable)


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (MemoryError(), "memory ran out while it was decoded"), (OSError("out of memory error when reading"), "memory ran out"),
        (OSError(errno.EMFILE, "a name"), r"cannot be decoded \(Too many open files\)"),
    ],
)  # fmt: skip
def test_a_decoder_that_the_machine_fails_says_nothing_of_the_image(monkeypatch, error, why):
    def fails(*given):
        raise error

    monkeypatch.setattr(decoding, "_shaped", fails)
    with pytest.raises(Unreadable, match=why):
        decode_image(PNG, 3, 16)
    monkeypatch.setattr(decoding, "_shaped", lambda *given: (_ for _ in ()).throw(OSError("image file is truncated")))
    with pytest.raises(Undecodable, match="damaged or cut short") as caught:
        decode_image(PNG, 3, 16)
    assert type(caught.value) is Undecodable


@given(
    st.sampled_from([PNG, JPEG, FAULTS["32 bits"][0], encoded(Image.new("P", (4, 4)), "GIF")]),
    st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 255)), max_size=4), st.integers(1, 1000),
)  # fmt: skip
def test_damaged_images_decode_or_break_a_rule(seed, changes, end):
    content = bytearray(seed)
    for place, value in changes:
        content[place % len(content)] = value
    try:
        found = decode_image(bytes(content[:end]), 3, 8)
    except Undecodable as error:
        assert "\n" not in str(error)
    else:
        assert found.shape == (3, 8, 8)


def test_workers_give_what_this_process_gives_in_order(tmp_path):
    pixels = pictures.made_up(40, 8)[0]
    files = []
    for number, image in enumerate(pixels):
        (tmp_path / f"{number}.png").write_bytes(pictures.png(image) if number != 7 else b"broken")
        files.append(str(tmp_path / f"{number}.png"))
    encoded_rows = files + [
        pictures.png(pixels[0]),
        b"",
        str(tmp_path / "a\u00fc.png"),
        pictures.png(np.zeros((1, 8, 8), np.uint16)),
    ]
    here, there = (list(Decoder(3, 8, workers).decode(encoded_rows)) for workers in (0, 2))
    for a, b in zip(here, there, strict=True):
        assert type(a) is type(b)
        assert str(a) == str(b) if isinstance(a, Undecodable) else a.dtype == b.dtype and np.array_equal(a, b)
    assert [isinstance(found, Undecodable) for found in there[:9]] == [False] * 7 + [True, False]


def test_a_worker_that_dies_is_replaced_and_its_file_tried_again():
    decoder = Decoder(3, 16, 1)
    assert not isinstance(next(decoder.decode([PNG])), Undecodable)
    worker = decoder._idle.get()
    os.kill(worker._child.pid, signal.SIGKILL)
    worker._child.wait()
    decoder._idle.put(worker)
    assert np.array_equal(next(decoder.decode([PNG])), decode_image(PNG, 3, 16))


def test_a_worker_that_cannot_be_started_is_said(monkeypatch):
    def refuse(*given, **named):
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(subprocess, "Popen", refuse)
    with pytest.raises(
        UsageError, match=r"cannot be started \(Resource temporarily unavailable\); free memory, .*workers to 0"
    ):
        next(Decoder(3, 16, 1).decode([PNG]))


def test_a_file_that_always_kills_its_worker_is_the_machines_fault(monkeypatch):
    def dies(self, *given):
        self._child.kill()
        raise EOFError

    monkeypatch.setattr(_Worker, "decode", dies)
    found = next(Decoder(3, 16, 1).decode([PNG]))
    assert isinstance(found, Unreadable) and str(found) == "the decoder crashed on it"


def test_workers_end_with_their_parent_even_when_it_is_killed():
    code = (
        "import os, sys\nfrom sparsedp.data.workers import Decoder\nd = Decoder(3, 8, 2)\nlist(d.decode([b'']))\n"
        "ids = [d._idle.get()._child.pid for _ in range(2)]\nprint(*ids, flush=True)\nos.kill(os.getpid(), 9)"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False).stdout
    waited = time.monotonic() + 10
    for child in map(int, said.split()):
        while _alive(child):
            assert time.monotonic() < waited
            time.sleep(0.02)


def _alive(process: int) -> bool:
    try:
        with open(f"/proc/{process}/stat") as stat:  # noqa: PTH123
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
