"""Codecs: what goes in comes out, and rubbish is refused without being believed."""

from __future__ import annotations

import json
import os
import pickle
import string
import struct
import tracemalloc
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch import Tensor

from wardround.errors import InputError
from wardround.federation.codecs import (
    CODECS,
    MAGIC,
    PREFIX_BYTES,
    Codec,
    _shuffle,
    _unshuffle,
    codec_named,
    to_json,
)
from wardround.federation.messages import BadMessage, Message

codecs = pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
packed = pytest.mark.parametrize("codec", [c for c in CODECS.values() if c.compress], ids=lambda c: c.name)

DTYPES = (np.float32, np.int64, np.bool_)
ARRAYS = st.sampled_from(DTYPES).flatmap(
    lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4))
)
NAMES = st.text(min_size=1, max_size=12).filter(lambda name: name != "__metadata__")
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=8,
)
MESSAGES = st.builds(
    Message,
    st.dictionaries(NAMES, ARRAYS.map(lambda array: torch.from_numpy(np.ascontiguousarray(array)).reshape(array.shape)),
                    max_size=4),
    st.dictionaries(st.text(), JSON, max_size=4),
)  # fmt: skip


def bits(tensor: Tensor) -> Tensor:
    """What distinguishes a NaN from another and 0 from -0."""
    return tensor.view(torch.int32) if tensor.dtype == torch.float32 else tensor


def as_half(tensor: Tensor) -> Tensor:
    """Rounded to float16 by NumPy, where finite values stay finite."""
    if tensor.dtype != torch.float32:
        return tensor
    values = tensor.numpy()
    with np.errstate(over="ignore"):
        rounded = values.astype(np.float16).astype(np.float32)
    overflown = np.isinf(rounded) & np.isfinite(values)
    return torch.from_numpy(np.asarray(np.where(overflown, np.sign(values) * np.float32(65504), rounded)))


@codecs
@settings(max_examples=60, deadline=None)
@given(message=MESSAGES)
def test_round_trip(codec: Codec, message: Message) -> None:
    back = codec.decode(codec.encode(message))
    assert back.scalars == message.scalars
    assert back.tensors.keys() == message.tensors.keys()
    for name, sent in message.tensors.items():
        expected = as_half(sent) if codec.half else sent
        got = back.tensors[name]
        assert (got.dtype, got.shape) == (sent.dtype, sent.shape)
        nan = expected.isnan()
        assert torch.equal(nan, got.isnan())
        assert torch.equal(bits(got)[~nan], bits(expected)[~nan])


@codecs
def test_the_empty_message_travels(codec: Codec) -> None:
    assert codec.decode(codec.encode(Message())) == Message({}, {})


@codecs
def test_nested_scalars_come_back_exactly(codec: Codec) -> None:
    scalars = {"é": [1, -0.1, None, True, {"deep": [[], {}, "Zürich \U0001f3e5 \ud800"]}], "third": 1 / 3, "big": 2**70}
    assert codec.decode(codec.encode(Message({}, scalars))).scalars == scalars


@codecs
def test_equal_messages_give_equal_bytes(codec: Codec) -> None:
    a, b = torch.arange(6.0).reshape(2, 3), torch.tensor(7)
    one = Message({"a": a, "b": b}, {"x": 1, "y": {"p": 1, "q": 2}})
    other = Message({"b": b.clone(), "a": a.T.contiguous().T}, {"y": {"q": 2, "p": 1}, "x": 1})
    assert codec.encode(one) == codec.encode(other)


@codecs
def test_tensors_that_share_memory_travel(codec: Codec) -> None:
    whole = torch.arange(4.0)
    back = codec.decode(codec.encode(Message({"whole": whole, "part": whole[1:], "again": whole}))).tensors
    assert back["part"].tolist() == [1, 2, 3]
    assert back["again"].tolist() == back["whole"].tolist() == [0, 1, 2, 3]


