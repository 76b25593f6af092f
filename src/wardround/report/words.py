"""How figures and lists are written on the page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

MISSING = "–"


def listed(items: Sequence[str], last: str = "and") -> str:
    """Items as a sentence has them.

    >>> listed(["a", "b", "c"])
    'a, b and c'
    """
    return f" {last} ".join([", ".join(items[:-1]), items[-1]]) if len(items) > 1 else "".join(items)


def plural(count: int, noun: str, many: str | None = None) -> str:
    """A count with its noun: `plural(2, "class", "classes")` is "2 classes"."""
    return f"{count:,} {noun if count == 1 else many or noun + 's'}"


def percent(value: float | None, digits: int = 1) -> str:
    """A fraction in percent, without the sign."""
    return MISSING if value is None else f"{100 * value:.{digits}f}"


def signed(value: float | None, digits: int = 1) -> str:
    """A difference of fractions in points, with its sign (a true minus)."""
    if value is None:
        return MISSING
    text = f"{100 * value:+.{digits}f}".replace("-", "−")
    return text[1:] if float(f"{100 * value:.{digits}f}") == 0 else text


def size(count: float | None) -> str:
    """Bytes in decimal units.

    >>> size(453_376)
    '453 kB'
    """
    if count is None:
        return MISSING
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.3g} {unit}" if count < 1000 * scale else f"{count / scale:,.0f} {unit}"
    return f"{count:.0f} B"


def duration(seconds: float | None) -> str:
    """A time span in its two leading units.

    >>> duration(3725)
    '1 h 2 min'
    """
    if seconds is None:
        return MISSING
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes_left = divmod(minutes, 60)
    return f"{hours} h {minutes_left} min" if hours else f"{minutes} min {rest} s"


def flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of nested mappings with their dotted names.

    >>> dict(flat({"method": {"name": "pafp"}, "seed": 0}))
    {'method.name': 'pafp', 'seed': 0}
    """
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
