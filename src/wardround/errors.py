"""What can go wrong, by who can mend it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class WardroundError(Exception):
    """Base of every error that Wardround raises on purpose."""


class InputError(WardroundError):
    """The input is wrong: the message names the file, the key or row, what was found and what is allowed.

    The command line exits with status 2.
    """


class RunError(WardroundError):
    """A run failed although its input was right (quorum lost, disk full). Exit status 1."""


class MissingExtra(InputError):
    """A feature needs an optional package that is not installed."""

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        super().__init__(f"{purpose} needs the package {package!r}: pip install 'wardround[{extra}]'")


def suggestion(word: str, allowed: Iterable[str]) -> str:
    """`" (did you mean 'fedavg'?)"` when one of `allowed` is close to `word`, else the list of what is allowed.

    >>> suggestion("fedagv", ["fedavg", "pafp"])
    " (did you mean 'fedavg'?)"
    """
    names = sorted(allowed)
    close = difflib.get_close_matches(word, names, n=1)
    return f" (did you mean {close[0]!r}?)" if close else f" (allowed: {', '.join(names)})"
