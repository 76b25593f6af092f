"""Messages to bytes and back.

A frame is a prefix (magic with version, codec number, length of the scalars), the scalars as JSON, and a body. The
body is a safetensors file, whose header carries names, shapes and types. Decoding therefore executes nothing.
`float16` codecs halve floating-point tensors; `zlib` compresses the body; `shuffle` first groups the bytes of the
tensor data by significance, so that similar exponents stand side by side and compress better.

The scalars stand outside the compressed body, and every float among them takes the same number of characters: the
length of a reply must not depend on how many digits the time of its training happens to have.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import safetensors.torch
import torch
from torch import Tensor

from wardround.errors import InputError, suggestion
from wardround.federation.messages import DEFAULT_LIMIT, BadMessage, Json, Message, shorten
from wardround.federation.tensor_bytes import safetensors_parts

MAGIC = b"WRD\x01"
LENGTH_BYTES = 4
PREFIX_BYTES = len(MAGIC) + 1 + LENGTH_BYTES
_MESSAGE_TYPES = {torch.float32, torch.int64, torch.bool}
_WIRE_TYPES = _MESSAGE_TYPES | {torch.float16}


@dataclass(frozen=True)
class Codec:
    """How messages become bytes.

    Attributes:
        name: as in an experiment file.
        number: the byte that names the codec in a frame.
        half: send floating-point tensors as float16. A finite value beyond float16's range saturates at 65504;
            NaN and infinities stay what they are, so that the receiver can refuse them.
        compress: zlib level, 0 for none.
        shuffle: group bytes by significance before compressing.
    """

    name: str
    number: int
    half: bool = False
    compress: int = 0
    shuffle: bool = False

    def encode(self, message: Message) -> bytes:
        """The frame for `message`. Equal messages give equal bytes.

        Raises:
            BadMessage: a tensor is of a type that does not travel.
            ValueError: a scalar is NaN or infinite.
        """
        scalars = to_json(message.scalars).encode()
        tensors = {name: self._outgoing(name, tensor) for name, tensor in message.tensors.items()}
        length = len(scalars).to_bytes(LENGTH_BYTES, "little")
        return b"".join((MAGIC, bytes([self.number]), length, scalars, *self._body(tensors)))

    @property
    def lossless(self) -> bool:
        """Whether a message comes out of its frame as it went in, and the frame's length is known without it."""
        return not (self.half or self.compress or self.shuffle)

    def length(self, message: Message) -> int:
        """The length of the frame for `message`, without making it; of a lossless codec.

        Raises:
            BadMessage: a tensor is of a type that does not travel.
            ValueError: a scalar is NaN or infinite.
        """
        tensors = {name: self._outgoing(name, tensor) for name, tensor in message.tensors.items()}
        pieces = [memoryview(piece).nbytes for piece in self._body(tensors)]
        return PREFIX_BYTES + len(to_json(message.scalars).encode()) + sum(pieces)

    def decode(self, frame: bytes, limit: int = DEFAULT_LIMIT) -> Message:
        """The message in `frame`.

        Raises:
            BadMessage: not a frame of this codec, larger than `limit` bytes before or after decompression,
                or damaged.
        """
        if len(frame) > limit:
            raise BadMessage(f"{len(frame)} bytes, at most {limit} are accepted")
        if frame[: len(MAGIC)] != MAGIC or len(frame) < PREFIX_BYTES:
            raise BadMessage("not a Wardround message")
        if frame[len(MAGIC)] != self.number:
            raise BadMessage(f"coded as number {frame[len(MAGIC)]}, expected {self.number} ({self.name})")
        end = PREFIX_BYTES + int.from_bytes(frame[len(MAGIC) + 1 : PREFIX_BYTES], "little")
        return Message(self._tensors(frame[end:], limit), _scalars(frame[PREFIX_BYTES:end]))

    def _tensors(self, body: bytes, limit: int) -> dict[str, Tensor]:
        if self.compress:
            body = _decompress(body, limit)
        if self.shuffle:
            body = _unshuffle(body)
        try:
            tensors = safetensors.torch.load(body)
        except Exception as error:  # no list of what a hostile body can provoke in the parser would be complete
            raise BadMessage(f"damaged message: {type(error).__name__} in the tensors") from error
        return {name: self._incoming(name, tensor) for name, tensor in tensors.items()}

    def _body(self, tensors: Mapping[str, Tensor]) -> list[bytes]:
        """The pieces of the body; joining them with the rest of the frame is the only copy where nothing else is."""
        pieces = safetensors_parts(tensors)
        if self.shuffle:
            pieces = [_shuffle(b"".join(pieces))]
        return [zlib.compress(b"".join(pieces), self.compress)] if self.compress else pieces

    def _outgoing(self, name: str, tensor: Tensor) -> Tensor:
        if tensor.dtype not in _MESSAGE_TYPES:
            raise BadMessage(f"tensor {name!r} has type {tensor.dtype}; only float32, int64 and bool travel")
        if self.half and tensor.is_floating_point():
            largest = torch.finfo(torch.float16).max
            tensor = torch.where(torch.isinf(tensor), tensor, tensor.clamp(-largest, largest)).to(torch.float16)
        return tensor

    def _incoming(self, name: str, tensor: Tensor) -> Tensor:
        if tensor.dtype not in _WIRE_TYPES:
            raise BadMessage(f"tensor '{shorten(name)}' has type {tensor.dtype}, which does not travel")
        return tensor.float() if tensor.dtype == torch.float16 else tensor


