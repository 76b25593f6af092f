"""What FDSE's server does with each shared parameter, and what it must be told for that.

A statistic `step/NAME` is the length of a client's step of parameter NAME, `own/NAME` the length of a parameter of one
of its erasers. The server divides by both, and knows by them which entries of the state are which.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from wardround.federation.rules import Owner, Rules
from wardround.federation.server import Reply
from wardround.methods.consensus import consensus_step, similarity_averages
from wardround.methods.stacks import Stacks
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


class Kept:
    """What the clients of a round have sent of every parameter.

    Args:
        start: the server's state that they began with.
    """

    def __init__(self, start: Mapping[str, Tensor]) -> None:
        self.start, self.clients, self.stacks = start, list[str](), Stacks()
        self.lengths: dict[str, list[Tensor]] = {}

    def keeping(self, replies: Iterator[Reply]) -> Iterator[Reply]:
        """`replies` as they come; those with images are kept."""
        for reply in replies:
            if reply.examples:
                self._keep(reply)
            yield reply

    def _keep(self, reply: Reply) -> None:
        """Steps of shared parameters as differences, erasers' parameters as they are."""
        self.clients.append(reply.client)
        state = reply.message.under("state")
        for entry, length in reply.message.under("statistic").items():
            role, name = entry.split("/", 1)
            self.stacks.append(entry, state[name] - self.start[name] if role == "step" else state[name])
            self.lengths.setdefault(entry, []).append(length)

    def combined(self, tau: float) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """What becomes of the parameters.

        Returns:
            The shared parameters after their consensus steps, by name; the erasers' averages by similarity, by
            `CLIENT/NAME`.
        """
        moved, own = dict[str, Tensor](), dict[str, Tensor]()
        for entry, lengths in self.lengths.items():
            role, name = entry.split("/", 1)
            start, norms = self.start[name], torch.stack(lengths)
            if role == "step":
                moved[name] = start + consensus_step(self.stacks[entry], norms).view_as(start)
            else:
                averages = similarity_averages(self.stacks[entry], norms, tau)
                own |= {
                    f"{client}/{name}": a.view_as(start).clone()
                    for client, a in zip(self.clients, averages, strict=True)
                }
        return moved, own
