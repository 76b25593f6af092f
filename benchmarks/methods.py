"""What every method costs beside federated averaging: processor seconds a round, and memory by number of clients.

    python benchmarks/methods.py [--only ditto moon] [--rounds 7] [--clients 20 --images 100] [--memory] [--out DIR]

The methods take turns round by round in one process, on one thread, with W1's federation and network (see rounds.py)
and, but for `KEYS`, their default keys. Those in `NETWORKS` race on a network of their own, with at most four clients:
beside W1's small one their other parts would be most of a round. Nothing is evaluated: work for personal models alone
is not counted.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import processes
import tables
from rounds import NEVER, Workload, experiment_of, federation_of
from wardround.config import Experiment
from wardround.data.federation import Federation
from wardround.errors import InputError
from wardround.experiment import open_transport, set_up
from wardround.federation.rounds import RoundLoop
from wardround.federation.server import Server
from wardround.methods.registry import METHODS
from wardround.training.options import TrainingOptions

REFERENCE = "fedavg"

# The most that a round should cost, in rounds of FedAvg, and why. Of a step, about a third is the forward pass.
EXPECTED: dict[str, tuple[float, str]] = {
    "isolated": (1.05, "nothing more; no weights travel"),
    "fedavg": (1.0, ""),
    "fedprox": (1.15, "two passes over the parameters a step"),
    "fedbn": (1.05, "nothing more"),
    "fedper": (1.05, "nothing more"),
    "fedrep": (1.6, "the head's steps: forward through the base, backward through the head alone"),
    "scaffold": (1.4, "a pass over the parameters a step; control variates travel both ways"),
    "ditto": (2.1, "as many steps again, each with a pass over the parameters"),
    "moon": (2.2, "two more forward passes a step; the projection head"),
    "per-fedavg": (1.2, "one gradient for every image, as in FedAvg; two passes over the parameters a step"),
    "fedproto": (1.5, "a forward pass over the images; no weights travel, but they are kept"),
    "dbe": (1.1, "a vector; the pass for the mean is in the first round"),
    "fedrod": (1.1, "a second linear layer"),
    "fedlc": (1.05, "nothing more"),
    "finetune": (1.05, "fine-tuning is done where models are evaluated"),
    "fedhealth": (1.1, "a copy of the received model; adaptation is done where models are evaluated"),
    "ccvr": (1.05, "calibration is done once, at the end"),
    "fedco2": (6.0, "two models; for each a pass of distillation with a teacher, and all clients' classifiers"),
    "fdse": (2.1, "1.83 forward and backward with erasers, their moments 0.15, the server's inner products 0.1"),
    "pafp": (2.2, "1.60 forward and backward with the layers, moments and their loss 0.3, two gradients apart 0.3"),
    "pafp-alt": (2.2, "as pafp, in turns"),
    "fm2": (2.2, "two epochs, at most 1.1 of two plain ones: the second is a forward pass and the experts'"),
}

# Keys that differ from the defaults: W1's images have one channel, which cannot be divided into groups.
KEYS: dict[str, dict[str, Any]] = {"pafp": {"groups": 1}, "pafp-alt": {"groups": 1}}
NETWORKS = {"fm2": "wardround:resnet4"}
FEW = 4  # clients of a race on such a network
MIB = processes.MIB


class SteadyLoop(RoundLoop):
    """A round loop that goes on round by round, and evaluates nothing."""

    def evaluates(self, round: int) -> bool:
        """Never."""
        return False

    def turn(self) -> float:
        """One round; its processor seconds."""
        started = time.process_time()
        self._round(self.server.round + 1)
        return time.process_time() - started


def experiment_with(name: str, backbone: str | None, training: TrainingOptions | None) -> Experiment:
    """W1's experiment with a method, a network (None: W1's own) and an arithmetic (None: whatever is best)."""
    base = experiment_of(NEVER, 1)
    changes: dict[str, Any] = {"method": {"name": name} | KEYS.get(name, {})}
    changes |= {"training": training} if training else {}
    changes |= {"model": base.model.model_copy(update={"backbone": backbone})} if backbone else {}
    return base.model_copy(update=changes)


def loop_of(
    name: str, federation: Federation, training: TrainingOptions | None = None, backbone: str | None = None
) -> SteadyLoop:
    """A method on a network, ready for its first round; see `experiment_with`.

    Raises:
        InputError: the method does not go with this network.
    """
    setup = set_up(experiment_with(name, backbone, training), federation)
    transport = open_transport(setup, Path(tempfile.mkdtemp()), None, 1)
    server = Server(dict(setup.side.initial_state))
    return SteadyLoop(
        setup.side, server, transport, federation.names, NEVER, setup.experiment.federation, setup.experiment.seed
    )


# ---- seconds -------------------------------------------------------------------------------------------------------


def races(names: Sequence[str], load: Workload, rounds: int) -> list[dict[str, Any]]:
    """A race on W1's network, and one on each network that some of the methods have to themselves."""
    small = [name for name in names if name not in NETWORKS]
    rows = race(small, load, rounds) if small else []
    few = Workload(load.name, min(load.clients, FEW), load.images)
    for backbone in dict.fromkeys(NETWORKS[name] for name in names if name in NETWORKS):
        own = [name for name in names if NETWORKS.get(name) == backbone]
        rows += [row | {"backbone": backbone} for row in race(own, few, rounds, backbone)]
    return rows


