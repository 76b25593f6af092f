"""Messages to bytes and back.

A frame is five bytes (magic, version, codec number) and a body. The body is a safetensors file: its header carries
the names, shapes and types and, as one metadata string, the scalars as JSON. Decoding therefore executes nothing.
`float16` codecs halve floating-point tensors; `zlib` compresses the body; `shuffle` first groups the bytes of the
tensor data by significance, so that similar exponents stand side by side and compress better.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass

import numpy as np
import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from wardround.errors import InputError, suggestion
from wardround.federation.messages import BadMessage, Message

MAGIC = b"WRD\x01"
FRAME_BYTES = len(MAGIC) + 1
DEFAULT_LIMIT = 4 * 2**30
_WIRE_TYPES = {torch.float32, torch.float16, torch.int64, torch.bool}


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
        """The frame for `message`. Equal messages give equal bytes."""
        tensors = {name: self._outgoing(tensor) for name, tensor in message.tensors.items()}
        scalars = json.dumps(message.scalars, sort_keys=True, allow_nan=False, separators=(",", ":"))
        body = safetensors.torch.save(tensors, metadata={"scalars": scalars})
        if self.shuffle:
            body = _shuffle(body)
        if self.compress:
            body = zlib.compress(body, self.compress)
        return MAGIC + bytes([self.number]) + body

    def decode(self, frame: bytes, limit: int = DEFAULT_LIMIT) -> Message:
        """The message in `frame`.

        Raises:
            BadMessage: not a frame of this codec, larger than `limit` bytes before or after decompression,
                or damaged.
        """
        if len(frame) > limit:
            raise BadMessage(f"{len(frame)} bytes, at most {limit} are accepted")
        if frame[: len(MAGIC)] != MAGIC or len(frame) < FRAME_BYTES:
            raise BadMessage("not a Wardround message")
        if frame[len(MAGIC)] != self.number:
            raise BadMessage(f"coded as number {frame[len(MAGIC)]}, expected {self.number} ({self.name})")
        return self._open(frame[FRAME_BYTES:], limit)

    def _open(self, body: bytes, limit: int) -> Message:
        if self.compress:
            body = _decompress(body, limit)
        if self.shuffle:
            body = _unshuffle(body)
        try:
            tensors = safetensors.torch.load(body)
            scalars = json.loads(_header(body).get("__metadata__", {}).get("scalars", "null"))
        except (SafetensorError, ValueError, KeyError, TypeError, RecursionError, RuntimeError) as error:
            raise BadMessage(f"damaged message: {type(error).__name__}") from error
        if not isinstance(scalars, dict):
            raise BadMessage("damaged message: no scalars")
        return Message({name: self._incoming(name, tensor) for name, tensor in tensors.items()}, scalars)

    def _outgoing(self, tensor: Tensor) -> Tensor:
        if self.half and tensor.is_floating_point():
            largest = torch.finfo(torch.float16).max
            infinite = torch.isinf(tensor)
            tensor = torch.where(infinite, tensor, tensor.clamp(-largest, largest)).to(torch.float16)
        return tensor.detach().contiguous()

    def _incoming(self, name: str, tensor: Tensor) -> Tensor:
        if tensor.dtype not in _WIRE_TYPES:
            raise BadMessage(f"tensor {name!r} has type {tensor.dtype}, which is not sent")
        return tensor.float() if tensor.dtype == torch.float16 else tensor


def _header(body: bytes) -> dict[str, dict[str, str]]:
    size = int.from_bytes(body[:8], "little")
    header: dict[str, dict[str, str]] = json.loads(body[8 : 8 + size])
    return header


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
    if inflater.unconsumed_tail or not inflater.eof:
        raise BadMessage(f"more than {limit} bytes after decompression, or cut short")
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
