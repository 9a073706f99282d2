"""What an audit found, as a page and as plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sparsedp import disk, statement
from sparsedp.audit.checks import Check
from sparsedp.audit.gradient import LOWER, VIOLATION, Finding
from sparsedp.environment import versions
from sparsedp.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Report:
    """All findings and checks of an audit."""

    recipe: Mapping[str, Any]
    """The sparsity and the mechanism that were audited."""
    findings: tuple[Finding, ...]
    checks: tuple[Check, ...]
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Nothing contradicts a claim, and every check holds."""
        return not any(f.violated for f in self.findings) and all(c.ok for c in self.checks)

    def text(self) -> str:
        """A page for a screen."""
        width = max((len(f.what) for f in self.findings), default=10)
        head = f"{'attack':{width}}  {'claimed':>8}  {'at least':>8}  {'share':>6}  {'any mech.':>9}  {'trials':>8}  verdict"
        rows = [
            f"{f.what:{width}}  {f.claimed:8.3f}  {f.bound:8.3f}  {100 * f.share:5.0f}%  {f.bound_by_rates:9.3f}  {f.trials:8}  "
            f"{'CONTRADICTED' if f.violated else 'consistent'} ({f.method}, {f.seconds:.0f} s)"
            for f in self.findings
        ]
        checks = [f"{'ok  ' if c.ok else 'FAIL'}  {c.what}: {c.seen}" for c in self.checks]
        return "\n".join([head, *rows, "", *checks, "", *self.notes, *EXPLAINED, "", self.verdict()])

    def verdict(self) -> str:
        """One sentence."""
        if self.ok:
            return "Nothing that was tried contradicts the claimed privacy."
        bad = [f.what for f in self.findings if f.violated] + [c.what for c in self.checks if not c.ok]
        return f"THE CLAIM IS CONTRADICTED by: {'; '.join(bad)}."

    def to_json(self) -> dict[str, Any]:
        """Plain values, for a program or for a privacy statement."""
        return {
            "ok": self.ok, "verdict": self.verdict(), "lower_bound_confidence": LOWER, "violation_confidence_family_wise": VIOLATION,
            "recipe": dict(self.recipe), "findings": [{**asdict(f), "share": f.share} for f in self.findings],
            "checks": [asdict(c) for c in self.checks], "notes": list(self.notes), "software": versions(),
        }  # fmt: skip


EXPLAINED = (
    f"claimed: epsilon of the attacked job (pld, add/remove). at least: what the attack proves at {LOWER:.0%}, by the method in brackets;",
    "any mech.: what it proves with no assumption about the mechanism. A claim is contradicted when the attack's errors lie below its whole",
    f"trade-off curve, at a family-wise {VIOLATION:.0%} over all attacks of this page. An audit can show a claim false, never true.",
)


def add_to_statement(report: Report, run_dir: Path) -> None:
    """Put an audit of the same configuration into a finished run's privacy statement."""
    public = run_dir / "public"
    if not (public / "privacy.json").exists():
        raise UsageError(f"{run_dir} has no public/privacy.json; give the folder of a finished run.")
    statement.check(public)
    stated = disk.read_json(public / "privacy.json", "the run's privacy statement")
    config = stated.get("config") if isinstance(stated, dict) else None
    for part in ("sparsity", "mechanism"):
        if not isinstance(config, dict) or config.get(part) != report.recipe[part]:
            raise UsageError(
                f"The audit's {part} settings are not those of the run in {run_dir}; audit the run's own configuration."
            )
    told = [{k: v for k, v in finding.items() if k != "seconds"} for finding in report.to_json()["findings"]]
    attacked = "; ".join(
        f"{f.what}: claimed {f.claimed:.3g}, shown at least {f.bound:.3g} ({f.method})" for f in report.findings
    )
    kept = {
        "ok": report.ok, "words": f"{report.verdict()} {attacked}; {LOWER:.0%} confidence", "lower_bound_confidence": LOWER,
        "findings": told, "checks": [asdict(c) for c in report.checks],
    }  # fmt: skip
    whole = {**stated, "audit": kept}
    try:
        statement.page(whole)
    except (KeyError, TypeError, AttributeError, ValueError, LookupError, ArithmeticError, RecursionError) as error:
        raise UsageError(
            f"The privacy statement of {run_dir} cannot be read ({type(error).__name__}); restore it, or train again."
        ) from error
    statement.write(public, whole)
