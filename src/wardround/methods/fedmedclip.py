"""FedMedCLIP: a shared attention over frozen features, and a classifier that never leaves its client."""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn

from wardround.errors import InputError
from wardround.federation.rules import Rules
from wardround.methods.base import Method, Weights
from wardround.methods.clip_losses import (
    Agreement,
    Contrastive,
    EntropyMode,
    agreement_loss,
    certainty,
    mixture,
)
from wardround.methods.on_text import need_prompts, prompts_of
from wardround.models.classifier import Classifier
from wardround.models.feature_attention import Activation, FeatureAttention, Norm, PrivateMLP
from wardround.models.masked_linear import Surrogate, settle
from wardround.models.prompts import Prompts
from wardround.models.text_head import CosineHead
from wardround.training.client import Client, Step
from wardround.training.losses import contrastive_loss


class FedMedCLIP(Method):
    """FedMedCLIP: masked feature attention (FAM, shared) and a masked classifier (MLP, private) on a frozen encoder.

    With image features I and the prompts' vectors t_c,

        v = (a * I) / ||a * I||,  a = FAM(I),      L = L_con(v, t) + L_MLP(MLP(v), y) + 0.04 L_sim(MLP(v), v . t)

    where L_con is a symmetric InfoNCE over the batch, L_MLP the task loss and L_sim a divergence per class over the
    batch. Prediction: `alpha p_MLP + (1 - alpha) p_FAM`, alpha = H_FAM / (H_FAM + H_MLP). Server: the mean of FAM over
    clients, each the same. The paper tests the received FAM with the client's own MLP, which is the model that results
    call the server's.

    Needs an encoder with a text side and nothing tuned: `model.finetune_blocks = 0`.
    """

    name: ClassVar[str] = "fedmedclip"
    title: ClassVar[str] = "FedMedCLIP: masked feature attention shared, masked classifier private"
    citation: ClassVar[str] = (
        "FedMedCLIP: federated adaptation of a frozen CLIP encoder with masked feature attention and a private "
        "classifier (2025)."
    )
    skews: ClassVar[tuple[str, ...]] = ("feature", "label")
    travels: ClassVar[str] = "the attention over features: two masked linear layers with their thresholds"
    needs_text: ClassVar[bool] = True
    stays: ClassVar[str] = "the private classifier, its batch norms included"
    extra_cost: ClassVar[str] = "none; the encoder runs once"

    weights: Weights = "uniform"
    lr_mlp: float = Field(1e-4, gt=0, description="learning rate of the private classifier; training.lr is FAM's")
    contrastive: Contrastive = Field("instance", description="form of L_con; none: without it")
    private_mlp: bool = Field(True, description="with the private classifier; without it, cosines alone predict")
    agreement: Agreement = Field("entropy", description="form of L_sim; none: without it")
    strength: float = Field(0.04, ge=0, alias="lambda", description="weight of L_sim (lambda)")
    temperature: float = Field(2.0, gt=0, description="of the softmax over the batch in L_sim (T)")
    entropy_mode: EntropyMode = Field("true", description="reference: softmaxed twice, as the published code")
    aggregate: bool = Field(True, description="share FAM; without, every client trains alone")
    surrogate: Surrogate = Field("dst", description="how thresholds learn; reference: they do not, as published")
    norm: Norm = Field("instance", description="in FAM; batch: as in the first release")
    activation: Activation = Field("relu", description="in FAM; relu6: as in the published README")
    hidden: int = Field(512, ge=1, description="width of the private classifier")

    def edit(self, model: Classifier, image_size: int) -> None:
        """Put FAM behind the encoder and the private classifier behind FAM.

        Raises:
            InputError: the encoder has no text side, or some of its blocks would train.
        """
        need_prompts(model, self.name)
        model.neck = FeatureAttention(model.head.in_features, self.norm, self.activation, self.surrogate)
        size, classes = model.head.in_features, model.head.out_features
        private = PrivateMLP(size, classes, self.hidden, self.surrogate)
        model.head = private if self.private_mlp else CosineHead(prompts_of(model), size)  # type: ignore[assignment]

    def rules(self, model: Classifier) -> Rules:
        """FAM is shared; the classifier is local, whatever `model.head` says."""
        rules = super().rules(model).local(model.head)
        return rules if self.aggregate else rules.local(model.neck)

    # ---- client half

    def optimizer(self, client: Client, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        """Two groups: FAM, and the classifier with its own rate."""
        return client.optimizer(client.apart(parameters, client.model.head.parameters(), self.lr_mlp))

    def train(self, client: Client, phase: str) -> float:
        """Local training; what the last step left is brought within bounds too."""
        loss = super().train(client, phase)
        settle(client.model)
        return loss

    def loss(self, step: Step) -> Tensor:
        """L_con + L_MLP + lambda L_sim, each where it is switched on."""
        prompts, v = prompts_of(step.client.model), step.features
        parts: dict[str, Tensor] = {}
        if self.contrastive != "none":
            parts["contrastive_loss"] = contrastive_loss(prompts.logits(v), step.labels, self.contrastive)
        if self.private_mlp:
            parts["mlp_loss"] = step.task_loss
            if self.agreement != "none":
                parts["agreement_loss"] = self.strength * self._disagreement(step.logits, prompts, v)
        if not parts:
            raise InputError('method.contrastive = "none" and method.private_mlp = false leave nothing to train with')
        for name, part in parts.items():
            step.client.log[name] = float(part.detach())
        return torch.stack(list(parts.values())).sum()

    def _disagreement(self, mlp_logits: Tensor, prompts: Prompts, v: Tensor) -> Tensor:
        p_mlp, p_fam = torch.softmax(mlp_logits, 1), torch.softmax(prompts.logits(v), 1)
        alpha = certainty(p_mlp, p_fam, self.entropy_mode)
        return agreement_loss(mlp_logits, prompts.cosines(v), alpha, self.agreement, self.temperature)

    def predict(self, client: Client, inputs: Tensor) -> Tensor:
        """Log-probabilities of the ensemble; of the cosines alone without a private classifier."""
        v = client.model.features(inputs).float()
        by_text = prompts_of(client.model).logits(v)
        return mixture(client.model.classify(v), by_text, self.entropy_mode) if self.private_mlp else by_text

    def predict_shared(self, client: Client, inputs: Tensor) -> Tensor:
        """Scaled cosines of the shared attention: a site that never trained has no classifier of its own."""
        return prompts_of(client.model).logits(client.model.features(inputs).float())

    def predicts_alone(self, model: Classifier) -> bool:
        """The prompts do, where an attention is shared."""
        return self.aggregate
