"""A small federation to try a method on, in which every message and every change of state can be looked at.

For `wardround.methods.check` and for tests of single methods. Four clients show what a hospital can be like: two
ordinary ones of different size, one with a single image, one without any.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import torch
from torch import Tensor

from wardround import seeds
from wardround.answering import NO_CAPTIONS, STATE, Answerer, under
from wardround.captions.gathering import GatheredCaptions, gather
from wardround.captions.inserting import insert_captions
from wardround.captions.options import CaptionOptions
from wardround.captions.template import TemplateCaptions
from wardround.captions.text_encoders import WordVectors
from wardround.captions.vocabulary import Vocabulary
from wardround.data import Federation
from wardround.data.federation import ClientData, Samples, samples
from wardround.errors import InputError, RunError
from wardround.federation.codecs import codec_named
from wardround.federation.local import InProcess
from wardround.federation.messages import BadMessage, Message
from wardround.federation.observers import Observer
from wardround.federation.rounds import EVALUATE, RoundLoop, RoundOptions
from wardround.federation.rules import Owner, Rules
from wardround.federation.server import Server
from wardround.federation.store import ClientStore
from wardround.methods.base import Method, ServerSide
from wardround.models.classifier import Classifier, Depth, build_classifier
from wardround.models.encoders.text import TextTower
from wardround.models.options import CorrectorKind, ModelOptions
from wardround.models.prompts import TextOptions, prompts_for
from wardround.training.cache import PrefixCache
from wardround.training.client import Client
from wardround.training.options import TrainingOptions

State = Mapping[str, Tensor]

# Training images of each of four classes. The large client lacks a class, the single one three.
CLIENTS: dict[str, tuple[int, ...]] = {
    "large": (5, 4, 4, 0),
    "small": (2, 3, 2, 2),
    "single": (0, 0, 1, 0),
    "empty": (0, 0, 0, 0),
}
HELD_OUT = "elsewhere"  # a site that is no client
CLASSES = 4
MODALITIES = ("photograph", "scan")
ROUNDS = 3
# Thirteen images make batches of four, four and five; every `auto` is decided, so that trials are alike everywhere.
TRAINING: dict[str, Any] = {
    "batch_size": 4,
    "lr": 0.05,
    "cache_type": "float32",
    "memory_format": "contiguous",
    "depthwise": "library",
    "device": "cpu",
}


class MadeUpText(TextTower):
    """A text side without a language: a word is a vector drawn by its letters, a sentence the mean of its words.

    Args:
        dim: D of the image features that it stands beside.
    """

    context_width = 8

    def __init__(self, dim: int) -> None:
        self.dim = dim
        self._project = torch.randn(self.context_width, dim, generator=torch.Generator().manual_seed(0))

    def encode(self, texts: Sequence[str]) -> Tensor:
        """`(n, D)`."""
        return torch.stack([embedded.mean(0) for embedded in map(self._words, texts)]) @ self._project

    def encode_context(self, context: Tensor, names: Sequence[str]) -> Tensor:
        """`(n, D)`, differentiable in the context `(L, W)` or `(n, L, W)`."""
        rows = context.expand(len(names), *context.shape[-2:])
        sentences = [torch.cat([row, self._words(name)]).mean(0) for row, name in zip(rows, names, strict=True)]
        return torch.stack(sentences) @ self._project

    def token_embeddings(self, texts: Sequence[str]) -> Tensor:
        """`(n, T, W)` of texts with the same number of words."""
        return torch.stack([self._words(text) for text in texts])

    def _words(self, text: str) -> Tensor:
        streams = [torch.Generator().manual_seed(sum(map(ord, word))) for word in text.split()]
        return torch.stack([torch.randn(self.context_width, generator=stream) for stream in streams])


@dataclass(frozen=True)
class Network:
    """A network to try methods on, with random weights.

    Attributes:
        backbone: as in an experiment file.
        image_size: in pixels.
        finetune_blocks: how many of its last blocks train.
        head: `local` or `shared`.
        logit_corrector: none, or a kind.
        dropout: before the head.
        text: with a made-up text side, as an encoder.
        captions: of the training images, from templates; None for none.
    """

    backbone: str
    image_size: int
    finetune_blocks: Depth
    head: Literal["local", "shared"] = "local"
    logit_corrector: Literal["none"] | CorrectorKind = "none"
    dropout: float = 0.2
    text: bool = False
    captions: CaptionOptions | None = None

    def model(self, method: Method, seed: int = 0) -> Classifier:
        """The network for `CLASSES` classes as `method` edits it.

        Raises:
            InputError: the method does not go with this network.
        """
        options = ModelOptions(
            backbone=self.backbone,
            pretrained=False,
            finetune_blocks=self.finetune_blocks,
            head=self.head,
            dropout=self.dropout,
            logit_corrector=self.logit_corrector,
        )
        model = build_classifier(options, CLASSES, 3, self.image_size, seed, modalities=MODALITIES)
        if self.text:
            tower = MadeUpText(model.head.in_features)
            model.prompts = prompts_for(tower, tuple("wxyz"), TextOptions(), 100.0, seed)
        if self.captions is not None:
            if not method.goes_with_captions():
                raise InputError(f"{method.name} takes no captions")
            insert_captions(model, self.captions, WordVectors.dim, seed)
        with seeds.torch_scope(seed, "edit"):
            method.edit(model, self.image_size)
        return model


@dataclass(frozen=True)
class Visit:
    """One answer of one client.

    Attributes:
        round, phase, client: which.
        frame: the server's message as it travelled.
        down: the same, decoded.
        up: the client's reply, decoded.
        changed: entries of the model that differ afterwards from what was loaded.
        before: the local entries at the start.
        after: the local entries that the client keeps.
    """

    round: int
    phase: str
    client: str
    frame: bytes
    down: Message
    up: Message
    changed: frozenset[str]
    before: State
    after: State


class ObservedAnswerer(Answerer):
    """A client half that keeps a record of what it does, and its last error."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.visits: list[Visit] = []
        self.failure: Exception | None = None
        self._loaded: State = {}

    def load(self, name: str, message: Message) -> Client:
        """Also note what the model holds before anything happens."""
        client = super().load(name, message)
        self._loaded = {entry: tensor.clone() for entry, tensor in self.model.state_dict().items()}
        return client

    def answer(self, client: str, frame: bytes) -> bytes:
        """Also note what came of it."""
        try:
            answer = super().answer(client, frame)
        except Exception as error:
            self.failure = error
            raise
        loaded, down = self._loaded, self._decode(frame)
        now = self.model.state_dict()
        changed = frozenset(name for name, tensor in now.items() if not torch.equal(tensor, loaded[name]))
        before, after = self.side.rules.pick(loaded, Owner.LOCAL), under(STATE, self.store.get(client))
        scalars = down.scalars
        visit = Visit(
            scalars["round"], scalars["phase"], client, frame, down, self.codec.decode(answer), changed, before, after
        )
        self.visits.append(visit)
        return answer


