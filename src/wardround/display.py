"""How a run gets on, for a person: bars with the time left on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from wardround.federation.observers import Observer

if TYPE_CHECKING:
    from rich.table import Table as RichTable

    from wardround.evaluation.tables import Table
    from wardround.federation.messages import Message
    from wardround.federation.server import Server
    from wardround.federation.transport import Refused

QUIET_SECONDS = 60.0  # a log file gets a sign of life this often


def bars(console: Console) -> Progress:
    """A progress display that is drawn at events only: no thread of its own, so that workers can be forked."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, auto_refresh=False)


def print_tables(console: Console, tables: Sequence[Table]) -> None:
    """Tables of results, and below the last one what the figures are."""
    for table in tables:
        console.print(table.title, style="bold", highlight=False)
        _print_table(console, table)
    console.print(tables[-1].caption, style="dim", highlight=False)


def _print_table(console: Console, table: Table) -> None:
    """On its side where it is too wide for the terminal; at its full width in a file."""
    from wardround.evaluation.tables import to_rich, transposed

    upright, on_its_side = to_rich(table), to_rich(transposed(table))
    for drawn in (upright, on_its_side):
        drawn.title = drawn.caption = None
    wanted = _width(console, upright)
    if not console.is_terminal:
        Console(file=console.file, width=max(console.width, wanted)).print(upright)
    elif wanted <= console.width or wanted <= _width(console, on_its_side):
        console.print(upright)
    else:
        console.print(on_its_side)


def _width(console: Console, table: RichTable) -> int:
    """Columns of the terminal that a table wants."""
    return table.__rich_measure__(console, console.options.update(max_width=10_000)).maximum


def tuning_table(record: Mapping[str, Any]) -> RichTable:
    """The best values of every method in a search, as `tuning.json` has them."""
    from rich.table import Table
    from rich.text import Text

    from wardround.search_plan import settings

    drawn = Table(title=f"Best of at most {record['budget']} trials a method", title_style="bold")
    for heading in ("method", "best values"):
        drawn.add_column(heading, overflow="fold")
    for heading in ("balanced accuracy on validation images", "trials"):
        drawn.add_column(heading, justify="right")
    for label, method in record["methods"].items():
        best = method["best"]
        spread = f" ± {100 * best['std']:.1f}" if len(record["seeds"]) > 1 else ""
        values = Text("\n".join(settings(best["values"])))
        drawn.add_row(Text(label), values, f"{100 * best['score']:.1f}{spread}", str(len(method["trials"])))
    return drawn


def in_words(seconds: float) -> str:
    """A duration for a person.

    >>> in_words(40), in_words(600), in_words(9000)
    ('40 s', '10 min', '2.5 h')
    """
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


class RunDisplay(Observer):
    """One run: a bar over rounds, or a line a round.

    Args:
        console: where to draw.
        rounds: how many the run has.
    """

    def __init__(self, console: Console, rounds: int) -> None:
        self.console, self.rounds = console, rounds
        self._scores: list[float] = []
        self._share = 0.0  # of a round that one answer is
        self._begun: tuple[float, int] | None = None
        self._bars: tuple[Progress, TaskID] | None = None

    def round_started(self, round: int, clients: Sequence[str]) -> None:
        """Begin to count the time."""
        self._scores, self._share = [], 1 / len(clients)
        if self._begun is None:
            self._begun = (time.monotonic(), round - 1)
            if self.console.is_terminal:
                progress = bars(self.console)
                self._bars = (progress, progress.add_task("rounds", total=self.rounds, completed=round - 1))
                progress.start()

    def answered(self, round: int, phase: str, client: str, answer: Message | Refused) -> None:
        """Collect scores and move the bar; a refusal is shown at once."""
        from wardround.federation.transport import Refused

        if self._bars:
            progress, task = self._bars
            progress.update(task, completed=min(round, progress.tasks[0].completed + self._share), refresh=True)
        if isinstance(answer, Refused):
            self.console.print(f"round {round}: refused {client}: {answer.reason}", style="yellow", markup=False)
            return
        score = ((answer.scalars.get("personal") or {}).get("test") or {}).get("balanced_accuracy")
        self._scores += [score] if score is not None else []

    def round_ended(self, round: int, server: Server) -> None:
        """Draw the bar, or print the line."""
        score = f"balanced accuracy {sum(self._scores) / len(self._scores):.3f}" if self._scores else ""
        if self._bars:
            progress, task = self._bars
            progress.update(task, completed=round, description=f"rounds  {score}".rstrip(), refresh=True)
        else:
            self.console.print(f"round {round}/{self.rounds}  {score}  {self._left(round)}".rstrip(), highlight=False)

    def close(self) -> None:
        """Leave the terminal tidy."""
        if self._bars:
            self._bars[0].stop()

    def _left(self, round: int) -> str:
        begun, before = self._begun or (time.monotonic(), 0)
        each = (time.monotonic() - begun) / max(1, round - before)
        return f"{each:.1f} s a round, {in_words(each * (self.rounds - round))} left"


class CompareDisplay:
    """A comparison: a bar over all rounds of all runs; elsewhere a line a finished run and one now and then."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.total = self.done = 0
        self._rounds: dict[tuple[str, int], tuple[int, int]] = {}  # run -> (done, of)
        self._bars: tuple[Progress, TaskID] | None = None
        self._began = self._last_line = time.monotonic()

    def queued(self, label: str, seed: int, rounds: int, done: bool) -> None:
        """Count a run in."""
        self.total += 1
        if done:
            self.done += 1
            self.console.print(f"{label}, seed {seed}: finished before, kept", markup=False, highlight=False)
        else:
            self._rounds[label, seed] = (0, rounds)

    def advanced(self, label: str, seed: int, round: int) -> None:
        """Move the bar."""
        self._rounds[label, seed] = (round, self._rounds[label, seed][1])
        self._draw(f"{label}, seed {seed}")

    def ended(self, label: str, seed: int, error: str | None) -> None:
        """Say how a run ended."""
        self.done += 1
        word = f"failed: {error}" if error else "done"
        text = f"[{self.done}/{self.total}] {label}, seed {seed}: {word} ({in_words(self._seconds)} so far)"
        self.console.print(text, style="red" if error else None, markup=False, highlight=False)

    def close(self) -> None:
        """Leave the terminal tidy."""
        if self._bars:
            self._bars[0].stop()

    @property
    def _seconds(self) -> float:
        return time.monotonic() - self._began

    def _draw(self, text: str) -> None:
        completed, total = (sum(numbers) for numbers in zip(*self._rounds.values(), strict=True))
        if not self.console.is_terminal:
            self._now_and_then(f"round {completed} of {total} in all runs")
            return
        if self._bars is None:
            progress = bars(self.console)
            self._bars = (progress, progress.add_task("", total=total))
            progress.start()
        progress, task = self._bars
        progress.update(task, completed=completed, description=text, refresh=True)

    def _now_and_then(self, text: str) -> None:
        if time.monotonic() - self._last_line >= QUIET_SECONDS:
            self._last_line = time.monotonic()
            self.console.print(f"{text} ({in_words(self._seconds)} so far)", markup=False, highlight=False)
