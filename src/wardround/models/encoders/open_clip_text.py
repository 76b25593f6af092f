"""The text side of an open_clip encoder: CLIP's own transformer, or one of the transformers library."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from torch import Tensor, nn

from wardround.errors import InputError
from wardround.models.encoders.open_clip_names import Description
from wardround.models.encoders.text import TokenTower


class OpenClipText(TokenTower):
    """open_clip's `encode_text` behind the interface of `TextTower`.

    The network is the one whose image side is the backbone's block: weights that are loaded into it are seen here.
    """

    def __init__(self, network: Any, about: Description) -> None:
        self.name, self.dim = about.name, int(about.config["embed_dim"])
        self._network, self._about = network, about
        layer: Any = self.embedding()
        self.context_width = 0 if layer is None else int(layer.embedding_dim)

    @property
    def logit_scale(self) -> float:  # type: ignore[override]
        """The exponential of CLIP's parameter, as it is now."""
        scale: Tensor = self._network.logit_scale.detach()
        # Networks that have shapes but no memory (torch's meta device) have no scale either.
        return TokenTower.logit_scale if scale.is_meta else float(scale.exp())

    @cached_property
    def _tokenizer(self) -> Any:
        """Made when first used: images alone need no words. InputError where it does not fit the network."""
        tokenizer: Any = self._about.tokenizer()
        words = len(getattr(tokenizer, "tokenizer", tokenizer.encoder if hasattr(tokenizer, "encoder") else ()))
        layer: Any = self.embedding()
        if layer is not None and words > layer.num_embeddings:
            raise InputError(
                f"model.backbone = {self.name!r}: text_cfg.vocab_size is {layer.num_embeddings}, but the tokeniser "
                f"knows {words} tokens (allowed: at least as many)"
            )
        return tokenizer

    def tokenise(self, texts: Sequence[str]) -> Tensor:
        """Token ids `(n, T)`."""
        ids: Tensor = self._tokenizer(list(texts))
        return ids

    def run(self, ids: Tensor) -> Tensor:
        """Features `(n, D)`, not normalised."""
        features: Tensor = self._network.encode_text(ids.to(self._network.logit_scale.device), normalize=False)
        return features

    def embedding(self) -> nn.Module | None:
        """CLIP's `token_embedding`, or the input embedding of a network of the transformers library."""
        text = getattr(self._network, "text", self._network)
        own: nn.Module | None = getattr(text, "token_embedding", None)
        if own is not None:
            return own
        ask = getattr(getattr(text, "transformer", None), "get_input_embeddings", None)
        found: Any = ask() if ask else None
        return found if isinstance(found, nn.Embedding) else None
