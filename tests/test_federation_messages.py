"""What a receiver accepts: the tensors of its schema, finite, and the scalars of a report."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from federation_fakes import evaluation, scores
from wardround.federation.messages import (
    HEADER_ROOM,
    BadMessage,
    Message,
    Spec,
    check,
    named,
    plain_copy,
    room_for,
    shorten,
)
from wardround.federation.reports import MAX_COUNT, checked

SCHEMA = {
    "state/w": Spec((2, 3)),
    "state/steps": Spec((), torch.int64),
    "mask": Spec((2,), torch.bool),
    "target/t": Spec((1,), required=False),
}


def good() -> dict[str, torch.Tensor]:
    """Tensors that fulfil the schema."""
    return {
        "state/w": torch.zeros(2, 3),
        "state/steps": torch.tensor(4),
        "mask": torch.tensor([True, False]),
    }


def test_what_fulfils_the_schema_is_accepted() -> None:
    check(Message(good()), SCHEMA)
    check(Message(good() | {"target/t": torch.ones(1)}), SCHEMA)
    check(Message(), {})


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"state/head": torch.ones(1)}, "unexpected tensor 'state/head'"),
        ({"state/w": torch.zeros(3, 2)}, r"'state/w' has shape \(3, 2\), expected \(2, 3\)"),
        ({"state/w": torch.zeros(6)}, r"'state/w' has shape \(6,\)"),
        ({"state/w": torch.zeros(2, 3, dtype=torch.int64)}, "'state/w' has type torch.int64, expected torch.float32"),
        ({"state/steps": torch.tensor([4])}, r"'state/steps' has shape \(1,\), expected \(\)"),
        ({"mask": torch.ones(2)}, "'mask' has type torch.float32"),
        ({"target/t": torch.ones(2)}, "'target/t' has shape"),
        ({"state/w": torch.tensor([[0, 1, float("nan")], [0, 0, 0]])}, "'state/w' holds 1 values that are not finite"),
        ({"state/w": torch.tensor([[0, 1, float("inf")], [0, 0, float("-inf")]])}, "holds 2 values"),
    ],
)
def test_anything_else_is_refused_by_name(change: dict[str, torch.Tensor], says: str) -> None:
    with pytest.raises(BadMessage, match=says):
        check(Message(good() | change), SCHEMA)


@pytest.mark.parametrize("missing", ["state/w", "state/steps", "mask"])
def test_a_missing_tensor_is_named(missing: str) -> None:
    with pytest.raises(BadMessage, match=f"'{missing}' is missing"):
        check(Message({name: t for name, t in good().items() if name != missing}), SCHEMA)


def test_finite_values_whose_sum_overflows_are_accepted() -> None:
    largest = torch.finfo(torch.float32).max
    check(Message({"x": torch.full((4,), largest)}), {"x": Spec((4,))})
    with pytest.raises(BadMessage, match="holds 1 values"):
        check(Message({"x": torch.tensor([largest, largest, -largest, float("nan")])}), {"x": Spec((4,))})


def test_what_the_other_side_chose_is_shortened_before_it_is_logged() -> None:
    with pytest.raises(BadMessage) as refusal:
        check(Message({"\x1b[2J\n" + "long" * 10**6: torch.ones(1)}), {})
    assert len(str(refusal.value)) < 300
    assert str(refusal.value).isprintable()
    with pytest.raises(BadMessage) as refusal:
        check(Message({"x": torch.zeros([0] * 1000)}), {"x": Spec((1,))})
    assert len(str(refusal.value)) < 300
    assert shorten("as it is") == "as it is"


def test_room_is_payload_and_header() -> None:
    assert room_for(SCHEMA) == HEADER_ROOM + 6 * 4 + 8 + 2 + 4
    assert room_for({}) == HEADER_ROOM


def test_name_spaces() -> None:
    tensors = named("state", {"a": torch.ones(1), "b/c": torch.ones(2)})
    message = Message(tensors | named("statement", {"x": torch.ones(3)}))
    assert list(message.under("state")) == ["a", "b/c"]
    assert message.elements == 6


def test_a_plain_copy_is_contiguous_and_its_own() -> None:
    image = torch.randn(2, 3, 4, 4).contiguous(memory_format=torch.channels_last).requires_grad_()
    copy = plain_copy(image)
    assert copy.is_contiguous()
    assert not copy.requires_grad
    assert copy.data_ptr() != image.data_ptr()
    assert torch.equal(copy, image)


# ---- scalars


def told(**scalars: Any) -> Any:
    """The scalars of a checked reply."""
    return checked(Message({}, scalars)).scalars


def test_a_report_gets_its_defaults() -> None:
    expected = {
        "examples": 7,
        "loss": None,
        "seconds": 0.0,
        "log": {},
        "counts": {},
        "personal": None,
        "received": None,
        "captioned": None,
    }
    assert told(examples=7) == expected


def test_a_full_report_is_unchanged() -> None:
    full = {
        "examples": MAX_COUNT,
        "loss": 0.5,
        "seconds": 3.0,
        "log": {"ratio": None, "x": -1.0},
        "counts": {"prototype/0": 5},
        "personal": evaluation(0.75),
        "received": evaluation(None),
        "captioned": evaluation(0.25)["test"],
    }
    assert told(**full) == full


def changed(path: str, value: Any) -> dict[str, Any]:
    """A report whose entry at a dotted path is replaced."""
    report: dict[str, Any] = {"examples": 1, "personal": evaluation(0.5)}
    *parents, last = path.split(".")
    inner = report
    for part in parents:
        inner = inner[part]
    inner[last] = value
    return report


@pytest.mark.parametrize(
    ("path", "value"),
    [
        *(("examples", value) for value in (None, -1, MAX_COUNT + 1, 2.0, "3", True, [1], 10**400)),
        *(("loss", value) for value in (float("nan"), float("inf"), "0.1", True)),
        *(("seconds", value) for value in (-1.0, None, float("inf"))),
        *(("log", value) for value in (None, [], {"x": "patient"}, {"x": [1.0]}, {"x": float("nan")})),
        *(("personal", value) for value in ("great", [1], {}, 0.9, {"val": {}})),
        *(("personal.val.balanced_accuracy", value) for value in (1.5, -0.1, "0.5", float("nan"))),
        *(("personal.val.confusion", value) for value in ([[1, -1], [0, 0]], [[0.5, 0], [0, 0]], [1, 2], None)),
        *(("personal.val", scores(0.5) | {"confusion": value}) for value in ([[1, 0]], [[1], [0]], [])),
        ("personal.test", scores(0.5) | {"patients": ["Doe, Jane"]}),
        ("personal.note", "Doe, Jane"),
        ("names", ["Doe, Jane"]),
    ],
)
def test_other_scalars_are_refused_by_name_and_their_values_kept_quiet(path: str, value: Any) -> None:
    report = changed(path, value)
    with pytest.raises(BadMessage, match=f"scalar '{path}") as refusal:
        told(**report)
    assert "Doe" not in str(refusal.value)
    assert len(str(refusal.value)) < 300


def test_a_reply_must_say_how_many_examples_it_stands_for() -> None:
    with pytest.raises(BadMessage, match="scalar 'examples': field required"):
        told(loss=0.5)