def header_bytes(tensors: dict[str, Tensor], half: bool) -> int:
    """Length of the safetensors header: JSON padded with spaces to whole words of eight bytes."""
    header: dict[str, Any] = {}
    position = 0
    for name in sorted(tensors, key=lambda n: (-(2 if half else 4), n)):
        size = tensors[name].numel() * (2 if half else 4)
        dtype = "F16" if half else "F32"
        shape = list(tensors[name].shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [position, position + size]}
        position += size
    length = len(json.dumps(header, separators=(",", ":")))
    return -(-length // 8) * 8


@pytest.mark.parametrize("name", ["float32", "float16"])
def test_the_length_is_that_of_prefix_scalars_header_and_payload(name: str) -> None:
    tensors = {"state/weight": torch.randn(7, 3), "state/bias": torch.randn(5), "statistic/mean": torch.randn(2, 2, 2)}
    codec = CODECS[name]
    scalars = {"examples": 1807, "log": {"loss": 0.25}}
    text = '{"examples":1807,"log":{"loss":2.5000000000000000e-01}}'
    payload = (21 + 5 + 8) * (2 if codec.half else 4)
    expected = 9 + len(text) + 8 + header_bytes(tensors, codec.half) + payload
    assert len(codec.encode(Message(tensors, scalars))) == expected


@settings(max_examples=60, deadline=None)
@given(message=MESSAGES)
def test_a_lossless_codec_knows_the_length_without_the_frame(message: Message) -> None:
    (codec,) = (each for each in CODECS.values() if each.lossless)
    assert codec.name == "float32"
    assert codec.length(message) == len(codec.encode(message))


@codecs
@given(seconds=st.floats(1e-9, 1e9))
@settings(max_examples=30, deadline=None)
def test_the_length_does_not_depend_on_how_long_something_took(codec: Codec, seconds: float) -> None:
    tensors = {"w": torch.arange(9.0)}
    assert len(codec.encode(Message(tensors, {"seconds": seconds}))) == len(
        codec.encode(Message(tensors, {"seconds": 1.0}))
    )


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_numbers_are_written_exactly(value: float) -> None:
    assert json.loads(to_json([value])) == [value]


@given(st.binary(max_size=41))
def test_grouping_bytes_is_undone_for_any_length(data: bytes) -> None:
    body = struct.pack("<Q", 2) + b"{}" + data
    shuffled = _shuffle(body)
    assert shuffled[10:] == data[0::2] + data[1::2]
    assert _unshuffle(shuffled) == body


@pytest.mark.parametrize("codec", [c for c in CODECS.values() if c.half], ids=lambda c: c.name)
def test_large_values_saturate_and_undefined_ones_survive(codec: Codec) -> None:
    values = torch.tensor([1e6, -1e6, 65504, 65519, float("inf"), float("-inf"), float("nan")])
    back = codec.decode(codec.encode(Message({"x": values}))).tensors["x"]
    assert back[:4].tolist() == [65504, -65504, 65504, 65504]
    assert back[4:6].tolist() == [float("inf"), float("-inf")]
    assert back[6].isnan()


def test_shuffling_helps_compression() -> None:
    torch.manual_seed(0)
    message = Message({"w": torch.randn(20000) * 0.01})
    lengths = {name: len(codec.encode(message)) for name, codec in CODECS.items()}
    assert lengths["float16+shuffle+zlib"] < lengths["float16+zlib"] < lengths["float16"] < lengths["float32"]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.complex64])
def test_other_types_are_refused_by_the_sender(dtype: torch.dtype) -> None:
    for codec in CODECS.values():
        with pytest.raises(BadMessage, match="'x' has type"):
            codec.encode(Message({"x": torch.zeros(2, dtype=dtype)}))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_scalars_are_finite(value: float) -> None:
    with pytest.raises(ValueError, match="not finite"):
        CODECS["float32"].encode(Message({}, {"deep": [value]}))


# ---- rubbish


def refused_or_read(codec: Codec, frame: bytes) -> None:
    """Whatever is decoded is a message of types that travel; anything else is refused."""
    try:
        message = codec.decode(frame, limit=10**6)
    except BadMessage:
        return
    assert isinstance(message.scalars, dict)
    assert all(t.dtype in (torch.float32, torch.int64, torch.bool) for t in message.tensors.values())


def real_frame(codec: Codec) -> bytes:
    """A frame with a bit of everything."""
    tensors = {"a": torch.arange(5.0), "b": torch.tensor(3), "c": torch.tensor([[True, False]])}
    return codec.encode(Message(tensors, {"examples": 3, "log": {"x": 0.5}}))


@codecs
@settings(max_examples=100, deadline=None)
@given(body=st.binary(max_size=200), compressed=st.booleans())
def test_random_bytes_are_refused(codec: Codec, body: bytes, compressed: bool) -> None:
    refused_or_read(codec, body)
    refused_or_read(codec, MAGIC + bytes([codec.number]) + body)
    rest = zlib.compress(body) if compressed else body
    refused_or_read(codec, MAGIC + bytes([codec.number]) + struct.pack("<I", 2) + b"{}" + rest)


@codecs
def test_every_truncated_frame_is_refused(codec: Codec) -> None:
    frame = real_frame(codec)
    for length in range(len(frame)):
        with pytest.raises(BadMessage):
            codec.decode(frame[:length])


@codecs
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_flipped_bytes_are_refused_or_harmless(codec: Codec, data: st.DataObject) -> None:
    frame = bytearray(real_frame(codec))
    for _ in range(data.draw(st.integers(1, 3))):
        frame[data.draw(st.integers(0, len(frame) - 1))] ^= data.draw(st.integers(1, 255))
    refused_or_read(codec, bytes(frame))