def to_json(value: Json) -> str:
    """JSON with sorted keys, whose floats are exact and all of one length (sign and huge exponents apart).

    >>> to_json({"b": [1, True], "a": 0.5})
    '{"a":5.0000000000000000e-01,"b":[1,true]}'
    """
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{json.dumps(key)}:{to_json(value[key])}" for key in sorted(value)) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(map(to_json, value)) + "]"
    if not isinstance(value, float):
        return json.dumps(value)
    if not math.isfinite(value):
        raise ValueError("a scalar is not finite")
    return f"{value:.16e}"


def _scalars(text: bytes) -> dict[str, Json]:
    try:
        scalars = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise BadMessage(f"damaged message: {type(error).__name__} in the scalars") from error
    if not isinstance(scalars, dict):
        raise BadMessage("damaged message: the scalars have no names")
    return scalars


def _refuse_constant(word: str) -> None:
    raise ValueError(f"{word} is no JSON number")


def _data_start(body: bytes) -> int:
    start = 8 + int.from_bytes(body[:8], "little")
    if len(body) < 8 or start > len(body):
        raise BadMessage("damaged message: header longer than the message")
    return start


def _shuffle(body: bytes) -> bytes:
    """All even bytes of the tensor data, then all odd ones: for float16, low bytes and high bytes apart."""
    start = _data_start(body)
    data = np.frombuffer(body, dtype=np.uint8, offset=start)
    return body[:start] + data[0::2].tobytes() + data[1::2].tobytes()


def _unshuffle(body: bytes) -> bytes:
    start = _data_start(body)
    shuffled = np.frombuffer(body, dtype=np.uint8, offset=start)
    data = np.empty_like(shuffled)
    half = (len(shuffled) + 1) // 2
    data[0::2], data[1::2] = shuffled[:half], shuffled[half:]
    return body[:start] + data.tobytes()


def _decompress(body: bytes, limit: int) -> bytes:
    """Inflate at most `limit` bytes, so that a small message cannot fill the memory."""
    inflater = zlib.decompressobj()
    try:
        plain = inflater.decompress(body, limit)
    except zlib.error as error:
        raise BadMessage("damaged message: not zlib data") from error
    if inflater.unconsumed_tail or inflater.unused_data or not inflater.eof:
        raise BadMessage(f"more than {limit} bytes after decompression, cut short, or followed by something else")
    return plain


CODECS = {
    codec.name: codec
    for codec in (
        Codec("float32", 0),
        Codec("float16", 1, half=True),
        Codec("float16+zlib", 2, half=True, compress=6),
        Codec("float16+shuffle+zlib", 3, half=True, compress=6, shuffle=True),
    )
}


def codec_named(name: str) -> Codec:
    """The codec called `name`.

    Raises:
        InputError: no codec has that name.
    """
    if name not in CODECS:
        raise InputError(f"transport.codec: no codec is called {name!r}{suggestion(name, CODECS)}")
    return CODECS[name]
