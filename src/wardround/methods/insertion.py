"""What it costs to insert untrained feature-alignment modules: their published form is far from the identity."""

from __future__ import annotations

import torch
from torch import Tensor

from wardround import seeds
from wardround.methods.alignment_sites import aligners
from wardround.models.classifier import Classifier, in_eval_mode
from wardround.training.client import Client

IMAGES = 200
BATCH = 50


@torch.no_grad()
def insertion_cost(client: Client) -> dict[str, float]:
    """How far the FA modules of `client.model` are from the identity, and what that does to its features.

    `insertion_change/l` is `||FA_l(x) - x|| / ||x||`, mean over batches. `insertion_accuracy_drop` is the
    nearest-class-mean accuracy of pooled features without the modules minus that with them, on at most 200 training
    images in an order of their own: the first half gives the class means, the second half the queries. Nothing is
    trained for it. NaN where no query's class is in the first half.
    """
    stream = seeds.torch_stream(client.seed, "insertion", client.round, client.name)
    rows = torch.randperm(len(client), generator=stream)[:IMAGES]
    with in_eval_mode(client.model):
        walks = [_walk(client.model, client.inputs.batch(part, None)) for part in torch.split(rows, BATCH)]
    changes, inserted, bare = (torch.cat([walk[i] for walk in walks]) for i in range(3))
    labels = client.labels[rows]
    drop = nearest_mean_accuracy(bare, labels) - nearest_mean_accuracy(inserted, labels)
    found = {f"insertion_change/{site}": float(change) for site, change in enumerate(changes.mean(0))}
    return {**found, "insertion_accuracy_drop": drop}


def _walk(model: Classifier, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Relative changes `(1, sites)`, and pooled features `(B, d)` with and without FA modules, on the CPU."""
    bare, changes = h, []
    for site, block in zip(aligners(model), model.tuned, strict=True):
        changes.append(site.insertion_change(h))
        h, bare = block(site(h)), block(bare)
    return torch.tensor([changes]), model.pool(h).float().cpu(), model.pool(bare).float().cpu()


def nearest_mean_accuracy(features: Tensor, labels: Tensor) -> float:
    """Share of the second half of `features` `(N, d)` that is nearest to its own class's mean over the first half.

    Queries of classes that the first half lacks do not count; NaN where none is left.
    """
    half = len(labels) // 2
    classes = torch.unique(labels[:half])
    known = torch.isin(labels[half:], classes)
    if not known.any():
        return float("nan")
    means = torch.stack([features[:half][labels[:half] == c].mean(0) for c in classes])
    nearest = classes[torch.cdist(features[half:][known], means).argmin(1)]
    return float((nearest == labels[half:][known]).float().mean())
