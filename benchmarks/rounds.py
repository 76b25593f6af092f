"""Rounds a second of federated averaging with a small network, beside a loop written by hand.

    python benchmarks/rounds.py [--only W1] [--rounds 12] [--workers 1 2] [--memory] [--out DIR]

Every contestant lives in its own process and waits for its turn; they take turns round by round, so a change of the
machine's speed meets all alike. Only one of them computes at any time.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch

import processes
import tables
from raw_loop import LeanLoop, TextbookLoop
from wardround.config import Experiment
from wardround.data.federation import ClientData, Federation, samples
from wardround.data.options import DataOptions
from wardround.experiment import Setup, build_model, open_transport, set_up
from wardround.federation.observers import Observer
from wardround.federation.rounds import RoundLoop, RoundOptions
from wardround.federation.server import Server
from wardround.models.options import ModelOptions
from wardround.training.options import TrainingOptions

SIDE, CLASSES = 28, 9
BATCH, LR = 10, 0.005
NEVER = 10**6
TEST_IMAGES = 4000


@dataclass(frozen=True)
class Workload:
    """A federation to race on: clients, and training images of each."""

    name: str
    clients: int
    images: int


WORKLOADS = {load.name: load for load in (Workload("W1", 20, 100), Workload("W2", 100, 10))}


# ---- what is trained -----------------------------------------------------------------------------------------------


def draw(count: int, key: int) -> tuple[np.ndarray, np.ndarray]:
    """`count` images `(count, 28, 28, 1)` with labels: a coarse pattern a class, under noise. Made on the spot."""
    patterns = np.random.default_rng(0).uniform(60, 195, (CLASSES, SIDE // 4, SIDE // 4))
    stream = np.random.default_rng([1, key])
    labels = stream.integers(0, CLASSES, count)
    images = patterns.repeat(4, axis=1).repeat(4, axis=2)[labels] + stream.normal(0, 60, (count, SIDE, SIDE))
    return images.clip(0, 255).astype(np.uint8)[..., None], labels


def federation_of(load: Workload) -> Federation:
    """Clients with training images alone."""
    empty = samples(np.zeros((0, SIDE, SIDE, 1), np.uint8), [], [])
    clients = []
    for number in range(load.clients):
        images, labels = draw(load.images, number)
        train = samples(images, labels, [f"{number}/{i}" for i in range(load.images)])
        clients.append(ClientData(f"client-{number:03}", train, empty, empty))
    return Federation(tuple(clients), tuple(f"class {c}" for c in range(CLASSES)), "benchmark")


def experiment_of(rounds: int, workers: int) -> Experiment:
    """FedAvg of the small network, with nothing that the loop by hand does not do."""
    training = TrainingOptions(
        batch_size=BATCH, lr=LR, weight_decay=0.0, clip_norm=None, loss="cross-entropy", class_weights="none"
    )
    return Experiment(
        rounds=rounds,
        data=DataOptions(source="phantoms", image_size=SIDE, channels=1),
        model=ModelOptions(backbone="wardround:cnn", pretrained=False, finetune_blocks="all", head="shared"),
        training=training,
        method={"name": "fedavg"},
        federation=RoundOptions(evaluate_every=NEVER, evaluate_server=False),
        transport={"name": "local", "workers": workers},  # type: ignore[arg-type]
    )


def accuracy(model: torch.nn.Module, key: int = NEVER) -> float:
    """Share of right answers of `model` (normalised float images to logits) on images that nobody trained on."""
    images, labels = draw(TEST_IMAGES, key)
    planes = torch.from_numpy(images).permute(0, 3, 1, 2).float() / 127.5 - 1
    with torch.inference_mode():
        guesses = torch.cat([model(part).argmax(1) for part in torch.split(planes, 250)])
    return float((guesses == torch.from_numpy(labels)).float().mean())


# ---- contestants: each waits for "go" before every round, and tells what the round cost ------------------------------


class TakesTurns(Observer):
    """Starts a round when told to, and reports it."""

    def __init__(self, pipe: Connection, setup_seconds: float) -> None:
        self.pipe, self.setup_seconds, self.bytes = pipe, setup_seconds, 0

    def round_started(self, round: int, clients: Sequence[str]) -> None:
        """Wait for this contestant's turn."""
        if round == 1:
            self.pipe.send({"setup": self.setup_seconds})
        self.pipe.recv()
        self.started = time.perf_counter()
        self.cpu = processes.cpu_seconds(os.getpid())

    def traffic(self, round: int, phase: str, entries: dict[tuple[str, str], int]) -> None:
        """Count the bytes of the round, both ways."""
        self.bytes = sum(entries.values())

    def round_ended(self, round: int, server: Server) -> None:
        """The turn is over."""
        seconds, cpu = time.perf_counter() - self.started, processes.cpu_seconds(os.getpid()) - self.cpu
        self.pipe.send({"seconds": seconds, "cpu": cpu})


