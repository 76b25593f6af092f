"""PromptFL: clients learn the words of the prompt together; the encoder stays frozen."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from wardround.federation.rules import Rules
from wardround.methods.base import Method, Weights
from wardround.methods.learned_context import new_context
from wardround.methods.on_text import need_prompts, prompts_of
from wardround.models.classifier import Classifier
from wardround.models.prompts import Aside, Prompts
from wardround.models.text_head import UnitLength


class PromptHead(nn.Module):
    """In the place of a linear head: scaled cosines with prompts whose context is learned.

    Args:
        prompts: the classes, with the encoder's text side.
        size: D.
        length: tokens of the context.
        per_class: a context for every class instead of one for all.
    """

    def __init__(self, prompts: Prompts, size: int, length: int, per_class: bool) -> None:
        super().__init__()
        self.context = new_context(prompts, length, per_class)
        self._aside = Aside(prompts)
        self.in_features, self.out_features = size, len(prompts.names)

    @property
    def weight(self) -> Tensor:
        """The classes' vectors with the context as it is, `(C, D)`, of length 1."""
        prompts: Prompts = self._aside.value
        return functional.normalize(prompts.tower.encode_context(self.context, prompts.names), dim=1)

    def forward(self, v: Tensor) -> Tensor:
        """Vectors of length 1 `(B, D)` to logits `(B, C)`."""
        return self._aside.value.scale * functional.linear(v, self.weight)  # type: ignore[no-any-return]


class PromptFL(Method):
    """Guo et al., IEEE TMC 2023: prompts `[SOS] [context x L] [class] . [EOS]` whose context all learn together.

    The context starts at N(0, 0.02^2). Clients minimise the task loss on scaled cosines over the context alone; the
    server averages it, each client the same. `context = "class"` learns one for every class.
    """

    name: ClassVar[str] = "promptfl"
    title: ClassVar[str] = "PromptFL: a learned prompt, shared"
    citation: ClassVar[str] = (
        "Guo, Guo, Wang, Tang, Xu. PromptFL: Let Federated Participants Cooperatively Learn Prompts Instead of Models. "
        "IEEE Transactions on Mobile Computing 2023."
    )
    skews: ClassVar[tuple[str, ...]] = ("feature", "label")
    travels: ClassVar[str] = "the context: L token embeddings, or L for every class"
    needs_text: ClassVar[bool] = True
    stays: ClassVar[str] = "nothing that trains"
    extra_cost: ClassVar[str] = "the text side runs forwards and backwards in every step, once a class"

    predicts_with_text: ClassVar[bool] = True

    weights: Weights = "uniform"
    length: int = Field(16, ge=1, description="tokens of the context (L)")
    context: Literal["shared", "class"] = Field("shared", description="one context for all classes, or one each")

    def edit(self, model: Classifier, image_size: int) -> None:
        """Put prompts with a learned context in the place of the head.

        Raises:
            InputError: the encoder has no text side, or some of its blocks would train.
        """
        need_prompts(model, self.name)
        model.neck = UnitLength()
        model.head = PromptHead(prompts_of(model), model.head.in_features, self.length, self.context == "class")  # type: ignore[assignment]

    def rules(self, model: Classifier) -> Rules:
        """The context is shared, whatever `model.head` says."""
        return super().rules(model).shared(model.head)
