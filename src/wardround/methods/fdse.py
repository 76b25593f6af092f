"""FDSE: all clients share what extracts features; each has its own erasers of its domain's skew."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar, Literal

from pydantic import Field
from torch import Tensor

from wardround.federation.rules import Rules
from wardround.federation.server import Reply, Server
from wardround.methods.alignment import Divergence
from wardround.methods.base import FedAvg
from wardround.methods.consistency import Consistency
from wardround.methods.fdse_parameters import Kept, lengths, shared_parameters
from wardround.methods.proximal import anchors
from wardround.models.classifier import Classifier
from wardround.models.records import recording
from wardround.models.shift_eraser import decompose_convolutions, insert_erasers, shift_erasers
from wardround.training.client import Client, Step


class FDSE(FedAvg):
    """Wang et al., CVPR 2025. A layer is an extractor (DFE) and an eraser (DSE); see `models.shift_eraser`.

    - Client: `L_task + lambda * sum_l w_l KL(N(g_l, v_l) || N(f_l, u_l))` from round 2 on, `w_l ~ exp(beta l)`; f_l
      and u_l are running moments per channel of what leaves eraser l, g_l and v_l the average that the server sent.
    - Server, for every tensor by itself: a shared parameter moves by the consensus step, an eraser's becomes its
      client's own average by similarity (`methods.consensus`), buffers are averaged.

    The moments inside an eraser never leave the client. A client that has not yet answered gets the plain mean of the
    others' erasers. With one client, or equal steps, the shared parameters become those of FedAvg up to rounding; with
    a large tau so do the erasers. `fdse_released` is the regulariser of the authors' code, which is no distance.

    The authors train from scratch and replace layers: `convolutions` (linear layers stay as they are). Pretrained
    weights would be lost. So by default, a reading of ours, erasers are put in front of the blocks that train, and
    these are the extractors. The server must see all steps at once: it keeps a round's replies, many of them on disk.
    """

    name: ClassVar[str] = "fdse"
    title: ClassVar[str] = "FDSE: shared extractors, personal erasers of domain shift"
    citation: ClassVar[str] = (
        "Wang, Wang, Wang, Fan, Wang. Federated Learning with Domain Shift Eraser. CVPR 2025, arXiv:2503.13063."
    )
    skews: ClassVar[tuple[str, ...]] = ("feature",)
    travels: ClassVar[str] = f"{FedAvg.travels}; the erasers; a length for each parameter"
    stays: ClassVar[str] = f"{FedAvg.stays}; the moments inside the erasers"
    extra_cost: ClassVar[str] = "the erasers' passes; a quadratic program for each tensor at the server"
    individual: ClassVar[bool] = True

    weights: Literal["examples", "uniform"] = Field(
        "uniform", description="what a client counts in averages of buffers: its training images, or as any other"
    )
    layers: Literal["before-blocks", "convolutions"] = Field(
        "before-blocks", description="erasers before the blocks that train, or convolutions replaced, as published"
    )
    strength: float = Field(0.01, ge=0, alias="lambda", description="weight of the consistency regulariser (lambda)")
    tau: float = Field(0.5, gt=0, description="temperature of the averages by similarity")
    beta: float = Field(0.1, ge=0, description="growth of the regulariser's weights with depth")
    m_loc: float = Field(0.1, gt=0, le=1, description="weight of the new batch in a client's running moments")
    divergence: Divergence = Field("kl", description="how local and average moments are compared")
    eps: float = Field(1e-3, gt=0, description="added to variances before they are compared")

    def edit(self, model: Classifier, image_size: int) -> None:
        """Put the erasers in, as `layers` says; `InputError` where there is no place for them."""
        if self.layers == "convolutions":
            decompose_convolutions(model)
        else:
            insert_erasers(model, image_size)

    def rules(self, model: Classifier) -> Rules:
        """FedAvg's, with the moments inside the erasers local."""
        return super().rules(model).local(*(layer.norm for layer in shift_erasers(model)))

    def statistic_shapes(self, model: Classifier, image_size: int, phase: str) -> Mapping[str, Sequence[int]]:
        """A scalar for each shared parameter."""
        return dict.fromkeys(shared_parameters(model, self.rules(model)), ())

    def cautions(self, model: Classifier, examples: Mapping[str, int]) -> list[str]:
        """Replaced convolutions have lost half of their filters."""
        if self.layers == "before-blocks" or not len(model.frozen):
            return []
        return ['fdse replaced the convolutions of a partly frozen network; layers = "before-blocks" keeps them.']

    # ---- client half

    def train(self, client: Client, phase: str) -> float:
        """Local training while the layers record what leaves their erasers."""
        layers, parameters = shift_erasers(client.model), shared_parameters(client.model, client.rules)
        client.scratch["start"] = dict(zip(parameters, anchors(list(parameters.values())), strict=True))
        client.scratch["consistency"] = Consistency(layers, self.m_loc)
        with recording(layers):
            return super().train(client, phase)

    def loss(self, step: Step) -> Tensor:
        """The task loss and, from round 2 on, lambda times the regulariser."""
        task, client = super().loss(step), step.client
        if not self.strength or client.round == 1:
            return task
        consistency: Consistency = client.scratch["consistency"]
        distance = consistency.loss(self.beta, self.divergence, self.eps)
        client.log["consistency_loss"] = float(distance.detach())
        return task + self.strength * distance

    def statistics(self, client: Client) -> Mapping[str, Tensor]:
        """The lengths that the server needs."""
        return lengths(shared_parameters(client.model, client.rules), client.scratch["start"])

    # ---- server half

    def state_for(self, server: Server, client: str) -> Mapping[str, Tensor]:
        """The server's state with the client's own erasers."""
        return {name: server.memory.get(f"{client}/{name}", tensor) for name, tensor in server.state.items()}

    def combine(self, server: Server, phase: str, replies: Iterator[Reply]) -> None:
        """Average as ever; then move the shared parameters by consensus, and give every client its erasers."""
        kept = Kept(server.state)
        super().combine(server, phase, kept.keeping(replies))
        moved, own = kept.combined(self.tau)
        server.state, server.memory = server.state | moved, server.memory | own
