"""One experiment: configuration -> federation -> method -> rounds -> results, in one folder."""

from __future__ import annotations

import functools
import json
import logging
import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from wardround import run_folder, seeds
from wardround.answering import NO_CAPTIONS, Answerer, resumable
from wardround.captions.gathering import GatheredCaptions, KnownNames, described, gather
from wardround.captions.inserting import insert_captions
from wardround.captions.providers import provider_for
from wardround.captions.text_encoders import TextEncoder, text_encoder_for
from wardround.captions.vocabulary import Vocabulary
from wardround.config import Experiment
from wardround.data import Federation
from wardround.data.cache import default_folder
from wardround.data.read import read_federation
from wardround.errors import InputError
from wardround.evaluation.results import client_results, summarise
from wardround.federation.checkpoints import Checkpoint, Checkpoints
from wardround.federation.codecs import Codec, codec_named
from wardround.federation.files import write_atomically
from wardround.federation.flower_setup import need_flower
from wardround.federation.journal import Journal
from wardround.federation.local import InProcess, WorkerProcesses
from wardround.federation.observers import Observer
from wardround.federation.rounds import RoundLoop
from wardround.federation.server import Server
from wardround.federation.store import ClientStore, Store
from wardround.federation.transport import Transport
from wardround.holding_out import HELD_OUT, HeldOut
from wardround.methods.base import Method, ServerSide
from wardround.models.classifier import ONE_MODALITY, Classifier, build_classifier
from wardround.recording import Recorder
from wardround.report.images import save_samples
from wardround.training.allocation import keep_memory
from wardround.training.arithmetic import layout
from wardround.training.cache import PrefixCache
from wardround.training.losses import weight_cautions
from wardround.training.selftest import choose_arithmetic

MIB = 2**20
Connect = Callable[["Setup", Path, Checkpoint | None], Transport]  # makes the transport of a run
STATE = "state"  # the folder of clients' state while a run lasts


@dataclass(frozen=True)
class Setup:
    """An experiment that is ready to run.

    Attributes:
        experiment: with every default written out and every `auto` decided.
        federation: its images.
        method: its method.
        model: the edited model, on its device.
        cache: where cached inputs are kept between runs; None for nowhere.
        captions: of its images.
    """

    experiment: Experiment
    federation: Federation
    method: Method
    model: Classifier
    cache: Path | None
    captions: GatheredCaptions = NO_CAPTIONS

    @functools.cached_property
    def side(self) -> ServerSide:
        """The method bound to the model."""
        return ServerSide(self.method, self.model, self.experiment.data.image_size)

    @property
    def device(self) -> torch.device:
        """Where the model lives."""
        return next(self.model.parameters()).device


def set_up(experiment: Experiment, federation: Federation | None = None, cache: Path | None = None) -> Setup:
    """Read the images, build the model, let the method edit it, gather captions, decide what is `auto`.

    Args:
        experiment: as loaded.
        federation: images that are read already; None reads them.
        cache: folder of caches; None for the user's own (`$WARDROUND_CACHE`).

    Raises:
        InputError: whatever is wrong with the data, the model, the captions or the method's keys.
    """
    torch.set_num_threads(experiment.training.threads)
    keep_memory()
    experiment = experiment.complete()
    folder = cache or default_folder()
    data = read_federation(experiment.data, experiment.seed) if federation is None else federation
    if not any(len(client.train) for client in data.clients):
        raise InputError(f"{data.source}: no client has a training image")
    encoder = None if data.is_elsewhere else _text_encoder(experiment)
    method, model = build_model(experiment, data.classes, data.modalities, encoder.dim if encoder else None)
    if method.transductive and not (data.held_out or data.is_elsewhere):
        raise InputError(
            f"method.name = {method.name}: it looks at the unlabelled images of sites that never train; name them in "
            "data.held_out, or give data.held_out_share"
        )
    device = pick_device(experiment.training.device)
    captions = gather_captions(experiment, data, encoder, folder) if encoder else NO_CAPTIONS
    data = replace(data, notes=(*data.notes, *captions.notes))
    model.to(device)
    training = experiment.training
    if not data.is_elsewhere:  # else nothing is trained here, and every client decides for itself
        training = choose_arithmetic(model, training, experiment.data.image_size, device, folder)
    model.to(memory_format=layout(training))
    return Setup(experiment.model_copy(update={"training": training}), data, method, model, folder, captions)


def _text_encoder(experiment: Experiment) -> TextEncoder | None:
    """What makes vectors of captions; None where no captions are asked for."""
    options = experiment.captions
    return None if options.provider == "none" else text_encoder_for(options.text_encoder)


