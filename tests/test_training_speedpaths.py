"""What was made fast gives what the plain way gives: frames, random streams, losses, the choice of arithmetic."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from wardround import seeds
from wardround.federation.codecs import CODECS
from wardround.federation.messages import Message, plain_copy
from wardround.federation.tensor_bytes import safetensors_parts
from wardround.models.classifier import Classifier, build_classifier
from wardround.models.options import ModelOptions
from wardround.training import selftest
from wardround.training.convolutions import has_large_depthwise
from wardround.training.losses import class_weights, cross_entropy, task_loss
from wardround.training.options import TrainingOptions

# ---- frames in one copy


def tensor(shape: list[int], dtype: torch.dtype, key: int) -> Tensor:
    """A tensor of any of the types that travel."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(key))
    return values > 0 if dtype == torch.bool else (values * 100).to(dtype)


tensors = st.dictionaries(
    st.text(min_size=1, max_size=12),
    st.builds(
        tensor,
        st.lists(st.integers(0, 4), max_size=4),
        st.sampled_from([torch.float32, torch.float16, torch.int64, torch.bool]),
        st.integers(0, 10),
    ),
    max_size=6,
)


@given(tensors)
@settings(max_examples=60, deadline=None)
def test_the_pieces_are_what_the_library_writes(state: dict[str, Tensor]) -> None:
    assert b"".join(safetensors_parts(state)) == safetensors.torch.save(state)


def test_layout_and_shared_memory_leave_no_trace() -> None:
    maps = torch.randn(4, 3, 5, 5)
    odd = {"channels_last": maps.to(memory_format=torch.channels_last), "transposed": maps.transpose(0, 3)}
    odd |= {"view": maps[1:3], "same": maps, "graph": nn.Parameter(maps)}
    plain = {name: plain_copy(value) for name, value in odd.items()}
    assert b"".join(safetensors_parts(odd)) == safetensors.torch.save(plain)


@pytest.mark.parametrize("codec", CODECS.values(), ids=list(CODECS))
def test_a_frame_is_a_copy(codec: Any) -> None:
    weights = torch.ones(3, 3)
    frame = codec.encode(Message({"w": weights}, {}))
    weights.zero_()
    assert torch.equal(codec.decode(frame).tensors["w"], torch.ones(3, 3))


# ---- random streams without a GPU


def draws(scope: Callable[[], Any]) -> tuple[Tensor, Tensor]:
    """What is drawn inside a scope, and right after it, from a fixed start."""
    torch.manual_seed(5)
    with scope():
        inside = functional.dropout(torch.ones(50))
    return inside, torch.rand(3)


def test_a_scope_draws_what_torchs_own_seed_gives() -> None:
    with torch.random.fork_rng():
        inside, after = draws(lambda: seeds.torch_scope(1, "dropout", 2, "a"))
        torch.manual_seed(seeds.key(1, "dropout", 2, "a"))
        assert torch.equal(inside, functional.dropout(torch.ones(50)))
        torch.manual_seed(5)
        assert torch.equal(after, torch.rand(3))


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU its own generator is seeded, too")
def test_scopes_leave_nothing_behind_for_a_gpu() -> None:
    def waiting() -> int:
        return len(torch.cuda._queued_calls)  # type: ignore[attr-defined]

    before = waiting()
    for round in range(5):
        with seeds.torch_scope(0, "dropout", round):
            torch.rand(1)
    assert waiting() == before


# ---- losses


def test_unweighted_cross_entropy_is_the_weighted_one_with_ones() -> None:
    options = TrainingOptions(loss="cross-entropy", class_weights="none")
    counts, labels = torch.tensor([5, 0, 3]), torch.tensor([0, 2, 2, 0, 1])
    slow, fast = (torch.randn(5, 3, generator=torch.Generator().manual_seed(0)).requires_grad_() for _ in range(2))
    expected = cross_entropy(slow, labels, class_weights(counts, "none"))
    found = task_loss(options, counts)(fast, labels)
    torch.testing.assert_close(found, expected)
    found.backward()  # type: ignore[no-untyped-call]
    expected.backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(fast.grad, slow.grad)


# ---- which arithmetic is tried, and how it is timed


def test_a_grey_stem_is_no_depthwise_convolution() -> None:
    assert not has_large_depthwise(nn.Conv2d(1, 32, 5))
    assert not has_large_depthwise(nn.Conv2d(8, 8, 3, groups=8))
    assert has_large_depthwise(nn.Sequential(nn.Conv2d(8, 8, 5, groups=8)))


def small_model() -> Classifier:
    options = ModelOptions(backbone="wardround:cnn", pretrained=False, finetune_blocks="all")
    return build_classifier(options, 3, 1, 16, seed=0)


@pytest.mark.parametrize(("faster", "chosen"), [(0.5, "channels_last"), (0.97, "contiguous"), (2.0, "contiguous")])
def test_the_self_test_keeps_the_plain_setting_unless_another_is_clearly_faster(
    monkeypatch: pytest.MonkeyPatch, faster: float, chosen: str
) -> None:
    def seconds(model: Any, options: TrainingOptions, *rest: Any) -> float:
        return faster if options.memory_format == "channels_last" else 1.0

    monkeypatch.setattr(selftest, "seconds_a_step", seconds)
    found = selftest.choose_arithmetic(small_model(), TrainingOptions(), 16, torch.device("cpu"), None)
    assert (found.memory_format, found.depthwise, found.precision) == (chosen, "library", "float32")


def test_timing_a_step_leaves_the_model_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selftest, "SECONDS", 0.0)
    model = small_model()
    before = pickle.dumps([tensor.numpy() for tensor in model.state_dict().values()])
    assert selftest.seconds_a_step(model, TrainingOptions(memory_format="channels_last"), 16, torch.device("cpu")) > 0
    assert pickle.dumps([tensor.numpy() for tensor in model.state_dict().values()]) == before
