"""A client's side of the experiment: its images in the federation's words, its model, its store, and what may leave."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from wardround import run_folder
from wardround.answering import STATE as STATE_SPACE
from wardround.answering import Answerer
from wardround.captions.options import CaptionOptions
from wardround.config import Experiment
from wardround.data import ClientData, Federation, Samples
from wardround.data.checking import check_data
from wardround.data.federation import SPLITS
from wardround.data.options import PartitionOptions
from wardround.data.read import list_records, read_federation
from wardround.deploy.agreement import CAPTIONS, IMAGES, Agreement, read_agreement, read_options
from wardround.deploy.joining import Joining, frozen_digest, joining
from wardround.deploy.settings import CLIENT, ClientSettings
from wardround.errors import InputError, suggestion
from wardround.experiment import STATE, make_answerer, set_up
from wardround.federation.checkpoints import Checkpoints
from wardround.federation.journal import Journal
from wardround.federation.messages import Message
from wardround.federation.reports import checked
from wardround.federation.rounds import EVALUATE
from wardround.federation.server import Server
from wardround.recording import Recorder
from wardround.training.client import Client

TRAINED_ELSEWHERE, UNREADABLE = {"label-not-trained"}, {"missing-file", "unreadable-image"}
ALL_ROUNDS = 10**9
FIXED = ("image_size", "channels", "resize", "colour_constancy", "augment", "max_train_per_client")
FIXED_CAPTIONS = (
    "fusion", "width", "heads", "dropout", "in_mixtures", "alpha", "temperature", "multi_positive", "at_test",
)  # fmt: skip


class HospitalAnswerer(Answerer):
    """Answers for one client, which keeps its finished model beside its state."""

    def reply(self, name: str, message: Message) -> Message:
        """As ever, and written down here. The server's last model and the client's own parts become a checkpoint."""
        reply = super().reply(name, message)
        round, phase = int(message.scalars["round"]), message.scalars["phase"]
        self._recorder.answered(round, phase, name, checked(Message({}, reply.scalars)))
        if phase == EVALUATE and self.folder is not None:
            server = Server(message.under(STATE_SPACE), round=round)
            Checkpoints(self.folder / "checkpoints", None).commit(server, [name])
        return reply

    @cached_property
    def _recorder(self) -> Recorder:
        """Goes on with the hospital's own `metrics.jsonl`."""
        return Recorder(self.folder or Path(), resumed=ALL_ROUNDS)

    def _checkpoint(self, client: Client, round: int, final: bool) -> None:
        """Between rounds the journal is enough."""
        if final:
            super()._checkpoint(client, round, final)


@dataclass(frozen=True)
class Hospital:
    """A client that is ready to take part.

    Attributes:
        folder: of the client, as `deploy init` made it.
        settings: the hospital's own.
        agreement: what all have agreed on.
        answerer: answers for it.
        said: what it says when it joins.
        notes: what was noticed while its images were read.
    """

    folder: Path
    settings: ClientSettings
    agreement: Agreement
    answerer: HospitalAnswerer
    said: Joining
    notes: tuple[str, ...]

    @property
    def run(self) -> Path:
        """The folder of this client's part in this experiment."""
        return run_of(self.folder, self.agreement)


def run_of(folder: Path, agreement: Agreement) -> Path:
    """Where a client keeps what belongs to one agreement: another one's never mixes with it."""
    return folder / f"run-{agreement.digest[:12]}"


def open_hospital(folder: Path, data: Path | None = None) -> Hospital:
    """Read a client's folder, check its images, and build its model.

    Args:
        folder: as `deploy init` made it.
        data: where the images are, instead of what `client.toml` says.

    Raises:
        InputError: a file is missing or wrong, the images are not fit for use, a label is not the federation's.
    """
    agreement, settings = read_agreement(folder), read_settings(folder)
    experiment = local_experiment(folder, agreement, settings, data)
    check_images(experiment)
    federation = own_federation(experiment, agreement, settings, folder / CLIENT)
    setup = set_up(experiment, federation)
    run = run_of(folder, agreement)
    run_folder.make_folder(run, "the folder of this client's run")
    run_folder.check_same_federation(run, federation)
    captions = setup.captions.record
    run_folder.check_same_captions(run, captions)
    run_folder.describe(run, setup.experiment, setup.federation, setup.device, agreement.digest, captions)
    answerer = make_answerer(setup, run, None, 1, Journal(run / STATE), settings.min_count, HospitalAnswerer)
    assert isinstance(answerer, HospitalAnswerer)
    frozen = frozen_digest(answerer.side, setup.model)
    said = joining(agreement, federation.clients[0], settings.min_count, frozen)
    return Hospital(folder, settings, agreement, answerer, said, setup.federation.notes)


def read_settings(folder: Path) -> ClientSettings:
    """`client.toml`, if it keeps to the agreement.

    Raises:
        InputError: it is wrong, names no client of the federation, or lowers `min_count`.
    """
    settings, parties = read_options(folder / CLIENT, ClientSettings), read_agreement(folder).parties
    if settings.name not in parties.clients:
        raise InputError(
            f"{folder / CLIENT}: name: there is no client {settings.name!r}{suggestion(settings.name, parties.clients)}"
        )
    if settings.min_count < parties.min_count:
        raise InputError(
            f"{folder / CLIENT}: min_count: {settings.min_count} is below the {parties.min_count} that all have agreed "
            "on; it may be raised here, and lowered only by a new agreement (`deploy init --min-count`)"
        )
    return settings


