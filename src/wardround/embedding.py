"""What the networks of finished runs make of test images, drawn flat: do modalities interleave, do classes cluster?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from wardround import run_folder
from wardround.config import Experiment, load_experiment
from wardround.data import Federation, Samples
from wardround.data.read import read_federation
from wardround.errors import InputError
from wardround.measuring_trained import runs_in
from wardround.seeds import numpy_stream
from wardround.skew.analyse import choose_images
from wardround.skew.interleaving import Groups, apart, flattened, notes
from wardround.skew.mmd import Features
from wardround.using import Which, load_trained

BATCH = 64
LEAST = 8  # images below which there is nothing to draw


@dataclass(frozen=True)
class Settings:
    """What is drawn.

    Attributes:
        model: each client's `personal` model, or the `server`'s with the client's own local parts.
        max_images: of each client, drawn at random.
        perplexity: of t-SNE, about how many neighbours an image has.
    """

    model: Which = "personal"
    max_images: int = 200
    perplexity: float = 30.0


def embed(
    folders: Sequence[Path], settings: Settings, tell: Callable[[str], None] = lambda text: None
) -> dict[str, Any]:
    """`embedding.json`: for every run and representation a place in the plane for each test image, and how far the
    images' modalities, classes and clients lie apart.

    Args:
        folders: of runs, or of comparisons, of which every system is drawn with its first seed.
        settings: what is drawn.
        tell: told what begins.

    Raises:
        InputError: not a finished run, other images than it had, runs of different images, or hardly any images.
    """
    drawing = _Drawing(settings, tell)
    for label, folder in labelled(folders):
        drawing.add(label, folder)
    return drawing.record()


def labelled(folders: Sequence[Path]) -> list[tuple[str, Path]]:
    """Label and folder of every run that is drawn; runs of one label are told apart by their folders.

    Raises:
        InputError: a folder holds no finished run, or one is named twice.
    """
    runs = [run for folder in folders for run in _one_a_label(folder)]
    known = Counter(label for label, _ in runs)
    named = [(f"{label} ({folder.name})" if known[label] > 1 else label, folder) for label, folder in runs]
    twice = [label for label, count in Counter(label for label, _ in named).items() if count > 1]
    if twice:
        raise InputError(f"{twice[0]}: is named twice; runs of one method need folders of different names")
    return named


def _one_a_label(folder: Path) -> list[tuple[str, Path]]:
    first: dict[str, Path] = {}
    for label, run in runs_in([folder]):
        first.setdefault(label, run)
    return list(first.items())


@dataclass
class _Drawing:
    """Runs, one after the other; the images that they share are read once.

    Attributes:
        settings, tell: as `embed` takes them.
        shown: the images of each client that are drawn, the same of every run.
        maps: what was found, an entry for a run and a representation.
    """

    settings: Settings
    tell: Callable[[str], None]
    shown: dict[str, Samples] = field(default_factory=dict)
    maps: list[dict[str, Any]] = field(default_factory=list)
    _federation: tuple[Any, Federation] | None = None

    def add(self, label: str, folder: Path) -> None:
        """Draw one run. InputError where its images are not those of the runs before it."""
        experiment = load_experiment(folder / run_folder.CONFIG)
        shown = self._images(experiment, folder)
        if self.shown and not _same(shown, self.shown):
            raise InputError(f"{folder}: its images are not those of the runs before it; only the same can be compared")
        self.shown = shown
        self.tell(f"{label}: computing features")
        for name, rows in _representations(folder, shown, self.settings.model).items():
            self.tell(f"{label}: flattening {name}, {len(rows)} images of {rows.shape[1]} numbers")
            self.maps.append({"label": label, "representation": name} | self._flat(rows, experiment.seed))

    def _flat(self, rows: Features, seed: int) -> dict[str, Any]:
        """Places in the plane, and figures by what images are grouped by."""
        number = int(numpy_stream(seed, "embedding").integers(2**31))
        picture = flattened(rows, self.settings.perplexity, number)
        figures = {kind: apart(rows, picture, groups) for kind, groups in groups_of(self.shown).items()}
        return {"figures": figures, "points": np.round(picture, 3).tolist()}

    def _images(self, experiment: Experiment, folder: Path) -> dict[str, Samples]:
        """Test images by client, without clients that have not trained or have none. InputError for hardly any."""
        key = (experiment.data, experiment.seed)
        if self._federation is None or self._federation[0] != key:
            self._federation = (key, read_federation(experiment.data, experiment.seed))
        federation = self._federation[1]
        run_folder.check_same_federation(folder, federation)
        names = [client.name for client in federation.clients if len(client.train) and len(client.test)]
        found = {n: choose_images(federation, n, "test", self.settings.max_images, experiment.seed) for n in names}
        if sum(map(len, found.values())) < LEAST:
            raise InputError(f"{folder}: has fewer than {LEAST} test images at clients that train: nothing to draw")
        return found

    def record(self) -> dict[str, Any]:
        """What is written."""
        assert self._federation is not None
        federation = self._federation[1]
        groups = groups_of(self.shown)
        names = {"modality": federation.modalities, "class": federation.classes, "client": tuple(self.shown)}
        return {
            **asdict(self.settings),
            "split": "test",
            "images": len(groups["client"]),
            "groups": {kind: {"names": list(names[kind]), "of": of.tolist()} for kind, of in groups.items()},
            "maps": self.maps,
            "notes": notes(groups, self.settings.model == "server"),
        }


def groups_of(shown: Mapping[str, Samples]) -> dict[str, Groups]:
    """Each image's modality, class and client, int64 `(N,)`, clients one after the other."""
    parts = list(shown.values())
    return {
        "modality": np.concatenate([part.modality for part in parts]),
        "class": np.concatenate([part.labels for part in parts]),
        "client": np.repeat(np.arange(len(parts)), [len(part) for part in parts]),
    }


def _same(one: Mapping[str, Samples], other: Mapping[str, Samples]) -> bool:
    """Whether clients have images of the same names and labels."""
    return list(one) == list(other) and all(
        one[name].names == other[name].names and np.array_equal(one[name].labels, other[name].labels) for name in one
    )


def _representations(folder: Path, shown: Mapping[str, Samples], which: Which) -> dict[str, Features]:
    """By name `(N, d)` of all images, each by its client's model, where all clients have it."""
    each = [_of_client(folder, name, images, which) for name, images in shown.items()]
    common = [name for name in each[0] if all(name in found for found in each)]
    return {name: np.concatenate([found[name] for found in each]) for name in common}


def _of_client(folder: Path, name: str, images: Samples, which: Which) -> dict[str, NDArray[np.float32]]:
    """By name `(n, d)` of one client's images, in eval mode."""
    trained = load_trained(folder, name, which)
    torch.set_num_threads(trained.experiment.training.threads)
    client = trained.as_client(images, next(trained.model.parameters()).device)
    parts: dict[str, list[torch.Tensor]] = {}
    with torch.inference_mode():
        for rows in torch.split(torch.arange(len(images)), BATCH):
            inputs = client.inputs.batch(rows, None)  # before `arithmetic`, which is for the trained blocks alone
            client.shown = client.modality[rows].to(client.device)
            with client.arithmetic():
                for kind, values in trained.method.representations(client, inputs).items():
                    parts.setdefault(kind, []).append(values.float().flatten(1).cpu())
    return {kind: torch.cat(values).numpy() for kind, values in parts.items()}
