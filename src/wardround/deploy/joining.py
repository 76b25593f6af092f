"""What a client says of itself when it joins: that it means the same, and how many images it has."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import numpy as np
from pydantic import ValidationError
from torch import Tensor

from wardround import __version__
from wardround.data import ClientData, Federation
from wardround.data.federation import SPLITS, WITHHELD, Samples, samples
from wardround.deploy.agreement import Agreement
from wardround.federation.reports import Count, Strict
from wardround.federation.rules import Owner
from wardround.methods.base import ServerSide
from wardround.models.classifier import Classifier


class SplitCounts(Strict):
    """How many images a split has; of which class only where no class has some but too few."""

    n: Count
    by_class: list[Count] | None


class Joining(Strict):
    """A client's word when it joins.

    Attributes:
        wardround: its version of this package.
        agreement: digest of its own copy of the agreement.
        frozen: digest of the frozen part of its network, which never travels.
        min_count: it tells nothing of fewer images.
        splits: its numbers of images.
    """

    wardround: str
    agreement: str
    frozen: str
    min_count: Count
    splits: dict[str, SplitCounts]


def frozen_digest(side: ServerSide, model: Classifier) -> str:
    """A hash of all that is frozen: two networks that differ there cannot be trained together."""
    digest = hashlib.sha256()
    entries: Mapping[str, Tensor] = side.rules.pick(model.state_dict(), Owner.FROZEN)
    for name in sorted(entries):
        digest.update(name.encode())
        digest.update(np.ascontiguousarray(entries[name].detach().cpu().numpy()).tobytes())
    return digest.hexdigest()


def joining(agreement: Agreement, data: ClientData, min_count: int, frozen: str) -> Joining:
    """What a client with these images says."""
    classes = len(agreement.parties.classes)
    splits: dict[str, SplitCounts] = {split: _counts(data.split(split), classes, min_count) for split in SPLITS}
    return Joining(wardround=__version__, agreement=agreement.digest, frozen=frozen, min_count=min_count, splits=splits)


def _counts(part: Samples, classes: int, least: int) -> SplitCounts:
    counts = part.counts(classes).tolist()
    return SplitCounts(n=len(part), by_class=counts if all(n == 0 or n >= least for n in counts) else None)


def opened(frame: bytes) -> Joining | str:
    """What a client said, or what is wrong with it."""
    try:
        return Joining.model_validate_json(frame)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        return f"its word is not understood ({'.'.join(map(str, first['loc']))}: {first['msg']})"


def objection(said: Joining, agreement: Agreement, frozen: str) -> str | None:
    """Why a client cannot take part; None where it can."""
    if said.agreement != agreement.digest:
        return f"it means another experiment (digest {said.agreement[:12]}, here {agreement.digest[:12]})"
    if said.frozen != frozen:
        return (
            f"the frozen part of its network differs (digest {said.frozen[:12]}, here {frozen[:12]}): other pretrained "
            "weights, or another version of the library that they come from"
        )
    if said.min_count < agreement.parties.min_count:
        return f"its min_count is {said.min_count}, agreed are {agreement.parties.min_count}"
    classes = len(agreement.parties.classes)
    tables = [split.by_class for split in said.splits.values() if split.by_class is not None]
    if set(said.splits) != set(SPLITS) or any(len(table) != classes for table in tables):
        return f"its numbers of images are not those of {len(SPLITS)} splits and {classes} classes"
    return None


def federation_elsewhere(agreement: Agreement, said: Mapping[str, Joining]) -> Federation:
    """The federation as the server knows it: numbers of images, and no image."""
    parties = agreement.parties
    clients = []
    notes: list[str] = []
    for name in parties.clients:
        splits = {split: _samples_elsewhere(said[name].splits[split]) for split in SPLITS}
        clients.append(ClientData(name, splits["train"], splits["val"], splits["test"]))
        hidden = [split for split in SPLITS if said[name].splits[split].by_class is None]
        if hidden:
            notes.append(f"{name}: images per class withheld for {', '.join(hidden)}, as some classes have too few")
    return Federation(tuple(clients), parties.classes, "deployed: images stay with the clients", parties.modalities,
                      tuple(notes))  # fmt: skip


def _samples_elsewhere(counts: SplitCounts) -> Samples:
    table = counts.by_class
    labels = [WITHHELD] * counts.n if table is None else np.repeat(np.arange(len(table)), table)
    nothing = np.broadcast_to(np.zeros((1, 0, 0, 1), np.uint8), (counts.n, 0, 0, 1))
    return samples(nothing, labels, [""] * counts.n)