def gather_captions(
    experiment: Experiment, data: Federation, encoder: TextEncoder, folder: Path | None
) -> GatheredCaptions:
    """The captions that the section `[captions]` asks for, of the images `data`.

    Raises:
        InputError, RunError: the file is wrong, the function fails, or the encoder cannot be had.
    """
    options, seed = experiment.captions, experiment.seed
    vocabulary = Vocabulary(data.classes, data.modalities, experiment.text.names, options.phrases)
    provider = provider_for(options, vocabulary, KnownNames(data, experiment.data), seed, folder)
    if provider is None:
        return NO_CAPTIONS
    return gather(options, data, provider, encoder, seed, experiment.training.batch_size, folder)


def build_model(
    experiment: Experiment,
    classes: int | Sequence[str],
    modalities: Sequence[str] = ONE_MODALITY,
    text_features: int | None = None,
) -> tuple[Method, Classifier]:
    """The experiment's method, and its model as the method wants it, with initial weights.

    `classes` are their names, which an encoder's text side needs, or how many there are; `modalities` the federation's;
    `text_features` how long the vectors of captions are, None for a model that will be told none.
    """
    method, data = experiment.bound_method(), experiment.data
    model = build_classifier(
        experiment.model, classes, data.channels, data.image_size, experiment.seed, experiment.text, modalities
    )
    if experiment.captions.provider != "none":
        insert_captions(model, experiment.captions, text_features, experiment.seed)
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
    connect: Connect | None = None,
) -> dict[str, Any]:
    """Run an experiment into a folder and return its `results.json`.

    Args:
        experiment: what to run.
        out: the run's folder. A folder that holds a run already is only taken with `resume`.
        resume: go on after the last whole checkpoint in `out`; start where there is none. A finished run is left as
            it is, unless the experiment now has more rounds.
        workers: overrides `transport.workers`.
        label: what tables call the run; the method's name by default.
        observers: told of every event, besides the recorder.
        federation: images that are read already.
        connect: makes the transport, where it is not for this function to make one.

    Raises:
        InputError: the input is wrong, or `out` belongs to another experiment.
        RunError: a quorum was lost, a worker died, the disk is full.
    """
    run_folder.claim(out, experiment, resume)
    with run_folder.alone(out), run_folder.disk_trouble(out):
        checkpoints = Checkpoints(out / "checkpoints", run_folder.recorded_digest(out))
        checkpoint = checkpoints.latest() if resume else None
        kept = _finished(out, experiment.rounds, checkpoints, checkpoint)
        if kept is not None:
            return kept
        session = _Session(out, checkpoints, checkpoint, connect or functools.partial(open_transport, workers=workers))
        results = session.run(run_folder.as_recorded(experiment, out), label, observers, federation)
        write_atomically(out / run_folder.RESULTS, json.dumps(results, indent=1).encode())
    return results


def _finished(out: Path, rounds: int, checkpoints: Checkpoints, checkpoint: Checkpoint | None) -> dict[str, Any] | None:
    """The results in `out` where nothing is left to do; InputError where more is done than is asked for."""
    done = checkpoint.round if checkpoint else 0
    if done > rounds:
        raise InputError(f"{out}: has done {done} rounds already, but rounds = {rounds} asks for fewer")
    return run_folder.kept_results(out, rounds) if done == rounds or not checkpoints.rounds() else None


@dataclass
class _Session:
    """One go at a run, from a checkpoint or from the start."""

    out: Path
    checkpoints: Checkpoints
    checkpoint: Checkpoint | None
    connect: Connect

    def run(
        self, experiment: Experiment, label: str | None, observers: Sequence[Observer], federation: Federation | None
    ) -> dict[str, Any]:
        """Do the rounds that are left and return the results of all."""
        started = time.monotonic()
        setup = set_up(experiment, federation)
        self._prepare(setup)
        held_out = HeldOut(setup.federation, functools.partial(_judge, setup, self.out / HELD_OUT))
        recorder = Recorder(self.out, self.done)
        with self.connect(setup, self.out, self.checkpoint) as transport:
            loop = _loop(setup, transport, self.checkpoints, self.checkpoint, [recorder, *observers])
            ready = time.monotonic()
            loop.run()
        results = _results(setup, recorder, label or setup.method.name, self.checkpoints.complaints)
        results["held_out"] = held_out.results(loop.server)
        results["seconds"] |= {"setup": ready - started, "total": time.monotonic() - started}
        self._tidy()
        return results

    @property
    def done(self) -> int:
        """The round after which this session goes on."""
        return self.checkpoint.round if self.checkpoint else 0

    def _prepare(self, setup: Setup) -> None:
        """Say in the folder what the run is, and clear away what an interrupted session left."""
        run_folder.check_same_federation(self.out, setup.federation)
        if self.checkpoint is None:
            self.checkpoints.experiment = setup.experiment.digest()
        run_folder.check_same_captions(self.out, setup.captions.record)
        digest, captions = self.checkpoints.experiment, setup.captions.record
        run_folder.describe(self.out, setup.experiment, setup.federation, setup.device, digest, captions)
        if not self.done and not setup.federation.is_elsewhere:
            save_samples(setup.federation, self.out)
        self.checkpoints.forget_after(self.done)
        self._tidy()

    def _tidy(self) -> None:
        shutil.rmtree(self.out / STATE, ignore_errors=True)


