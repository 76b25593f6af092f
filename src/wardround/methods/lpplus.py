"""LP++: a linear probe on frozen features that blends learned class prototypes with the prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional

from wardround.federation.rounds import TRAIN
from wardround.federation.rules import Rules
from wardround.federation.server import Reply, Server
from wardround.methods.base import Method, Weights
from wardround.methods.on_text import need_prompts, prompts_of
from wardround.models.blended_head import BlendedHead, descend
from wardround.models.classifier import Classifier
from wardround.models.text_head import UnitLength
from wardround.training.client import Client

CENTROIDS = "centroids"
PROTOTYPES, ALPHA = "head.prototypes", "head.alpha"  # as in the state of every Classifier that LP++ has edited


class LPPlus(Method):
    """Huang et al., CVPR 2024: logits `v . (w_c + alpha_c t_c)` of image features v and prompts t_c, both of length 1.

    The plain cross-entropy over all of a client's images, of which there are N, falls by full-batch steps on one block
    at a time, as long as the block's curvature allows, with V the client's features:

        w     <- w     - 4N / lambda_max(V^T V)             dL/dw        `w_steps` times,
        alpha <- alpha - 4N / max_c sum_i (v_i . t_c)^2     dL/dalpha    once.

    A round is `training.local_epochs` such cycles. `training.loss`, class weights, the optimiser with its rate, batches
    and augmentation play no part. The authors' code also has momentum and a bias, and never clears alpha's gradient.

    The federated form is ours. Before the first round its clients send the number of their images of each class, the
    sum of their v and that of v . t_c: C (D + 2) numbers. From these the server finds, over all these images, the mean
    of v in each class, at which w_c starts (the authors: the sum over their few shots), and the mean over classes of
    the mean v . t_c, 250 times which every alpha starts at. A class without images starts at w_c = 0. Then w and alpha
    travel every round, and the server averages them, each client the same. The sum of a class with one image is that
    image's feature vector, and says as much about it.
    """

    name: ClassVar[str] = "lp++"
    title: ClassVar[str] = "LP++: a linear probe that blends class prototypes with the prompts"
    citation: ClassVar[str] = (
        "Huang, Shakeri, Dolz, Boudiaf, Bahig, Ben Ayed. LP++: A Surprisingly Strong Linear Probe for Few-Shot CLIP. "
        "CVPR 2024."
    )
    skews: ClassVar[tuple[str, ...]] = ("feature", "label")
    travels: ClassVar[str] = "a prototype and a number for each class; once, sums over the features of each class"
    needs_text: ClassVar[bool] = True
    stays: ClassVar[str] = "nothing that trains"
    extra_cost: ClassVar[str] = "none; the encoder runs once, and a client's features are in memory together"

    weights: Weights = "uniform"
    w_steps: int = Field(10, ge=1, description="steps on the prototypes before each step on alpha")
    initial_alpha: float = Field(250.0, gt=0, description="alpha starts at this times the mean cosine with the prompts")

    def edit(self, model: Classifier, image_size: int) -> None:
        """Put prototypes and prompts in the place of the head.

        Raises:
            InputError: the encoder has no text side, or some of its blocks would train.
        """
        need_prompts(model, self.name)
        model.neck = UnitLength()
        model.head = BlendedHead(prompts_of(model), model.head.in_features)  # type: ignore[assignment]

    def rules(self, model: Classifier) -> Rules:
        """Prototypes and alpha are shared, whatever `model.head` says."""
        return super().rules(model).shared(model.head)

    def phases(self, round: int) -> Sequence[str]:
        """Before the first round the centroids are found."""
        return (CENTROIDS, TRAIN) if round == 1 else (TRAIN,)

    def sends_state(self, phase: str) -> bool:
        """What the centroids are made of travels without the model."""
        return phase != CENTROIDS

    def statistic_shapes(self, model: Classifier, image_size: int, phase: str) -> Mapping[str, Sequence[int]]:
        """What the centroids are made of, once."""
        classes, d = model.head.out_features, model.head.in_features
        return {"count": (classes,), "sum": (classes, d), "cosine": (classes,)} if phase == CENTROIDS else {}

    # ---- client half

    def train(self, client: Client, phase: str) -> float:
        """Cycles of full-batch steps; for the centroids none. Returns the mean of the losses before each step."""
        if phase == CENTROIDS:
            return float("nan")
        assert isinstance(client.model.head, BlendedHead)
        features, labels = client.training_features().to(client.device), client.labels.to(client.device)
        return float(descend(client.model.head, features, labels, client.options.local_epochs, self.w_steps).mean())

    def statistics(self, client: Client) -> Mapping[str, Tensor]:
        """Of each class the images, the sum of their features, and that of their cosines with the class's prompt."""
        if client.phase != CENTROIDS:
            return {}
        members = functional.one_hot(client.labels, len(client.counts)).float()  # (N, C)
        sums = members.T @ client.training_features()
        return {"count": members.sum(0), "sum": sums, "cosine": (sums * prompts_of(client.model).vectors.cpu()).sum(1)}

    def release(self, client: Client, statistics: Mapping[str, Tensor], least: int) -> Mapping[str, Tensor]:
        """The sums without the classes that have fewer images than `least`."""
        if client.phase != CENTROIDS:
            return super().release(client, statistics, least)
        count, sums, cosines = (statistics[name] for name in ("count", "sum", "cosine"))
        kept = (count >= least).float()
        return {"count": kept * count, "sum": kept[:, None] * sums, "cosine": kept * cosines}

    # ---- server half

    def digest(self, reply: Reply) -> Mapping[str, Tensor]:
        """Sums that weigh as much as they have images, whatever a client counts in averages."""
        share = max(self.weight(reply), 1.0)  # less only without images, which is not counted
        return {name: tensor / share for name, tensor in super().digest(reply).items()}

    def absorb(self, server: Server, average: Mapping[str, Tensor]) -> None:
        """Start from the centroids, if there are any."""
        if not average or not average["count"].any():
            return
        present, sums = average["count"] > 0, average["sum"]
        alpha = self.initial_alpha * (average["cosine"][present] / average["count"][present]).mean()
        centroids = torch.where(present[:, None], sums / average["count"][:, None], 0.0)
        server.state = server.state | {PROTOTYPES: centroids, ALPHA: alpha.expand(len(present)).clone()}
