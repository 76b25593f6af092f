"""How finished runs bear a fast-gradient-sign attack (Goodfellow, Shlens and Szegedy, ICLR 2015).

White-box, on each client's own test images, against the method's own predictor:

    x_adv = clip_[0,1](x + epsilon sign(grad_x CE(log p(x), y)))

with x the pixels in 0..1 before normalisation, so that the gradient goes through normalisation, frozen blocks and
whatever the method's `predict` does. Everything is computed in float32, the frozen blocks too, whatever the run cached
or trained in. Adversarial images stay floating-point numbers: they are not rounded to the 256 levels of an image file.

The control moves every pixel by epsilon up or down at random: what it costs is not the attack's doing.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from wardround import run_folder
from wardround.config import Experiment, load_experiment
from wardround.data import Federation, Samples
from wardround.data.caps import stratified_cap
from wardround.data.read import read_federation
from wardround.data.transforms import centre_crop
from wardround.errors import InputError, suggestion
from wardround.evaluation.metrics import confusion_matrix, from_confusion, merge_confusions, predicted_classes
from wardround.evaluation.results import over_seeds
from wardround.measuring_trained import runs_in
from wardround.run_folder import write_json
from wardround.seeds import numpy_stream, torch_stream
from wardround.using import TrainedModel, Which, load_trained

ATTACK = "attack.json"
LEVELS = 255.0  # epsilon is given in levels of an image file
BATCH = 16  # images at a time: a graph through an encoder is large
CLEAN, ATTACKED, NOISE = "clean", "attacked", "noise"
FIGURES = ("accuracy", "balanced_accuracy", "pooled_balanced_accuracy")

Predict = Callable[[Tensor], Tensor]
"""Pixels in 0..1, float32 `(B, H, W, C)`, to logits `(B, classes)`."""
Condition = tuple[str, float]
"""Clean, attacked or noise, and by how many levels; 0 for clean."""


@dataclass(frozen=True)
class Settings:
    """What is attacked, and how hard.

    Attributes:
        epsilons: in levels of 255, ascending.
        clients: whose test images; None for all clients.
        max_images: of each client, classes in proportion; None for all.
        model: each client's `personal` model, or the `server`'s with the client's own local parts.
    """

    epsilons: tuple[float, ...] = (1.0, 2.0, 4.0, 8.0)
    clients: tuple[str, ...] | None = None
    max_images: int | None = None
    model: Which = "personal"

    def __post_init__(self) -> None:
        wrong = [epsilon for epsilon in self.epsilons if not 0 <= epsilon <= LEVELS]
        if wrong or not self.epsilons:
            found = f"{wrong[0]:g}" if wrong else "is empty"
            raise InputError(f"--epsilon {found}: expected levels from 0 to 255, as 1,2,4,8")
        object.__setattr__(self, "epsilons", tuple(sorted(set(self.epsilons))))

    def to_json(self) -> dict[str, Any]:
        """The settings as JSON has them."""
        plain: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return plain

    @property
    def conditions(self) -> tuple[Condition, ...]:
        """Everything that is measured, in the order of tables."""
        moved = ((kind, epsilon) for kind in (ATTACKED, NOISE) for epsilon in self.epsilons)
        return ((CLEAN, 0.0), *moved)


# ---- the attack


def moved(pixels: Tensor, direction: Tensor, epsilon: float) -> Tensor:
    """`clip_[0,1](x + epsilon d)`, d of the pixels' shape with entries -1, 0 and 1, epsilon a share of white."""
    return (pixels + epsilon * direction).clamp(0, 1)


def loss_signs(predict: Predict, pixels: Tensor, labels: Tensor) -> Tensor:
    """`sign(grad_x CE(log p(x), y))`, of the pixels' shape; 0 where the gradient is 0 or not a number.

    Args:
        predict: in which no image depends on the others.
        pixels: `(B, H, W, C)`.
        labels: int64 `(B,)`.
    """
    x = pixels.detach().requires_grad_(True)
    with torch.enable_grad():
        loss = functional.cross_entropy(predict(x), labels, reduction="sum")
        (gradient,) = torch.autograd.grad(loss, x)
    return torch.sign(torch.nan_to_num(gradient))


def noise_signs(shape: Sequence[int], stream: torch.Generator) -> Tensor:
    """-1 or 1 for every pixel, alike likely, float32 of `shape`."""
    return 2.0 * torch.randint(0, 2, tuple(shape), generator=stream) - 1.0


def pixel_predictor(trained: TrainedModel, data: Samples) -> Predict:
    """The method's own prediction for a client, from pixels, with gradients to them and to nothing else."""
    model = trained.model.requires_grad_(False)
    client = trained.as_client(data, next(model.parameters()).device)

    def predict(pixels: Tensor) -> Tensor:
        shown = trained.shown(len(pixels))
        client.shown = None if shown is None else shown.to(client.device)
        return trained.predictor(client, model.inputs_of_pixels(pixels)).float()

    return predict


