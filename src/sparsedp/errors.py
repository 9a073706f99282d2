"""Every error a user can cause is worded here: one sentence that names the thing, its value, the rule and the remedy."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from errno import errorcode


class UsageError(ValueError):
    """Something the user gave cannot work. The message is one sentence fit for a screen; it never quotes training data."""


class BudgetError(UsageError):
    """The next step would pass the privacy target."""


MOST, LONGEST = 20, 1000  # problems that one error lists, characters that it shows of a value


def wrong(name: str, value: object, rule: str, remedy: str) -> UsageError:
    """The error for one value that breaks one rule."""
    return UsageError(f"{name} is {told(value)}, but {rule}; {remedy}.")


def require(ok: bool, name: str, value: object, rule: str, remedy: str) -> None:
    """Raise `wrong(...)` unless `ok`."""
    if not ok:
        raise wrong(name, value, rule, remedy)


def unknown(name: str, value: object, legal: Iterable[str]) -> UsageError:
    """The error for a word that is not in its list; lists the legal ones."""
    return UsageError(f"{name} is {told(value)}, which is not known; choose one of {', '.join(sorted(legal))}.")


def one_of(name: str, value: str, legal: Sequence[str]) -> str:
    """`value`, if it is one of `legal`."""
    if value not in legal:
        raise unknown(name, value, legal)
    return value


def missing_extra(package: str, extra: str, purpose: str) -> UsageError:
    """The error for an optional dependency that is not installed."""
    return UsageError(f"{purpose} needs the package {package!r}, which is not installed; pip install 'sparsedp[{extra}]'.")


def together(title: str, problems: Sequence[str]) -> UsageError:
    """One error for several problems found in one pass."""
    if len(problems) == 1:
        return UsageError(problems[0])
    listed = list(problems[:MOST]) + [f"{len(problems) - MOST} more like these."] * (len(problems) > MOST)
    return UsageError(title + "\n" + "\n".join(f"  - {problem}" for problem in listed))


_NO_MEMORY = ("out of memory", "can't allocate memory", "cannot allocate memory", "alloc_failed", "bad_alloc")


def out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory could not be had."""
    said = str(error).lower()
    named = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"  # torch's
    return named or any(words in said for words in _NO_MEMORY)


def reason_of(error: BaseException) -> str:
    """Why the system refused, in its own words; never the error's, which may quote data."""
    number = getattr(error, "errno", None)
    return os.strerror(number) if isinstance(number, int) and number in errorcode else type(error).__name__


def machine_fault(what: str, why: str) -> UsageError:
    """The error for reading that failed, though every record could be read before the first event."""
    return UsageError(
        f"{what} could not be used, through no fault of its content: {why}; mend that and start again: a step that was begun is done "
        "again as it was, at no new cost."
    )


def told(value: object) -> str:
    """A value as it would be written, cut where it is long."""
    text = repr(value)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]} .."


def shown(name: str) -> str:
    """A name that came out of a file, fit for a line of a screen: quoted where it has odd characters, and cut where it is long."""
    return (name if name.isprintable() else repr(name)[1:-1])[:100]
