"""Whatever bytes arrive, nothing worse happens than the typed error. `make fuzz` tries 10,000 cases of each."""

from __future__ import annotations

import contextlib
import os

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from federation_fakes import X
from wardround.deploy.joining import Joining, opened
from wardround.federation.codecs import CODECS
from wardround.federation.messages import BadMessage, Message, check, named
from wardround.federation.reports import check_instructions, checked

CASES = int(os.environ.get("WARDROUND_FUZZ", "500"))
FUZZ = settings(max_examples=CASES, deadline=None, suppress_health_check=list(HealthCheck))
SOUND = Message(
    named("state", {"w": torch.arange(6.0).view(2, 3), "n": torch.tensor(3)}) | {"x": torch.ones(2)},
    {"examples": 3, "loss": 0.5, "seconds": 1.0, "log": {"a": 1.0}},
)
LIMIT = 2**20


@st.composite
def damaged_frames(draw: st.DrawFn) -> tuple[str, bytes]:
    """A codec's name and a sound frame of it with bytes changed, cut out, put in or taken from elsewhere."""
    name = draw(st.sampled_from(sorted(CODECS)))
    frame = bytearray(CODECS[name].encode(SOUND))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(frame)))
        size = draw(st.integers(0, 16))
        piece = draw(st.one_of(st.binary(max_size=16), st.just(bytes(frame[: draw(st.integers(0, 64))]))))
        kind = draw(st.sampled_from(["replace", "insert", "delete", "truncate"]))
        if kind == "replace":
            frame[at : at + len(piece)] = piece
        elif kind == "insert":
            frame[at:at] = piece
        elif kind == "delete":
            del frame[at : at + size]
        else:
            del frame[at:]
    return name, bytes(frame)


@FUZZ
@given(damaged_frames())
def test_a_damaged_frame_is_refused_or_sound(case: tuple[str, bytes]) -> None:
    name, frame = case
    try:
        message = CODECS[name].decode(frame, LIMIT)
        check(message, X)
        checked(message)
    except BadMessage:
        return
    assert set(message.tensors) == set(X)


SCALARS = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=5)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)),
    max_leaves=8,
)
KEYS = st.sampled_from(["round", "phase", "examples", "loss", "log", "personal", "received", "counts", "more"])


@FUZZ
@given(st.dictionaries(KEYS, SCALARS, max_size=6))
def test_scalars_are_refused_or_sound(scalars: dict[str, object]) -> None:
    for look in (checked, check_instructions):
        with contextlib.suppress(BadMessage):
            look(Message({}, scalars))


@FUZZ
@given(st.one_of(st.binary(max_size=60), st.dictionaries(KEYS, SCALARS, max_size=4).map(lambda d: repr(d).encode())))
def test_a_clients_word_is_understood_or_refused(frame: bytes) -> None:
    assert isinstance(opened(frame), Joining | str)
