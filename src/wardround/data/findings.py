"""What a check of data found, as text for people and as a dictionary for programs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal

Severity = Literal["error", "warning", "note"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")
_EXAMPLES = 10  # kept in the report
_SHOWN = 5  # of them printed


@dataclass(frozen=True)
class Finding:
    """One thing that was found.

    Attributes:
        severity: an error makes the data unfit; a warning wants a look; a note informs.
        kind: a fixed word for programs, such as `duplicate-across-splits`.
        message: a sentence.
        count: how many cases there are.
        examples: the first cases.
    """

    severity: Severity
    kind: str
    message: str
    count: int = 1
    examples: tuple[str, ...] = ()


def finding(severity: Severity, kind: str, message: str, cases: Iterable[str]) -> list[Finding]:
    """A list of one finding with its cases counted and the first ones kept; an empty list where there are none."""
    every = list(cases)
    return [Finding(severity, kind, message, len(every), tuple(every[:_EXAMPLES]))] if every else []


@dataclass(frozen=True)
class DataReport:
    """All findings on one source, gravest first.

    Attributes:
        path: the source.
        images: number of images listed.
        sites: its sites, in natural order.
        classes: its classes in their order.
        findings: what was found.
    """

    path: str
    images: int
    sites: tuple[str, ...]
    classes: tuple[str, ...]
    findings: tuple[Finding, ...]

    @property
    def fit(self) -> bool:
        """Whether nothing was found that is an error."""
        return not self.of("error")

    def of(self, severity: Severity) -> tuple[Finding, ...]:
        """The findings of one severity."""
        return tuple(found for found in self.findings if found.severity == severity)

    def to_dict(self) -> dict[str, Any]:
        """A dictionary of plain values, ready for JSON; `fit` is included."""
        return {"fit": self.fit, **asdict(self)}

    def render(self) -> str:
        """The report as text, one finding a paragraph."""
        sites = f"{len(self.sites)} sites" if self.sites else "no sites"
        head = f"{self.path}: {self.images} images, {sites}, {len(self.classes)} classes"
        lines = [line for severity in SEVERITIES for found in self.of(severity) for line in _lines(found)]
        counts = ", ".join(f"{len(self.of(severity))} {severity}s" for severity in SEVERITIES)
        return "\n".join([head, *lines, f"{'fit for use' if self.fit else 'not fit for use'}: {counts}"])


def _lines(found: Finding) -> list[str]:
    """The sentence, and below it the first cases: on one line where they are short."""
    shown = list(found.examples[:_SHOWN])
    hidden = found.count - len(shown)
    more = [f"and {hidden} more"] if hidden > 0 else []
    brief = ", ".join(shown + more)
    cases = [brief] if len(brief) <= 100 else shown + more
    return [f"{found.severity}: {found.message} [{found.kind}]", *(f"    {case}" for case in cases if shown)]