def race(names: Sequence[str], load: Workload, rounds: int, backbone: str | None = None) -> list[dict[str, Any]]:
    """Let the methods take turns for `rounds` rounds after one that warms up."""
    federation = federation_of(load)
    # The same arithmetic for all.
    training = set_up(experiment_with(REFERENCE, backbone, None), federation).experiment.training
    loops = {name: loop_of(name, federation, training, backbone) for name in dict.fromkeys((REFERENCE, *names))}
    seconds: dict[str, list[float]] = {name: [] for name in loops}
    for _ in range(rounds + 1):
        for name, loop in loops.items():
            seconds[name].append(loop.turn())
    medians = {name: statistics.median(spent[1:]) for name, spent in seconds.items()}
    return [_row(name, medians[name], medians[REFERENCE], seconds[name]) for name in loops]


def _row(name: str, median: float, reference: float, seconds: Sequence[float]) -> dict[str, Any]:
    limit, why = EXPECTED.get(name, (None, ""))
    factor = median / reference
    return {
        "method": name,
        "cpu_seconds": median,
        "factor": factor,
        "at_most": limit,
        "within": None if limit is None else factor <= limit or name == REFERENCE,
        "because": why,
        "all": seconds,
    }


# ---- memory --------------------------------------------------------------------------------------------------------


def memory_of(name: str, clients: int, rounds: int = 2) -> dict[str, Any]:
    """Memory after `rounds` rounds of `clients` clients with ten images; call it in a fresh process."""
    loop = loop_of(name, federation_of(Workload("memory", clients, 10)))
    for _ in range(rounds):
        loop.turn()
    store = loop.transport.answerer.store  # type: ignore[attr-defined]
    kept = sum(_bytes(store.get(client)) for client in loop.clients)
    return {
        "clients": clients,
        "kept_by_clients": kept / MIB,
        "kept_by_server": (_bytes(loop.server.state) + _bytes(loop.server.memory)) / MIB,
        "peak": processes.memory(os.getpid()).largest,
    }


def measure_memory(names: Sequence[str], clients: Sequence[int]) -> list[dict[str, Any]]:
    """Few and many clients of each method, each in a process of its own."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context, max_tasks_per_child=1) as pool:
        waiting = {name: [pool.submit(memory_of, name, count) for count in clients] for name in names}
        return [{"method": name, "sizes": [size.result() for size in sizes]} for name, sizes in waiting.items()]


def _bytes(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


# ---- showing -------------------------------------------------------------------------------------------------------


def show(rows: Sequence[dict[str, Any]], load: Workload) -> None:
    """Print the table of seconds."""
    body = [
        [
            " on ".join([row["method"], *filter(None, [row.get("backbone")])]),
            f"{row['cpu_seconds']:.2f}",
            f"{row['factor']:.2f}",
            "" if row["at_most"] is None else f"{row['at_most']:.2f}",
            {None: "not known", True: "", False: "more"}[row["within"]],
            row["because"],
        ]
        for row in rows
    ]
    heads = ["", "CPU s a round", "x fedavg", "at most", "", "because of"]
    tables.show(f"{load.clients} clients x {load.images} images: a round of every method", heads, body)


def show_memory(rows: Sequence[dict[str, Any]]) -> None:
    """Print the table of memory."""
    few, many = (rows[0]["sizes"][end]["clients"] for end in (0, -1))
    body = []
    for row in rows:
        small, large = row["sizes"][0], row["sizes"][-1]
        kept = [f"{size['kept_by_clients']:.0f} + {size['kept_by_server']:.0f}" for size in (small, large)]
        peaks = [f"{size['peak']:.0f}" for size in (small, large)]
        body.append([row["method"], f"{large['kept_by_clients'] / many:.2f}", *kept, *peaks])
    kept_heads = [f"kept, {count} (clients + server)" for count in (few, many)]
    heads = ["MiB", "a client keeps", *kept_heads, f"peak, {few}", f"peak, {many}"]
    tables.show("Memory by number of clients", heads, body)


def possible(names: Sequence[str]) -> list[str]:
    """Those of `names` that go with W1's network; the others are named."""
    found, federation = [], federation_of(Workload("one", 1, 2))
    for name in names:
        try:
            loop_of(name, federation)
        except InputError as error:
            print(f"{name} is left out: {error}")
        else:
            found.append(name)
    return found


def run(out: Path, names: Sequence[str], load: Workload, rounds: int, clients: Sequence[int]) -> None:
    """Measure, print, and write `methods.json`; no `clients`, no memory."""
    torch.set_num_threads(1)
    result: dict[str, Any] = {"machine": processes.machine()}
    names = possible(names)
    result["seconds"] = races(names, load, rounds)
    show(result["seconds"], load)
    if clients:
        result["memory"] = measure_memory(names, clients)
        show_memory(result["memory"])
    result["machine"]["load_after"] = os.getloadavg()[0]
    tables.write(out, "methods", result)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(METHODS), default=list(METHODS), metavar="METHOD")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--images", type=int, default=100)
    parser.add_argument("--memory", type=int, nargs="*", default=[20, 500], help="numbers of clients; none: skip it")
    parser.add_argument("--out", type=Path, default=tables.DEFAULT_FOLDER)
    args = parser.parse_args()
    run(args.out, args.only, Workload("W1", args.clients, args.images), args.rounds, args.memory)


if __name__ == "__main__":
    main()
