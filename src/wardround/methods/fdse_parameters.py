"""What FDSE's server does with each shared parameter, and what it must be told for that.

A statistic `step/NAME` is the length of a client's step of parameter NAME, `own/NAME` the length of a parameter of one
of its erasers. The server divides by both, and knows by them which entries of the state are which.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from wardround.federation.messages import Message
from wardround.federation.rules import Owner, Rules
from wardround.federation.server import Reply
from wardround.methods.consensus import consensus_step, similarity_averages
from wardround.models.classifier import Classifier
from wardround.models.shift_eraser import shift_erasers


def shared_parameters(model: Classifier, rules: Rules) -> dict[str, nn.Parameter]:
    """The shared parameters of `model`: as `own/NAME` those of erasers, as `step/NAME` all others."""
    own = {id(parameter) for layer in shift_erasers(model) for parameter in layer.eraser.parameters()}
    shared = rules.named_parameters(model, Owner.SHARED)
    return {f"{'own' if id(p) in own else 'step'}/{name}": p for name, p in shared.items()}


def lengths(parameters: Mapping[str, Tensor], start: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The norms of `own/...`, and of what `step/...` differ by from `start`, their values before training."""
    return {
        name: (now.detach() - start[name] if name.startswith("step/") else now.detach()).norm()
        for name, now in parameters.items()
    }


def keeping(replies: Iterator[Reply], kept: dict[str, Message]) -> Iterator[Reply]:
    """`replies` as they come; the messages of those with images are put into `kept` by client."""
    for reply in replies:
        if reply.examples:
            kept[reply.client] = reply.message
        yield reply


def combined(
    start: Mapping[str, Tensor], kept: Mapping[str, Message], tau: float
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What becomes of the parameters, from the state `start` and the clients' replies to it.

    Returns:
        The shared parameters after their consensus steps, by name; the erasers' averages by similarity, by
        `CLIENT/NAME`.
    """
    moved, own = dict[str, Tensor](), dict[str, Tensor]()
    announced = next(iter(kept.values())).under("statistic") if kept else {}
    for role, name in (entry.split("/", 1) for entry in announced):
        values = _stacked(kept, f"state/{name}")
        norms = _stacked(kept, f"statistic/{role}/{name}")
        if role == "step":
            moved[name] = start[name] + consensus_step(values - start[name], norms)
        else:
            averages = similarity_averages(values, norms, tau)
            own |= {f"{client}/{name}": average for client, average in zip(kept, averages, strict=True)}
    return moved, own


def _stacked(messages: Mapping[str, Message], name: str) -> Tensor:
    return torch.stack([message.tensors[name] for message in messages.values()])
