"""A finished run put to use: one client's model from its folder, predictions for new images, export."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from wardround import __version__, run_folder
from wardround.answering import MEMORY, PERSONAL, STATE, Predict, logits_in_batches, set_label_counts, under
from wardround.config import PATHS, Experiment, experiment_from, load_experiment
from wardround.data import Samples
from wardround.data.federation import samples
from wardround.data.images import ImageOpener, decode
from wardround.data.transforms import centre_crop
from wardround.errors import InputError, suggestion
from wardround.experiment import build_model, pick_device
from wardround.federation.checkpoints import Checkpoints
from wardround.federation.files import write_atomically
from wardround.federation.messages import named, plain_copy
from wardround.federation.rules import Owner
from wardround.methods.base import Method
from wardround.models.classifier import ONE_MODALITY, Classifier
from wardround.new_images import OPTION, NewImage, new_images
from wardround.recording import METRICS, read_lines
from wardround.training.client import Client
from wardround.training.inputs import ImageInputs

Which = Literal["personal", "server"]
BATCH = 64


@dataclass(frozen=True)
class TrainedModel:
    """A model that is ready to predict.

    Attributes:
        client: whose model it is.
        experiment: how it was made.
        method: knows how predictions are made.
        model: with trained weights, in eval mode.
        classes: names of the logits' columns.
        counts: the client's training images per class.
        memory: what the method kept at the client.
        which: of the client's models.
        modality: of all the client's training images, an index into `model.modalities`; None where they have several.
    """

    client: str
    experiment: Experiment
    method: Method
    model: Classifier
    classes: tuple[str, ...]
    counts: tuple[int, ...]
    memory: dict[str, Tensor]
    which: Which = "personal"
    modality: int | None = None

    def logits(self, images: np.ndarray, modalities: Sequence[int | None] | None = None) -> np.ndarray:
        """Logits `(N, C)`, float32, of uint8 images `(N, H, W, C)` of the size that the experiment stores.

        Args:
            images: theirs.
            modalities: for each an index into `model.modalities`, or None where it is unknown. Where nothing is said,
                all are of the client's only modality; of an unknown one where it has several.
        """
        said = [self.modality] * len(images) if modalities is None else modalities
        logits = np.zeros((len(images), len(self.classes)), np.float32)
        for unknown in (False, True):  # a batch is of known or of unknown modalities
            rows = [row for row, number in enumerate(said) if (number is None) == unknown]
            if rows:
                numbers = None if unknown else torch.tensor([said[row] for row in rows])
                logits[rows] = self._logits(images[rows], numbers)
        return logits

    def _logits(self, images: np.ndarray, modality: Tensor | None) -> np.ndarray:
        """Logits `(N, C)` of images whose modality, int64 `(N,)`, is known, or is of none."""
        device = next(self.model.parameters()).device
        data = centre_crop(images, self.experiment.data.image_size)
        client = self.as_client(samples(data, np.zeros(len(data), np.int64), [""] * len(data)), device)
        return logits_in_batches(self.predictor, client, client.inputs, len(data), BATCH, modality)

    def shown(self, count: int) -> Tensor | None:
        """The modality of `count` new images, int64 `(count,)` on the processor; None where it is not known."""
        return None if self.modality is None else torch.full((count,), self.modality)

    @property
    def predictor(self) -> Predict:
        """The method's own prediction with this model, `(client, inputs) -> logits (B, C)`."""
        return self.method.predict if self.which == "personal" else self.method.predict_received

    def as_client(self, data: Samples, device: torch.device) -> Client:
        """The client as its method knows it, with the images `data`, on `device`."""
        size = self.experiment.data.image_size
        return Client(
            name=self.client,
            round=self.experiment.rounds,
            seed=self.experiment.seed,
            model=self.model,
            rules=self.method.rules(self.model),
            inputs=ImageInputs(self.model, data, size, "none", device, self.experiment.training.frozen_precision),
            labels=torch.from_numpy(data.labels),
            modality=torch.from_numpy(data.modality),
            counts=torch.tensor(self.counts),
            options=self.experiment.training,
            memory={name: tensor.to(device) for name, tensor in self.memory.items()},
        )