class History(Observer):
    """The server's shared state and log after every round.

    Attributes:
        servers: states; the first is the one that the run starts from.
        logs: of every round.
    """

    def __init__(self, start: State) -> None:
        self.servers, self.logs = [dict(start)], list[dict[str, float]]()

    def round_ended(self, round: int, server: Server) -> None:
        """Keep both."""
        self.servers.append(dict(server.state))
        self.logs.append(dict(server.log))


class Trial:
    """A run of a method in this process, over the real codec, transport and round loop.

    Only the last round's personal models are evaluated.

    Args:
        method: what is tried.
        network: on what.
        clients: some of `CLIENTS`, in an order; or training images per class for any other name.
        seed: of every draw.
        training: keys of the `[training]` section that differ from `TRAINING`.
    """

    def __init__(
        self,
        method: Method,
        network: Network,
        clients: Iterable[str] | Mapping[str, Sequence[int]] = tuple(CLIENTS),
        seed: int = 0,
        **training: Any,
    ) -> None:
        self.method, self.network, self.seed = method, network, seed
        counts = clients if isinstance(clients, Mapping) else {name: CLIENTS[name] for name in clients}
        self.federation = tiny_federation(counts, network.image_size)
        self.options = TrainingOptions(**TRAINING | training)
        self.answerer = self.new_answerer()
        self.model, self.side = self.answerer.model, ServerSide(method, self.answerer.model, network.image_size)
        self.history = History(self.side.initial_state)
        self.loop = RoundLoop(
            method=self.side,
            server=Server(dict(self.side.initial_state)),
            transport=InProcess(self.answerer.codec, self.answerer, hand_over=False),  # the frames are looked at
            clients=self.federation.names,
            rounds=0,
            options=RoundOptions(quorum=1.0, evaluate_every=10**6, evaluate_server=False),
            seed=seed,
            observers=[self.history],
        )

    def new_answerer(self) -> ObservedAnswerer:
        """The client half of this trial as it was at the start."""
        model, size = self.network.model(self.method, self.seed), self.network.image_size
        cache = PrefixCache(model, self.options, size, "none", self.seed, torch.device("cpu"), 2**30, None)
        store, codec = ClientStore(Path("state"), 2**30), codec_named("float32")
        return ObservedAnswerer(
            self.method, model, self.federation, self.options, size, cache, store, codec, self.seed, None,
            captions=self._captions(),
        )  # fmt: skip

    def _captions(self) -> GatheredCaptions:
        options, data = self.network.captions, self.federation
        if options is None:
            return NO_CAPTIONS
        provider = TemplateCaptions(Vocabulary(data.classes, data.modalities), self.seed)
        return gather(options, data, provider, WordVectors(), self.seed, self.options.batch_size)

    def run(self, rounds: int) -> Self:
        """Go on until `rounds` rounds are done.

        Raises:
            AssertionError: the server may not send what it would, a client failed, or its reply was refused.
        """
        self.loop.rounds = rounds
        try:
            self.loop.run()
        except (RunError, BadMessage) as error:
            raise AssertionError(str(error)) from self.answerer.failure
        return self

    def visits(self, client: str | None = None, round: int | None = None) -> list[Visit]:
        """The visits that trained, of one client or all, in one round or all."""
        return [
            visit
            for visit in self.answerer.visits
            if visit.phase != EVALUATE and client in (None, visit.client) and round in (None, visit.round)
        ]


