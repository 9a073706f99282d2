"""Files are whole or as they were, whatever fails."""

from __future__ import annotations

import errno
import json
import math
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sparsedp import disk
from sparsedp.errors import UsageError


def test_a_file_is_written_with_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "a"
    disk.write_bytes(path, b"one", mode=0o600)
    disk.write_bytes(path, b"two", mode=0o600)
    assert path.read_bytes() == b"two"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def fails(number: int) -> Callable[..., Any]:
    def raising(*_: Any, **__: Any) -> Any:
        raise OSError(number, os.strerror(number))

    return raising


@pytest.mark.parametrize(
    "said",
    [
        '{"a": 1}',
        "[]",
        "3",
        '{"b": "1"}',
        '{"b": true}',
        '{"b": [1]}',
        '{"b": NaN}',
        '{"b": 1e999}',
        '{"b": 1%s}' % ("0" * 400),
    ],
)
def test_a_number_is_a_finite_one(tmp_path: Path, said: str) -> None:
    (tmp_path / "a").write_text(said)
    for or_null in (False, True):
        with pytest.raises(UsageError, match=r"the score in .*a has no number 'b'; restore the file\.$"):
            disk.read_number(tmp_path / "a", "the score", "b", or_null)


@pytest.mark.parametrize("left, right", ["[]", ('{"a":', "}")])
def test_values_within_each_other_without_end_are_refused(tmp_path: Path, left: str, right: str) -> None:
    core = "1"
    (tmp_path / "a").write_text(left * 60 + core + right * 60)
    assert disk.read_json(tmp_path / "a", "it") is not None
    for depth in (70, 900, 100_000):
        (tmp_path / "a").write_text(left * depth + core + right * depth)
        with pytest.raises(UsageError, match=r"it cannot be read from .*; restore the file\.$"):
            disk.read_json(tmp_path / "a", "it")


def test_a_number_or_a_null_is_read(tmp_path: Path) -> None:
    (tmp_path / "a").write_text('{"a": 1, "b": -0.5, "c": null}')
    assert [disk.read_number(tmp_path / "a", "it", name, or_null=True) for name in "abc"] == [1.0, -0.5, None]
    with pytest.raises(UsageError, match="no number 'c'"):
        disk.read_number(tmp_path / "a", "it", "c")


@pytest.mark.parametrize("call", ["fsync", "fdopen", "replace"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int
) -> None:
    path = tmp_path / "a"
    disk.write_text(path, "old")
    monkeypatch.setattr(Path if call == "replace" else os, call, fails(number))
    with pytest.raises(UsageError, match=r"a cannot be written \(.*\); free space or choose another folder") as caught:
        disk.write_text(path, "new")
    monkeypatch.undo()
    assert os.strerror(number) in str(caught.value)
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize(
    "work", [disk.lock, disk.erase, disk.remove, disk.sweep, lambda path: disk.one_at_a_time(path).__enter__()]
)
def test_locks_and_files_that_cannot_be_written_or_removed_are_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, work: Callable[[Path], object]
) -> None:
    path = tmp_path if work is disk.sweep else tmp_path / "a"
    for name in ("a", f".b{disk.UNFINISHED}"):
        (tmp_path / name).write_bytes(b"x")
    for owner, call in ((os, "open"), (os, "fsync"), (Path, "unlink")):
        monkeypatch.setattr(owner, call, fails(errno.EROFS))
    with pytest.raises(UsageError, match="cannot be written .Read-only file system.; free space or choose another folder"):
        work(path)


def test_a_folder_that_is_a_file_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("")
    for place in (tmp_path / "a", tmp_path / "a" / "b"):
        with pytest.raises(UsageError, match="cannot be written"):
            disk.make_folder(place)


def test_a_folder_without_leave_to_write_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(UsageError, match="Permission denied"):
        disk.make_folder(tmp_path / "a")


def test_json_says_null_for_what_it_cannot_say(tmp_path: Path) -> None:
    disk.write_json(tmp_path / "a", {"x": math.inf, 1: [math.nan, (2.5, -math.inf)]})
    assert disk.read_json(tmp_path / "a", "it") == {"x": None, "1": [None, [2.5, None]]}


def test_lines_are_added(tmp_path: Path) -> None:
    for step in range(3):
        disk.append_line(tmp_path / "a", {"step": step, "x": math.nan})
    assert [json.loads(line) for line in (tmp_path / "a").read_text().splitlines()][2] == {"step": 2, "x": None}
    with pytest.raises(UsageError, match="cannot be written"):
        disk.append_line(tmp_path, {})


@pytest.mark.parametrize(("content", "said"), [
    (b"{", r"the thing cannot be read from .*a \(JSONDecodeError\); restore"), (b"\xff\xfe", "UnicodeDecodeError"),
    (b"[" * 100_000, "RecursionError"), (None, "the thing is missing: there is no .*a; check the path"),
])  # fmt: skip
def test_json_that_cannot_be_read_is_named(tmp_path: Path, content: bytes | None, said: str) -> None:
    if content is not None:
        (tmp_path / "a").write_bytes(content)
    with pytest.raises(UsageError, match=said):
        disk.read_json(tmp_path / "a", "the thing")


def test_sweeping_takes_only_what_was_being_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = [tmp_path / name for name in ("a", ".hidden", "b.part")]
    for path in kept:
        path.write_text("")
    monkeypatch.setattr(Path, "replace", fails(errno.EIO))
    monkeypatch.setattr(Path, "unlink", fails(errno.EIO))
    with pytest.raises(UsageError):
        disk.write_text(tmp_path / "c", "new")
    monkeypatch.undo()
    assert len(list(tmp_path.iterdir())) == 4
    disk.sweep(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted(kept)


def test_a_lock_is_one_process_s_and_ends_with_it(tmp_path: Path) -> None:
    held = disk.lock(tmp_path / "lock")
    assert held is not None
    assert disk.lock(tmp_path / "lock") is None
    os.close(held)
    child = os.fork()
    if child == 0:
        os._exit(0 if disk.lock(tmp_path / "lock") is not None else 1)
    assert os.waitpid(child, 0)[1] == 0
    again = disk.lock(tmp_path / "lock")
    assert again is not None
    os.close(again)


def test_erasing_overwrites_in_place(tmp_path: Path) -> None:
    path, twin = tmp_path / "a", tmp_path / "b"
    path.write_bytes(b"secret")
    os.link(path, twin)
    disk.erase(path)
    assert not path.exists()
    assert twin.read_bytes() == bytes(6)
    disk.erase(path)


def test_a_folder_where_a_file_belongs_is_named_with_its_remedy(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    with pytest.raises(UsageError, match=r"a cannot be written \(Is a directory\); remove the folder that is there, nothing"):
        disk.write_bytes(tmp_path / "a", b"x")