def load_trained(folder: Path, client: str | None, which: Which = "personal") -> TrainedModel:
    """One client's model from a run's folder.

    Args:
        folder: of a run (not of a comparison).
        client: its name; None where the run has only one.
        which: `personal` is the model after the client's last local training, the one that `results.json` speaks
            of; `server` is the server's last model with the client's own local parts.

    Raises:
        InputError: no run there, no such client, no whole checkpoint, or no personal model of that client.
    """
    experiment, roster = _read_run(folder)
    entries = {entry["name"]: entry for entry in roster["clients"]}
    client = _chosen(folder, client, list(entries))
    checkpoint = Checkpoints(folder / "checkpoints", None).latest()
    if checkpoint is None:
        raise InputError(f"{folder / 'checkpoints'}: holds no whole checkpoint")
    if which == "personal" and checkpoint.round < experiment.rounds:
        raise InputError(
            f"{folder}: the run stopped after round {checkpoint.round} of {experiment.rounds}, and personal models "
            "are kept at its end: finish it with --resume, or take --model server"
        )
    method, model = build_model(experiment, roster["classes"], roster.get("modalities", ONE_MODALITY))
    stored = checkpoint.client(client)
    model.load_state_dict(under(STATE, stored), strict=False)
    if method.rules(model).names(Owner.SHARED):
        _check_personal(folder, client, which, checkpoint.round)
        other = under(PERSONAL, stored) if which == "personal" else checkpoint.server().state
        model.load_state_dict(other, strict=False)
    elif which == "server":
        raise InputError(f"--model server: nothing was shared in {folder}, so its server has no model")
    counts = tuple(entries[client]["counts"]["train"])
    set_label_counts(model, torch.tensor(counts))
    model.to(pick_device(experiment.training.device)).eval()
    return TrainedModel(
        client, experiment, method, model, tuple(roster["classes"]), counts, under(MEMORY, stored), which,
        _only(entries[client].get("modality_counts")),  # older runs do not say
    )  # fmt: skip


def _only(counts: Sequence[int] | None) -> int | None:
    """The one modality that has images; None where several have, or that is not known."""
    present = [number for number, count in enumerate(counts or ()) if count]
    return present[0] if len(present) == 1 else None


def _chosen(folder: Path, client: str | None, names: Sequence[str]) -> str:
    """The client that is meant."""
    if client is None and len(names) == 1:
        return names[0]
    if client is None:
        raise InputError(f"--client is missing; {folder} has {', '.join(names)}")
    if client not in names:
        raise InputError(f"--client {client}: {folder} has no such client{suggestion(client, names)}")
    return client


def _check_personal(folder: Path, client: str, which: Which, round: int) -> None:
    """InputError unless the client trained in `round`, the last one: its file may keep an older personal model."""
    trained = {line["client"] for line in read_lines(folder / METRICS) if line["round"] == round and "examples" in line}
    if which == "personal" and client not in trained:
        raise InputError(
            f"--client {client}: took no part in the last round of {folder}, so its personal model was not kept; "
            "take --model server"
        )


def predict(trained: TrainedModel, files: Sequence[Path], modality: str = "") -> list[dict[str, Any]]:
    """For each image its most probable class and the probability of every class.

    Where the prediction depends on the image's modality, an entry says of which the image was taken to be, and why.

    Args:
        trained: the model.
        files: of images, or tables of them; see `new_images`.
        modality: of all images of which no table says more; empty where it is not known.

    Raises:
        InputError: a file is missing or does not decode; the model knows no such modality, or needs none.
    """
    asked = new_images(files, modality, trained.experiment.data.columns)
    numbers = _numbers(trained, asked, modality)
    opener, how = ImageOpener(), trained.experiment.data.decoding
    images = np.stack([decode(new.image, how, opener) for new in asked])
    logits = torch.from_numpy(trained.logits(images, numbers))
    return [
        {
            "image": str(new.image),
            "label": trained.classes[int(row.argmax())],
            "probabilities": dict(zip(trained.classes, torch.softmax(row, 0).tolist(), strict=True)),
            "logits": row.tolist(),
            **_taken(trained, new, number),
        }
        for new, number, row in zip(asked, numbers, logits, strict=True)
    ]


def _numbers(trained: TrainedModel, asked: Sequence[NewImage], modality: str) -> list[int | None]:
    """The modality of each image as an index into the model's; all None where the prediction depends on none."""
    if trained.method.without_modality(trained.model):
        _number(trained, modality, OPTION)  # it may be wrong though every row of a table has its own
        return [_number(trained, new.modality, new.said_by) for new in asked]
    if modality:
        raise InputError(
            f"{OPTION} {modality}: what this model ({trained.method.name}) predicts does not depend on the modality; "
            "leave the option out"
        )
    return [None] * len(asked)


