"""What the fast engine decided for a run, as plain data: recorded before the first step that it serves, read back on resume."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from sparsedp.errors import UsageError, shown


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Which engine, which method for which use of a layer, and how many rows at a time on how many threads.

    The same plan on the same machine gives the same sums to the bit.
    """

    engine: str
    methods: Mapping[str, str] = field(default_factory=dict)
    """By use: the parameter's name, and `#2`, `#3`, .. for its later uses."""
    costs: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Seconds per unit that each candidate took when the choice was made; for the reader only."""
    micro_batch: int | None = None
    """Rows at a time."""
    threads: int | None = None

    def with_methods(self, methods: Mapping[str, str]) -> Plan:
        """This plan with some methods chosen by hand."""
        return replace(self, methods={**self.methods, **methods})

    def to_json(self) -> dict[str, Any]:
        """Plain values for a JSON file."""
        return json.loads(json.dumps(asdict(self)))  # type: ignore[no-any-return]

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> Plan:
        """The plan that `to_json` wrote."""
        try:
            plan = Plan(**values)
            plan._check()
        except (TypeError, ValueError, AttributeError) as error:
            raise UsageError(
                f"The recorded plan of the engine cannot be read ({shown(str(error))}); start a new run."
            ) from error
        return plan

    def _check(self) -> None:
        """Raises ValueError at what `to_json` would not have written."""
        texts = [self.engine, *self.methods.keys(), *self.methods.values(), *self.costs.keys()]
        counts = [count for count in (self.micro_batch, self.threads) if count is not None]
        seconds = [second for row in self.costs.values() for second in row.values()]
        sound = all(isinstance(text, str) for text in texts) and all(isinstance(second, int | float) for second in seconds)
        if not sound or not all(type(count) is int and count >= 1 for count in counts):
            raise ValueError("a value of another kind")