def open_transport(setup: Setup, out: Path, checkpoint: Checkpoint | None, workers: int | None = None) -> Transport:
    """What `transport.name` says. `local` is this process alone for one worker, or on a GPU, else worker processes."""
    codec = codec_named(setup.experiment.transport.codec)
    wanted = workers or setup.experiment.transport.workers or run_folder.cores()
    workers = min(wanted, len(setup.federation.clients))
    if setup.experiment.transport.name == "flower":
        return _simulated(setup, codec, out, checkpoint, workers)
    make = functools.partial(make_answerer, setup, out, checkpoint, workers)
    if workers == 1 or setup.device.type != "cpu":
        return InProcess(codec, make())
    load = {client.name: len(client.train) for client in setup.federation.clients}
    prepare_to_fork()
    return WorkerProcesses(codec, make, load, workers)


def _simulated(setup: Setup, codec: Codec, out: Path, checkpoint: Checkpoint | None, workers: int) -> Transport:
    """Flower's simulation, whose clients begin where the checkpoint says."""
    untested = need_flower()
    if untested:
        logging.getLogger(__name__).warning(untested)
    from wardround.federation.flower_simulation import SimulatedClients, Simulation
    from wardround.flower_client import Residence, client_app

    names = setup.federation.names
    begin_journals(out, names, checkpoint)
    simulation = Simulation(client_app(Residence(out, workers)), len(names), workers)
    return SimulatedClients(codec, names, setup.experiment.digest(), simulation)


def begin_journals(out: Path, names: Iterable[str], checkpoint: Checkpoint | None) -> None:
    """Let clients that share the run's folder begin where the checkpoint says."""
    if checkpoint is None:
        return
    journal = Journal(out / STATE)
    for name in names:
        journal.begin(name, {"round": checkpoint.round})
        journal.put(name, resumable(checkpoint.client(name)))


def prepare_to_fork() -> None:
    """Import now what optimisers import when they are first made, or each process would spend the seconds anew."""
    import torch._dynamo  # noqa: F401


def make_answerer(
    setup: Setup, out: Path | None, checkpoint: Checkpoint | None, workers: int, store: Store | None = None,
    min_count: int = 0, kind: type[Answerer] = Answerer,
) -> Answerer:  # fmt: skip
    """The client half in one worker; without a `store`, its clients' state lives as long as it does."""
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
    spill = (out or Path()) / STATE
    store = store or ClientStore(spill, experiment.transport.state_ram_mib * MIB // workers)
    answerer = kind(
        setup.method, setup.model, setup.federation, training, size, cache, store,
        codec_named(experiment.transport.codec), experiment.seed, out, min_count, setup.captions,
    )  # fmt: skip
    if checkpoint is not None:
        answerer.restore({name: checkpoint.client(name) for name in setup.federation.names})
    return answerer


def _judge(setup: Setup, out: Path, sites: Federation) -> Answerer:
    """An answerer for sites that only judge; their predictions go to `out`."""
    return make_answerer(replace(setup, federation=sites, captions=NO_CAPTIONS), out, None, 1)


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
        "parameters": setup.side.parameter_elements,
        "captions": _captions(setup, recorder, examples),
        "seconds": {"train": recorder.train_seconds, "evaluate": recorder.evaluate_seconds},
        "warnings": [*_cautions(setup, examples), *complaints, *recorder.refusals],
    }


def _captions(setup: Setup, recorder: Recorder, examples: dict[str, int]) -> dict[str, Any] | None:
    """Whether training had captions, and of how many images; None without. How many is not known where they stay apart.

    All other results are of images alone; `with_captions` are those with captions, where `captions.at_test` is set.
    """
    options, clients = setup.experiment.captions, setup.captions.record.get("clients", {})
    if options.provider == "none":
        return None
    captioned = sum(client["captioned"] for client in clients.values()) if clients else None
    images = sum(examples.values())
    told = {name: {"test": scores} for name, scores in recorder.captioned.items()}
    return {
        **described(options),
        "captioned": captioned,
        "images": images,
        "coverage": None if captioned is None else captioned / images,
        "with_captions": _scores(told, examples) if told else None,
    }


def _cautions(setup: Setup, examples: dict[str, int]) -> list[str]:
    """What the choice of method and loss means on these data."""
    data = setup.federation
    counts = {name: torch.from_numpy(row) for name, row in zip(data.names, data.counts(), strict=True)}
    return setup.method.cautions(setup.model, examples) + weight_cautions(
        counts, data.classes, setup.experiment.training
    )


def _scores(models: Any, examples: dict[str, int]) -> dict[str, Any]:
    tests = {name: [scores["test"]] for name, scores in models.items() if scores}
    return {
        "clients": {name: client_results(runs, examples[name]) for name, runs in tests.items()},
        "summary": summarise(tests, examples),
    }
