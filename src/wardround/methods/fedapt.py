"""FedAPT: one prompt for all clients, which a key turns towards each of them; an image chooses among the keys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal, cast

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional

from wardround.errors import InputError
from wardround.federation.messages import BadMessage
from wardround.federation.rules import Rules
from wardround.federation.server import Server
from wardround.methods.base import Method, ServerSide, Weights
from wardround.methods.keyed_prompts import KeyedPromptHead
from wardround.methods.on_text import need_prompts, prompts_of
from wardround.models.classifier import Classifier
from wardround.training.client import Client, Step


class FedAPT(Method):
    """Su et al., AAAI 2024: federated adaptive prompt tuning.

    Client k of K has a frozen key `r_k ~ U[0, 1)^(L x W)`; with the shared context c its prompts have the context
    `c * (1 + r_k)`. A shared domain head Q, linear and without a bias, tells clients apart by their images I. A client
    minimises

        L = L_task(s cos(I, prompts_k), y) + CE(Q(I), k)

    over c and Q, and the server averages both, each client the same. For a prediction, each image mixes the keys of
    the clients that have trained by `softmax(z / tau)`, z being Q(I) standardised over them. That is nearly always
    one key alone: images that call for the same one share its texts.

    All keys are drawn from the experiment's seed while the model is edited, so that every side has the same. Q has room
    for `domains` clients; with as many as there are, the loss is the published one. The server tells each client its
    number. The published runs have SGD with 0.01, momentum 0.9, weight decay 1e-5, and batches of 256.
    """

    name: ClassVar[str] = "fedapt"
    title: ClassVar[str] = "FedAPT: a learned prompt, shared, which a key turns towards each client"
    citation: ClassVar[str] = (
        "Su, Yang, Li, Xue. Federated Adaptive Prompt Tuning for Multi-Domain Collaborative Learning. AAAI 2024."
    )
    skews: ClassVar[tuple[str, ...]] = ("feature",)
    travels: ClassVar[str] = (
        "the context: L token embeddings for every class; the domain head, a row a client; which clients have trained"
    )
    needs_text: ClassVar[bool] = True
    stays: ClassVar[str] = "nothing that trains"
    extra_cost: ClassVar[str] = (
        "the text side runs forwards and backwards in every step, once a class; in predicting, once a class and key"
    )
    individual: ClassVar[bool] = True
    predicts_with_text: ClassVar[bool] = True

    weights: Weights = "uniform"
    length: int = Field(24, ge=1, description="tokens of the context (L)")
    context: Literal["class", "shared"] = Field("class", description="one context for each class, or one for all")
    # A client's number must survive the coarsest codec: float16 has every integer to 2048.
    domains: int = Field(16, ge=1, le=2048, description="room in the domain head (K): clients at most")
    temperature: float = Field(0.01, gt=0, description="of the softmax that mixes keys (tau)")
    texts_at_once: int = Field(256, ge=1, description="texts in one pass of the text side; fewer take less memory")

    def edit(self, model: Classifier, image_size: int) -> None:
        """Put keyed prompts in the place of the head.

        Raises:
            InputError: the encoder has no text side, or some of its blocks would train.
        """
        need_prompts(model, self.name)
        model.head = KeyedPromptHead(  # type: ignore[assignment]
            prompts_of(model), model.head.in_features, domains=self.domains, length=self.length,
            per_class=self.context == "class", temperature=self.temperature, at_once=self.texts_at_once,
        )  # fmt: skip

    def rules(self, model: Classifier) -> Rules:
        """Context and domain head are shared, whatever `model.head` says; keys are nobody's."""
        return super().rules(model).shared(model.head).frozen(head_of(model).keys)

    def target_shapes(self, side: ServerSide) -> Mapping[str, Sequence[int]]:
        """A client's number."""
        return {"number": (1,)}

    # ---- client half

    def train(self, client: Client, phase: str) -> float:
        """Local training with the client's own key.

        Raises:
            BadMessage: the server gave no number, or one for which there is no key.
        """
        head = head_of(client.model)
        head.own = self._number(client)
        head.seen[head.own] = True
        try:
            return super().train(client, phase)
        finally:
            head.own = None

    def loss(self, step: Step) -> Tensor:
        """The task loss, and the cross-entropy of the domain head."""
        head, features = head_of(step.client.model), step.features  # asked for first, so that they serve for both
        own = torch.full_like(step.labels, cast(int, head.own))
        domain = functional.cross_entropy(head.domain(features), own)
        step.client.log["domain_loss"] = float(domain.detach())
        return super().loss(step) + domain

    def _number(self, client: Client) -> int:
        given = client.received.get("number")
        number = -1 if given is None else int(given)
        if number not in range(self.domains):
            raise BadMessage(f"the server gave this client no number from 0 to {self.domains - 1}")
        return number

    # ---- server half

    def targets(self, server: Server, client: str) -> Mapping[str, Tensor]:
        """The client's number.

        Raises:
            InputError: there are more clients than the domain head has room for.
        """
        if len(server.names) > self.domains:
            raise InputError(
                f"method.domains = {self.domains}: the federation has {len(server.names)} clients "
                f"(allowed: {len(server.names)} or more)"
            )
        return {"number": torch.tensor([float(server.names.index(client))])}


def head_of(model: Classifier) -> KeyedPromptHead:
    """The head that `FedAPT` has put there."""
    return cast(KeyedPromptHead, model.head)