class Bench:
    """A method on a network, with the trial that most checks look at.

    Args:
        method: what is checked.
        network: on what.
        rounds: how many rounds the trial has; more than three where a method does something less often.
    """

    def __init__(self, method: Method, network: Network, rounds: int = ROUNDS) -> None:
        self.method, self.network, self.rounds = method, network, rounds

    @cached_property
    def trial(self) -> Trial:
        """All four clients of `trial.CLIENTS`, after `rounds` rounds."""
        return Trial(self.method, self.network).run(self.rounds)

    @property
    def model(self) -> Classifier:
        """The model of the trial."""
        return self.trial.model

    @property
    def rules(self) -> Rules:
        """Who owns what."""
        return self.trial.side.rules

    @property
    def averages(self) -> bool:
        """Whether the method's aggregation is the default, a weighted average."""
        return type(self.method).combine is Method.combine


def tiny_federation(counts: Mapping[str, Sequence[int]], size: int) -> Federation:
    """Noise images `(size, size, 3)` that are brighter the higher their class, and differ in tone by client. What they
    are called takes turns between the modalities.

    Each client has `counts` training images a class, one test image a class, and validation images if it trains. A
    held-out site, for methods that are transductive, has two images a class.
    """
    clients = tuple(
        ClientData(
            name,
            _images(name, "train", wanted, size),
            _images(name, "val", [int(sum(wanted) > 1)] * CLASSES, size),
            _images(name, "test", [1] * CLASSES, size),
        )
        for name, wanted in counts.items()
    )
    nothing, images = (_images(HELD_OUT, "test", [number] * CLASSES, size) for number in (0, 2))
    apart = ClientData(HELD_OUT, nothing, nothing, images)
    return Federation(clients, tuple("wxyz"), "trial", MODALITIES, held_out=(apart,))


def _images(client: str, split: str, wanted: Sequence[int], size: int) -> Samples:
    stream = seeds.numpy_stream(0, f"trial {split}", client=client)
    labels = stream.permutation(np.repeat(np.arange(CLASSES), wanted))
    noise = stream.integers(0, 120, (len(labels), size, size, 3))
    tone = stream.integers(0, 40, 3)
    images = (noise + tone + 30 * labels[:, None, None, None]).astype(np.uint8)
    names = [f"{client}/{split}/{i}" for i in range(len(labels))]
    return samples(images, labels, names, np.arange(len(labels)) % len(MODALITIES))
