"""FedProto: clients exchange one mean feature vector a class and keep their networks to themselves."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional

from wardround.federation.averaging import WeightedMean
from wardround.federation.server import Reply, Server
from wardround.methods.isolated import Isolated
from wardround.models.classifier import Classifier
from wardround.training.client import Client, Step

ABSENT = -1e9  # the logit of a class that a client does not have; no squared distance comes near


class FedProto(Isolated):
    """Tan et al., AAAI 2022. A client minimises `L_task + lambda * mean_i mean_d (h_i - P_y)^2`: h are pooled features,
    P_y the prototype that the server sent for the image's class. An image whose class has none counts as 0.

    After training, a client sends the mean of h over all its training images of each class that it has, in eval mode
    and without augmentation. The server's prototype of a class is the mean of those sent, unweighted by default as in
    the authors' code; one that nobody sent stays. No weights travel: lambda = 0 is isolated training.

    Predictions are the authors': the nearest prototype among the classes that the client has, with logits
    `-||h - P_c||^2` and a large negative one for other classes. The prototypes are those received in the round, and
    the client's own where there was none; before its first training a client predicts with its head.

    The prototype of a class with one image is that image's feature vector, and says as much about it.
    """

    name: ClassVar[str] = "fedproto"
    title: ClassVar[str] = "FedProto: prototypes instead of weights"
    citation: ClassVar[str] = (
        "Tan, Long, Liu, Zhou, Lu, Jiang, Zhang. FedProto: Federated Prototype Learning across Heterogeneous Clients. "
        "AAAI 2022."
    )
    skews: ClassVar[tuple[str, ...]] = ("label",)
    travels: ClassVar[str] = "the mean feature vector of each class that a client has"
    stays: ClassVar[str] = "everything that trains; the prototypes that it predicts with"
    extra_cost: ClassVar[str] = "one forward pass over the training images a round"
    optional_statistics: ClassVar[bool] = True
    predicts_from_memory: ClassVar[bool] = True

    weights: Literal["examples", "uniform"] = Field(
        "uniform", description="what a client counts in a class's mean: the same as any other, or its training images"
    )
    strength: float = Field(1.0, ge=0, alias="lambda", description="weight of the distance to prototypes (lambda)")
    prediction: Literal["prototype", "head"] = Field(
        "prototype", description="by the nearest prototype, or by the network's own head"
    )

    def statistic_shapes(self, model: Classifier, image_size: int, phase: str) -> Mapping[str, Sequence[int]]:
        """`prototype/c` for every class c."""
        return {f"prototype/{c}": (model.head.in_features,) for c in range(model.head.out_features)}

    def train(self, client: Client, phase: str) -> float:
        """Local training towards the received prototypes; then the client's own are computed."""
        client.scratch["received"] = received, known = received_prototypes(client)
        loss = super().train(client, phase)
        client.scratch["own"] = own = class_means(client)
        client.memory["prototypes"] = torch.where(known[:, None], received, own)
        client.memory["present"] = client.counts.to(client.device) > 0
        return loss

    def loss(self, step: Step) -> Tensor:
        """The task loss and, once prototypes were received, lambda times the distance to them."""
        if not (self.strength and step.client.received):
            return super().loss(step)
        h = step.features  # asked for first, so that one forward pass serves both terms
        prototypes, known = step.client.scratch["received"]
        targets = torch.where(known[step.labels, None], prototypes[step.labels], h.detach())
        return super().loss(step) + self.strength * functional.mse_loss(h, targets)

    def statistics(self, client: Client) -> Mapping[str, Tensor]:
        """The prototypes of the classes that the client has."""
        return {f"prototype/{c}": client.scratch["own"][c] for c in client.counts.nonzero().flatten().tolist()}

    def statistic_counts(self, client: Client) -> Mapping[str, int]:
        """A prototype is made of its class's images alone; of one image it is that image's feature."""
        return {f"prototype/{c}": count for c, count in enumerate(client.counts.tolist())}

    def predict(self, client: Client, inputs: Tensor) -> Tensor:
        """Negative squared distances to the prototypes."""
        if self.prediction == "head" or not client.memory:
            return super().predict(client, inputs)
        h, prototypes = client.model.features(inputs).float(), client.memory["prototypes"]
        # By differences: torch's faster way for large batches makes an image's distance depend on the batch.
        distances = torch.cdist(h, prototypes, compute_mode="donot_use_mm_for_euclid_dist")
        return torch.where(client.memory["present"], -distances.square(), ABSENT)

    def targets(self, server: Server, client: str) -> Mapping[str, Tensor]:
        """Every prototype that there is."""
        return server.memory

    def combine(self, server: Server, phase: str, replies: Iterator[Reply]) -> None:
        """Average each class over the clients that sent it."""
        means: dict[str, WeightedMean] = defaultdict(WeightedMean)
        for reply in replies:
            for name, prototype in reply.message.under("statistic").items():
                means[name].add({name: prototype}, self.weight(reply))
        for mean in means.values():
            server.memory.update(mean.result())


def received_prototypes(client: Client) -> tuple[Tensor, Tensor]:
    """What the server sent: prototypes `(C, d)`, and for which classes there is one, bool `(C,)`; the rest are 0."""
    names = [f"prototype/{c}" for c in range(len(client.counts))]
    nothing = torch.zeros(client.model.head.in_features, device=client.device)
    known = torch.tensor([name in client.received for name in names], device=client.device)
    return torch.stack([client.received.get(name, nothing) for name in names]), known


def class_means(client: Client) -> Tensor:
    """Mean features `(C, d)` of a client's training images without augmentation, as its model is; 0 without images."""
    members = functional.one_hot(client.labels, len(client.counts)).float()  # (N, C)
    sums = members.T @ client.training_features()
    return (sums / client.counts.clamp(min=1)[:, None]).to(client.device)
