"""One experiment: configuration -> federation -> method -> rounds -> results, in one folder."""

from __future__ import annotations

import functools
import json
import os
import platform
import shutil
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from wardround import __version__, seeds
from wardround.answering import Answerer
from wardround.config import Experiment, differences, load_experiment
from wardround.data import Federation
from wardround.data.cache import default_folder
from wardround.data.federation import SPLITS
from wardround.data.read import read_federation
from wardround.errors import InputError
from wardround.evaluation.results import client_results, summarise
from wardround.federation.checkpoints import Checkpoint, Checkpoints
from wardround.federation.codecs import codec_named
from wardround.federation.files import write_atomically
from wardround.federation.local import InProcess, WorkerProcesses
from wardround.federation.observers import Observer
from wardround.federation.rounds import RoundLoop
from wardround.federation.server import Server
from wardround.federation.store import ClientStore
from wardround.federation.transport import Transport
from wardround.methods.base import Method, ServerSide
from wardround.models.classifier import Classifier, build_classifier
from wardround.recording import Recorder
from wardround.report.images import save_samples
from wardround.training.allocation import keep_memory
from wardround.training.arithmetic import layout
from wardround.training.cache import PrefixCache
from wardround.training.selftest import CHOICES, choose_arithmetic

MIB = 2**20


@dataclass(frozen=True)
class Setup:
    """An experiment that is ready to run.

    Attributes:
        experiment: with every default written out and every `auto` decided.
        federation: its images.
        method: its method.
        model: the edited model, on its device.
        cache: where cached inputs are kept between runs; None for nowhere.
    """

    experiment: Experiment
    federation: Federation
    method: Method
    model: Classifier
    cache: Path | None

    @functools.cached_property
    def side(self) -> ServerSide:
        """The method bound to the model."""
        return ServerSide(self.method, self.model, self.experiment.data.image_size)

    @property
    def device(self) -> torch.device:
        """Where the model lives."""
        return next(self.model.parameters()).device


def set_up(experiment: Experiment, federation: Federation | None = None, cache: Path | None = None) -> Setup:
    """Read the images, build the model, let the method edit it, decide what is `auto`.

    Args:
        experiment: as loaded.
        federation: images that are read already; None reads them.
        cache: folder of caches; None for the user's own (`$WARDROUND_CACHE`).

    Raises:
        InputError: whatever is wrong with the data, the model or the method's keys.
    """
    torch.set_num_threads(experiment.training.threads)
    keep_memory()
    experiment = experiment.complete()
    folder = cache or default_folder()
    data = read_federation(experiment.data, experiment.seed) if federation is None else federation
    if not data.counts().sum():
        raise InputError(f"{data.source}: no client has a training image")
    method, model = build_model(experiment, len(data.classes))
    device = pick_device(experiment.training.device)
    model.to(device)
    training = choose_arithmetic(model, experiment.training, experiment.data.image_size, device, folder)
    model.to(memory_format=layout(training))
    return Setup(experiment.model_copy(update={"training": training}), data, method, model, folder)


def build_model(experiment: Experiment, classes: int) -> tuple[Method, Classifier]:
    """The experiment's method, and its model as the method wants it, with initial weights."""
    method, data = experiment.bound_method(), experiment.data
    model = build_classifier(experiment.model, classes, data.channels, data.image_size, experiment.seed)
    with seeds.torch_scope(experiment.seed, "edit"):
        method.edit(model, data.image_size)
    return method, model


