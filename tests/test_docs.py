"""What the documents name is there: every place in the code, every test, every row of the catalogue, every link."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from tests.mutants.catalogue import ALL, ROWS, WITHOUT, row_of

ROOT = Path(__file__).parents[1]
PITFALLS = (ROOT / "docs" / "pitfalls.md").read_text("utf-8")
PAGES = sorted([*ROOT.glob("docs/*.md"), *ROOT.glob("*.md")])


@cache
def names_in(path: Path) -> set[str]:
    """Functions, classes and their methods, with dots."""
    found = set()
    for node in ast.parse(path.read_text("utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{inner.name}" for inner in node.body if isinstance(inner, ast.FunctionDef)}
    return found


def rows_of(page: str) -> dict[str, tuple[str, str]]:
    """By row of the catalogue: what prevents it, and what holds that."""
    lines = re.findall(r"^\| ([A-E]\d+) \| [^|]+ \| ([^|]+) \| ([^|]+) \|$", page, re.MULTILINE)
    assert len({row for row, _, _ in lines}) == len(lines), "a row stands twice"
    return {row: (code, tests) for row, code, tests in lines}


def missing(page: str) -> list[str]:
    """Places of the code and tests that a page names, and that are not there."""
    code = [(ROOT / "src/sparsedp" / file, name) for file, name in re.findall(r"`([\w/]+\.py):([\w.]+)`", page)]
    tests = [(ROOT / "tests" / file, name) for file, name in re.findall(r"`([\w/]+\.py)::([\w.]+)`", page)]
    return [f"{path}:{name}" for path, name in (*code, *tests) if not path.exists() or name not in names_in(path)]


def test_every_row_of_the_catalogue_stands_there_once_in_order() -> None:
    assert list(rows_of(PITFALLS)) == ROWS


def test_every_place_and_every_test_exists() -> None:
    assert not missing(PITFALLS)
    assert len(re.findall(r"`[\w/]+\.py:[\w.]+`", PITFALLS)) > 79 and len(re.findall(r"`[\w/]+\.py::test_\w+`", PITFALLS)) > 100


@pytest.mark.parametrize("wrong", ["`dp/noise.py:add_nois`", "`dp/nois.py:add_noise`", "`test_docs.py::test_of_no_such_name`"])
def test_a_place_that_is_not_there_is_seen(wrong: str) -> None:
    assert len(missing(wrong)) == 1
    assert not missing(
        "`dp/noise.py:add_noise`, `dp/values.py:Released.over`, `test_docs.py::test_a_place_that_is_not_there_is_seen`"
    )


@pytest.mark.parametrize("row", ROWS)
def test_a_row_has_code_and_a_test_and_the_test_is_one_that_caught_a_mutant(row: str) -> None:
    code, tests = rows_of(PITFALLS)[row]
    named = set(re.findall(r"`([\w/]+\.py::test_\w+)`", tests))
    assert named and re.search(r"`[\w/]+\.py:[\w.]+`", code)
    killers = {re.sub(r"\[.*", "", k).removeprefix("tests/") for m in ALL if row_of(m) == row for k in m.killers}
    if row in WITHOUT:
        assert "**Not covered" in code
    else:
        assert named & killers, f"none of {sorted(killers)}"


@pytest.mark.parametrize("page", PAGES, ids=[p.stem for p in PAGES])
def test_every_document_that_is_named_exists(page: Path) -> None:
    """Links, and files of docs/ named in words."""
    text = page.read_text("utf-8")
    linked = [page.parent / link for link in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", text)]
    linked += [ROOT / name for name in re.findall(r"\b(docs/[\w.-]+\.\w+)", text)]
    assert not [str(path) for path in linked if not path.exists()]
