"""The feature-alignment modules of a model at work: what they record, and how hard alignment pulls at them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from wardround.methods.alignment import Moments, Reduce, RunningMoments
from wardround.models.classifier import Classifier
from wardround.models.feature_alignment import FeatureAlignment
from wardround.models.records import recording


def aligners(model: Classifier) -> list[FeatureAlignment]:
    """The FA modules of `model`, in the order of their sites."""
    return [module for module in model.before if isinstance(module, FeatureAlignment)]


class Watch:
    """The running moments at every site of one client during one round."""

    def __init__(self, sites: Sequence[FeatureAlignment], reduce: Reduce, m: float) -> None:
        self.sites = sites
        self.running = [RunningMoments(reduce, m) for _ in sites]

    def update(self) -> list[Moments]:
        """Take in the last forward pass; the moments carry gradients to what the sites put out."""
        return [running.update(record_of(site)) for running, site in zip(self.running, self.sites, strict=True)]

    def now(self) -> dict[str, Tensor]:
        """The moments as they travel, `l/mean` and `l/var` for site l."""
        found = {site: running.now for site, running in enumerate(self.running) if running.now is not None}
        return {f"{site}/{part}": getattr(moments, part) for site, moments in found.items() for part in ("mean", "var")}


@contextmanager
def watching(model: Classifier, reduce: Reduce, m: float) -> Iterator[Watch]:
    """Let the FA modules keep the tensor whose distribution is aligned, and drop it afterwards."""
    watch = Watch(aligners(model), reduce, m)
    with recording(watch.sites):
        yield watch


def record_of(site: FeatureAlignment) -> Tensor:
    """What `site` put out in the last forward pass, with its graph."""
    if site.recorded is None:
        raise RuntimeError("no forward pass since recording began")
    return site.recorded


def gradient_ratio(model: Classifier, task: Tensor, alignment: Tensor) -> float | None:
    """The norm of the alignment loss's gradient over that of the task loss, on the FA modules that train.

    None where none trains or the task has no gradient there. The graph is kept for the step itself.
    """
    parameters = [parameter for parameter in model.before.parameters() if parameter.requires_grad]
    norms = []
    for loss in (task, alignment) if parameters else ():
        gradients = torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True)
        norms.append(sum(float(g.square().sum()) for g in gradients if g is not None) ** 0.5)
    return norms[1] / norms[0] if norms and norms[0] > 0 else None
