"""Weighted means: exact values, and nothing but the sums in memory."""

from __future__ import annotations

import weakref
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from wardround.federation.averaging import WeightedMean
from wardround.federation.messages import Message
from wardround.federation.server import Reply, Server
from wardround.methods.base import FedAvg


def mean_of(*pairs: tuple[dict[str, torch.Tensor], float]) -> dict[str, torch.Tensor]:
    """The mean of (tensors, weight) pairs."""
    mean = WeightedMean()
    for tensors, weight in pairs:
        mean.add(tensors, weight)
    return mean.result()


def test_values_by_hand() -> None:
    result = mean_of(({"w": torch.tensor([1.0, -2.0])}, 3), ({"w": torch.tensor([5.0, 2.0])}, 1))
    assert result["w"].tolist() == [(3 * 1 + 5) / 4, (3 * -2 + 2) / 4]
    assert result["w"].dtype == torch.float32


@given(st.lists(st.tuples(st.floats(-1e6, 1e6, width=32), st.integers(1, 10**9)), min_size=1, max_size=20))
def test_the_mean_is_right_to_the_last_bit_but_one(pairs: list[tuple[float, int]]) -> None:
    exact = sum(Fraction(value) * weight for value, weight in pairs) / sum(weight for _, weight in pairs)
    got = mean_of(*(({"w": torch.tensor([value])}, weight) for value, weight in pairs))["w"].item()
    largest = max(abs(value) for value, _ in pairs)
    half_of_the_smallest = Fraction(2) ** -150  # below float32's normal range steps no longer shrink
    bound = abs(exact) * Fraction(2) ** -24 + Fraction(largest) * Fraction(2) ** -48 + half_of_the_smallest
    assert abs(Fraction(got) - exact) <= bound


def test_sums_are_in_float64() -> None:
    """In float32, 1 + 2**-30 is 1, and the small share of many clients would vanish."""
    pairs = [({"w": torch.tensor([1.0])}, 2**26)] + [({"w": torch.tensor([1.0 + 2.0**-20])}, 1)] * 2**6
    mean = WeightedMean()
    for tensors, weight in pairs:
        mean.add(tensors, weight)
    assert mean._sums["w"].item() == 2**26 + 2**6 + 2**-14


def test_counters_take_the_largest_and_flags_hold_if_any_does() -> None:
    result = mean_of(
        ({"steps": torch.tensor(7), "flag": torch.tensor([True, False])}, 1),
        ({"steps": torch.tensor(9), "flag": torch.tensor([False, False])}, 5),
        ({"steps": torch.tensor(8), "flag": torch.tensor([False, False])}, 5),
    )
    assert result["steps"].item() == 9
    assert result["steps"].dtype == torch.int64
    assert result["flag"].tolist() == [True, False]


def test_zero_weights_count_for_nothing() -> None:
    nan = {"w": torch.tensor([float("nan")])}
    assert mean_of((nan, 0), ({"w": torch.tensor([2.0])}, 4), (nan, 0))["w"].tolist() == [2.0]
    mean = WeightedMean()
    mean.add(nan, 0)
    assert (mean.total, mean.result()) == (0, {})


@pytest.mark.parametrize("weight", [-1, float("nan"), float("inf")])
def test_impossible_weights_are_refused(weight: float) -> None:
    with pytest.raises(ValueError, match="weight"):
        WeightedMean().add({"w": torch.ones(1)}, weight)


@pytest.mark.parametrize("other", [{}, {"v": torch.ones(1)}, {"w": torch.ones(1), "v": torch.ones(1)}])
def test_an_entry_that_only_some_have_is_an_error(other: dict[str, torch.Tensor]) -> None:
    mean = WeightedMean()
    mean.add({"w": torch.ones(1)}, 1)
    with pytest.raises(ValueError, match="differ in name"):
        mean.add(other, 1)
    assert mean.total == 1


def test_the_order_of_addition_is_the_only_order() -> None:
    torch.manual_seed(0)
    tensors = [{"w": torch.randn(50), "n": torch.tensor(i)} for i in range(9)]
    one, other = (mean_of(*((t, 0.1 * (i + 1)) for i, t in enumerate(tensors))) for _ in range(2))
    assert torch.equal(one["w"], other["w"])


def test_replies_are_not_kept() -> None:
    mean = WeightedMean()
    for number in range(3):
        reply = {"w": torch.ones(4), "n": torch.tensor([number])}
        mean.add(reply, 1.0)
        watched = [weakref.ref(tensor) for tensor in reply.values()]
        del reply
        assert [reference() for reference in watched] == [None, None]


def test_inputs_and_results_are_not_aliased() -> None:
    first = {"w": torch.ones(1), "n": torch.tensor([1])}
    mean = WeightedMean()
    mean.add(first, 1)
    mean.add({"w": torch.zeros(1), "n": torch.tensor([5])}, 1)
    result = mean.result()
    mean.add({"w": torch.zeros(1), "n": torch.tensor([9])}, 1)
    assert first["n"].item() == first["w"].item() == 1
    assert (result["w"].item(), result["n"].item()) == (0.5, 5)


def reply(client: str, examples: int, **state: torch.Tensor) -> Reply:
    """A client's answer that holds state."""
    tensors = {f"state/{name}": tensor for name, tensor in state.items()}
    return Reply(client, Message(tensors, {"examples": examples}))


def test_federated_averaging_averages_buffers() -> None:
    """Some libraries average parameters alone, so that their FedAvg keeps every client's own batch statistics."""
    server = Server({"running_mean": torch.zeros(2), "num_batches_tracked": torch.tensor(0)})
    replies = [
        reply("a", 1, running_mean=torch.tensor([4.0, 0.0]), num_batches_tracked=torch.tensor(3)),
        reply("b", 3, running_mean=torch.tensor([0.0, 8.0]), num_batches_tracked=torch.tensor(2)),
    ]
    FedAvg().combine(server, "train", iter(replies))
    assert server.state["running_mean"].tolist() == [1.0, 6.0]
    assert server.state["num_batches_tracked"].item() == 3


def test_clients_without_images_leave_the_server_as_it_was() -> None:
    """Elsewhere this is a division by zero or a model of NaN."""
    server = Server({"w": torch.tensor([1.5])})
    FedAvg().combine(server, "train", iter([reply("a", 0, w=torch.ones(1)), reply("b", 0, w=torch.ones(1))]))
    assert server.state["w"].tolist() == [1.5]