@dataclass
class Outcome:
    """What a client's predictor made of its images.

    Attributes:
        labels: int64 `(N,)`.
        predicted: by condition, classes int64 `(N,)`.
        without_gradient: images that no gradient reaches, which are not moved: the predictor is flat there.
    """

    labels: NDArray[np.int64]
    predicted: dict[Condition, NDArray[np.int64]]
    without_gradient: int


def attack_images(
    predict: Predict, data: Samples, size: int, settings: Settings, stream: torch.Generator, device: torch.device
) -> Outcome:
    """Predictions for clean, attacked and noisy images.

    Args:
        predict: see `pixel_predictor`.
        data: a client's images.
        size: their side that the network sees, in pixels.
        settings: epsilons.
        stream: of the noise.
        device: where the network is.
    """
    found: dict[Condition, list[NDArray[np.int64]]] = {condition: [] for condition in settings.conditions}
    flat = 0
    for rows in torch.split(torch.arange(len(data)), BATCH):
        images = torch.from_numpy(centre_crop(data.images[rows.numpy()], size).copy())
        pixels, labels = images.to(device).float() / LEVELS, torch.from_numpy(data.labels)[rows].to(device)
        signs = loss_signs(predict, pixels, labels)
        flat += int((signs.flatten(1) == 0).all(1).sum())
        directions = {CLEAN: signs, ATTACKED: signs, NOISE: noise_signs(pixels.shape, stream).to(device)}
        for (kind, epsilon), classes in found.items():
            classes.append(_classes(predict, moved(pixels, directions[kind], epsilon / LEVELS)))
    return Outcome(data.labels, {condition: np.concatenate(parts) for condition, parts in found.items()}, flat)


def _classes(predict: Predict, pixels: Tensor) -> NDArray[np.int64]:
    with torch.no_grad():
        return predicted_classes(predict(pixels).cpu().numpy())


# ---- runs and comparisons


@dataclass
class Attack:
    """Attacks on runs, one after the other; images that they share are read once.

    Attributes:
        settings: the same for all.
        tell: told what begins.
    """

    settings: Settings
    tell: Callable[[str], None] = lambda text: None
    _federation: tuple[Any, Federation] | None = field(default=None, repr=False)

    def run(self, folder: Path, file: Path | None = None) -> dict[str, Any]:
        """Attack one finished run, write `attack.json`, and return it; a finished attack of the same kind is kept.

        Args:
            folder: the run's.
            file: what to write; by default `attack.json` in the folder.

        Raises:
            InputError: not a finished run, an unknown client, other images than the run had, or a client without the
                model that is asked for.
        """
        results = json.loads((folder / run_folder.RESULTS).read_text(encoding="utf-8"))
        experiment = load_experiment(folder / run_folder.CONFIG)
        identity = {
            "attack": "fgsm",
            "settings": self.settings.to_json(),
            "label": results["label"],
            "method": results["method"],
            "seed": results["seeds"][0],
            "rounds": results["rounds"],
            "experiment": experiment.digest(),
        }
        file = file or folder / ATTACK
        kept = _kept(file, identity)
        if kept is None:
            kept = identity | self._measure(folder, experiment, f"{results['label']}, seed {results['seeds'][0]}")
            write_json(file, kept)
        return kept

    def _measure(self, folder: Path, experiment: Experiment, label: str) -> dict[str, Any]:
        """`clients` and `summary` of one run."""
        torch.set_num_threads(experiment.training.threads)
        federation = self._images(experiment, folder)
        outcomes = {}
        for name in self._chosen(federation, folder):
            self.tell(f"{label}: attacking {name}")
            outcomes[name] = self._client(folder, name, federation, experiment)
        classes = len(federation.classes)
        return {
            "clients": {name: _entry(outcome, classes) for name, outcome in outcomes.items()},
            "summary": _summary(list(outcomes.values()), classes),
        }

    def _client(self, folder: Path, name: str, federation: Federation, experiment: Experiment) -> Outcome:
        trained = load_trained(folder, name, self.settings.model)
        data = federation.client(name).test
        rng = numpy_stream(experiment.seed, "attack/images", client=name)
        data = data.take(stratified_cap(data.labels, self.settings.max_images, rng))
        device = next(trained.model.parameters()).device
        noise = torch_stream(experiment.seed, "attack/noise", client=name)
        predict = pixel_predictor(trained, data)
        return attack_images(predict, data, experiment.data.image_size, self.settings, noise, device)

    def _images(self, experiment: Experiment, folder: Path) -> Federation:
        key = (experiment.data, experiment.seed)
        if self._federation is None or self._federation[0] != key:
            self._federation = (key, read_federation(experiment.data, experiment.seed))
        run_folder.check_same_federation(folder, self._federation[1])
        return self._federation[1]

    def _chosen(self, federation: Federation, folder: Path) -> list[str]:
        """The clients that are asked for, without those that have no test images."""
        asked = self.settings.clients or federation.names
        for name in asked:
            if name not in federation.names:
                raise InputError(f"--clients {name}: {folder} has no such client{suggestion(name, federation.names)}")
        found = [name for name in asked if len(federation.client(name).test)]
        if not found:
            raise InputError(f"{folder}: no test image at {', '.join(asked)}")
        return found


