"""Whether training brought the clients' features together: finished runs beside the network that they began with."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from wardround import run_folder
from wardround.comparing import COMPARISON
from wardround.config import Experiment, load_experiment
from wardround.data import Federation, Samples
from wardround.data.cache import default_folder
from wardround.data.federation import SplitName
from wardround.data.read import read_federation
from wardround.errors import InputError
from wardround.experiment import MIB, pick_device
from wardround.models.classifier import Classifier, build_classifier
from wardround.skew.analyse import choose_images
from wardround.skew.mmd import Features, Variant
from wardround.skew.trained import NOTES, Course, Distances, beyond_training, describe, distances
from wardround.training.arithmetic import layout
from wardround.training.cache import PrefixCache
from wardround.using import Which, load_trained

BATCH = 64


def measure_trained(
    folders: Sequence[Path],
    *,
    which: Which = "personal",
    split: SplitName = "test",
    max_images: int = 500,
    variant: Variant = Variant(),  # noqa: B008 - frozen
) -> dict[str, Any]:
    """`trained.json`: distances between the clients' features, by the networks of finished runs and before them.

    A client's features are those that its own network gives for its own images. A client without training images or
    without images in `split` has none, and null in its row and column. How before and after are comparable is said
    in `wardround.skew.trained`.

    Args:
        folders: of runs, or of comparisons, whose every finished run counts. Runs of one method with several seeds
            are averaged. All must have the same clients.
        which: each client's `personal` model, or the `server`'s with the client's own local parts.
        split: which images; on test images no network has trained.
        max_images: of each client, the same before and after.
        variant: of the MMD.

    Raises:
        InputError: not a finished run, other images than it had, or runs with different clients.
    """
    measuring = _Measuring(which, split, max_images, variant)
    for label, folder in runs_in(folders):
        measuring.add(label, folder)
    systems = [describe(course) for course in measuring.courses.values()]
    return {
        "split": split,
        "model": which,
        "max_images": max_images,
        "estimator": variant.estimator,
        "squared": variant.squared,
        "bandwidth": variant.bandwidth,
        "clients": list(measuring.clients),
        "systems": systems,
        "notes": [*beyond_training(systems), *NOTES],
    }


def runs_in(folders: Sequence[Path]) -> list[tuple[str, Path]]:
    """Label and folder of every finished run in `folders`, in their order.

    Raises:
        InputError: a folder holds none.
    """
    found = []
    for folder in folders:
        inside = [folder] if (folder / run_folder.CONFIG).exists() else sorted(folder.glob("*/seed-*"))
        finished = [run for run in inside if (run / run_folder.RESULTS).exists()]
        if not finished:
            raise InputError(f"{folder}: holds no finished run, neither of its own nor in METHOD/seed-NUMBER")
        labelled = [(_label(run), run) for run in finished]
        order = _compared(folder)
        found += sorted(labelled, key=lambda one: order.index(one[0]) if one[0] in order else len(order))
    return found


def _compared(folder: Path) -> list[str]:
    """The labels of a comparison in the order in which they were asked for."""
    file = folder / COMPARISON
    return list(json.loads(file.read_text(encoding="utf-8"))["methods"]) if file.exists() else []


def _label(run: Path) -> str:
    label: str = json.loads((run / run_folder.RESULTS).read_text(encoding="utf-8"))["label"]
    return label


@dataclass
class _Measuring:
    """Runs, one after the other; what they share (images, the network before) is read and computed once.

    Attributes:
        which, split, most, variant: as `measure_trained` takes them.
        clients: of the first run, and so of all.
        courses: what was found, by the runs' label.
    """

    which: Which
    split: SplitName
    most: int
    variant: Variant
    clients: tuple[str, ...] = ()
    courses: dict[str, Course] = field(default_factory=dict)
    _federation: tuple[Any, Federation] | None = None
    _before: dict[str, Distances] = field(default_factory=dict)

    def add(self, label: str, folder: Path) -> None:
        """Measure one run. InputError where its clients are not those of the runs before it."""
        experiment = load_experiment(folder / run_folder.CONFIG)
        samples = self._samples(experiment, folder)
        self.clients = self.clients or tuple(samples)
        if tuple(samples) != self.clients:
            raise InputError(f"{folder}: its clients are {', '.join(samples)}, but before it {', '.join(self.clients)}")
        course = self.courses.setdefault(label, Course(label))
        course.before.append(self._before_training(experiment, samples))
        course.after.append(_distances(_own_features(folder, samples, self.which), samples, self.variant))

    def _samples(self, experiment: Experiment, folder: Path) -> dict[str, Samples]:
        """The images of each client that features are computed from; none of a client that has not trained."""
        key = (experiment.data, experiment.seed)
        if self._federation is None or self._federation[0] != key:
            self._federation = (key, read_federation(experiment.data, experiment.seed))
        federation = self._federation[1]
        run_folder.check_same_federation(folder, federation)
        chosen = {}
        for client in federation.clients:
            images = choose_images(federation, client.name, self.split, self.most, experiment.seed)
            chosen[client.name] = images if len(client.train) else images.take([])
        return chosen

    def _before_training(self, experiment: Experiment, samples: dict[str, Samples]) -> Distances:
        """Distances by the backbone before any training, the same network for all clients."""
        key = repr((experiment.data, experiment.seed, experiment.model.backbone, experiment.model.pretrained))
        if key not in self._before:
            data = experiment.data
            model = build_classifier(experiment.model, 2, data.channels, data.image_size, experiment.seed)
            model.to(pick_device(experiment.training.device)).eval()
            usable = {name: images for name, images in samples.items() if len(images)}
            found = ((name, _features(model, experiment, name, images)) for name, images in usable.items())
            self._before[key] = _distances(found, samples, self.variant)
        return self._before[key]


def _own_features(folder: Path, samples: dict[str, Samples], which: Which) -> Iterator[tuple[str, Features]]:
    """Each client's name and its features by its own network; one network is in memory at a time."""
    for name, images in samples.items():
        if len(images):
            trained = load_trained(folder, name, which)
            yield name, _features(trained.model, trained.experiment, name, images)


def _distances(found: Iterator[tuple[str, Features]], samples: dict[str, Samples], variant: Variant) -> Distances:
    """Distances between all clients, with no features for those that `found` leaves out."""
    known = dict(found)
    width = next((rows.shape[1] for rows in known.values()), 0)
    features = {name: known.get(name, np.zeros((0, width))) for name in samples}
    return distances(features, {name: images.labels for name, images in samples.items()}, variant)


def _features(model: Classifier, experiment: Experiment, client: str, images: Samples) -> Features:
    """Pooled features `(N, d)` as the head takes them, in eval mode, centre crop, float32.

    The frozen blocks' outputs come from the cache that training uses, so that all methods share them.
    """
    torch.set_num_threads(experiment.training.threads)
    training, data = experiment.training, experiment.data
    model.to(memory_format=layout(training))
    cache = PrefixCache(
        model=model,
        options=training,
        size=data.image_size,
        policy="none",
        seed=experiment.seed,
        device=next(model.parameters()).device,
        budget=training.cache_ram_mib * MIB,
        folder=default_folder(),
    )
    inputs = cache.inputs(client, images, training=False)
    batches = torch.split(torch.arange(len(images)), BATCH)
    with torch.inference_mode():
        parts = [model.features(inputs.batch(rows, None)).cpu() for rows in batches]
    return torch.cat(parts).numpy()