def local_experiment(folder: Path, agreement: Agreement, settings: ClientSettings, data: Path | None) -> Experiment:
    """The experiment with this hospital's places in it.

    Raises:
        InputError: a key of [data] or [captions] that all have to share, or that does not exist; captions that nobody
            has agreed on.
    """
    where = str(folder / CLIENT)
    shared = [key for key in settings.data if key in FIXED]
    if shared:
        raise InputError(f"{where}: data.{shared[0]} is the same for all: experiment.toml says what it is")
    changes = {f"data.{key}": value for key, value in settings.data.items()}
    if data is not None:
        changes["data.path"] = str(data)
    path = changes.get("data.path")
    if path is not None:
        changes["data.path"] = str((folder / Path(path).expanduser()) if data is None else data.resolve())
    elif agreement.experiment.data.path is not None:
        changes["data.path"] = str(folder / IMAGES)
    if settings.pretrained is not None:
        changes["model.pretrained"] = str((folder / Path(settings.pretrained).expanduser()).resolve())
    changes |= own_captions(folder, agreement.experiment.captions, settings.captions)
    return agreement.experiment.changed(changes, where)


def own_captions(folder: Path, agreed: CaptionOptions, own: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted keys of [captions] as this hospital has them; only the network and its loss are the same for all.

    A function is called only where this hospital itself names it.

    Raises:
        InputError: a key that all have to share; captions where none are agreed on, or none where some are; or a
            function that is not named.
    """
    where, provider = folder / CLIENT, own.get("provider", agreed.provider)
    shared = [key for key in own if key in FIXED_CAPTIONS]
    if shared:
        raise InputError(f"{where}: captions.{shared[0]} is the same for all: experiment.toml says what it is")
    if agreed.provider == "none":
        if own:
            raise InputError(f"{where}: [captions]: experiment.toml has no captions, and all train the same network")
        return {}
    if provider == "none":
        raise InputError(f"{where}: captions.provider: all train the same network; coverage = 0 does without captions")
    if provider == "callable" and "callable" not in own:
        raise InputError(f'{where}: captions.callable is missing: name your own function, as "module:function"')
    changes = {**own, **{key: "none" for key in ("file", "callable") if key != provider}}
    if provider == "file":
        changes["file"] = str((folder / Path(own.get("file", CAPTIONS)).expanduser()).resolve())
    else:
        changes["states_label"] = own.get("states_label", True)
    return {f"captions.{key}": value for key, value in changes.items()}


def check_images(experiment: Experiment) -> None:
    """See that the images are fit for use, all faults at once.

    Raises:
        InputError: they are not; the message has the whole report.
    """
    if experiment.data.path is None:
        return
    report = check_data(Path(experiment.data.path), experiment.data)
    allowed = TRAINED_ELSEWHERE | (UNREADABLE if experiment.data.on_bad_image == "skip" else set())
    if any(found.kind not in allowed for found in report.of("error")):
        raise InputError(f"{experiment.data.path}: these images are not fit for use\n{report.render()}")


def own_federation(experiment: Experiment, agreement: Agreement, settings: ClientSettings, file: Path) -> Federation:
    """This hospital's images as a federation of one, in the federation's words.

    Raises:
        InputError: the images are of several sites none of which is this client's, or a label is not in the list.
    """
    options = experiment.data
    if options.path is not None and not any(record.site for record in list_records(options).records):
        options = options.model_copy(update={"partition": PartitionOptions(kind="quantity", clients=1)})
    read = read_federation(options, experiment.seed, alone=True)
    own = _own(read, settings.name, file)
    parties = agreement.parties
    words = _words(read.classes, _used(own, "labels"), settings.labels, parties.classes, file, "labels")
    kinds = _words(read.modalities, _used(own, "modality"), settings.modalities, parties.modalities, file, "modalities")
    splits = {split: _reworded(own.split(split), words, kinds) for split in SPLITS}
    return Federation(
        (ClientData(settings.name, splits["train"], splits["val"], splits["test"]),), parties.classes, read.source,
        parties.modalities, read.notes,
    )  # fmt: skip


def _own(read: Federation, name: str, file: Path) -> ClientData:
    if name in read.names:
        return read.client(name)
    if len(read.clients) == 1:
        return read.clients[0]
    raise InputError(
        f"{file}: the images are of {len(read.names)} sites ({', '.join(read.names)}), none of which is {name!r}; "
        'name the one that is meant: [data] sites = ["..."]'
    )


def _used(own: ClientData, what: str) -> set[int]:
    return {int(value) for split in SPLITS for value in getattr(own.split(split), what)}


def _words(
    here: tuple[str, ...], used: set[int], given: dict[str, str], agreed: tuple[str, ...], file: Path, section: str
) -> np.ndarray:
    """For each word of this hospital its number in the federation; -1 for one that no image of its has."""
    if here == ("image",) and len(agreed) == 1 and section == "modalities":
        return np.zeros(1, np.int64)
    meant = [given.get(word, word) for word in here]
    unknown = [here[number] for number in sorted(used) if meant[number] not in agreed]
    if unknown:
        raise InputError(
            f"{file}: {', '.join(map(repr, unknown))} not in the federation's list ({', '.join(agreed)}); say in "
            f"[{section}] which of them is meant"
        )
    return np.array([agreed.index(word) if word in agreed else -1 for word in meant], np.int64)


def _reworded(part: Samples, words: np.ndarray, kinds: np.ndarray) -> Samples:
    return replace(part, labels=words[part.labels], modality=kinds[part.modality])
