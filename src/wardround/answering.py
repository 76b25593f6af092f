"""The client half of a federation: one function that answers a message, whatever carried it.

A worker keeps one model and lends it to its clients in turn. A client is what is loaded into it: the received shared
state, the client's own local state, its images and its streams.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from wardround.captions.embedding import EmbeddedCaptions
from wardround.captions.gathering import GatheredCaptions
from wardround.data import Federation, Samples, SplitName
from wardround.data.federation import WITHHELD, joined
from wardround.evaluation.metrics import Metrics, evaluate_probabilities, softmax
from wardround.evaluation.predictions import write_predictions
from wardround.federation.codecs import Codec
from wardround.federation.messages import BadMessage, Message, Schema, Spec, check, named, plain_copy, room_for, shorten
from wardround.federation.reports import check_instructions, released
from wardround.federation.rounds import EVALUATE
from wardround.federation.rules import Owner
from wardround.federation.store import Store
from wardround.methods.base import Method, ServerSide
from wardround.models.caption_fusion import telling
from wardround.models.classifier import Classifier
from wardround.models.label_counts import KnowsLabelCounts
from wardround.training.arithmetic import compile_if_asked
from wardround.training.cache import PrefixCache
from wardround.training.client import Client
from wardround.training.inputs import Inputs
from wardround.training.options import TrainingOptions

EVALUATION_BATCH = 256
NO_CAPTIONS = GatheredCaptions()
Predict = Callable[[Client, Tensor], Tensor]
STATE, MEMORY, PERSONAL = "state", "memory", "personal"  # name spaces of a client's stored tensors


class Answerer:
    """Answers for every client of a federation, one at a time.

    Args:
        method: its client half is used.
        model: the edited model; its present local entries are every client's start.
        federation: the images.
        options: the `[training]` section.
        image_size: side of the images, in pixels.
        cache: makes the inputs.
        store: the clients' local state.
        codec: how frames are coded.
        seed: the experiment's seed.
        folder: the run's folder, for predictions and checkpoints; None writes nothing.
        min_count: nothing that sums up fewer images than this leaves a client.
        captions: of the clients' images; they are told in training, and nowhere else but in `_judge_told`.
    """

    def __init__(
        self,
        method: Method,
        model: Classifier,
        federation: Federation,
        options: TrainingOptions,
        image_size: int,
        cache: PrefixCache,
        store: Store,
        codec: Codec,
        seed: int,
        folder: Path | None,
        min_count: int = 0,
        captions: GatheredCaptions = NO_CAPTIONS,
    ) -> None:
        self.min_count, self.captions = min_count, captions
        self.method, self.model, self.federation, self.options = method, model, federation, options
        self.cache, self.store, self.codec, self.seed, self.folder = cache, store, codec, seed, folder
        self.side = ServerSide(method, model, image_size)
        compile_if_asked(model, options)
        self._entries = model.state_dict()  # views into the model: loading is copying into them
        self._initial = self._copy(Owner.LOCAL)
        self._inputs: dict[tuple[str, SplitName], Inputs] = {}
        self._broadcast: tuple[bytes, Message] | None = None
        self._accepted: Message | None = None

    def answer(self, client: str, frame: bytes) -> bytes:
        """The reply's frame.

        Raises:
            BadMessage: the server's message is not what this client accepts.
        """
        return self.codec.encode(self.reply(client, self._decode(frame)))

    def hand(self, client: str, message: Message) -> Message:
        """The reply itself, for a server in the same process.

        Raises:
            BadMessage: the server's message is not what this client accepts.
        """
        if self._accepted is not message:
            self._check(message)
            self._accepted = message
        reply = self.reply(client, message)
        return Message({name: plain_copy(tensor) for name, tensor in reply.tensors.items()}, reply.scalars)

    def reply(self, name: str, message: Message) -> Message:
        """Load the client, do what `message` asks, keep its local state, and say what may be said."""
        self.store.begin(name, message.scalars)
        client = self.load(name, message)
        scalars: dict[str, Any] = {"examples": len(client)}
        if message.scalars.get("evaluate_received") and self.side.initial_state:
            scalars["received"] = self._evaluate(client, "received", final=message.scalars["phase"] == EVALUATE)
        if message.scalars["phase"] == EVALUATE:
            return Message({}, scalars)
        started = time.perf_counter()
        scalars["loss"] = _finite(self.method.train(client, client.phase)) if len(client) else None
        scalars["seconds"] = time.perf_counter() - started
        tensors = self._outgoing(client)
        self._keep(client)
        if message.scalars.get("evaluate_personal"):
            tensors = {name: plain_copy(tensor) for name, tensor in tensors.items()}
            if len(client):
                self.method.personalise(client)
            final = bool(message.scalars.get("final"))
            scalars["personal"] = self._evaluate(client, "personal", final)
            scalars |= self._judge_told(client) if final else {}
        scalars["log"] = {key: _finite(value) for key, value in client.log.items()}
        scalars |= self._counts(client, tensors)
        if 0 < len(client) < self.min_count:
            scalars |= {"loss": None, "log": {}}
        if message.scalars.get("checkpoint"):
            self._checkpoint(client, message.scalars["checkpoint_round"], final=bool(message.scalars.get("final")))
        return Message(tensors, scalars)

    def judge(self, name: str, message: Message) -> Metrics:
        """Metrics on a client's test images of what is shared in `message`, alone."""
        scores: Metrics = self._evaluate(self.load(name, message), "shared", final=True)["test"]
        return scores

    def restore(self, states: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Start from the local states of a checkpoint."""
        for client, state in states.items():
            self.store.put(client, resumable(state))

    def client_inputs(self, name: str, split: SplitName) -> Inputs:
        """The inputs of one split, made when first asked for and kept while this object lives."""
        if (name, split) not in self._inputs:
            samples = self.federation.client(name).split(split)
            self._inputs[name, split] = self.cache.inputs(name, samples, training=split == "train")
        return self._inputs[name, split]

    @cached_property
    def _unlabelled(self) -> Inputs | None:
        """The images of held-out sites; what they show is not told."""
        parts = [replace(site.test, labels=np.full(len(site.test), WITHHELD)) for site in self.federation.held_out]
        return self.cache.inputs("held-out", joined(parts), training=False) if parts else None

    # ---- loading and keeping

    def load(self, name: str, message: Message) -> Client:
        """Put the received shared state and the client's own into the model, which is then this client's."""
        stored = self.store.get(name)
        with torch.no_grad():
            for entry, tensor in ({**self._initial, **under(STATE, stored)} | message.under(STATE)).items():
                self._entries[entry].copy_(tensor)
        train = self.federation.client(name).train
        counts = torch.from_numpy(train.counts(len(self.federation.classes)))
        set_label_counts(self.model, counts)
        if self.model.training:
            self.model.eval()
        return Client(
            name=name,
            round=int(message.scalars["round"]),
            seed=self.seed,
            model=self.model,
            rules=self.side.rules,
            inputs=self.client_inputs(name, "train"),
            labels=torch.from_numpy(train.labels),
            modality=torch.from_numpy(train.modality),
            counts=counts,
            options=self.options,
            received=self._own(message.under("target")),
            memory=self._own(under(MEMORY, stored)),
            phase=message.scalars["phase"],
            unlabelled=self._unlabelled if self.method.transductive else None,
            captions=self.captions.training.get(name),
        )

    def _decode(self, frame: bytes) -> Message:
        if self._broadcast is None or self._broadcast[0] is not frame:
            message = self.codec.decode(frame, room_for(self.request_schema))
            self._check(message)
            self._broadcast = (frame, message)
        return self._broadcast[1]

    def _check(self, message: Message) -> None:
        check(message, self.request_schema)
        check_instructions(message)
        self._check_phase(message.scalars["round"], message.scalars["phase"])

    def _check_phase(self, round: int, phase: str) -> None:
        known = {EVALUATE, *self.method.phases(round), *self.method.closing_phases()}
        if phase not in known:
            raise BadMessage(f"phase '{shorten(phase)}' is none of this method's ({', '.join(sorted(known))})")

    @cached_property
    def request_schema(self) -> Schema:
        """What tensors the server may send: the shared state, and the method's targets."""
        known = {n: Spec.of(t) for n, t in named(STATE, self.side.initial_state).items()}
        targets = self.method.target_shapes(self.side)
        return known | {f"target/{n}": Spec(tuple(shape), required=False) for n, shape in targets.items()}

    def _own(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies on the model's device: one client's changes reach neither the store nor the next client."""
        device = next(iter(self._entries.values())).device
        return {name: tensor.to(device, copy=True) for name, tensor in tensors.items()}

    def _copy(self, *owners: Owner) -> dict[str, Tensor]:
        entries = self.side.rules.pick(self._entries, *owners)
        return {name: plain_copy(tensor) for name, tensor in entries.items()}

    def _outgoing(self, client: Client) -> dict[str, Tensor]:
        """Shared state and statistics; a client without images sends zeros, which count for nothing.

        They are views into the model: the codec copies them into the frame.
        """
        sends = self.method.sends_state(client.phase)
        shared = self.side.rules.pick(self._entries, Owner.SHARED) if sends else {}
        self.side.rules.refuse_private(shared)
        if len(client):
            given = self.method.release(client, self.method.statistics(client), self.min_count)
            statistics = {name: plain_copy(tensor) for name, tensor in given.items()}
        else:
            shapes = {} if self.method.optional_statistics else self.side.statistic_shapes(client.phase)
            statistics = {name: torch.zeros(tuple(shape)) for name, shape in shapes.items()}
        return _sound(named(STATE, shared) | named("statistic", statistics), self.side.reply_schema(client.phase))

    def _counts(self, client: Client, sent: Mapping[str, Tensor]) -> dict[str, Any]:
        """Of how many images the statistics in `sent` are made, where that is not all of the client's."""
        counts = {n: count for n, count in self.method.statistic_counts(client).items() if f"statistic/{n}" in sent}
        return {"counts": counts} if counts else {}

    def _keep(self, client: Client) -> None:
        """Store local state and method memory, once all that training has left proved finite."""
        kept = named(STATE, self.side.rules.pick(self._entries, Owner.LOCAL)) | named(MEMORY, client.memory)
        self.store.put(client.name, _sound(kept, {name: Spec.of(tensor) for name, tensor in kept.items()}))

    def _checkpoint(self, client: Client, round: int, final: bool) -> None:
        """Save the client's state for the checkpoint of `round`, this one or a later one."""
        if self.folder is not None:
            personal = named(PERSONAL, self._personal(client.name)) if final else {}
            partial = self.folder / "checkpoints" / f"round-{round:04d}.partial"
            self.store.save(client.name, partial, personal)

    def _personal(self, name: str) -> dict[str, Tensor]:
        """The entries of the personal model that are not kept as local state anyway."""
        kept = under(STATE, self.store.get(name))
        entries = self._copy(Owner.SHARED, Owner.LOCAL)
        return {entry: t for entry, t in entries.items() if entry not in kept or not torch.equal(t, kept[entry])}

    # ---- evaluation

    def _evaluate(self, client: Client, which: str, final: bool) -> dict[str, Any]:
        """Metrics on the client's validation and test images; predictions on the latter are kept when final."""
        started = time.perf_counter()
        scores: dict[str, Any] = {}
        data = self.federation.client(client.name)
        predict = self._predictions[which]
        for split in ("val", "test"):
            samples = data.split(split)
            logits = self.logits(client, split, samples, predict)
            scores[split] = released(evaluate_probabilities(softmax(logits), samples.labels), self.min_count)
            if final and split == "test" and self.folder is not None:
                write_predictions(self.folder, client.name, samples.names, samples.labels, which, logits)
        scores["seconds"] = time.perf_counter() - started
        return scores

    def _judge_told(self, client: Client) -> dict[str, Any]:
        """`captioned`: metrics of the personal model on test images fused with their captions; nothing without any.

        There are only any where `captions.at_test` asks for it.
        """
        captions, samples = self.captions.testing.get(client.name), self.federation.client(client.name).test
        if captions is None:
            return {}
        logits = self.logits(client, "test", samples, told(self.method.predict, captions))
        return {"captioned": released(evaluate_probabilities(softmax(logits), samples.labels), self.min_count)}

    @cached_property
    def _predictions(self) -> Mapping[str, Predict]:
        method = self.method
        return {"personal": method.predict, "received": method.predict_received, "shared": method.predict_shared}

    def logits(self, client: Client, split: SplitName, samples: Samples, predict: Predict | None = None) -> np.ndarray:
        """A model's logits `(N, C)`, float32, on one split; those of the personal one unless told otherwise."""
        client.model.eval()
        inputs = self.client_inputs(client.name, split)
        modality = torch.from_numpy(samples.modality)
        return logits_in_batches(
            predict or self.method.predict, client, inputs, len(samples), EVALUATION_BATCH, modality
        )


def told(predict: Predict, captions: EmbeddedCaptions) -> Predict:
    """`predict`, with the captions of images that come in their order, batch after batch."""
    done = 0

    def told_now(client: Client, inputs: Tensor) -> Tensor:
        nonlocal done
        rows, done = torch.arange(done, done + len(inputs)), done + len(inputs)
        with telling(client.model, captions.batch(rows, client.device)):
            return predict(client, inputs)

    return told_now


def logits_in_batches(
    predict: Predict, client: Client, inputs: Inputs, count: int, size: int, modality: Tensor | None = None
) -> np.ndarray:
    """The logits `(N, C)`, float32, of the `count` images of `inputs`, `size` images at a time.

    `modality`, int64 `(count,)`, is what `client.shown` tells of each batch; None where it is not known.
    """
    parts = [torch.zeros(0, len(client.counts))]
    with torch.inference_mode():
        for start in range(0, count, size):
            rows = torch.arange(start, min(start + size, count))
            batch = inputs.batch(rows, None)  # before `arithmetic`, which is for the trained blocks alone
            client.shown = None if modality is None else modality[rows].to(client.device)
            with client.arithmetic():
                parts.append(predict(client, batch).float().cpu())
    client.shown = None
    return torch.cat(parts).numpy()


def set_label_counts(model: Classifier, counts: Tensor) -> None:
    """Tell every part of the model that asks for them the client's training images per class `(C,)`."""
    for module in model.modules():
        if isinstance(module, KnowsLabelCounts):
            module.set_counts(counts)


def resumable(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What of a client's part of a checkpoint it goes on with: not what only the finished model needs."""
    return {name: tensor for name, tensor in state.items() if not name.startswith(PERSONAL + "/")}


def under(space: str, stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A client's stored tensors of one name space, by the rest of their name."""
    return Message(stored).under(space)


def _sound(tensors: dict[str, Tensor], schema: Schema) -> dict[str, Tensor]:
    """`tensors`, unless they are not those of `schema` or not finite.

    Raises:
        BadMessage: names the first of them.
    """
    try:
        check(Message(tensors), schema)
    except BadMessage as bad:
        raise BadMessage(f"training went wrong: {bad}; a smaller training.lr may help") from bad
    return tensors


def _finite(value: float) -> float | None:
    """JSON has no NaN: an undefined number is null."""
    return value if math.isfinite(value) else None
