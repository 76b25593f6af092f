"""The stored predictions of several runs, lined up image by image."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import numpy as np
from numpy.typing import NDArray

from wardround.errors import InputError, suggestion
from wardround.evaluation.metrics import evaluate_probabilities, predicted_classes, softmax

ClientPredictions = tuple[NDArray[Any], NDArray[Any]]  # labels (N,), logits (N, C)
Run = Mapping[str, ClientPredictions]  # client -> its predictions
Predictions = Mapping[str, Mapping[int, Run]]  # method label -> seed -> run


@dataclass(frozen=True)
class Block:
    """The images that some seeds share at one client.

    Attributes:
        seeds: positions of those seeds in `Aligned.seeds`, length S'.
        labels: `(N,)` true classes.
        hits: `(N, methods, S')`, 1.0 where the method's model of that seed is right, else 0.0; float32.
    """

    seeds: tuple[int, ...]
    labels: NDArray[np.int64]
    hits: NDArray[np.float32]


@dataclass(frozen=True)
class Aligned:
    """Predictions of all methods on the same images: for each client with test images, its blocks."""

    methods: tuple[str, ...]
    seeds: tuple[int, ...]
    classes: int
    clients: dict[str, tuple[Block, ...]]

    @property
    def images(self) -> dict[str, int]:
        """Test images of each client (of its first seed, where the split depends on the seed)."""
        return {name: len(blocks[0].labels) for name, blocks in self.clients.items()}


def read_predictions(folder: Path, key: str = "personal") -> dict[str, ClientPredictions]:
    """The predictions of one run: client -> (labels, logits), from `folder/predictions/*.npz`.

    Args:
        folder: a run's folder.
        key: `personal`, or `received` for the server's model.

    Raises:
        InputError: no predictions there, or a file without `key`.
    """
    paths = sorted((folder / "predictions").glob("*.npz"))
    if not paths:
        raise InputError(f"{folder / 'predictions'} holds no predictions (*.npz)")
    return {unquote(path.stem): _read_file(path, key) for path in paths}


def pooled_metrics(folder: Path, key: str = "personal") -> dict[str, Any]:
    """Metrics of one run on the test images of all clients in one pool, each by its own client's model.

    Empty where no predictions are kept, as at the server of a deployment.
    """
    pool = pooled(folder, key)
    return dict(evaluate_probabilities(*pool)) if pool else {}


def pooled(folder: Path, key: str = "personal") -> tuple[NDArray[np.float64], NDArray[np.int64]] | None:
    """Probabilities `(N, C)` and labels `(N,)` of all clients' test images; None where no predictions are kept."""
    try:
        found = read_predictions(folder, key)
    except InputError:
        return None
    labels, logits = (np.concatenate(parts) for parts in zip(*found.values(), strict=True))
    return softmax(logits), labels


def _read_file(path: Path, key: str) -> ClientPredictions:
    """`labels` and `key` of one file, in the order of the images' names, so that runs line up."""
    with np.load(path, allow_pickle=False) as file:
        if key not in file:
            raise InputError(f"{path} has no array {key!r}{suggestion(key, file.files)}")
        order = np.argsort(file["names"], kind="stable")
        return file["labels"][order], file[key][order]


def align(predictions: Predictions) -> Aligned:
    """Line up the predictions of several methods over the seeds and clients that all of them have.

    Where a client's labels are the same in all seeds, its test images are taken to be the same: one block.
    Otherwise (a split that depends on the seed) each seed is a block of its own.

    Raises:
        InputError: no method, no seed in common, or methods that differ in clients or test labels.
    """
    if not predictions:
        raise InputError("no method to compare")
    methods = tuple(predictions)
    seeds = tuple(sorted(set.intersection(*(set(runs) for runs in predictions.values()))))
    if not seeds:
        raise InputError(f"the methods {', '.join(methods)} have no seed in common")
    first = predictions[methods[0]][seeds[0]]
    _check_same_images(predictions, methods, seeds)
    classes = max((logits.shape[1] for _, logits in first.values()), default=0)
    used = [name for name in first if len(first[name][0])]
    return Aligned(methods, seeds, classes, {name: _blocks(predictions, seeds, name) for name in used})


def _check_same_images(predictions: Predictions, methods: tuple[str, ...], seeds: tuple[int, ...]) -> None:
    """InputError unless, in each seed, all methods predict the same labelled images."""
    for seed in seeds:
        expected = predictions[methods[0]][seed]
        for method in methods:
            found = predictions[method][seed]
            if set(found) != set(expected):
                raise InputError(
                    f"{method!r}, seed {seed}: clients {sorted(found)}, but {methods[0]!r} has {sorted(expected)}"
                )
            for client, (labels, logits) in found.items():
                if not np.array_equal(labels, expected[client][0]) or len(logits) != len(labels):
                    raise InputError(
                        f"{method!r}, seed {seed}, client {client!r}: the test images are not those of "
                        f"{methods[0]!r}; only methods tested on the same images can be compared"
                    )


def _blocks(predictions: Predictions, seeds: tuple[int, ...], client: str) -> tuple[Block, ...]:
    """One client's blocks: a single one where all seeds have the same labels."""
    runs = next(iter(predictions.values()))
    truths = [np.asarray(runs[seed][client][0], dtype=np.int64) for seed in seeds]
    shared = all(np.array_equal(truth, truths[0]) for truth in truths)
    groups = [tuple(range(len(seeds)))] if shared else [(i,) for i in range(len(seeds))]
    return tuple(Block(group, truths[group[0]], _hits(predictions, seeds, client, group)) for group in groups)


def _hits(predictions: Predictions, seeds: tuple[int, ...], client: str, group: tuple[int, ...]) -> NDArray[np.float32]:
    """`(N, methods, len(group))`: 1.0 where the prediction is right."""
    right = [
        [predicted_classes(logits) == labels for labels, logits in (runs[seeds[i]][client] for i in group)]
        for runs in predictions.values()
    ]
    return np.moveaxis(np.array(right, dtype=np.float32), 2, 0)


def write_predictions(
    folder: Path,
    client: str,
    names: Sequence[str],
    labels: NDArray[np.int64],
    which: str,
    logits: NDArray[np.float32],
) -> None:
    """Add the logits `(N, C)` of one model to `folder/predictions/<client>.npz`.

    Args:
        folder: a run's folder.
        client: whose test images they are.
        names: of the images, N.
        labels: `(N,)`.
        which: `personal` or `received`; logits of the other model that the file holds stay there.
        logits: one row an image.
    """
    path = folder / "predictions" / f"{quote(client, safe='')}.npz"
    arrays: dict[str, Any] = {}
    if path.exists():
        with np.load(path, allow_pickle=False) as file:
            arrays = {key: file[key] for key in ("personal", "received") if key in file}
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    with partial.open("wb") as target:
        np.savez(target, names=np.array(names, dtype=np.str_), labels=labels, **{**arrays, which: logits})
    partial.replace(path)