def _number(trained: TrainedModel, modality: str, said_by: str) -> int | None:
    """The index of a modality; that of the client's only one where nothing is said."""
    if not modality:
        return trained.modality
    known = trained.model.modalities
    if modality not in known:
        raise InputError(f"{said_by} {modality}: the model knows no such modality (it has {', '.join(known)})")
    return known.index(modality)


def _taken(trained: TrainedModel, new: NewImage, number: int | None) -> dict[str, Any]:
    """`modality`: its name, null where it is unknown, and how that is; nothing where no prediction depends on it."""
    unknown = trained.method.without_modality(trained.model)
    if not unknown:
        return {}
    if number is None:
        return {"modality": {"name": None, "how": unknown}}
    how = "as given" if new.modality else "the client's only one"
    return {"modality": {"name": trained.model.modalities[number], "how": how}}


def export(trained: TrainedModel, file: Path) -> None:
    """Write every tensor of the model, frozen ones too, as safetensors; `load_exported` reads it back.

    Where the method predicts with more than the network, what it remembers is written as `memory/NAME`. The metadata
    say how to rebuild the network and how its images are made, but not where the images were.

    Raises:
        InputError: the file cannot be written.
    """
    import safetensors.torch

    about = {
        "wardround": __version__,
        "client": trained.client,
        "classes": trained.classes,
        "counts": trained.counts,
        "which": trained.which,
        "modalities": trained.model.modalities,
        "modality": trained.modality,
        "experiment": _without_places(trained.experiment),
    }
    remembered = named(MEMORY, trained.memory) if trained.method.predicts_from_memory else {}
    state = {name: plain_copy(tensor) for name, tensor in (trained.model.state_dict() | remembered).items()}
    try:
        write_atomically(file, safetensors.torch.save(state, metadata={"wardround": json.dumps(about, sort_keys=True)}))
    except OSError as error:
        raise InputError(f"{file}: cannot be written ({error.strerror or error})") from error


def _without_places(experiment: Experiment) -> dict[str, Any]:
    """The experiment with the names of its files, but not their folders: those are no business of a reader."""
    tree = experiment.to_toml()
    for section, key in PATHS:
        if isinstance(tree[section][key], str):
            tree[section][key] = Path(tree[section][key]).name
    return tree


def load_exported(file: Path) -> TrainedModel:
    """The model that `export` wrote, without the run's folder, and of pretrained weights at most a text side's.

    Raises:
        InputError: not a file that `export` wrote.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt") as opened:
            about = json.loads((opened.metadata() or {})["wardround"])
            state = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - not a dict
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise InputError(f"{file}: not a model that `wardround export` wrote ({error})") from error
    experiment = experiment_from(about["experiment"], str(file))
    # Every weight is in the file, but those of a text side.
    weights = _text_weights(experiment, file) if experiment.bound_method().predicts_with_text else False
    changes = {"anchors": None, "pretrained": weights}
    bare = experiment.model_copy(update={"model": experiment.model.model_copy(update=changes)})
    method, model = build_model(bare, about["classes"], about.get("modalities", ONE_MODALITY))
    memory = under(MEMORY, state)
    model.load_state_dict({name: state[name] for name in state.keys() - named(MEMORY, memory).keys()})
    set_label_counts(model, torch.tensor(about["counts"]))
    return TrainedModel(
        about["client"], experiment, method, model.eval(), tuple(about["classes"]), tuple(about["counts"]), memory,
        about["which"], about.get("modality"),
    )  # fmt: skip


def _text_weights(experiment: Experiment, file: Path) -> bool | str:
    """Where the text side's weights are: a file of theirs lies beside the exported one, or in the current folder."""
    named = experiment.model.pretrained
    if not isinstance(named, str):
        return named
    places = [folder / named for folder in (file.parent, Path())]
    if not any(place.exists() for place in places):
        raise InputError(f"{file}: predicts with its encoder's text side; put {named!r} beside it")
    return str(next(place for place in places if place.exists()))


def _read_run(folder: Path) -> tuple[Experiment, dict[str, Any]]:
    config, roster = folder / run_folder.CONFIG, folder / run_folder.ROSTER
    if not config.exists() or not roster.exists():
        inside = sorted(str(path.parent) for path in folder.glob(f"*/seed-*/{run_folder.CONFIG}"))
        hint = f"; it is a comparison: take one of its runs, such as {inside[0]}" if inside else ""
        raise InputError(f"{folder}: holds no run ({config.name} and {roster.name} are not there){hint}")
    return load_experiment(config), json.loads(roster.read_text(encoding="utf-8"))
