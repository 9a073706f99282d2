"""`python -m tests.fuzz`: damaged and hostile inputs for every parser, each watched; fails if one ends in no sentence."""

from __future__ import annotations

import argparse
import json
import logging
import sys
from dataclasses import asdict
from pathlib import Path

import torch

from tests.fuzz.harness import Report
from tests.fuzz.page import Result, page
from tests.fuzz.suite import TARGETS, begin_with_one_thread, tried


def main() -> int:
    names = [target.name for target in TARGETS]
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--inputs", type=int, default=10_000, help="for each target; slow ones get a share of them")
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME", help=f"of {', '.join(names)}")
    parser.add_argument("--seed", type=int, default=1, help="other seeds make other inputs")
    parser.add_argument("--json", type=Path, help="keep the results here, beside those of other targets that are there")
    parser.add_argument("--write", type=Path, help="write the page of all results, those kept in --json too, to this file")
    asked = parser.parse_args()
    logging.getLogger("absl").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    found = kept(asked.json)
    failures = 0
    for report in tried([t for t in TARGETS if t.name in asked.only and asked.inputs], asked.inputs, asked.seed):
        found[report.target] = Result(report, asked.inputs, asked.seed)
        failures += len(report.failures)
        sys.stdout.write(said(report))
        sys.stdout.flush()
        if asked.json:
            asked.json.write_text(json.dumps([asdict(result) for result in found.values()], indent=1) + "\n", "utf-8")
    if asked.write:
        asked.write.write_text(page([found[name] for name in names if name in found]), "utf-8")
    return 1 if failures else 0


def kept(path: Path | None) -> dict[str, Result]:
    """What earlier calls found, by target."""
    rows = json.loads(path.read_text("utf-8")) if path and path.exists() else []
    return {row["report"]["target"]: Result(**{**row, "report": Report.from_json(row["report"])}) for row in rows}


def said(report: Report) -> str:
    """A line for a target, and one for each input that ended badly."""
    counts = (
        f"{report.inputs:7} inputs {report.accepted:7} accepted {report.refused:7} refused {len(report.failures):3} failures"
    )
    line = f"{report.target:14}{counts} {report.seconds:7.1f} s {report.megabytes:7.1f} MiB\n"
    return line + "".join(f"    FAILURE {f.kind}, input {f.number}: {f.said}\n" for f in report.failures)


if __name__ == "__main__":
    begin_with_one_thread()
    sys.exit(main())