def ours(pipe: Connection, load: Workload, rounds: int, workers: int) -> None:
    """Wardround: the library's own engine with its own choices, from a cold cache folder."""
    os.environ["WARDROUND_CACHE"] = tempfile.mkdtemp()
    federation = federation_of(load)
    started = time.perf_counter()
    setup = set_up(experiment_of(rounds, workers), federation)
    with open_transport(setup, Path(tempfile.mkdtemp()), None, workers) as transport:
        observer = TakesTurns(pipe, time.perf_counter() - started)
        server = Server(dict(setup.side.initial_state))
        RoundLoop(
            setup.side, server, transport, federation.names, rounds, setup.experiment.federation, 0, None, [observer]
        ).run()  # fmt: skip
        spent = asdict(processes.memory(os.getpid()))
    pipe.send({"memory": spent, "bytes": observer.bytes, "accuracy": _accuracy_of(setup, server)})
    pipe.recv()


def lean(pipe: Connection, load: Workload, rounds: int, workers: int) -> None:
    """The loop by hand that the ratios refer to."""
    by_hand(pipe, load, rounds, LeanLoop)


def textbook(pipe: Connection, load: Workload, rounds: int, workers: int) -> None:
    """The loop by hand in its usual form."""
    by_hand(pipe, load, rounds, TextbookLoop)


def by_hand(pipe: Connection, load: Workload, rounds: int, kind: type[LeanLoop]) -> None:
    """A loop by hand on one thread, with our initial weights."""
    torch.set_num_threads(1)
    _, model = build_model(experiment_of(rounds, 1), CLASSES)
    loop = kind(model, federation_of(load), BATCH, LR)
    observer = TakesTurns(pipe, 0.0)
    for round in range(1, rounds + 1):
        observer.round_started(round, ())
        loop.round()
        observer.round_ended(round, Server({}))
    spent = asdict(processes.memory(os.getpid()))
    model.load_state_dict(loop.state)
    pipe.send({"memory": spent, "bytes": 0, "accuracy": accuracy(model.eval())})
    pipe.recv()


def _accuracy_of(setup: Setup, server: Server) -> float:
    setup.model.load_state_dict(setup.model.state_dict() | server.state)
    return accuracy(setup.model.eval())


# ---- the race --------------------------------------------------------------------------------------------------------


@dataclass
class Contestant:
    """One process that waits for its turns."""

    label: str
    pipe: Connection
    process: Any
    setup: float
    turns: list[dict[str, float]]

    @classmethod
    def start(cls, label: str, work: Callable[..., None], load: Workload, rounds: int, workers: int) -> Contestant:
        """A fresh interpreter, ready for its first round."""
        context = multiprocessing.get_context("spawn")
        pipe, theirs = context.Pipe()
        process = context.Process(target=work, args=(theirs, load, rounds, workers))
        process.start()
        theirs.close()
        return cls(label, pipe, process, pipe.recv()["setup"], [])

    def turn(self) -> None:
        """One round."""
        self.pipe.send("go")
        self.turns.append(self.pipe.recv())

    def finish(self) -> dict[str, Any]:
        """What is known at the end: the figures of all rounds but the first, and what was spent in all."""
        end = self.pipe.recv()
        self.pipe.send("done")
        self.process.join()
        first, *later = self.turns
        seconds, cpu = ([turn[key] for turn in later] for key in ("seconds", "cpu"))
        return {
            "label": self.label,
            "rounds_per_second": 1 / statistics.median(seconds),
            "median_seconds": statistics.median(seconds),
            "fastest_seconds": min(seconds),
            "median_cpu_seconds": statistics.median(cpu),
            "setup_seconds": self.setup,
            "first_round_seconds": first["seconds"],
            **end,
        }


