"""FM²: a shared backbone, shared experts by imaging modality, and private experts by class."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, ClassVar, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn import functional

from wardround import seeds
from wardround.federation.rules import Rules
from wardround.federation.server import Reply, Server
from wardround.methods.base import FEATURES, Method, ServerSide
from wardround.methods.expertwise import expertwise_mean
from wardround.methods.proximal import anchors, pull
from wardround.methods.top_k import Score, highest, scores
from wardround.models.classifier import Classifier
from wardround.models.dual_moe import DualMoE, Size, dual_moe
from wardround.models.experts import WIDTH, expert_of
from wardround.models.modality_clusters import ModalityClusters
from wardround.models.routing import PRIOR, RoutingKind
from wardround.training.client import Client, Step
from wardround.training.inputs import CachedInputs, Inputs, SometimesTold
from wardround.training.local import fit
from wardround.training.options import TrainingOptions

MIXTURES, CLUSTERS = "mixtures", "modality_clusters"  # places in `Classifier.extras`
DOMAIN = f"extras.{MIXTURES}.domain."  # begins the names of M_d's entries


class FM2(Method):
    """FM² (2026), trained from scratch. V is the backbone, F_h its linear head; on the pooled features stand M_d, with
    an expert for each modality, and M_c, with an expert for each class of the client:

        y = gamma_d M_d(V(x)) + gamma_c M_c(V(x)),   on logits

    - Stage 1: V and F_h, on all images, by the task loss.
    - V stands still. Of each class the `top_k` images of highest score make D_s; see `top_k.scores`.
    - Stage 2: M_d and M_c, on D_s, by the task loss of y and `lambda ||M_d - received M_d||^2` over all of M_d. Its
      gradient is 2 lambda (p - p^): lambda = 0.1 is FedProx's mu = 0.2. M_d has no weight decay, which would shrink
      the experts that no image goes through. Features are computed once, without augmentation. Class weights are D_s's.
    - Server: V, and M_d's classifier, by n_i / n. Expert e over the clients that have its modality, by their images of
      it (`expertwise`); the paper's FedAvg (`plain`) mixes in copies of the old expert from all others.

    The personal model is V, M_d and M_c after local training; the served one has V and M_d as received. Dials at 0 are
    the ablations: gamma_c without M_c, gamma_d without M_d (then it stays at home), lambda without alignment.

    The paper leaves open the order of stages, how a vector scores, K, and who counts in M_d: these readings are ours.
    A `fused` round has both stages, `training.local_epochs` passes each; the other schedules have one stage a round,
    hence need twice the rounds, and send the other stage's part as it came. With hard routing, clients without a common
    modality share V and M_d's classifier but no expert; with soft routing all train all experts, which suits `plain`.

    Captions enter V in stage 1, with their loss. Scores and, by default, the features of stage 2 are of images alone:
    the mixtures learn on what they will predict from, and cannot lean on captions that state the class.

    New images of a client with one modality are of that one. Elsewhere an unknown modality means all experts alike, or
    the nearest of the client's own mean features (`clusters`, which never leave it, and so know no other modalities).
    At a site that never trained M_d predicts alone; a modality that no client has meets an untrained expert there.
    """

    name: ClassVar[str] = "fm2"
    title: ClassVar[str] = "FM²: experts by modality shared, experts by class private"
    citation: ClassVar[str] = "FM²: a federated medical multimodal foundation model (2026)."
    skews: ClassVar[tuple[str, ...]] = ("feature", "label")
    travels: ClassVar[str] = (
        "the trained blocks, buffers included; the experts by modality with their classifier; how many training images "
        "of each modality a client has"
    )
    stays: ClassVar[str] = "the head; the experts by class with their gate and classifier; a logit corrector"
    extra_cost: ClassVar[str] = (
        "a forward pass over the training images and an epoch of the experts on the chosen ones a round; 38 % more "
        "traffic with ResNet-4, `tiny` and five modalities"
    )
    optional_statistics: ClassVar[bool] = True

    size: Size = Field("tiny", description="layers of an expert after its first: 2, 4 or 8")
    width: int = Field(WIDTH, ge=1, description="of every layer of an expert (w)")
    routing: RoutingKind = Field(
        "hard", description="of M_d: each image to its modality's expert; soft: by a learned gate; prior: a gate that "
        "leans towards it"
    )  # fmt: skip
    prior: float = Field(PRIOR, ge=0, description="what the modality adds to its logit in the gate, for prior (b)")
    gamma_d: float = Field(0.5, ge=0, le=1, description="weight of M_d's logits; 0: without M_d")
    gamma_c: float = Field(0.5, ge=0, le=1, description="weight of M_c's logits; 0: without M_c")
    strength: float = Field(0.1, ge=0, alias="lambda", description="pull of M_d towards the received one (lambda)")
    gate_ce: float = Field(0.0, ge=0, description="weight of a loss that sends an image to its class's expert in M_c")
    top_k: Annotated[int, Field(ge=1)] | Literal["all"] = Field(
        200, description="images of each class in stage 2 (K); a class with fewer gives all"
    )
    score: Score = Field("own-logit", description="by which they are chosen, the highest first")
    schedule: Literal["fused", "interleaved", "sequential"] = Field(
        "fused", description="fused: both stages in every round; else one: in turns, or first all of stage 1"
    )
    observer_rounds: int | None = Field(
        None, ge=0, description="rounds of stage 1 for sequential; none: half of the experiment's"
    )
    aggregation: Literal["expertwise", "plain"] = Field(
        "expertwise", description="of M_d's experts: by images of their modality; plain: by all images"
    )
    aggregate: bool = Field(True, description="share V and M_d; without, every client trains the same networks alone")
    unknown_modality: Literal["mean", "clusters"] = Field(
        "mean", description="images of unknown modality: all experts alike, or the expert of the nearest mean feature"
    )

    @model_validator(mode="after")
    def _predicts(self) -> Self:
        if not (self.gamma_d or self.gamma_c):
            raise ValueError("gamma_d = gamma_c = 0 leaves nothing to predict with")
        return self

    # ---- both halves

    def edit(self, model: Classifier, image_size: int) -> None:
        """Put the two mixtures beside the network, and the means of features by modality where they are asked for."""
        features, classes, modalities = model.head.in_features, model.head.out_features, len(model.modalities)
        model.extras[MIXTURES] = dual_moe(
            self.size, features, classes, modalities, width=self.width, routing=self.routing, prior=self.prior,
            gamma_d=self.gamma_d, gamma_c=self.gamma_c,
        )  # fmt: skip
        if self.unknown_modality == "clusters":
            # V moves between rounds, so that the means of the last one say nothing about the features of this one.
            model.extras[CLUSTERS] = ModalityClusters(modalities, features, momentum=0.0)

    def rules(self, model: Classifier) -> Rules:
        """V and M_d are shared; F_h, M_c and what tells modalities apart are local, whatever `model.head` says."""
        pair = mixtures(model)
        local = [model.head, pair.by_class, *(model.extras[key] for key in model.extras if key == CLUSTERS)]
        rules = super().rules(model).local(*local, *([] if self.gamma_d else [pair.domain]))
        return rules if self.aggregate else rules.local(model).frozen(model.frozen, model.prompts)

    def statistic_shapes(self, model: Classifier, image_size: int, phase: str) -> Mapping[str, Sequence[int]]:
        """`images/e`, a number, for every modality e."""
        return {f"images/{e}": () for e in range(len(model.modalities))} if self._expertwise else {}

    def target_shapes(self, side: ServerSide) -> Mapping[str, Sequence[int]]:
        """When stage 1 is over, where that is a matter of rounds."""
        return {"observer_rounds": ()} if self.schedule == "sequential" else {}

    def cautions(self, model: Classifier, examples: Mapping[str, int]) -> list[str]:
        """With one modality the experts have nothing to tell apart."""
        if len(model.modalities) > 1 or not self.gamma_d:
            return []
        return ["All images are of one modality: FM²'s domain experts are one, and every client trains it."]

    @property
    def _expertwise(self) -> bool:
        return self.aggregate and self.aggregation == "expertwise" and self.gamma_d > 0

    def passes(self, training: TrainingOptions, round: int) -> int:
        """Those of each stage: a fused round has two. Stage 2 passes over D_s alone, and counts the same."""
        return training.local_epochs * (2 if self.schedule == "fused" else 1)

    # ---- client half

    def train(self, client: Client, phase: str) -> float:
        """The stages of this round; returns the last one's mean loss."""
        first, second = self.stages(client)
        loss = super().train(client, phase) if first else float("nan")
        if not second:
            return loss
        if first:
            client.log["observer_loss"] = loss
        return self.train_mixtures(self.subset(client))

    def stages(self, client: Client) -> tuple[bool, bool]:
        """Whether this round has stage 1 and stage 2."""
        if self.schedule == "fused":
            return True, True
        turns = client.round % 2 == 1
        first = turns if self.schedule == "interleaved" else client.round <= int(client.received["observer_rounds"])
        return first, not first

    def parameters(self, client: Client) -> list[nn.Parameter]:
        """Those of stage 1: V and F_h."""
        pair = {id(parameter) for parameter in mixtures(client.model).parameters()}
        return [parameter for parameter in super().parameters(client) if id(parameter) not in pair]

    def subset(self, client: Client) -> Client:
        """The client with D_s for its training images, whose inputs are V's features `(B, d)`."""
        features = client.training_features()
        if CLUSTERS in client.model.extras:
            clusters_of(client.model).update(features.to(client.device), client.modality.to(client.device))
        rows = self.choose(client, features)
        labels = client.labels[rows]
        counts = labels.bincount(minlength=len(client.counts))
        client.log |= {"chosen_images": len(rows), "chosen_classes": int((counts > 0).sum())}
        if self.top_k != "all":
            client.log["classes_below_k"] = int(((client.counts > 0) & (client.counts < self.top_k)).sum())
        return replace(
            client, inputs=self.features_of(client, features, rows), labels=labels, modality=client.modality[rows],
            counts=counts, captions=None,
        )  # fmt: skip

    def features_of(self, client: Client, features: Tensor, rows: Tensor) -> Inputs:
        """Stage 2's inputs, of the images `rows` among `features` `(N, d)`, which are those of images alone."""
        alone = CachedInputs([features[rows]], client.device, torch.contiguous_format)
        captions = client.captions
        if captions is None or not captions.options.in_mixtures:
            return alone
        fused = replace(alone, views=[client.training_features(told=True)[rows]])
        return SometimesTold(alone, fused, captions.options.dropout)

    @torch.no_grad()
    def choose(self, client: Client, features: Tensor) -> Tensor:
        """The rows of D_s, ascending, by the features `(N, d)` of all training images."""
        logits = client.model.head(features.to(client.device)).cpu()
        stream = seeds.torch_stream(client.seed, "top-k", client.round, client.name)
        found = scores(self.score, features, logits, client.labels, stream)
        return highest(found, client.labels, None if self.top_k == "all" else self.top_k)

    def train_mixtures(self, client: Client) -> float:
        """Stage 2, on a client that is its `subset`; returns the mean loss."""
        pair = mixtures(client.model)
        parameters, domain = list(pair.parameters()), list(pair.domain.parameters())
        client.scratch["received"] = domain, anchors(domain)
        optimizer = client.optimizer(client.apart(parameters, domain, None, weight_decay=0.0))
        steps = client.steps(client.options.local_epochs, "mixtures")
        return fit(client, parameters, optimizer, self.backward_mixtures, steps)

    def backward_mixtures(self, step: Step) -> Tensor:
        """The gradient of stage 2's loss, with M_d's alignment; returns the loss without it."""
        loss = self.mixture_loss(step)
        loss.backward()  # type: ignore[no-untyped-call]
        pull(2 * self.strength, *step.client.scratch["received"])
        return loss

    def mixture_loss(self, step: Step) -> Tensor:
        """The task loss of y, and of the gate where that is asked for; the step's inputs are features."""
        pair, v = mixtures(step.client.model), step.inputs
        loss = step.client.task_loss(pair(v, step.modality), step.labels)
        if not (self.gate_ce and self.gamma_c):
            return loss
        return loss + self.gate_ce * functional.cross_entropy(pair.by_class.gate_logits(v), step.labels)

    def statistics(self, client: Client) -> Mapping[str, Tensor]:
        """Training images of each modality that the client has."""
        return {name: torch.tensor(float(count)) for name, count in self.statistic_counts(client).items()}

    def statistic_counts(self, client: Client) -> Mapping[str, int]:
        """The same as numbers: a modality with few images is not told, and its expert then counts for nothing."""
        counts = enumerate(client.modality.bincount().tolist() if self._expertwise else ())
        return {f"images/{e}": count for e, count in counts if count}

    def predict(self, client: Client, inputs: Tensor) -> Tensor:
        """The logits y."""
        v = client.model.features(inputs).float()
        logits: Tensor = mixtures(client.model)(v, self._modality(client, v))
        return logits

    def representations(self, client: Client, inputs: Tensor) -> Mapping[str, Tensor]:
        """The features v `(B, d)`; `mixtures`, gamma_d X_d beside gamma_c X_c; and `domain`, X_d alone `(B, w)`.

        Only the alignment's effect on X_d shows: V is trained without M_d, and stands still while M_d is trained.
        """
        v = client.model.features(inputs).float()
        pair, modality = mixtures(client.model), self._modality(client, v)
        found = {FEATURES: v, MIXTURES: pair.mixtures(v, modality)}
        return found | ({"domain": pair.domain.mixture(v, modality)} if self.gamma_d else {})

    def predict_shared(self, client: Client, inputs: Tensor) -> Tensor:
        """The logits of M_d alone."""
        v = client.model.features(inputs).float()
        logits: Tensor = mixtures(client.model).domain(v, self._modality(client, v))
        return logits

    def predicts_alone(self, model: Classifier) -> bool:
        """M_d does, where there is one that travels."""
        return self.aggregate and self.gamma_d > 0

    def without_modality(self, model: Classifier) -> str:
        """By all experts, by the gate, or as the nearest mean says; empty where y is the same for every modality."""
        leaning = self.routing == "hard" or (self.routing == "prior" and self.prior > 0)
        if not (leaning and self.gamma_d and len(model.modalities) > 1):
            return ""
        if self.unknown_modality == "clusters" and bool(clusters_of(model).images.any()):
            return "taken for the one of the nearest mean feature"
        return "all experts alike" if self.routing == "hard" else "experts by the gate alone"

    def _modality(self, client: Client, v: Tensor) -> Tensor | None:
        """Of the images in hand with features v `(B, d)`, int64 `(B,)`; None where it is unknown."""
        if client.shown is not None or self.unknown_modality == "mean":
            return client.shown
        return clusters_of(client.model).assign(v)

    # ---- server half

    def targets(self, server: Server, client: str) -> Mapping[str, Tensor]:
        """The last round of stage 1, for clients that cannot know how many rounds there are."""
        if self.schedule != "sequential":
            return {}
        half = (server.rounds + 1) // 2
        return {"observer_rounds": torch.tensor(float(half if self.observer_rounds is None else self.observer_rounds))}

    def combine(self, server: Server, phase: str, replies: Iterator[Reply]) -> None:
        """Average V and M_d's classifier as ever, and the experts as `aggregation` says.

        An expert whose modality no client has told of stays as it is.
        """
        if not self._expertwise:
            return super().combine(server, phase, replies)
        server.state = server.state | expertwise_mean(replies, _domain_expert, self._weigh)

    def _weigh(self, reply: Reply, expert: int | None) -> float:
        """What a reply counts; for an expert by the images that were told, of which there are no more than images."""
        if expert is None or not reply.examples:
            return self.weight(reply) if reply.examples else 0.0
        told = float(reply.message.under("statistic").get(f"images/{expert}", torch.zeros(())))
        images = min(max(told, 0.0), reply.examples)
        return images if self.weights == "examples" else float(images > 0)


def mixtures(model: Classifier) -> DualMoE:
    """M_d and M_c."""
    found = model.extras[MIXTURES]
    assert isinstance(found, DualMoE)
    return found


def clusters_of(model: Classifier) -> ModalityClusters:
    """What tells a client's modalities apart."""
    found = model.extras[CLUSTERS]
    assert isinstance(found, ModalityClusters)
    return found


def _domain_expert(entry: str) -> int | None:
    """Which of M_d's experts a state entry is part of; the backbone may have experts of its own."""
    return expert_of(entry) if entry.startswith(DOMAIN) else None
