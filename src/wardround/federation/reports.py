"""What a client may say beside tensors: an allow-list.

Scalars end up in logs, tables and the choice of the best round, so that a wrong one could stop the server and a
stray one could leak. A reply that says anything else, or says it in another form, is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from wardround.federation.messages import BadMessage, Message, shorten

MAX_COUNT = 10**9

Count = Annotated[int, Field(ge=0, le=MAX_COUNT)]
Seconds = Annotated[float, Field(ge=0)]
Share = Annotated[float | None, Field(ge=0, le=1)]


class Strict(BaseModel):
    """What the other side may say: these fields, in these types, and nothing else."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class Scores(Strict):
    """Metrics on one split; the shares are None where they are undefined."""

    n: Count
    accuracy: Share
    balanced_accuracy: Share
    macro_f1: Share
    auroc: Share
    ece: Share
    support: list[Count]
    confusion: list[list[Count]]

    @model_validator(mode="after")
    def _square(self) -> Scores:
        classes = len(self.support)
        if [len(row) for row in self.confusion] != [classes] * classes:
            raise ValueError("confusion and support disagree on the number of classes")
        return self


class Evaluation(Strict):
    """One model on a client's own images."""

    val: Scores
    test: Scores
    seconds: Seconds


class Report(Strict):
    """The scalars of a reply.

    Attributes:
        examples: training images that the reply stands for; the weight in averages.
        loss: mean training loss of the round.
        seconds: of training.
        log: the method's own numbers.
        counts: images behind a statistic, where that is not all of `examples`.
        personal: metrics of the client's model after training, when asked for.
        received: metrics of the server's model with the client's local parts, when asked for.
        captioned: metrics of the client's model on its test images with their captions, when `captions.at_test` is set.
    """

    examples: Count
    loss: float | None = None
    seconds: Seconds = 0.0
    log: dict[str, float | None] = {}
    counts: dict[str, Count] = {}
    personal: Evaluation | None = None
    received: Evaluation | None = None
    captioned: Scores | None = None


class Instructions(Strict):
    """The scalars of a server's message: all that it may ask of a client.

    Attributes:
        round: counted from 1.
        phase: which exchange of the round this is.
        exchange: its number in the round.
        evaluate_received: report how the received model does on the client's own images.
        evaluate_personal: report how the personal model does.
        checkpoint: keep the local state for a checkpoint.
        checkpoint_round: the round of that checkpoint.
        resumable: the oldest round that the server may go back to.
        final: nothing follows.
    """

    round: Count
    phase: Annotated[str, Field(max_length=100)]
    exchange: Count | None = None
    evaluate_received: bool = False
    evaluate_personal: bool = False
    checkpoint: bool = False
    checkpoint_round: Count = 0
    resumable: Count = 0
    final: bool = False


def check_instructions(message: Message) -> None:
    """Refuse a server's message that asks for anything else than `Instructions` provide for.

    Raises:
        BadMessage: names the first scalar that is unknown, missing or not what it should be.
    """
    try:
        Instructions.model_validate(dict(message.scalars))
    except ValidationError as error:
        raise BadMessage(_first(error)) from None


def released(scores: Mapping[str, Any], least: int) -> dict[str, Any]:
    """What of the `Scores` of one split may leave a client that tells nothing of fewer than `least` images.

    Everything but the number of images stays where there are too few of them; the tables by class stay where a class
    has some, but too few.
    """
    support = scores["support"]
    if 0 < scores["n"] < least:
        scores = {key: value if key == "n" else None for key, value in scores.items()}
    elif all(count == 0 or count >= least for count in support):
        return dict(scores)
    empty = [0] * len(support)
    return {**scores, "support": empty, "confusion": [empty] * len(support)}


def checked(message: Message) -> Message:
    """The reply with every scalar of a `Report`, defaults included.

    Raises:
        BadMessage: names the first scalar that is missing, unknown or not what it should be, but not its value.
    """
    try:
        report = Report.model_validate(dict(message.scalars))
    except ValidationError as error:
        raise BadMessage(_first(error)) from None
    return Message(message.tensors, report.model_dump())


def _first(error: ValidationError) -> str:
    problem: Any = error.errors(include_url=False, include_context=False, include_input=False)[0]
    where = ".".join(str(part) for part in problem["loc"])
    return f"scalar '{shorten(where)}': {problem['msg'].lower()}"
