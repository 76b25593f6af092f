"""Many runs, several at once, each in a process of its own: a queue that survives interruption and failing runs."""

from __future__ import annotations

import _thread
import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

from wardround import run_folder
from wardround.data import Federation
from wardround.data.read import read_federation
from wardround.errors import InputError, WardroundError
from wardround.experiment import pick_device, prepare_to_fork, run, set_up
from wardround.federation.local import process_context
from wardround.federation.observers import Observer
from wardround.federation.server import Server
from wardround.systems import System


class Watcher(Protocol):
    """Told how a comparison gets on."""

    def queued(self, label: str, seed: int, rounds: int, done: bool) -> None:
        """A run stands in the queue, or is finished already."""

    def advanced(self, label: str, seed: int, round: int) -> None:
        """A run has finished a round."""

    def ended(self, label: str, seed: int, error: str | None) -> None:
        """A run has ended, well or not."""


def parallel(systems: Sequence[System], workers: int | None) -> int:
    """How many runs at once: a GPU takes one."""
    device = pick_device(systems[0].experiment.training.device)
    return 1 if device.type != "cpu" else workers or run_folder.cores()


@dataclass
class _Job:
    """A run in progress."""

    system: System
    seed: int
    process: multiprocessing.process.BaseProcess
    pipe: Connection


@dataclass
class RunQueue:
    """Runs of several systems and seeds, below one folder.

    Attributes:
        out: holds a folder `SYSTEM/seed-NUMBER` a run.
        watcher: told of progress.
        slots: how many runs at once.
        failures: what went wrong so far, one sentence a run.
    """

    out: Path
    watcher: Watcher
    slots: int
    failures: list[str] = field(default_factory=list)
    _waiting: list[tuple[System, int]] = field(default_factory=list)
    _data: tuple[tuple[Any, int], Federation] | None = None

    def settle(self, system: System, seeds: Sequence[int]) -> System:
        """The system with everything that is `auto` decided, once for all its seeds: as its runs here have it.

        Raises:
            InputError: whatever is wrong with the system, or with a run of it that `out` holds.
        """
        experiment = system.experiment
        try:
            for seed in seeds:
                run_folder.check_same_experiment(self.folder(system, seed), system.seeded(seed))
                experiment = run_folder.as_recorded(experiment, self.folder(system, seed))
            return System(system.label, set_up(experiment, self.federation(system, seeds[0])).experiment)
        except InputError as error:
            raise InputError(f"{system.label}: {error}") from error

    def put(self, system: System, seed: int) -> None:
        """Queue a run unless `out` holds its results."""
        done = run_folder.kept_results(self.folder(system, seed), system.experiment.rounds) is not None
        self.watcher.queued(system.label, seed, system.experiment.rounds, done)
        if not done:
            self._waiting.append((system, seed))

    def folder(self, system: System, seed: int) -> Path:
        """Where a run lives."""
        return self.out / system.folder_name / f"seed-{seed}"

    def federation(self, system: System, seed: int) -> Federation:
        """The images of a run, read once for all systems that share them."""
        key = (system.experiment.data, seed)
        if self._data is None or self._data[0] != key:
            self._data = (key, read_federation(system.experiment.data, seed))
        return self._data[1]

    def work(self) -> None:
        """Run everything that waits."""
        if self._waiting:
            prepare_to_fork()
        running: list[_Job] = []
        each = max(1, self.slots // max(1, len(self._waiting)))
        try:
            while self._waiting or running:
                while self._waiting and len(running) < self.slots:
                    running += self._started(*self._waiting.pop(0), workers=each)
                ready = wait([job.pipe for job in running])
                for job in [job for job in running if job.pipe in ready]:
                    if not self._listen(job):
                        running.remove(job)
        except KeyboardInterrupt:
            _interrupt(running)
            raise

    def _started(self, system: System, seed: int, workers: int) -> list[_Job]:
        """The run, begun; nothing when its images cannot be read, which is no reason to give up the others."""
        try:
            return [self._start(system, seed, workers)]
        except WardroundError as error:
            self._ended(system, seed, str(error))
            return []

    def _start(self, system: System, seed: int, workers: int) -> _Job:
        context = process_context()
        mine, theirs = context.Pipe(duplex=False)
        details = (system, seed, self.folder(system, seed), self.federation(system, seed), workers, theirs)
        process = context.Process(target=_run_job, args=details)  # type: ignore[attr-defined]
        process.start()
        theirs.close()
        return _Job(system, seed, process, mine)

    def _listen(self, job: _Job) -> bool:
        """Take one word from a run; False once it has ended."""
        try:
            word = job.pipe.recv()
        except EOFError:
            job.process.join()
            word = f"its process died (exit code {job.process.exitcode})"
        if isinstance(word, int):
            self.watcher.advanced(job.system.label, job.seed, word)
            return True
        self._ended(job.system, job.seed, word)
        job.pipe.close()
        job.process.join()
        return False

    def _ended(self, system: System, seed: int, error: str) -> None:
        if error:
            self.failures.append(f"{system.label}, seed {seed}: {error}")
        self.watcher.ended(system.label, seed, error or None)


def _interrupt(jobs: Iterable[_Job]) -> None:
    """Let runs finish what they are writing, then end. On a terminal they have had the Ctrl-C themselves."""
    for job in jobs:
        if job.process.pid is not None and job.process.is_alive():
            os.kill(job.process.pid, signal.SIGINT)
    for job in jobs:
        job.process.join()


class _Teller(Observer):
    """Tells the comparison of every finished round."""

    def __init__(self, pipe: Connection) -> None:
        self.pipe = pipe

    def round_ended(self, round: int, server: Server) -> None:
        """One word a round."""
        self.pipe.send(round)


def _run_job(system: System, seed: int, folder: Path, federation: Federation, workers: int, pipe: Connection) -> None:
    """One run in a process of its own. Sends rounds, and at last an error or an empty string."""
    signal.signal(signal.SIGINT, _interrupted_once)
    _end_with_parent()
    try:
        run(
            system.seeded(seed),
            folder,
            resume=True,
            workers=workers,
            label=system.label,
            observers=[_Teller(pipe)],
            federation=federation,
        )
        pipe.send("")
    except KeyboardInterrupt:
        return
    except WardroundError as error:
        pipe.send(str(error) or type(error).__name__)
    except Exception as error:
        traceback.print_exc()
        pipe.send(f"{type(error).__name__}: {error}")


def _interrupted_once(number: int, frame: FrameType | None) -> None:
    """Ctrl-C, and deaf to more of it while the run winds up."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise KeyboardInterrupt


def _end_with_parent() -> None:
    """Stop as at Ctrl-C when the comparison is killed: nobody waits for this run any more."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_interrupt_after, args=(parent.sentinel,), daemon=True).start()


def _interrupt_after(sentinel: int) -> None:
    wait([sentinel])
    _thread.interrupt_main()