HEADERS = st.dictionaries(
    st.sampled_from(["a", "__metadata__", ""]),
    st.none()
    | JSON
    | st.fixed_dictionaries(
        {
            "dtype": st.sampled_from(["F32", "F16", "F64", "BOOL", "I64", "U8", "F8_E4M3", "F4", "C64", "BF16", "?"]),
            "shape": st.lists(st.sampled_from([0, 1, 2, 2**31, 2**40, 2**63, 2**64, -1]), max_size=4),
            "data_offsets": st.lists(st.sampled_from([0, 1, 4, 8, 2**40, 2**64 - 1]), min_size=2, max_size=2),
        }
    ),
    max_size=3,
)


@settings(max_examples=300, deadline=None)
@given(header=HEADERS, data=st.binary(max_size=8), scalars=st.sampled_from(["{}", "[]", "null", '{"a":NaN}', "{"]))
def test_forged_headers_are_refused(header: Any, data: bytes, scalars: str) -> None:
    text = json.dumps(header).encode()
    body = struct.pack("<Q", len(text)) + text + data
    prefix = MAGIC + b"\0" + struct.pack("<I", len(scalars)) + scalars.encode()
    refused_or_read(CODECS["float32"], prefix + body)


@pytest.mark.parametrize("size", [3, 10**6, 2**40, 2**63, 2**64 - 1])
def test_absurd_header_sizes_are_refused(size: int) -> None:
    for codec in CODECS.values():
        body = struct.pack("<Q", size) + b"{}"
        rest = zlib.compress(body) if codec.compress else body
        with pytest.raises(BadMessage):
            codec.decode(MAGIC + bytes([codec.number]) + struct.pack("<I", 2) + b"{}" + rest)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "null",
        "[]",
        "7",
        '{"a":NaN}',
        '{"a":-Infinity}',
        "[" * 100_000,
        '{"a":' + "1" * 5000 + "}",
        '{"a":1}x',
        "\xff",
    ],
    ids=lambda text: text[:12],
)
def test_scalars_that_are_no_object_of_finite_json_are_refused(text: str) -> None:
    frame = CODECS["float32"].encode(Message())
    raw = text.encode("latin-1")
    with pytest.raises(BadMessage, match="scalars"):
        CODECS["float32"].decode(frame[:5] + struct.pack("<I", len(raw)) + raw + frame[PREFIX_BYTES + 2 :])


@codecs
def test_a_frame_of_another_codec_or_program_is_refused(codec: Codec) -> None:
    for other in CODECS.values():
        if other is not codec:
            with pytest.raises(BadMessage, match=f"number {other.number}, expected {codec.number}"):
                codec.decode(real_frame(other))
    with pytest.raises(BadMessage, match="not a Wardround message"):
        codec.decode(b"WRD\x02" + real_frame(codec)[4:])
    with pytest.raises(BadMessage, match="not a Wardround message"):
        codec.decode(b"")


class _Trap:
    """Unpickling this creates a file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.file),)


@codecs
def test_nothing_is_executed(codec: Codec, tmp_path: Path) -> None:
    trap = pickle.dumps(_Trap(tmp_path / "sprung"))
    rest = zlib.compress(trap) if codec.compress else trap
    for frame in (trap, MAGIC + bytes([codec.number]) + struct.pack("<I", 2) + b"{}" + rest):
        with pytest.raises(BadMessage):
            codec.decode(frame)
    assert not (tmp_path / "sprung").exists()


@packed
def test_a_bomb_is_refused_within_the_limit(codec: Codec) -> None:
    bomb = MAGIC + bytes([codec.number]) + struct.pack("<I", 2) + b"{}" + zlib.compress(bytes(100 * 2**20))
    limit = 2**20
    assert len(bomb) < limit
    tracemalloc.start()
    with pytest.raises(BadMessage, match="after decompression"):
        codec.decode(bomb, limit)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 5 * limit


@packed
def test_nothing_may_follow_the_compressed_body(codec: Codec) -> None:
    with pytest.raises(BadMessage, match="followed by something else"):
        codec.decode(real_frame(codec) + b"more")


@codecs
def test_the_limit_counts_the_frame(codec: Codec) -> None:
    frame = real_frame(codec)
    with pytest.raises(BadMessage, match=f"{len(frame)} bytes, at most {len(frame) - 1}"):
        codec.decode(frame, len(frame) - 1)


def test_codecs_have_names() -> None:
    assert all(codec_named(name).name == name for name in CODECS)
    assert sorted(codec.number for codec in CODECS.values()) == list(range(len(CODECS)))
    with pytest.raises(InputError, match=r"transport\.codec: .*'flaot16'.*float16"):
        codec_named("flaot16")


def test_names_may_hold_any_character() -> None:
    name = "".join(c for c in string.printable) + "日本 \x00"
    back = CODECS["float32"].decode(CODECS["float32"].encode(Message({name: torch.ones(1)})))
    assert list(back.tensors) == [name]
