"""The faster convolutions compute what the library's do."""

from __future__ import annotations

import shutil

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from wardround.models.classifier import build_classifier
from wardround.models.options import ModelOptions
from wardround.training.arithmetic import arithmetic, compile_if_asked, layout
from wardround.training.convolutions import DepthwiseConvolution, FastConvolutions, has_large_depthwise, weight_gradient
from wardround.training.options import TrainingOptions

CPU = torch.device("cpu")


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@pytest.mark.parametrize("kernel", [3, 5, 7])
@pytest.mark.parametrize("stride", [(1, 1), (2, 2), (2, 1), (3, 2)])
@pytest.mark.parametrize("padding", [(0, 0), (2, 2), (1, 3)])
def test_the_weight_gradient_by_shifts_is_autograds(
    kernel: int, stride: tuple[int, int], padding: tuple[int, int]
) -> None:
    x, weight = draw(2, 4, 9, 12), draw(4, 1, kernel, kernel, seed=1).requires_grad_()
    output = functional.conv2d(x, weight, None, stride, padding, 1, 4)
    flow = draw(*output.shape, seed=2)
    output.backward(flow)
    torch.testing.assert_close(weight_gradient(x, flow, kernel, stride, padding), weight.grad)


@pytest.mark.parametrize("needed", [True, False])
def test_the_function_passes_gradcheck_in_both_arguments(needed: bool) -> None:
    x, weight = draw(2, 3, 7, 6).requires_grad_(needed), draw(3, 1, 5, 5, seed=1).requires_grad_()
    assert torch.autograd.gradcheck(lambda a, b: DepthwiseConvolution.apply(a, b, (2, 1), (2, 2)), (x, weight))


def test_a_second_derivative_is_refused_rather_than_wrong() -> None:
    x, weight = draw(1, 2, 5, 5), draw(2, 1, 5, 5, seed=1).requires_grad_()
    output = DepthwiseConvolution.apply(x, weight, (1, 1), (2, 2))
    (gradient,) = torch.autograd.grad(output.square().sum(), weight, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def network() -> nn.Sequential:
    """Every kind of convolution that a mobile network has, and one with a text for padding."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 1),
        nn.Conv2d(8, 8, 5, stride=2, padding=2, groups=8, bias=False),
        nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False),
        nn.Conv2d(8, 8, 5, padding=2, groups=8),
        nn.Conv2d(8, 8, 5, padding="same", groups=8, bias=False),
        nn.Conv2d(8, 8, 5, padding=4, dilation=2, groups=8, bias=False),
        nn.Conv2d(8, 6, 1, bias=False),
    )


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    model(x).square().mean().backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


def test_shifts_change_no_result() -> None:
    model, x = network().double(), draw(3, 3, 11, 10)
    plain = gradients(model, x)
    with FastConvolutions(shifts=True, pointwise=False):
        fast = gradients(model, x)
    torch.testing.assert_close(fast, plain)


def test_shifts_are_taken_for_large_depthwise_kernels_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[tuple[int, ...]] = []
    apply = DepthwiseConvolution.apply

    def spy(x: Tensor, weight: Tensor, *rest: tuple[int, int]) -> Tensor:
        taken.append(tuple(weight.shape))
        return apply(x, weight, *rest)

    monkeypatch.setattr(DepthwiseConvolution, "apply", spy)
    with FastConvolutions(shifts=True, pointwise=False):
        network()(draw(1, 3, 9, 9, dtype=torch.float32))
    assert taken == [(8, 1, 5, 5)]


def test_a_fixed_weight_takes_the_librarys_way() -> None:
    model = network().requires_grad_(False)
    with FastConvolutions(shifts=True, pointwise=True):
        assert model(draw(1, 3, 9, 9, dtype=torch.float32)).grad_fn is None


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_pointwise_bfloat16_is_close(layout: torch.memory_format) -> None:
    """Eight bits of mantissa, float32 sums: the gradients agree to about one per cent."""
    model = network().to(memory_format=layout)
    x = draw(4, 3, 11, 10, dtype=torch.float32).contiguous(memory_format=layout)
    plain = gradients(model, x)
    with FastConvolutions(shifts=False, pointwise=True):
        output = model(x)
        fast = gradients(model, x)
    assert output.dtype == torch.float32
    for one, other in zip(fast, plain, strict=True):
        assert (one - other).norm() < 0.03 * other.norm()
        assert one.dtype == torch.float32
    assert not all(torch.equal(one, other) for one, other in zip(fast, plain, strict=True))


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("padding", [0, 1])
def test_a_pointwise_convolution_on_channels_last_maps_is_the_librarys_in_bfloat16(stride: int, padding: int) -> None:
    x = draw(2, 6, 5, 4, dtype=torch.float32).contiguous(memory_format=torch.channels_last)
    weight, bias = draw(8, 6, 1, 1, seed=1, dtype=torch.float32), draw(8, seed=2, dtype=torch.float32)
    with FastConvolutions(shifts=False, pointwise=True):
        found = functional.conv2d(x, weight, bias, stride, padding)
    expected = functional.conv2d(x.bfloat16(), weight.bfloat16(), bias.bfloat16(), stride, padding).float()
    torch.testing.assert_close(found, expected, rtol=0.01, atol=0.02)
    assert found.is_contiguous(memory_format=torch.channels_last)


def test_outside_the_context_nothing_is_taken_over() -> None:
    model, x = network(), draw(2, 3, 9, 9, dtype=torch.float32)
    before = model(x)
    with FastConvolutions(shifts=True, pointwise=True):
        inside = model(x)
    assert not torch.equal(inside, before)
    assert torch.equal(model(x), before)


def test_large_depthwise_layers_are_recognised() -> None:
    assert has_large_depthwise(network())
    assert not has_large_depthwise(nn.Sequential(nn.Conv2d(8, 8, 3, groups=8), nn.Conv2d(8, 8, 5)))


@pytest.mark.parametrize(
    ("keys", "kind"),
    [
        ({"depthwise": "library"}, "nullcontext"),
        ({"depthwise": "shifts"}, "FastConvolutions"),
        ({"depthwise": "library", "precision": "pointwise-bfloat16"}, "FastConvolutions"),
        ({"depthwise": "shifts", "precision": "bfloat16"}, "autocast"),
    ],
)
def test_options_choose_the_context(keys: dict[str, str], kind: str) -> None:
    assert type(arithmetic(TrainingOptions(**keys), CPU)).__name__ == kind  # type: ignore[arg-type]


def test_options_choose_the_layout() -> None:
    assert layout(TrainingOptions(memory_format="channels_last")) == torch.channels_last
    assert layout(TrainingOptions(memory_format="contiguous")) == torch.contiguous_format


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
def test_compiled_blocks_train_like_plain_ones() -> None:
    """Three steps with `compile = "on"` give the weights of the plain steps, and state names do not change."""
    states = []
    for compiled in ("off", "on"):
        options = ModelOptions(backbone="wardround:cnn-bn", pretrained=False, finetune_blocks=1)
        model = build_classifier(options, 3, 3, 32, seed=0)
        names = list(model.state_dict())
        compile_if_asked(model, TrainingOptions(compile=compiled))
        inputs = model.prefix(torch.randn(6, 3, 32, 32, generator=torch.Generator().manual_seed(0)))
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)
        for _ in range(3):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(inputs), torch.tensor([0, 1, 2, 0, 1, 2])).backward()
            optimizer.step()
        assert list(model.state_dict()) == names
        states.append(model.state_dict())
    plain, fast = states
    assert all(torch.allclose(plain[name].float(), fast[name].float(), atol=1e-5) for name in plain)
