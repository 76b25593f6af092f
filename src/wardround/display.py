"""How a run gets on, for a person: bars with the time left on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from wardround.federation.observers import Observer

if TYPE_CHECKING:
    from wardround.federation.messages import Message
    from wardround.federation.server import Server
    from wardround.federation.transport import Refused


def bars(console: Console) -> Progress:
    """A progress display that is drawn at events only: no thread of its own, so that workers can be forked."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, auto_refresh=False)


class RunDisplay(Observer):
    """One run: a bar over rounds, or a line a round.

    Args:
        console: where to draw.
        rounds: how many the run has.
    """

    def __init__(self, console: Console, rounds: int) -> None:
        self.console, self.rounds = console, rounds
        self._scores: list[float] = []
        self._begun: tuple[float, int] | None = None
        self._bars: tuple[Progress, TaskID] | None = None

    def round_started(self, round: int, clients: Sequence[str]) -> None:
        """Begin to count the time."""
        self._scores = []
        if self._begun is None:
            self._begun = (time.monotonic(), round - 1)
            if self.console.is_terminal:
                progress = bars(self.console)
                self._bars = (progress, progress.add_task("rounds", total=self.rounds, completed=round - 1))
                progress.start()

    def answered(self, round: int, phase: str, client: str, answer: Message | Refused) -> None:
        """Collect scores; a refusal is shown at once."""
        from wardround.federation.transport import Refused

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
            progress.update(task, completed=round, description=f"rounds  {score}", refresh=True)
        else:
            self.console.print(f"round {round}/{self.rounds}  {score}  {self._left(round)}".rstrip(), highlight=False)

    def close(self) -> None:
        """Leave the terminal tidy."""
        if self._bars:
            self._bars[0].stop()

    def _left(self, round: int) -> str:
        begun, before = self._begun or (time.monotonic(), 0)
        each = (time.monotonic() - begun) / max(1, round - before)
        return f"{each:.1f} s a round, {each * (self.rounds - round) / 60:.1f} min left"


class CompareDisplay:
    """A comparison: a bar over all rounds of all runs, or a line a finished run."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.total = self.done = 0
        self._rounds: dict[tuple[str, int], tuple[int, int]] = {}  # run -> (done, of)
        self._bars: tuple[Progress, TaskID] | None = None
        self._began = time.monotonic()

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
        minutes = (time.monotonic() - self._began) / 60
        text = f"[{self.done}/{self.total}] {label}, seed {seed}: {word} ({minutes:.1f} min so far)"
        self.console.print(text, style="red" if error else None, markup=False, highlight=False)

    def close(self) -> None:
        """Leave the terminal tidy."""
        if self._bars:
            self._bars[0].stop()

    def _draw(self, text: str) -> None:
        if not self.console.is_terminal:
            return
        if self._bars is None:
            progress = bars(self.console)
            self._bars = (progress, progress.add_task("", total=sum(of for _, of in self._rounds.values())))
            progress.start()
        progress, task = self._bars
        completed = sum(done for done, _ in self._rounds.values())
        progress.update(task, completed=completed, description=text, refresh=True)
