"""Methods on a frozen encoder's features: the published schedule at the size of ISIC 2019, from cached features.

    python benchmarks/frozen.py [--rounds 10] [--workers 1 2] [--methods fedmedclip fedclip ...] [--out DIR]

25,331 images in six clients, 60 % of them for training, 512 features each, six classes, batches of 32, AdamW, one local
epoch a round. The features are made on the spot: what they show does not matter for the time. The paper's schedule has
100 rounds; `--rounds` says how many are timed, and the table has the time of 100 at that pace.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import tables
from wardround import seeds
from wardround.config import Experiment
from wardround.data.federation import ClientData, Federation, samples
from wardround.data.options import DataOptions
from wardround.experiment import Setup, open_transport
from wardround.federation.observers import Observer
from wardround.federation.rounds import RoundLoop, RoundOptions
from wardround.federation.server import Server
from wardround.methods.trial import MadeUpText
from wardround.models.backbones import Backbone
from wardround.models.classifier import Classifier
from wardround.models.prompts import TextOptions, prompts_for
from wardround.training.allocation import keep_memory
from wardround.training.options import TrainingOptions

FEATURES, CLASSES, PAPER_ROUNDS = 512, 6, 100
SIDE = 23  # an image of 529 pixels: the encoder of this benchmark takes the first 512
TRAINING_SHARE = 0.6
# Images a site of ISIC 2019 with a known body site, as its metadata count them, without the two smallest sites.
SITES = {"anterior": 6915, "head": 4587, "lower": 4990, "palms": 398, "posterior": 2787, "upper": 2910}
WHOLE = 25_331
CHOICES: dict[str, dict[str, Any]] = {
    "fedmedclip": {"name": "fedmedclip", "lr_mlp": 1e-3},
    "fedmedclip, inert mask": {"name": "fedmedclip", "lr_mlp": 1e-3, "surrogate": "reference"},
    "fedclip": {"name": "fedclip"},
    "fedavg, linear head": {"name": "fedavg"},
}
NEVER = 10**6


def federation() -> Federation:
    """Six clients with the shares of ISIC 2019's sites, 25,331 images in all, of which 60 % are here."""
    scale = WHOLE * TRAINING_SHARE / sum(SITES.values())
    stream, empty = np.random.default_rng(0), samples(np.zeros((0, SIDE, SIDE, 1), np.uint8), [], [])
    patterns = stream.uniform(40, 215, (CLASSES, SIDE, SIDE))
    clients = []
    for name, count in SITES.items():
        labels = stream.integers(0, CLASSES, round(scale * count))
        images = patterns[labels] + stream.normal(0, 60, (len(labels), SIDE, SIDE))
        pixels = images.clip(0, 255).astype(np.uint8)[..., None]
        train = samples(pixels, labels, [f"{name}/{i}" for i in range(len(labels))])
        clients.append(ClientData(name, train, empty, empty))
    return Federation(tuple(clients), tuple(f"class {c}" for c in range(CLASSES)), "benchmark")


def experiment(method: dict[str, Any], rounds: int, workers: int) -> Experiment:
    """The published training of one method."""
    training = TrainingOptions(
        optimizer="adamw", lr=5e-4, lr_decay=0.97, weight_decay=0.02, adam_betas=(0.9, 0.98), adam_eps=1e-6,
        clip_norm=None, batch_size=32, loss="cross-entropy", class_weights="none", cache_type="float32", device="cpu",
        memory_format="contiguous", depthwise="library",
    )  # fmt: skip
    return Experiment(
        rounds=rounds,
        data=DataOptions(source="phantoms", image_size=SIDE, channels=1),
        training=training,
        method=method,
        federation=RoundOptions(evaluate_every=NEVER, evaluate_server=False),
        transport={"name": "local", "workers": workers, "codec": "float16+zlib"},  # type: ignore[arg-type]
    ).complete()


class Pixels(nn.Module):
    """An encoder that sees what is there: the first pixels of an image, one after the other."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`(B, 1, H, W)` to `(B, 512)`."""
        return x.flatten(1)[:, :FEATURES]


def set_up(chosen: Experiment, data: Federation) -> Setup:
    """The experiment on an encoder whose features are the images' own pixels."""
    text = MadeUpText(FEATURES)
    encoder = Backbone(
        "benchmark", "benchmark", [Pixels()], pool=nn.Identity(), features=FEATURES, text=text,
        mean=(0.5,), std=(0.25,),
    )  # fmt: skip
    with seeds.torch_scope(0, "head"):
        model = Classifier(encoder, CLASSES, 0, dropout=0.0)
    model.prompts = prompts_for(text, data.classes, TextOptions(), 100.0, 0)
    method = chosen.bound_method()
    with seeds.torch_scope(0, "edit"):
        method.edit(model, SIDE)
    return Setup(chosen, data, method, model, None)


class Clock(Observer):
    """The seconds of every round, and the bytes of the last."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.bytes = 0

    def round_started(self, round: int, clients: Sequence[str]) -> None:
        """Note the time."""
        self._started = time.perf_counter()

    def traffic(self, round: int, phase: str, entries: dict[tuple[str, str], int]) -> None:
        """Count both ways."""
        self.bytes = sum(entries.values())

    def round_ended(self, round: int, server: Server) -> None:
        """Keep the time that it took."""
        self.seconds.append(time.perf_counter() - self._started)


def measure(label: str, rounds: int, workers: int, data: Federation) -> dict[str, Any]:
    """Rounds of one method; the first, in which workers begin and features are laid out, is not in the mean."""
    setup, clock = set_up(experiment(CHOICES[label], rounds + 1, workers), data), Clock()
    torch.set_num_threads(1)
    keep_memory()
    with open_transport(setup, Path(tempfile.mkdtemp()), None, workers) as transport:
        server = Server(dict(setup.side.initial_state))
        RoundLoop(
            setup.side, server, transport, data.names, rounds + 1, setup.experiment.federation, 0, None, [clock]
        ).run()  # fmt: skip
    steps = sum(-(-len(client.train) // 32) for client in data.clients)
    mean = float(np.mean(clock.seconds[1:]))
    return {
        "method": label,
        "workers": workers,
        "first_round": clock.seconds[0],
        "round": mean,
        "fastest": min(clock.seconds[1:]),
        "milliseconds_a_step": 1000 * mean / steps,
        "minutes_of_100": PAPER_ROUNDS * mean / 60,
        "bytes_a_client": clock.bytes / len(data.clients),
    }


def run(out: Path, rounds: int, workers: Sequence[int], labels: Sequence[str]) -> None:
    """Measure, print and keep the table."""
    data = federation()
    rows = []
    for label in labels:
        for count in workers:
            rows.append(measure(label, rounds, count, data))
    heads = ["method", "workers", "ms a step", "s a round", "minutes of 100 rounds", "kB a client and round"]
    lines = [
        [
            row["method"], str(row["workers"]), f"{row['milliseconds_a_step']:.1f}", f"{row['round']:.2f}",
            f"{row['minutes_of_100']:.1f}", f"{row['bytes_a_client'] / 1000:.0f}",
        ]
        for row in rows
    ]  # fmt: skip
    tables.show("From cached features, at the size of ISIC 2019", heads, lines)
    tables.write(out, "frozen", rows)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10, help="rounds that are timed")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--methods", nargs="+", choices=list(CHOICES), default=list(CHOICES))
    parser.add_argument("--out", type=Path, default=tables.DEFAULT_FOLDER)
    args = parser.parse_args()
    run(args.out, args.rounds, args.workers, args.methods)


if __name__ == "__main__":
    main()
