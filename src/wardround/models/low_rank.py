"""Low-rank adaptation (LoRA) of attention: pairs of thin matrices beside weights that stay as they were pretrained."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

PROJECTIONS = ("q", "k", "v", "o")
FORMS = (("in_proj_weight", "out_proj.weight"), ("qkv.weight", "proj.weight"))
"""What attention calls its queries, keys and values in one matrix `(3 D', D)`, and its output projection `(D, D')`: as
torch's MultiheadAttention does, which open_clip and torchvision use, and as timm's attention does."""


class LowRank(nn.Module):
    """What is added to a weight, `B A`. A starts Kaiming-uniform with a = sqrt 5, B at 0, so that nothing is added.

    Args:
        inputs, outputs: the weight's sizes.
        rank: of the product, at most.

    Attributes:
        A: `(rank, inputs)`; B: `(outputs, rank)`.
    """

    def __init__(self, inputs: int, outputs: int, rank: int) -> None:
        super().__init__()
        self.A = nn.Parameter(torch.empty(rank, inputs))
        self.B = nn.Parameter(torch.zeros(outputs, rank))
        nn.init.kaiming_uniform_(self.A, a=math.sqrt(5))

    def forward(self) -> Tensor:
        """`(outputs, inputs)`."""
        return self.B @ self.A


class LowRankAttention(nn.Module):
    """Attention whose weights are the pretrained ones plus `scale * B A`, with a pair each for q, k, v and o.

    The pretrained module runs as it always does, on other weights: its masks, dropout and fast paths are its own, and
    with B = 0 its outputs are the same to the bit. The sum is made in every pass, in training as in evaluation, so that
    there is nothing to merge or to take apart again; it costs four products `(D, rank) (rank, D)`.

    Args:
        base: attention in one of `FORMS`.
        rank: of each pair.
        scale: multiplies the products.
    """

    def __init__(self, base: nn.Module, rank: int, scale: float) -> None:
        super().__init__()
        names = form_of(base)
        assert names is not None
        self.joint, self.output = names
        inside, width = (base.get_parameter(name).shape[1] for name in names)
        self.base, self.scale = base, scale
        sizes = [(inside, width)] * 3 + [(width, base.get_parameter(self.output).shape[0])]
        self.pairs = nn.ModuleDict({name: LowRank(*size, rank) for name, size in zip(PROJECTIONS, sizes, strict=True)})

    def weights(self) -> dict[str, Tensor]:
        """The weights in use, by their names in `base`."""
        q, k, v, o = (pair() for pair in self.pairs.values())
        joint, output = self.base.get_parameter(self.joint), self.base.get_parameter(self.output)
        return {self.joint: joint + self.scale * torch.cat([q, k, v]), self.output: output + self.scale * o}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As `base`."""
        return functional_call(self.base, self.weights(), args, kwargs)


def form_of(module: nn.Module) -> tuple[str, str] | None:
    """The names of `module`'s joint weight and output projection; None if it is no attention in one of `FORMS`."""
    for form in FORMS:
        try:
            joint, output = (module.get_parameter(name) for name in form)
        except AttributeError:
            continue
        if joint.ndim == output.ndim == 2 and len(joint) == 3 * output.shape[1]:
            return form
    return None


def attentions(model: nn.Module) -> list[nn.Module]:
    """Every attention in one of `FORMS` inside `model`."""
    return [module for module in model.modules() if form_of(module)]


def narrowest(attention: nn.Module) -> int:
    """The smallest size of the weights of an attention: no larger rank is low."""
    form = form_of(attention)
    assert form is not None
    joint, output = (attention.get_parameter(name) for name in form)
    least: int = min(joint.shape[1], *output.shape)
    return least


def adapt_attention(model: nn.Module, rank: int, scale: float) -> None:
    """Put a `LowRankAttention` in the place of every attention inside `model`, whose own parameters stop training.

    Attention in other forms, as some encoders pool with, stays as it is.
    """
    model.requires_grad_(False)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if form_of(child):
                setattr(parent, name, LowRankAttention(child, rank, scale))


def pair_names(state: Iterable[str]) -> list[tuple[str, str]]:
    """The names of A and B of every pair among the entries of a state."""
    names = set(state)
    stems = sorted(name.removesuffix(".A") for name in names if name.endswith(".A"))
    return [(f"{stem}.A", f"{stem}.B") for stem in stems if f"{stem}.B" in names]


def mean_pair(
    states: Sequence[Mapping[str, Tensor]], shares: Sequence[float], names: tuple[str, str]
) -> tuple[dict[str, Tensor], float, float]:
    """The best pair for a mean of products, `B A ~ M = sum_k p_k B_k A_k`, in the Frobenius norm.

    `A = V^T` and `B = U S` with the first singular vectors and values of M, and the largest entry in each row of A
    positive, which makes the two unique. A's rows have length 1 whatever M is, so that B goes on learning even from
    M = 0. M is never formed: it is the product of all B side by side and all A above each other.

    Args:
        states: of K clients.
        shares: p_k; they sum to 1.
        names: of A `(r, in)` and B `(out, r)` in each state.

    Returns:
        A and B by name, `||M - B A||^2` and `||M||^2`.
    """
    tall = torch.cat([share * state[names[1]].double() for share, state in zip(shares, states, strict=True)], 1)
    wide = torch.cat([state[names[0]].double() for state in states])
    (q_tall, r_tall), (q_wide, r_wide) = torch.linalg.qr(tall), torch.linalg.qr(wide.T)
    u, s, vt = torch.linalg.svd(r_tall @ r_wide.T, full_matrices=False)
    like = states[0][names[0]]
    rank = len(like)
    a, b = vt[:rank] @ q_wide.T, q_tall @ u[:, :rank] * s[:rank]
    sign = a.gather(1, a.abs().argmax(1, keepdim=True)).sign()
    squares = s.square()
    pair = {names[0]: (sign * a).to(like.dtype), names[1]: (b * sign.T).to(like.dtype)}
    return pair, float(squares[rank:].sum()), float(squares.sum())