def pick_device(name: str) -> torch.device:
    """`auto` is a GPU where there is one, else the processor.

    Raises:
        InputError: not a device, or not on this machine.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise InputError(f"training.device: {name!r} cannot be used here ({str(error).splitlines()[0]})") from error
    return device


def run(
    experiment: Experiment,
    out: Path,
    *,
    resume: bool = False,
    workers: int | None = None,
    label: str | None = None,
    observers: Sequence[Observer] = (),
    federation: Federation | None = None,
) -> dict[str, Any]:
    """Run an experiment into a folder and return its `results.json`.

    Args:
        experiment: what to run.
        out: the run's folder. A folder that holds a run already is only taken with `resume`.
        resume: go on after the last whole checkpoint in `out`; start where there is none.
        workers: overrides `transport.workers`.
        label: what tables call the run; the method's name by default.
        observers: told of every event, besides the recorder.
        federation: images that are read already.

    Raises:
        InputError: the input is wrong, or `out` belongs to another experiment.
        RunError: a quorum was lost, a worker died, the disk is full.
    """
    started = time.monotonic()
    _claim(out, experiment, resume)
    setup = set_up(_as_recorded(experiment, out, resume), federation)
    experiment = setup.experiment
    checkpoints = Checkpoints(out / "checkpoints", experiment.digest())
    checkpoint = checkpoints.latest() if resume else None
    done = checkpoint.round if checkpoint else 0
    checkpoints.forget_after(done)
    _describe(out, setup)
    recorder = Recorder(out, done)
    count = workers or experiment.transport.workers or os.cpu_count() or 1
    with open_transport(setup, out, checkpoint, min(count, len(setup.federation.clients))) as transport:
        loop = _loop(setup, transport, checkpoints, checkpoint, [recorder, *observers])
        ready = time.monotonic()
        loop.run()
    results = _results(setup, recorder, label or setup.method.name, checkpoints.complaints)
    results["seconds"] |= {"setup": ready - started, "total": time.monotonic() - started}
    write_atomically(out / "results.json", json.dumps(results, indent=1).encode())
    shutil.rmtree(out / "state", ignore_errors=True)
    return results


def open_transport(setup: Setup, out: Path, checkpoint: Checkpoint | None, workers: int) -> Transport:
    """This process alone for one worker, or on a GPU, which workers could not share well; else processes."""
    codec = codec_named(setup.experiment.transport.codec)
    make = functools.partial(make_answerer, setup, out, checkpoint, workers)
    if workers == 1 or setup.device.type != "cpu":
        return InProcess(codec, make())
    load = {client.name: len(client.train) for client in setup.federation.clients}
    return WorkerProcesses(codec, make, load, workers)


def make_answerer(setup: Setup, out: Path | None, checkpoint: Checkpoint | None, workers: int) -> Answerer:
    """The client half in one worker."""
    torch.set_num_threads(setup.experiment.training.threads)
    experiment = setup.experiment
    training, size = experiment.training, experiment.data.image_size
    cache = PrefixCache(
        model=setup.model,
        options=training,
        size=size,
        policy=experiment.data.augment,
        seed=experiment.seed,
        device=setup.device,
        budget=training.cache_ram_mib * MIB // workers,
        folder=setup.cache,
    )
    spill = (out or Path()) / "state"
    store = ClientStore(spill, experiment.transport.state_ram_mib * MIB // workers)
    answerer = Answerer(
        setup.method, setup.model, setup.federation, training, size, cache, store,
        codec_named(experiment.transport.codec), experiment.seed, out,
    )  # fmt: skip
    if checkpoint is not None:
        answerer.restore({name: checkpoint.client(name) for name in setup.federation.names})
    return answerer


def _loop(
    setup: Setup,
    transport: Transport,
    checkpoints: Checkpoints,
    checkpoint: Checkpoint | None,
    observers: Sequence[Observer],
) -> RoundLoop:
    server = checkpoint.server() if checkpoint else Server(dict(setup.side.initial_state))
    notes = checkpoint.notes if checkpoint else {}
    best = (notes["best"], notes["best_score"]) if notes.get("best") is not None else None
    experiment = setup.experiment
    return RoundLoop(
        setup.side, server, transport, setup.federation.names, experiment.rounds, experiment.federation,
        experiment.seed, checkpoints, observers, best,
    )  # fmt: skip


def _claim(out: Path, experiment: Experiment, resume: bool) -> None:
    """Make `out`, unless it holds something that must not be overwritten."""
    config = out / "config.toml"
    if config.exists() and not resume:
        raise InputError(f"{out}: holds a run already; give another --out, or --resume to go on with it")
    if not config.exists() and out.exists() and any(out.iterdir()):
        raise InputError(f"{out}: is not empty and holds no run; give another --out")
    if config.exists():
        differing = differences(experiment.complete(), load_experiment(config))
        differing = [line for line in differing if "'auto'" not in line.rsplit("-> ", 1)[-1]]
        if differing:
            raise InputError(f"{out}: belongs to another experiment: {'; '.join(differing)}")
    out.mkdir(parents=True, exist_ok=True)


def _as_recorded(experiment: Experiment, out: Path, resume: bool) -> Experiment:
    """A resumed run computes as it began: what was `auto` stays what was chosen then."""
    config = out / "config.toml"
    if not (resume and config.exists()):
        return experiment
    then = load_experiment(config).training
    chosen = {key: getattr(then, key) for key in CHOICES}
    return experiment.model_copy(update={"training": experiment.training.model_copy(update=chosen)})


def _describe(out: Path, setup: Setup) -> None:
    """Write what the run is, before it starts."""
    setup.experiment.write(out / "config.toml")
    write_json(out / "environment.json", environment(setup.device))
    write_json(out / "federation.json", describe_federation(setup.federation))
    if not (out / "samples").exists():
        save_samples(setup.federation, out)


def environment(device: torch.device) -> dict[str, Any]:
    """Versions and machine, for a reader who compares two runs."""
    return {
        "wardround": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": platform.platform(),
        "cores": os.cpu_count(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
    }


def describe_federation(federation: Federation) -> dict[str, Any]:
    """`federation.json`: who has how many images of what."""
    counts = {split: federation.counts(split).tolist() for split in SPLITS}
    return {
        "source": federation.source,
        "classes": list(federation.classes),
        "modalities": list(federation.modalities),
        "notes": list(federation.notes),
        "clients": [
            {"name": name, "counts": {split: counts[split][i] for split in SPLITS}}
            for i, name in enumerate(federation.names)
        ],
    }


def write_json(file: Path, value: Any) -> None:
    """Write a JSON file, whole or not at all."""
    write_atomically(file, json.dumps(value, indent=1).encode(), durable=False)


def _results(setup: Setup, recorder: Recorder, label: str, complaints: Iterable[str]) -> dict[str, Any]:
    examples = {client.name: len(client.train) for client in setup.federation.clients}
    # A client that never took part is judged by the server's model with its own untrained parts.
    personal = {name: recorder.personal.get(name) or recorder.received.get(name) for name in examples}
    server_side = bool(recorder.received) and bool(setup.side.initial_state)
    return {
        "method": setup.method.name,
        "label": label,
        "seeds": [setup.experiment.seed],
        "rounds": setup.experiment.rounds,
        **_scores(personal, examples),
        "global": _scores(recorder.received, examples) if server_side else None,
        "communication": {
            "bytes_up": recorder.bytes["up"],
            "bytes_down": recorder.bytes["down"],
            "shared_elements": setup.side.shared_elements,
            "statistic_elements": setup.side.statistic_elements,
        },
        "seconds": {"train": recorder.train_seconds, "evaluate": recorder.evaluate_seconds},
        "warnings": [*setup.method.cautions(examples), *complaints, *recorder.refusals],
    }


def _scores(models: Any, examples: dict[str, int]) -> dict[str, Any]:
    tests = {name: [scores["test"]] for name, scores in models.items() if scores}
    return {
        "clients": {name: client_results(runs, examples[name]) for name, runs in tests.items()},
        "summary": summarise(tests, examples),
    }
