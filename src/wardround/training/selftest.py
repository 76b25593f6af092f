"""What computes fastest on this machine: a measurement, not an assumption.

The answer is kept beside the caches, by processor, library and network, so that a second run on the machine makes
the same choice and gives the same bits; a run's `config.toml` records it, so that a rerun elsewhere does too.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import json
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from wardround.federation.files import write_atomically
from wardround.models.classifier import Classifier
from wardround.training.arithmetic import arithmetic, compile_if_asked, layout
from wardround.training.convolutions import has_large_depthwise
from wardround.training.local import single_image_statistics
from wardround.training.options import TrainingOptions

STEPS, SECONDS = 3, 0.15  # a setting takes at least so many steps, and so long
MARGIN = 0.95  # a setting replaces the plain one only if it is at least 5 % faster

# Each key that may be `auto`, with its plain setting first. They are decided one after the other, in this order; but
# what a compiler makes fast it makes fast together, so `compile` is tried with every layout that is open.
CHOICES = {
    "memory_format": ("contiguous", "channels_last"),
    "depthwise": ("library", "shifts"),
    "precision": ("float32", "pointwise-bfloat16", "bfloat16"),
    "compile": ("off", "on"),
}


def choose_arithmetic(
    model: Classifier, options: TrainingOptions, image_size: int, device: torch.device, folder: Path | None
) -> TrainingOptions:
    """Replace every `auto` of `CHOICES` by what trains `model` fastest, or where no block trains, runs it fastest.

    Args:
        model: an edited model on `device`; it is copied, not changed.
        options: the `[training]` section.
        image_size: side of the images, in pixels.
        device: where the model lives.
        folder: where answers are kept between runs; None measures anew.
    """
    undecided = [key for key in CHOICES if getattr(options, key) == "auto"]
    if "depthwise" in undecided and (device.type != "cpu" or not has_large_depthwise(model.tuned)):
        options = options.model_copy(update={"depthwise": "library"})
        undecided.remove("depthwise")
    if not len(model.tuned):  # a head computes as it does; what takes time is to run the frozen blocks, once
        options = options.model_copy(update={key: CHOICES[key][0] for key in undecided if key != "memory_format"})
        undecided = [key for key in undecided if key == "memory_format"]
    if not undecided:
        return options
    file = folder / "arithmetic.json" if folder else None
    key, known = _key(model, options, image_size, device), _read(file)
    if not _answers(known.get(key), undecided):
        known[key] = _decide(model, options, image_size, device, undecided)
        _remember(file, known)
    return options.model_copy(update=known[key])


def _answers(known: object, undecided: list[str]) -> bool:
    """Whether a remembered answer settles what is undecided, and nothing else: the file may be old or damaged."""
    if not isinstance(known, dict) or known.keys() != set(undecided):
        return False
    return all(known[key] in CHOICES[key] for key in undecided)


def _decide(
    model: Classifier, options: TrainingOptions, image_size: int, device: torch.device, undecided: list[str]
) -> dict[str, str]:
    def seconds(changes: Mapping[str, str]) -> float:
        return seconds_a_step(model, options.model_copy(update=plain | chosen | dict(changes)), image_size, device)

    chosen: dict[str, str] = {}
    plain = {key: CHOICES[key][0] for key in undecided}
    for key in undecided:
        first = {key: CHOICES[key][0]}
        others = [{key: setting} for setting in CHOICES[key][1:]]
        if key == "compile":
            others = _layouts(undecided)
        times = [seconds(first), *map(seconds, others)]
        best = min(times[1:])
        chosen |= others[times.index(best, 1) - 1] if best < MARGIN * times[0] else first
    return chosen


def _layouts(undecided: Sequence[str]) -> list[dict[str, str]]:
    """Every way to lay out a compiled network that is open."""
    keys = [key for key in ("memory_format", "depthwise") if key in undecided]
    settings = itertools.product(*(CHOICES[key] for key in keys))
    return [dict(zip(keys, values, strict=True)) | {"compile": "on"} for values in settings]


def seconds_a_step(model: Classifier, options: TrainingOptions, image_size: int, device: torch.device) -> float:
    """The best of a few training steps of a copy of `model` on random images, in seconds, after one to warm up.

    Of a model none of whose blocks train, it is the time of the frozen ones.

    One thread of a processor is timed by its own clock, which stands still while others use the processor.
    """
    if options.compile == "on":
        torch.compiler.reset()  # its cache counts the networks measured before as variants of this one
    trial = copy.deepcopy(model).to(memory_format=layout(options))
    images = torch.randint(0, 256, (options.batch_size, image_size, image_size, model.channels), dtype=torch.uint8)
    prepared = trial.prepare(images.to(device))
    clock = time.thread_time if device.type == "cpu" and options.threads == 1 else time.perf_counter
    if not len(trial.tuned):
        return _best(lambda: _seconds(lambda: trial.prefix(prepared), clock, device))
    inputs = trial.prefix(prepared)
    if inputs.dim() == 4:
        inputs = inputs.contiguous(memory_format=layout(options))
    compile_if_asked(trial, options)
    optimizer = torch.optim.SGD([p for p in trial.parameters() if p.requires_grad], options.lr)
    trial.train()
    return _best(lambda: _seconds(lambda: _step(trial, inputs, options, optimizer), clock, device))


def _best(measure: Callable[[], float]) -> float:
    """The smallest of a few measurements, after one to warm up."""
    measure()
    times: list[float] = []
    while len(times) < STEPS or sum(times) < SECONDS:
        times.append(measure())
    return min(times)


def _seconds(work: Callable[[], object], clock: Callable[[], float], device: torch.device) -> float:
    start = clock()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return clock() - start


def _step(model: Classifier, inputs: Tensor, options: TrainingOptions, optimizer: torch.optim.Optimizer) -> None:
    labels = torch.zeros(len(inputs), dtype=torch.int64, device=inputs.device)
    optimizer.zero_grad(set_to_none=True)
    with single_image_statistics(model, len(inputs)), arithmetic(options, inputs.device):
        logits = model(inputs)
    nn.functional.cross_entropy(logits.float(), labels).backward()  # type: ignore[no-untyped-call]
    optimizer.step()


def _key(model: Classifier, options: TrainingOptions, image_size: int, device: torch.device) -> str:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else _processor()
    settings = [getattr(options, key) for key in CHOICES]
    parts = [name, torch.__version__, options.threads, options.batch_size, image_size, settings, model]
    return hashlib.sha256("|".join(map(str, parts)).encode()).hexdigest()[:32]


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(errors="replace").splitlines() if cpuinfo.exists() else []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()


def _read(file: Path | None) -> dict[str, dict[str, str]]:
    try:
        found = json.loads(file.read_text()) if file else {}
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _remember(file: Path | None, known: dict[str, dict[str, str]]) -> None:
    try:
        if file is not None:
            write_atomically(file, json.dumps(known, indent=1, sort_keys=True).encode(), durable=False)
    except OSError:
        return  # an unwritable cache costs a measurement next time, nothing else
