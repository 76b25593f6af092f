"""How the clients of an experiment differ before any training: skew, measured on the untouched backbone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from wardround.config import Experiment
from wardround.data import Federation, Samples
from wardround.data.transforms import centre_crop
from wardround.experiment import pick_device
from wardround.methods.registry import METHODS
from wardround.models.backbones.registry import has_text
from wardround.models.classifier import build_classifier
from wardround.skew.analyse import analyse_skew
from wardround.skew.mmd import Bandwidth, Estimator
from wardround.skew.recommend import recommend

BATCH = 64


def measure_skew(
    experiment: Experiment,
    federation: Federation,
    *,
    max_images: int = 500,
    permutations: int = 500,
    estimator: Estimator = "biased",
    squared: bool = False,
    bandwidth: Bandwidth = "global",
) -> dict[str, Any]:
    """`skew.json`: labels, quantity, and the features of the backbone before any fine-tuning (PAFP, section V).

    It ends with which methods to try first, of those that are registered and go with the backbone.

    Args:
        experiment: its backbone and image size are used.
        federation: its images.
        max_images: of each client, drawn once.
        permutations: of each two-sample test.
        estimator, squared, bandwidth: see `wardround.skew.mmd`.
    """
    found = analyse_skew(
        federation,
        backbone_features(experiment, len(federation.classes)),
        seed=experiment.seed,
        max_images=max_images,
        permutations=permutations,
        estimator=estimator,
        squared=squared,
        bandwidth=bandwidth,
    )
    text = has_text(experiment.model.backbone)
    known = {name: kind.skews for name, kind in METHODS.items() if text or not kind.needs_text}
    return found | {"recommendation": recommend(found, known)}


def backbone_features(experiment: Experiment, classes: int) -> Callable[[Samples], np.ndarray]:
    """A function from samples to pooled features `(N, d)` of the pretrained network, in eval mode, centre crop."""
    torch.set_num_threads(experiment.training.threads)
    data = experiment.data
    model = build_classifier(experiment.model, classes, data.channels, data.image_size, experiment.seed)
    device = pick_device(experiment.training.device)
    model.to(device, memory_format=torch.channels_last).eval()  # type: ignore[call-overload]

    def features(samples: Samples) -> np.ndarray:
        images = torch.from_numpy(centre_crop(samples.images, data.image_size).copy())
        with torch.inference_mode():
            parts = [
                model.features(model.prefix(model.prepare(batch.to(device)))).cpu()
                for batch in torch.split(images, BATCH)
            ]
        return torch.cat(parts).numpy()

    return features
