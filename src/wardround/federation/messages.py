"""A message between server and client: named tensors, and scalars that fit in JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

# What may stand in `Message.scalars`: anything that JSON can hold.
Json = Any
# Bytes that a message may take beside its tensors: names, shapes and scalars.
HEADER_ROOM = 2**24
# Bytes that a message may take whose length is not known beforehand.
DEFAULT_LIMIT = 4 * 2**30


class BadMessage(Exception):
    """A message that the receiver refuses. The text says what is wrong, never what the values were."""


@dataclass(frozen=True)
class Message:
    """What one side tells the other: tensors by name (float32, int64 or bool) plus JSON scalars."""

    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    scalars: Mapping[str, Json] = field(default_factory=dict)

    @property
    def elements(self) -> int:
        """How many numbers the tensors hold."""
        return sum(tensor.numel() for tensor in self.tensors.values())

    def under(self, space: str) -> dict[str, Tensor]:
        """The tensors whose name starts with `space/`, by the rest of their name.

        >>> Message({"state/w": torch.ones(1)}).under("state")
        {'w': tensor([1.])}
        """
        start = space + "/"
        return {name.removeprefix(start): t for name, t in self.tensors.items() if name.startswith(start)}


def named(space: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Put `tensors` under a name space of the wire: `w` becomes `state/w`."""
    return {f"{space}/{name}": tensor for name, tensor in tensors.items()}


def shorten(text: str, length: int = 200) -> str:
    """At most `length` characters of a text that the other side chose, fit for one line of a log."""
    printable = "".join(c if c.isprintable() else "?" for c in text[: length + 1])
    return printable if len(printable) <= length else printable[: length - 3] + "..."


def plain_copy(tensor: Tensor) -> Tensor:
    """A copy on the CPU in the plain memory layout, which is the one that travels and is stored."""
    return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


@dataclass(frozen=True)
class Spec:
    """What a receiver expects of one tensor. A dimension of -1 may have any length."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    required: bool = True

    @classmethod
    def of(cls, tensor: Tensor, required: bool = True) -> Spec:
        """The spec that `tensor` itself fulfils."""
        return cls(tuple(tensor.shape), tensor.dtype, required)

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Whether a tensor may have this shape."""
        return shape == self.shape or (
            len(shape) == len(self.shape) and all(want in (-1, n) for n, want in zip(shape, self.shape, strict=True))
        )


Schema = Mapping[str, Spec]


def room_for(schema: Schema) -> int:
    """The most bytes that a message of `schema` takes, however it is coded."""
    if any(-1 in spec.shape for spec in schema.values()):
        return DEFAULT_LIMIT
    return HEADER_ROOM + sum(math.prod(spec.shape) * spec.dtype.itemsize for spec in schema.values())


def check(message: Message, schema: Schema) -> None:
    """Refuse a message whose tensors are not exactly those of `schema`, or hold a NaN or an infinity.

    Raises:
        BadMessage: names the first tensor that is unknown, missing, misshapen, of another type or not finite.
    """
    for name in message.tensors:
        if name not in schema:
            raise BadMessage(f"unexpected tensor '{shorten(name)}'")
    for name, spec in schema.items():
        tensor = message.tensors.get(name)
        if tensor is None:
            if spec.required:
                raise BadMessage(f"tensor {name!r} is missing")
            continue
        _check_tensor(name, tensor, spec)


def _check_tensor(name: str, tensor: Tensor, spec: Spec) -> None:
    if not spec.fits(tuple(tensor.shape)):
        raise BadMessage(f"tensor {name!r} has shape {shorten(str(tuple(tensor.shape)))}, expected {spec.shape}")
    if tensor.dtype != spec.dtype:
        raise BadMessage(f"tensor {name!r} has type {tensor.dtype}, expected {spec.dtype}")
    # The sum is NaN or infinite whenever an element is; only then is the slower element-wise look needed,
    # because a sum of finite numbers may overflow too.
    if spec.dtype.is_floating_point and not math.isfinite(float(tensor.sum())):
        bad = int((~torch.isfinite(tensor)).sum())
        if bad:
            raise BadMessage(f"tensor {name!r} holds {bad} values that are not finite")
