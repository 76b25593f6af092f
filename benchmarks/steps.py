"""Milliseconds a training batch of pretrained-size networks whose last two blocks train.

    python benchmarks/steps.py [--only Lite0] [--repetitions 5] [--precision float32] [--arithmetic] [--compile]

Five ways to take the same step, then (`--arithmetic`) the bare step in every arithmetic. The contestants take turns,
repetition by repetition, in one process and on one thread.
"""

from __future__ import annotations

import argparse
import io
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

import processes
import tables
from wardround.data import Samples
from wardround.data.federation import samples
from wardround.methods.base import FedAvg
from wardround.models.classifier import Classifier, build_classifier
from wardround.models.options import ModelOptions
from wardround.training.allocation import keep_memory
from wardround.training.arithmetic import arithmetic, compile_if_asked, layout
from wardround.training.cache import PrefixCache
from wardround.training.client import Client
from wardround.training.options import TrainingOptions
from wardround.training.selftest import CHOICES, choose_arithmetic

BATCH, CLASSES, TUNED_BLOCKS = 32, 7, 2
PHOTO = (600, 450)  # pixels: width and height of the JPEG files, as dermatoscopes deliver them
CPU = torch.device("cpu")

Work = Callable[[], None]


@dataclass(frozen=True)
class Shape:
    """A network at a size."""

    title: str
    backbone: str
    size: int

    def model(self, blocks: int | str = TUNED_BLOCKS) -> Classifier:
        """The network with random weights, its last `blocks` trained."""
        options = ModelOptions(backbone=self.backbone, pretrained=False, finetune_blocks=blocks)  # type: ignore[arg-type]
        return build_classifier(options, CLASSES, 3, self.size, seed=0)

    def samples(self, count: int) -> Samples:
        """`count` random images."""
        stream = np.random.default_rng(0)
        images = stream.integers(0, 256, (count, self.size, self.size, 3), dtype=np.uint8)
        return samples(images, stream.integers(0, CLASSES, count), [str(i) for i in range(count)])


SHAPES = {
    "Lite0": Shape("EfficientNet-Lite0 at 128 px", "timm:tf_efficientnet_lite0", 128),
    "B0": Shape("EfficientNet-B0 at 224 px", "torchvision:efficientnet_b0", 224),
}


# ---- the bare step ---------------------------------------------------------------------------------------------------


@dataclass
class Bare:
    """What a step needs at least: forward, loss, backward, SGD."""

    model: Classifier
    options: TrainingOptions

    def __post_init__(self) -> None:
        """Lay the model out and compile it as the options say, and make its optimiser."""
        self.model.to(memory_format=layout(self.options)).train()
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.SGD(trained, lr=self.options.lr, fused=True)
        compile_if_asked(self.model, self.options)

    def step(self, h: Tensor, labels: Tensor) -> None:
        """One step on the output `h` of the frozen blocks."""
        self.optimizer.zero_grad(set_to_none=True)
        with arithmetic(self.options, CPU):
            logits = self.model(h)
        nn.functional.cross_entropy(logits.float(), labels).backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()

    def prefix(self, images: np.ndarray) -> Tensor:
        """uint8 `(B, H, W, C)` through the frozen blocks."""
        return self.model.prefix(self.model.prepare(torch.from_numpy(images)))


# ---- five ways -----------------------------------------------------------------------------------------------------


def ways(shape: Shape, options: TrainingOptions, batches: int) -> dict[str, Work]:
    """What is compared; each takes `batches` steps when called."""
    data = shape.samples(batches * BATCH)
    labels = torch.split(torch.from_numpy(data.labels), BATCH)
    images = [data.images[rows] for rows in _chunks(len(data))]
    photos = [_jpeg(number) for number in range(BATCH)]
    full, plain, bare = Bare(shape.model("all"), options), Bare(shape.model(), options), Bare(shape.model(), options)
    h = [_laid_out(bare.prefix(batch), options) for batch in images]
    return {
        "a: full fine-tuning": lambda: _steps(full, map(full.prefix, images), labels),
        "b: frozen part run each time": lambda: _steps(plain, map(plain.prefix, images), labels),
        "b': the same, images decoded from JPEG": lambda: _steps(
            plain, (plain.prefix(_decoded(photos, shape.size)) for _ in images), labels
        ),
        "c: bare step on a tensor in memory": lambda: _steps(bare, h, labels),
        "d: wardround, frozen part cached": _ours(shape, options, data),
    }


