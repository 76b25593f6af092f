"""The base of every method. Its defaults are federated averaging; a variant overrides only what differs.

The hooks, by the question that each answers:

| hook               | question                                                       | half   |
|--------------------|----------------------------------------------------------------|--------|
| `edit`             | what is changed in the model before the run?                    | both   |
| `rules`            | whose is each entry of the model's state?                       | both   |
| `statistic_shapes`, `target_shapes` | what travels besides state, up and down?        | both   |
| `refuse`           | which training options does it not go with?                     | both   |
| `loss`             | what does a client minimise?                                    | client |
| `parameters`       | which parameters train in this round?                           | client |
| `steps`            | on which batches?                                               | client |
| `passes`           | how often does a round pass over the images?                    | both   |
| `optimizer`        | what steps do gradients become?                                 | client |
| `backward`         | how do gradients come about?                                    | client |
| `train`            | what is a round of local training?                              | client |
| `statistics`       | which statistics does this client send?                         | client |
| `statistic_counts`, `release` | of how many images is each, and which may not leave?   | client |
| `personalise`      | what makes the personal model of what training left?            | client |
| `predict`, `predict_received` | how is a prediction made, by the personal and the server's model? | client |
| `predict_shared`, `predicts_alone` | how, and can it, by what is shared alone?      | client |
| `without_modality` | how does it predict images of unknown modality, in words?       | client |
| `representations`  | what does it make of an image on the way to a prediction?       | client |
| `phases`, `sends_state` | which exchanges has a round, and is state sent up in each?  | both   |
| `closing_phases`   | which exchanges follow the last round?                         | both   |
| `state_for`, `targets` | what does the server send?                                  | server |
| `weight`, `digest`, `absorb` | how are replies averaged, and what follows?           | server |

What every method must keep to, whatever its hooks do, is in `wardround.methods.check`, which tries it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, ClassVar, Literal, Self

import torch
from pydantic import Field
from torch import Tensor, nn

from wardround.federation.averaging import WeightedMean
from wardround.federation.messages import BadMessage, Schema, Spec, named, plain_copy
from wardround.federation.rounds import TRAIN
from wardround.federation.rules import Owner, Rules
from wardround.federation.server import Reply, Server
from wardround.models.caption_fusion import caption_projection
from wardround.models.classifier import Classifier
from wardround.options import Options
from wardround.training.client import Client, Step
from wardround.training.local import fit
from wardround.training.options import TrainingOptions

FEATURES = "features"  # the pooled ones, among a method's `representations`

Weights = Annotated[
    Literal["examples", "uniform"],
    Field(description="what a client counts in averages: its training images, or the same as any other"),
]


class Method(Options):
    """What every method is made of; its defaults are federated averaging.

    A method is its own frozen configuration: the keys of the `[method]` section are its fields. It keeps no state;
    what lasts lives in `Server.memory`, `Client.memory` or the model.
    """

    name: ClassVar[str] = ""
    title: ClassVar[str] = ""
    citation: ClassVar[str] = ""
    skews: ClassVar[tuple[str, ...]] = ()
    travels: ClassVar[str] = "the trained blocks, buffers included; the head where it is shared"
    stays: ClassVar[str] = "the head where it is local; a logit corrector"
    extra_cost: ClassVar[str] = "none"
    individual: ClassVar[bool] = False
    optional_statistics: ClassVar[bool] = False
    predicts_from_memory: ClassVar[bool] = False
    needs_text: ClassVar[bool] = False
    predicts_with_text: ClassVar[bool] = False
    transductive: ClassVar[bool] = False
    takes_captions: ClassVar[bool] = True

    weights: Weights = "examples"

    # ---- both halves -------------------------------------------------------------------------------------------

    def edit(self, model: Classifier, image_size: int) -> None:
        """Change `model` in place before the run: insert modules, replace layers. Default: nothing."""

    def rules(self, model: Classifier) -> Rules:
        """Frozen blocks are nobody's; corrector, P_t of captions and a local head the client's; the rest is shared."""
        own = [*([model.head] if model.local_head else []), *caption_projection(model)]
        return Rules.of(model).frozen(model.frozen, model.prompts).local(model.corrector, *own)

    def goes_with_captions(self) -> bool:
        """Whether captions can be fused with what it trains on: not with words for classes in the place of a head."""
        return self.takes_captions and not self.needs_text

    def discreet(self) -> Self:
        """This method with whatever of its own keys makes its messages say least of single images. Default: itself."""
        return self

    def refuse(self, training: TrainingOptions) -> None:
        """Raise `InputError` for training options that the method does not go with. Default: it goes with all."""

    def statistic_shapes(self, model: Classifier, image_size: int, phase: str) -> Mapping[str, Sequence[int]]:
        """Names and shapes of the float32 tensors that travel to the server besides state. Default: none.

        With `optional_statistics`, a client may leave out any of them.
        """
        return {}

    def target_shapes(self, side: ServerSide) -> Mapping[str, Sequence[int]]:
        """Names and shapes of what `targets` may send. Default: the statistics' own.

        A dimension of -1 may have any length.
        """
        return side.statistic_shapes(TRAIN)

    def phases(self, round: int) -> Sequence[str]:
        """The exchanges of a round: `train`, once, and what comes before and after."""
        return (TRAIN,)

    def closing_phases(self) -> Sequence[str]:
        """The exchanges that follow the last round's, with the same clients. Default: none."""
        return ()

    def passes(self, training: TrainingOptions, round: int) -> int:
        """Passes over its training images that a client makes in `round`, whatever part of the model each trains.

        Curves and budgets of local epochs count by it. What is done for personal models alone is left out. Default:
        `local_epochs`.
        """
        return training.local_epochs

    def sends_state(self, phase: str) -> bool:
        """Whether clients send the shared state in `phase`. Default: always."""
        return True

    def cautions(self, model: Classifier, examples: Mapping[str, int]) -> list[str]:
        """What the report should warn of, given the training images per client. Default: nothing."""
        return []

    # ---- client half -------------------------------------------------------------------------------------------

    def train(self, client: Client, phase: str) -> float:
        """Local training of one round; returns the mean loss."""
        parameters = self.parameters(client)
        if not parameters:
            return float("nan")
        optimizer = self.optimizer(client, parameters)
        return fit(client, parameters, optimizer, self.backward, self.steps(client), self.fixed_statistics())

    def parameters(self, client: Client) -> list[nn.Parameter]:
        """The parameters that train in this round. Default: all that are not frozen."""
        return client.owned(Owner.SHARED, Owner.LOCAL)

    def steps(self, client: Client) -> Iterable[Step]:
        """The batches of this round. Default: `local_epochs` passes over the client's images."""
        return client.steps(client.options.local_epochs)

    def fixed_statistics(self) -> bool:
        """Whether batch norms none of whose parameters train in this round keep their running statistics."""
        return True

    def optimizer(self, client: Client, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        """A new optimiser for one round."""
        return client.optimizer([{"params": parameters}])

    def backward(self, step: Step) -> Tensor:
        """Fill the gradients of one step; return the loss."""
        loss = self.loss(step)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    def loss(self, step: Step) -> Tensor:
        """The local objective on one batch, a scalar."""
        return step.task_loss

    def statistics(self, client: Client) -> Mapping[str, Tensor]:
        """The tensors announced by `statistic_shapes`, after training."""
        return {}

    def statistic_counts(self, client: Client) -> Mapping[str, int]:
        """Of how many images each statistic is made, where that is not all of the client's. Default: all are of all."""
        return {}

    def release(self, client: Client, statistics: Mapping[str, Tensor], least: int) -> Mapping[str, Tensor]:
        """Those of `statistics` that are made of at least `least` images: a summary of few can betray one.

        Raises:
            BadMessage: one has to stay, and the method cannot do without it.
        """
        counts = self.statistic_counts(client)
        withheld = {name for name in statistics if counts.get(name, len(client)) < least}
        if withheld and not self.optional_statistics:
            raise BadMessage(
                f"withheld: statistics of {len(client)} images; this client gives none of fewer than {least}"
            )
        return {name: tensor for name, tensor in statistics.items() if name not in withheld}

    def personalise(self, client: Client) -> None:
        """Make `client.model` the personal model, once the reply is safe; nothing of it travels or is kept for the
        next round. Default: the model as training left it.
        """

    def predict(self, client: Client, inputs: Tensor) -> Tensor:
        """Logits `(B, C)` of the client's personal model, which is in eval mode.

        Whoever reads `client.memory` here sets `predicts_from_memory`, so that exported models have it too; whoever
        runs the encoder's text side sets `predicts_with_text`, as its weights are not exported.
        """
        logits: Tensor = client.model(inputs)
        return logits

    def predict_received(self, client: Client, inputs: Tensor) -> Tensor:
        """Logits `(B, C)` of the server's model at this client. Default: as those of the personal one."""
        return self.predict(client, inputs)

    def predict_shared(self, client: Client, inputs: Tensor) -> Tensor:
        """Logits `(B, C)` of what is shared alone, at a site that never trained. Default: as those of the server's."""
        return self.predict_received(client, inputs)

    def without_modality(self, model: Classifier) -> str:
        """How images are predicted whose modality is not known, in words. Default: empty, no prediction depends on it.

        Whoever reads `client.shown` in predicting says something here.
        """
        return ""

    def representations(self, client: Client, inputs: Tensor) -> Mapping[str, Tensor]:
        """What the client's model makes of images on the way to its logits, by name, each float32 `(B, ...)`.

        The model is in eval mode, and `client.shown` is what it is for `predict`. Default: the pooled features.
        """
        return {FEATURES: client.model.features(inputs).float()}

    def predicts_alone(self, model: Classifier) -> bool:
        """Whether what is shared can predict without any client's part. Default: unless the head is a client's own."""
        return not any(name.startswith("head.") for name in self.rules(model).names(Owner.LOCAL))

    # ---- server half -------------------------------------------------------------------------------------------

    def state_for(self, server: Server, client: str) -> Mapping[str, Tensor]:
        """The shared state that is sent. `client` is empty unless `individual` is set. Default: the server's."""
        return server.state

    def targets(self, server: Server, client: str) -> Mapping[str, Tensor]:
        """What the server sends besides state. `client` is empty unless `individual` is set. Default: nothing."""
        return {}

    def weight(self, reply: Reply) -> float:
        """A reply's weight in every average. Default: as `weights` says."""
        return reply.examples if self.weights == "examples" else 1.0

    def digest(self, reply: Reply) -> Mapping[str, Tensor]:
        """What of a reply's statistics is averaged over clients. Default: the statistics as they are."""
        return reply.message.under("statistic")

    def absorb(self, server: Server, average: Mapping[str, Tensor]) -> None:
        """Take in the average of the digests. Default: nothing."""

    def combine(self, server: Server, phase: str, replies: Iterator[Reply]) -> None:
        """Average the replies while they arrive; one without images counts for nothing, whatever `weight` says.

        Where no client has images the server stays as it is.
        """
        state, digest = WeightedMean(), WeightedMean()
        for reply in replies:
            weight = self.weight(reply) if reply.examples else 0.0
            state.add(reply.message.under("state"), weight)
            digest.add(self.digest(reply), weight)
        if state.total > 0:
            server.state = server.state | state.result()
            self.absorb(server, digest.result())


class FedAvg(Method):
    """McMahan et al., AISTATS 2017: local SGD on the task loss, then `phi = sum_k p_k phi_k`, `p_k = n_k / n`.

    With `model.finetune_blocks = "all"` the whole pretrained network is trained (FedAvg-ft); with 2 it is the
    `ft-2B` of the PAFP paper. With `model.head = "local"` each client keeps its own head.
    """

    name: ClassVar[str] = "fedavg"
    title: ClassVar[str] = "Federated averaging"
    citation: ClassVar[str] = (
        "McMahan, Moore, Ramage, Hampson, Agüera y Arcas. Communication-Efficient Learning of Deep Networks from "
        "Decentralized Data. AISTATS 2017."
    )


class ServerSide:
    """A method bound to its model: what the round loop talks to.

    Args:
        method: the method.
        model: an edited model, for names and shapes.
        image_size: side of the images, in pixels.
    """

    def __init__(self, method: Method, model: Classifier, image_size: int) -> None:
        self.method = method
        self.rules = method.rules(model)
        shared = self.rules.pick(model.state_dict(), Owner.SHARED)
        self.initial_state = {name: plain_copy(tensor) for name, tensor in shared.items()}
        self._model, self._image_size = model, image_size
        self._shapes: dict[str, Mapping[str, Sequence[int]]] = {}
        self._schemas: dict[str, Schema] = {}
        self.statistic_shapes(TRAIN)  # whatever is wrong with the model shows here

    @property
    def individual(self) -> bool:
        """Whether clients get different messages."""
        return self.method.individual

    @property
    def statistic_elements(self) -> int:
        """Numbers that one client sends at most besides state when it trains."""
        return sum(math.prod(shape) for shape in self.statistic_shapes(TRAIN).values())

    @property
    def shared_elements(self) -> int:
        """Numbers in the shared state, counters included."""
        return sum(tensor.numel() for tensor in self.initial_state.values())

    @property
    def parameter_elements(self) -> dict[str, int]:
        """Numbers in the model's parameters by their owner; buffers are not counted."""
        return {owner.value: sum(p.numel() for p in self.rules.parameters(self._model, owner)) for owner in Owner}

    def phases(self, round: int) -> Sequence[str]:
        """The exchanges of a round."""
        return self.method.phases(round)

    def closing_phases(self) -> Sequence[str]:
        """The exchanges that follow the last round's."""
        return self.method.closing_phases()

    def statistic_shapes(self, phase: str) -> Mapping[str, Sequence[int]]:
        """What travels to the server besides state in `phase`."""
        if phase not in self._shapes:
            self._shapes[phase] = self.method.statistic_shapes(self._model, self._image_size, phase)
        return self._shapes[phase]

    def reply_schema(self, phase: str) -> Schema:
        """Every shared entry where state is sent, and the statistics; nothing else."""
        if phase not in self._schemas:
            state = self.initial_state if self.method.sends_state(phase) else {}
            required = not self.method.optional_statistics
            self._schemas[phase] = {name: Spec.of(tensor) for name, tensor in named("state", state).items()} | {
                f"statistic/{n}": Spec(tuple(s), required=required) for n, s in self.statistic_shapes(phase).items()
            }
        return self._schemas[phase]

    def outgoing(self, server: Server, client: str, phase: str) -> Mapping[str, Tensor]:
        """Shared state and the method's targets; anything local raises `BadMessage`."""
        state = self.method.state_for(server, client)
        self.rules.refuse_private(state)
        return named("state", state) | named("target", self.method.targets(server, client))

    def combine(self, server: Server, phase: str, replies: Iterator[Reply]) -> None:
        """Fold the replies into `server`."""
        self.method.combine(server, phase, replies)