def _kept(file: Path, identity: Mapping[str, Any]) -> dict[str, Any] | None:
    """What `file` holds, if it is a finished attack of this kind on this run."""
    with contextlib.suppress(OSError, ValueError):
        held = json.loads(file.read_text(encoding="utf-8"))
        if isinstance(held, dict) and {key: held.get(key) for key in identity} == identity:
            return held
    return None


def _entry(outcome: Outcome, classes: int) -> dict[str, Any]:
    """One client in `attack.json`."""
    scores = {c: from_confusion(matrix) for c, matrix in _confusions(outcome, classes).items()}
    plain = {c: {name: found[name] for name in FIGURES[:2]} for c, found in scores.items()}  # type: ignore[literal-required]
    return {"n": len(outcome.labels), "without_gradient": outcome.without_gradient, **_nested(plain)}


def _summary(outcomes: Sequence[Outcome], classes: int) -> dict[str, Any]:
    """Means over clients, and the balanced accuracy of all images in one pool."""
    each = [_confusions(outcome, classes) for outcome in outcomes]
    found = {}
    for condition in each[0]:
        matrices = [confusions[condition] for confusions in each]
        scores = [from_confusion(matrix) for matrix in matrices]
        means = {name: _mean(score[name] for score in scores) for name in FIGURES[:2]}  # type: ignore[literal-required]
        pool = from_confusion(merge_confusions(matrices))["balanced_accuracy"]
        found[condition] = means | {FIGURES[2]: pool}
    flat = sum(outcome.without_gradient for outcome in outcomes)
    return {"n": sum(len(outcome.labels) for outcome in outcomes), "without_gradient": flat, **_nested(found)}


def _confusions(outcome: Outcome, classes: int) -> dict[Condition, NDArray[np.int64]]:
    return {c: confusion_matrix(outcome.labels, predicted, classes) for c, predicted in outcome.predicted.items()}


def _mean(values: Iterable[float | None]) -> float | None:
    return over_seeds(values)["mean"]


def _nested(scores: Mapping[Condition, Any]) -> dict[str, Any]:
    """`clean`, then `attacked` and `noise` by epsilon."""
    found: dict[str, Any] = {CLEAN: scores[CLEAN, 0.0], ATTACKED: {}, NOISE: {}}
    for (kind, epsilon), score in scores.items():
        if kind != CLEAN:
            found[kind][f"{epsilon:g}"] = score
    return found


def at(entry: Mapping[str, Any], condition: Condition) -> Any:
    """The scores of one condition in a client's or a summary's entry."""
    kind, epsilon = condition
    return entry[CLEAN] if kind == CLEAN else entry[kind][f"{epsilon:g}"]


def is_run(folder: Path) -> bool:
    """Whether `folder` is that of one run."""
    return (folder / run_folder.CONFIG).exists()


def attack_run(folder: Path, attack: Attack, file: Path | None = None) -> dict[str, Any]:
    """Attack one run; see `Attack.run`. InputError where the folder holds no finished run."""
    ((_, only),) = runs_in([folder])
    return attack.run(only, file)


def attack_comparison(folder: Path, attack: Attack, file: Path | None = None) -> dict[str, Any]:
    """Attack every finished run of a comparison; each keeps its own `attack.json`. Write the mean over seeds.

    Args:
        folder: the comparison's.
        attack: what to do to each run.
        file: where the means go; by default `attack.json` in the folder.

    Returns:
        What is written: by system, the figures of `summary` as mean and deviation over its seeds.

    Raises:
        InputError: the folder holds no finished run, or as `Attack.run` says.
    """
    runs: dict[str, list[dict[str, Any]]] = {}
    for label, run in runs_in([folder]):
        runs.setdefault(label, []).append(attack.run(run))
    record = {
        "attack": "fgsm",
        "settings": attack.settings.to_json(),
        "systems": {label: over_runs(found, attack.settings) for label, found in runs.items()},
    }
    write_json(file or folder / ATTACK, record)
    return record


def over_runs(found: Sequence[Mapping[str, Any]], settings: Settings) -> dict[str, Any]:
    """One system's figures over its seeds, from the `attack.json` of each run; images are counted over all seeds."""
    scores = {
        condition: {name: over_seeds(at(one["summary"], condition)[name] for one in found) for name in FIGURES}
        for condition in settings.conditions
    }
    counts = {key: sum(one["summary"][key] for one in found) for key in ("n", "without_gradient")}
    return {"method": found[0]["method"], "seeds": [one["seed"] for one in found], **counts, **_nested(scores)}