def _steps(bare: Bare, inputs: Iterable[Tensor], labels: Iterable[Tensor]) -> None:
    for h, target in zip(inputs, labels, strict=True):
        bare.step(h, target)


def _ours(shape: Shape, options: TrainingOptions, data: Samples) -> Work:
    """The library's own local training, with everything that a run has: its order, loss, clipping and contexts."""
    method, model = FedAvg(), shape.model().to(memory_format=layout(options))
    cache = PrefixCache(model, options, shape.size, "none", 0, CPU, budget=2**31, folder=None)
    counts, rules = torch.from_numpy(data.counts(CLASSES)), method.rules(model)
    inputs, labels = cache.inputs("client", data, training=True), torch.from_numpy(data.labels)
    modality = torch.from_numpy(data.modality)

    def train() -> None:
        method.train(Client("client", 1, 0, model, rules, inputs, labels, modality, counts, options), "train")

    return train


def _laid_out(h: Tensor, options: TrainingOptions) -> Tensor:
    return h.contiguous(memory_format=layout(options)) if h.dim() == 4 else h


def _chunks(count: int) -> Iterator[slice]:
    return (slice(start, start + BATCH) for start in range(0, count, BATCH))


def _jpeg(number: int) -> bytes:
    """A smooth random photograph as a file in memory."""
    coarse = np.random.default_rng(number).integers(0, 256, (15, 20, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(coarse).resize(PHOTO, Image.Resampling.BICUBIC).save(file, "JPEG", quality=90)
    return file.getvalue()


def _decoded(photos: Iterable[bytes], size: int) -> np.ndarray:
    opened = (Image.open(io.BytesIO(photo)).convert("RGB") for photo in photos)
    return np.stack([np.asarray(photo.resize((size, size), Image.Resampling.BILINEAR)) for photo in opened])


# ---- measuring -----------------------------------------------------------------------------------------------------


def take_turns(works: Mapping[str, Work], repetitions: int, batches: int) -> list[dict[str, Any]]:
    """Milliseconds a batch of each, by the clock and of the processor; one turn of each warms up."""
    wall: dict[str, list[float]] = {name: [] for name in works}
    cpu: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(repetitions + 1):
        for name, work in works.items():
            started, used = time.perf_counter(), time.process_time()
            work()
            wall[name].append((time.perf_counter() - started) * 1e3 / batches)
            cpu[name].append((time.process_time() - used) * 1e3 / batches)
    return [
        {
            "name": name,
            "ms_min": min(wall[name][1:]),
            "ms_median": statistics.median(wall[name][1:]),
            "cpu_ms_min": min(cpu[name][1:]),
            "cpu_ms_median": statistics.median(cpu[name][1:]),
        }
        for name in works
    ]


def compare_ways(shape: Shape, precision: str, repetitions: int, batches: int) -> dict[str, Any]:
    """The five ways in the arithmetic that the self-test chooses here."""
    options = TrainingOptions(batch_size=BATCH, precision=precision)  # type: ignore[arg-type]
    chosen = choose_arithmetic(shape.model(), options, shape.size, CPU, Path(tempfile.mkdtemp()))
    rows = take_turns(ways(shape, chosen, batches), repetitions, batches)
    floor = next(row for row in rows if row["name"].startswith("c"))
    for row in rows:
        row |= {f"over_floor_{key}": row[key] / floor[key] for key in ("ms_min", "ms_median", "cpu_ms_min")}
    return {"chosen": {key: getattr(chosen, key) for key in CHOICES}, "ways": rows}


def compare_arithmetic(shape: Shape, repetitions: int, compiled: bool) -> list[dict[str, Any]]:
    """The bare step in every arithmetic, compiled or not."""
    batches = 2
    data = shape.samples(batches * BATCH)
    labels = torch.split(torch.from_numpy(data.labels), BATCH)
    choices = CHOICES if compiled else {**CHOICES, "compile": ("off",)}
    settings = [dict(zip(choices, values, strict=True)) for values in itertools.product(*choices.values())]
    if compiled:
        from torch._dynamo import config

        config.recompile_limit = len(settings)  # it would run the later networks uncompiled
    works = {}
    for setting in settings:
        options = TrainingOptions(batch_size=BATCH, **setting)  # type: ignore[arg-type]
        works[" ".join(setting.values())] = _bare_work(Bare(shape.model(), options), options, data, labels)
    rows = take_turns(works, repetitions, batches)
    for row, setting in zip(rows, settings, strict=True):
        row |= {**setting, "speed_up": rows[0]["cpu_ms_min"] / row["cpu_ms_min"]}
    return rows


def _bare_work(bare: Bare, options: TrainingOptions, data: Samples, labels: Iterable[Tensor]) -> Work:
    h = [_laid_out(bare.prefix(data.images[rows]), options) for rows in _chunks(len(data))]
    return lambda: _steps(bare, h, labels)


# ---- showing -------------------------------------------------------------------------------------------------------


def show_ways(shape: Shape, found: Mapping[str, Any]) -> None:
    """Print the five ways."""
    keys = ("ms_min", "ms_median", "cpu_ms_min")
    body = [
        [row["name"], *(f"{row[key]:.1f}" for key in keys), *(f"{row['over_floor_' + key]:.3f}" for key in keys)]
        for row in found["ways"]
    ]
    chosen = ", ".join(str(value) for value in found["chosen"].values())
    heads = ["", "ms, fastest", "ms, median", "CPU ms, fastest", "x floor, fastest", "median", "CPU"]
    tables.show(f"{shape.title}, batch {BATCH}, in {chosen}", heads, body)


def show_arithmetic(shape: Shape, rows: Iterable[Mapping[str, Any]]) -> None:
    """Print the bare step in every arithmetic."""
    body = [
        [
            *(str(row[key]) for key in CHOICES),
            *(f"{row[key]:.1f}" for key in ("ms_min", "ms_median", "cpu_ms_min")),
            f"{row['speed_up']:.2f}",
        ]
        for row in rows
    ]
    heads = [*CHOICES, "ms, fastest", "ms, median", "CPU ms, fastest", "x first line (CPU)"]
    tables.show(f"{shape.title}: the bare step in every arithmetic", heads, body)


@dataclass(frozen=True)
class Plan:
    """What to measure, as the command line says."""

    only: list[str]
    repetitions: int = 5
    batches: int = 8
    precision: str = "float32"
    arithmetic: bool = True
    compile: bool = False


def run(out: Path, plan: Plan) -> None:
    """Measure, print, and write `steps.json`."""
    torch.set_num_threads(1)
    keep_memory()
    result: dict[str, Any] = {"machine": processes.machine(), "shapes": {}}
    for name in plan.only:
        shape = SHAPES[name]
        found = compare_ways(shape, plan.precision, plan.repetitions, plan.batches)
        show_ways(shape, found)
        if plan.arithmetic:
            found["arithmetic"] = compare_arithmetic(shape, plan.repetitions, plan.compile)
            show_arithmetic(shape, found["arithmetic"])
        result["shapes"][name] = found
    tables.write(out, "steps", result)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--batches", type=int, default=8, help="steps in a turn")
    parser.add_argument("--precision", default="float32", choices=["auto", *CHOICES["precision"]])
    parser.add_argument("--arithmetic", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=False, help="takes minutes")
    parser.add_argument("--out", type=Path, default=tables.DEFAULT_FOLDER)
    args = vars(parser.parse_args())
    run(args.pop("out"), Plan(**args))


if __name__ == "__main__":
    main()
