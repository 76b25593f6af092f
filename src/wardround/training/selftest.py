"""Which memory format and precision are faster on this machine: a measurement, not an assumption.

The answer is kept beside the caches, by processor, library and network, so that a second run on the machine makes
the same choice and gives the same bits; a run's `config.toml` records it, so that a rerun elsewhere does too.
"""

from __future__ import annotations

import copy
import hashlib
import json
import platform
import time
from itertools import product
from pathlib import Path

import torch
from torch import Tensor, nn

from wardround.federation.files import write_atomically
from wardround.models.classifier import Classifier
from wardround.training.options import TrainingOptions

STEPS = 3
MARGIN = 0.95  # another setting than the plain one must be at least 5 % faster


def choose_arithmetic(
    model: Classifier, options: TrainingOptions, image_size: int, device: torch.device, folder: Path | None
) -> TrainingOptions:
    """Replace `auto` in `memory_format` and `precision` by what trains `model` fastest.

    Args:
        model: an edited model on `device`; it is copied, not changed.
        options: the `[training]` section.
        image_size: side of the images, in pixels.
        device: where the model lives.
        folder: where answers are kept between runs; None measures anew.
    """
    formats = ("contiguous", "channels_last") if options.memory_format == "auto" else (options.memory_format,)
    precisions = ("float32", "bfloat16") if options.precision == "auto" else (options.precision,)
    settings = list(product(formats, precisions))
    if len(settings) == 1:
        return options
    file = folder / "arithmetic.json" if folder else None
    key = _key(model, options, image_size, device, settings)
    known = _read(file)
    if key not in known:
        known[key] = list(_fastest(model, options, image_size, device, settings))
        if file is not None:
            _remember(file, known)
    chosen = known[key]
    return options.model_copy(update={"memory_format": chosen[0], "precision": chosen[1]})


def layout(options: TrainingOptions) -> torch.memory_format:
    """The memory format that `options` name; contiguous while it is `auto`."""
    return torch.channels_last if options.memory_format == "channels_last" else torch.contiguous_format


def _fastest(
    model: Classifier,
    options: TrainingOptions,
    image_size: int,
    device: torch.device,
    settings: list[tuple[str, str]],
) -> tuple[str, str]:
    plain, *others = settings
    images = torch.zeros(options.batch_size, image_size, image_size, model.channels, dtype=torch.uint8)
    times = {}
    for setting in settings:
        trial = copy.deepcopy(model).to(memory_format=_format(setting[0]))
        inputs = trial.prefix(trial.prepare(images.random_(0, 255).to(device)))
        times[setting] = seconds_a_step(trial, inputs, options, setting[1])
    best = min(others, key=lambda setting: times[setting])
    return best if times[best] < MARGIN * times[plain] else plain


def seconds_a_step(model: Classifier, inputs: Tensor, options: TrainingOptions, precision: str) -> float:
    """The best of a few training steps on `inputs`, in seconds, after one to warm up."""
    labels = torch.zeros(len(inputs), dtype=torch.int64, device=inputs.device)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], options.lr)
    model.train()
    best = float("inf")
    for _ in range(1 + STEPS):
        start = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(inputs.device.type, torch.bfloat16, enabled=precision == "bfloat16"):
            logits = model(inputs)
        nn.functional.cross_entropy(logits.float(), labels).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if inputs.device.type == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return best


def _format(name: str) -> torch.memory_format:
    return torch.channels_last if name == "channels_last" else torch.contiguous_format


def _key(
    model: Classifier,
    options: TrainingOptions,
    image_size: int,
    device: torch.device,
    settings: list[tuple[str, str]],
) -> str:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else _processor()
    parts = [
        name,
        torch.__version__,
        options.threads,
        options.batch_size,
        image_size,
        str(settings),
        str(model),
    ]
    return hashlib.sha256("|".join(map(str, parts)).encode()).hexdigest()[:32]


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(errors="replace").splitlines() if cpuinfo.exists() else []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()


def _read(file: Path | None) -> dict[str, list[str]]:
    try:
        found = json.loads(file.read_text()) if file else {}
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _remember(file: Path, known: dict[str, list[str]]) -> None:
    try:
        write_atomically(file, json.dumps(known, indent=1, sort_keys=True).encode(), durable=False)
    except OSError:
        return  # an unwritable cache costs a measurement next time, nothing else
