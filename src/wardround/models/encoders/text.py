"""The text side of an encoder: sentences, or prompts with a learned context, to vectors beside the image features."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from wardround.errors import InputError

FILLER = "x"
"""A word that is one token in every vocabulary. It keeps the place of a context vector."""
CHUNK = 256
"""Texts that are encoded at once."""


class TextTower(ABC):
    """Turns text into vectors that are compared with an encoder's image features by their cosine. Frozen.

    It is no `nn.Module`, so that a backbone which holds one neither trains, nor saves, nor sends it. It is not made
    for use by several threads at once.

    Attributes:
        dim: D, the length of a vector, as of the image features.
        context_width: W, the length of a token's embedding; 0 where prompts cannot have a learned context.
        logit_scale: what cosines are multiplied by (the exponential of CLIP's logarithmic parameter).
    """

    dim: int
    context_width: int
    logit_scale: float = 100.0

    @abstractmethod
    def encode(self, texts: Sequence[str]) -> Tensor:
        """Features of `texts`: float32 `(n, D)`, not normalised, without a graph. The library cuts long texts off."""

    @abstractmethod
    def encode_context(self, context: Tensor, names: Sequence[str]) -> Tensor:
        """Features `(n, D)` of the prompts `[SOS] [context x L] [name] . [EOS]`, differentiable in `context`.

        Args:
            context: token embeddings, `(L, W)` for all names or `(n, L, W)` for one context each.
            names: the classes, in words.

        Raises:
            InputError: the encoder has no token embeddings, the shape is another one, or a prompt is too long.
        """

    @abstractmethod
    def token_embeddings(self, texts: Sequence[str]) -> Tensor:
        """Embeddings `(n, T, W)` of the tokens of `texts`, without the special ones: a context to start from.

        Raises:
            InputError: the encoder has no token embeddings, a text is too long, or the texts differ in length.
        """


class TokenTower(TextTower):
    """A text tower around a library's tokeniser and network.

    A context takes the place of the embeddings of filler words inside the library's own forward pass, so that
    positions, masks and pooling are the library's.
    """

    name: str

    @abstractmethod
    def tokenise(self, texts: Sequence[str]) -> Tensor:
        """Token ids int64 `(n, T)`, with special tokens and padding at the end."""

    @abstractmethod
    def run(self, ids: Tensor) -> Tensor:
        """Token ids `(n, T)` to features `(n, D)`."""

    @abstractmethod
    def embedding(self) -> nn.Module | None:
        """The layer that turns `(n, T)` ids into `(n, T, W)`; None if the encoder has none."""

    @torch.no_grad()
    def encode(self, texts: Sequence[str]) -> Tensor:
        """See `TextTower.encode`."""
        chunks = [texts[start : start + CHUNK] for start in range(0, len(texts), CHUNK)]
        parts = [self.run(self.tokenise(chunk)).float() for chunk in chunks]
        return torch.cat(parts) if parts else torch.zeros(0, self.dim)

    def encode_context(self, context: Tensor, names: Sequence[str]) -> Tensor:
        """See `TextTower.encode_context`."""
        layer, rows = self._embedding(), self._rows(context, len(names))
        length = rows.shape[1]
        prompts = [" ".join([FILLER] * length + [name]) + "." for name in names]
        self._ends(prompts)
        start = self._ends([""])[0]

        def put(module: nn.Module, args: object, output: Tensor) -> Tensor:
            given = rows.to(output.device, output.dtype)
            return torch.cat([output[:, :start], given, output[:, start + length :]], dim=1)

        handle = layer.register_forward_hook(put)
        try:
            return self.run(self.tokenise(prompts)).float().to(context.device)
        finally:
            handle.remove()

    @torch.no_grad()
    def token_embeddings(self, texts: Sequence[str]) -> Tensor:
        """See `TextTower.token_embeddings`."""
        layer, ends, start = self._embedding(), self._ends(texts), self._ends([""])[0]
        if len(set(ends)) > 1:
            counts = ", ".join(f"{text!r}: {end - start}" for text, end in zip(texts, ends, strict=True))
            raise InputError(f"texts must have the same number of tokens to be contexts together, found {counts}")
        embedded: Tensor = layer(self.tokenise(texts)[:, start : ends[0] if ends else start])
        return embedded.float()

    def _embedding(self) -> nn.Module:
        """The token embedding. InputError, naming the encoder, where there is none."""
        layer = self.embedding()
        if layer is None:
            raise InputError(
                f"model.backbone = {self.name!r} has no token embeddings that its text side would accept: methods that "
                "learn a prompt's context cannot use it (encoders with CLIP's own or a BERT-like text side can be used)"
            )
        return layer

    def _rows(self, context: Tensor, count: int) -> Tensor:
        """`context` as `(count, L, W)`. InputError for other shapes."""
        width = self.context_width
        if context.ndim == 2 and context.shape[1] == width:
            return context.expand(count, -1, -1)
        if context.ndim == 3 and (len(context), context.shape[2]) == (count, width):
            return context
        raise InputError(
            f"a context for {count} names must be (L, {width}) or ({count}, L, {width}), found {tuple(context.shape)}"
        )

    def _ends(self, texts: Sequence[str]) -> list[int]:
        """Where the words of each text end in its row of ids: the first place that one more word changes.

        The same holds for any tokeniser, whatever its special tokens. InputError where one more word changes nothing,
        because the row is full and the end of the text may have been cut off.
        """
        ids, longer = self.tokenise(texts), self.tokenise([f"{text} {FILLER}" for text in texts])
        width = min(ids.shape[1], longer.shape[1])
        changed = ids[:, :width] != longer[:, :width]
        cut = [text for text, any_change in zip(texts, changed.any(1).tolist(), strict=True) if not any_change]
        if cut:
            raise InputError(
                f"a prompt is too long for {self.name!r}, which takes {width} tokens with the special ones: "
                f"{cut[0]!r} (allowed: fewer context vectors, or a shorter name)"
            )
        return [int(end) for end in changed.int().argmax(1)]


def freeze(module: nn.Module) -> nn.Module:
    """Eval mode and no gradients, in place: what a tower is in."""
    return module.requires_grad_(False).eval()
