"""FedCLIP: a shared adapter of attention over a frozen encoder's features."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field
from torch import Tensor

from wardround.methods.base import Method, Weights
from wardround.methods.clip_losses import Contrastive
from wardround.methods.on_text import need_prompts, prompts_of
from wardround.models.classifier import Classifier
from wardround.models.text_head import AttentionAdapter, CosineHead, UnitLength
from wardround.training.client import Step
from wardround.training.losses import contrastive_loss
from wardround.training.options import TrainingOptions


class FedCLIP(Method):
    """Lu, Hu, Wang and Xie, 2023: an adapter of attention on CLIP's image features, trained against the class prompts.

    L = the symmetric InfoNCE of FedMedCLIP's L_con, or with `contrastive = "none"` the task loss on scaled cosines.
    Server: the mean of the adapters, each client the same. Prediction: the nearest prompt by cosine.
    """

    name: ClassVar[str] = "fedclip"
    title: ClassVar[str] = "FedCLIP: a shared attention adapter on frozen features"
    citation: ClassVar[str] = (
        "Lu, Hu, Wang, Xie. FedCLIP: Fast Generalization and Personalization for CLIP in Federated Learning. "
        "IEEE Data Engineering Bulletin 2023."
    )
    skews: ClassVar[tuple[str, ...]] = ("feature",)
    travels: ClassVar[str] = "the adapter: two linear layers"
    needs_text: ClassVar[bool] = True
    stays: ClassVar[str] = "nothing that trains"

    weights: Weights = "uniform"
    contrastive: Contrastive = Field("instance", description="form of the loss; none: the task loss on scaled cosines")

    def edit(self, model: Classifier, image_size: int) -> None:
        """Put the adapter behind the encoder, and the prompts in the place of the head.

        Raises:
            InputError: the encoder has no text side, or some of its blocks would train.
        """
        need_prompts(model, self.name)
        model.neck = AttentionAdapter(model.head.in_features)
        model.head = CosineHead(prompts_of(model), model.head.in_features)  # type: ignore[assignment]

    def loss(self, step: Step) -> Tensor:
        """The contrastive loss, or the task loss."""
        if self.contrastive == "none":
            return step.task_loss
        return contrastive_loss(step.logits, step.labels, self.contrastive)


class CLIPZeroShot(Method):
    """Radford et al., ICML 2021: the nearest prompt by cosine. Nothing trains and nothing travels."""

    name: ClassVar[str] = "clip-zeroshot"
    title: ClassVar[str] = "CLIP, zero-shot: the nearest prompt"
    citation: ClassVar[str] = (
        "Radford et al. Learning Transferable Visual Models From Natural Language Supervision. ICML 2021."
    )
    travels: ClassVar[str] = "nothing"
    needs_text: ClassVar[bool] = True
    stays: ClassVar[str] = "nothing that trains"
    extra_cost: ClassVar[str] = "none; nothing is trained"

    def passes(self, training: TrainingOptions, round: int) -> int:
        """None."""
        return 0

    def edit(self, model: Classifier, image_size: int) -> None:
        """Put the prompts in the place of the head.

        Raises:
            InputError: the encoder has no text side, or some of its blocks would train.
        """
        need_prompts(model, self.name)
        model.neck = UnitLength()
        model.head = CosineHead(prompts_of(model), model.head.in_features)  # type: ignore[assignment]