def race(load: Workload, rounds: int, workers: Sequence[int]) -> list[dict[str, Any]]:
    """Let the loops by hand and ours, with each number of workers, take turns; add ratios to the first."""
    contestants = [
        Contestant.start("raw loop", lean, load, rounds, 1),
        Contestant.start("raw loop, textbook", textbook, load, rounds, 1),
    ]
    for count in workers:
        contestants.append(Contestant.start(f"wardround, workers: {count}", ours, load, rounds, count))
    for _ in range(rounds):
        for contestant in contestants:
            contestant.turn()
    results = [contestant.finish() for contestant in contestants]
    for result in results:
        for key in ("median_seconds", "fastest_seconds", "median_cpu_seconds"):
            result["ratio_of_" + key] = results[0][key] / result[key]
    return results


def memory_by_clients(workers: int, counts: Sequence[int] = (20, 100, 500), rounds: int = 2) -> list[dict[str, Any]]:
    """Peak memory of all processes for federations of different size, 10 images a client."""
    found = []
    for count in counts:
        contestant = Contestant.start(f"{count} clients", ours, Workload("memory", count, 10), rounds, workers)
        for _ in range(rounds):
            contestant.turn()
        found.append({"clients": count, "workers": workers, **contestant.finish()["memory"]})
    for row in found:
        row["ratio"] = row["peak"] / found[0]["peak"]
    return found


def show(load: Workload, results: Sequence[dict[str, Any]]) -> None:
    """Print the table of one race."""
    rows = [
        [
            r["label"],
            f"{r['rounds_per_second']:.2f}",
            f"{r['ratio_of_median_seconds']:.2f}",
            f"{r['ratio_of_fastest_seconds']:.2f}",
            f"{r['ratio_of_median_cpu_seconds']:.2f}",
            f"{r['setup_seconds']:.1f} + {r['first_round_seconds']:.1f}",
            f"{r['memory']['peak']:.0f}",
            f"{r['bytes'] / 1e6:.1f}",
            f"{r['accuracy']:.3f}",
        ]
        for r in results
    ]
    heads = ["", "rounds/s", "x raw", "fastest", "CPU", "set-up + round 1, s", "peak MiB", "MB/round", "accuracy"]
    tables.show(f"{load.name}: {load.clients} clients x {load.images} images", heads, rows)


def show_memory(rows: Sequence[dict[str, Any]]) -> None:
    """Print the table of memory."""
    heads = ["clients", "workers", "peak MiB", "proportional MiB", "largest process MiB", "x smallest"]
    keys = ("peak", "proportional", "largest")
    body = [[str(r["clients"]), str(r["workers"]), *(f"{r[k]:.0f}" for k in keys), f"{r['ratio']:.2f}"] for r in rows]
    tables.show("Memory of all processes by number of clients", heads, body)


def run(out: Path, rounds: int, workers: Sequence[int], only: Sequence[str], memory: bool) -> None:
    """Do what was asked for, print it and write `rounds.json`."""
    result: dict[str, Any] = {"machine": processes.machine(), "races": {}, "memory": []}
    for name in only:
        result["races"][name] = race(WORKLOADS[name], rounds, workers)
        show(WORKLOADS[name], result["races"][name])
    for count in workers if memory else ():
        rows = memory_by_clients(count)
        show_memory(rows)
        result["memory"] += rows
    result["machine"]["load_after"] = os.getloadavg()[0]
    tables.write(out, "rounds", result)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=list(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--memory", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--out", type=Path, default=tables.DEFAULT_FOLDER)
    args = parser.parse_args()
    run(args.out, args.rounds, args.workers, args.only, args.memory)


if __name__ == "__main__":
    main()
