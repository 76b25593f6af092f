"""What a name after `open_clip:` stands for: a configuration, and where its weights and words are."""

from __future__ import annotations

import copy
import importlib.util
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from wardround.errors import InputError, MissingExtra, suggestion
from wardround.models.weights import downloading

Config = dict[str, Any]
T = TypeVar("T")

CONFIG_FILE = "open_clip_config.json"
HUB = "hf-hub:"
WEIGHTS = ("open_clip_model", "open_clip_pytorch_model", "model", "pytorch_model")
ENDINGS = (".safetensors", ".bin", ".pth", ".pt")
TOWERS = ("embed_dim", "vision_cfg", "text_cfg")
"""What every configuration has."""


@dataclass(frozen=True)
class Description:
    """An encoder before it is built.

    Attributes:
        name: as the experiment file has it.
        config: open_clip's configuration of the network; a copy of one's own.
        preprocessing: mean, std and whatever else open_clip says of the images.
        repository: on the Hugging Face hub, or empty.
        file: in that repository, or empty for open_clip's usual names.
        folder: where files lie that the configuration names, if it comes from a file.
    """

    name: str
    config: Config
    preprocessing: Config = field(default_factory=dict)
    repository: str = ""
    file: str = ""
    folder: Path | None = None

    @property
    def mean(self) -> tuple[float, ...]:
        """Per channel, of images scaled to 0..1."""
        from open_clip import OPENAI_DATASET_MEAN

        return tuple(self.preprocessing.get("mean") or OPENAI_DATASET_MEAN)

    @property
    def std(self) -> tuple[float, ...]:
        """Per channel, of images scaled to 0..1."""
        from open_clip import OPENAI_DATASET_STD

        return tuple(self.preprocessing.get("std") or OPENAI_DATASET_STD)

    def weights(self) -> tuple[str, str]:
        """The file of the published weights, and in words where it came from. InputError: there is none."""
        from open_clip.pretrained import download_pretrained_from_hf

        if self.repository:
            file = from_hub(
                self.name, "its weights", lambda: download_pretrained_from_hf(self.repository, self.file or None)
            )
            return str(file), f"hub {self.repository}"
        found = _weights_in(self.folder) if self.folder else None
        if found is None:
            raise InputError(
                f"model.pretrained = true, but {self.name!r} does not say whose weights: {_choices(self)}"
                'set model.pretrained to "a/local/file.safetensors" or to false'
            )
        return str(found), f"file {found}"

    def tokenizer(self) -> Any:
        """open_clip's tokeniser for this encoder: a list of texts to ids `(n, T)`. InputError: it cannot be had."""
        from open_clip.tokenizer import HFTokenizer, SimpleTokenizer

        text = self.config["text_cfg"]
        length, options = text.get("context_length", 77), text.get("tokenizer_kwargs", {})
        source, mode = text.get("hf_tokenizer_name"), text.get("tokenizer_mode")
        if not source:
            return SimpleTokenizer(context_length=length, **options)
        return from_hub(
            self.name,
            "its tokeniser",
            lambda: HFTokenizer(source, context_length=length, tokenizer_mode=mode, **options),
        )


def prefixed(architecture: str) -> str:
    """`open_clip:ARCHITECTURE`."""
    return f"open_clip:{architecture}"


def describe(architecture: str) -> Description:
    """What `architecture`, the part after `open_clip:`, stands for; see `OpenClipSource` for the forms.

    Raises:
        InputError: open_clip is not installed, the name is unknown, or its configuration cannot be had or read.
    """
    if importlib.util.find_spec("open_clip") is None:
        raise MissingExtra("open_clip_torch", "clip", f"model.backbone = {prefixed(architecture)!r}")
    if architecture.startswith(HUB):
        return _of_repository(architecture)
    path = Path(architecture).expanduser()
    if path.suffix == ".json" or path.is_dir():
        return _of_file(prefixed(architecture), path / CONFIG_FILE if path.is_dir() else path, path.is_dir())
    return _of_library(architecture)


def _of_library(architecture: str) -> Description:
    """`MODEL` or `MODEL/TAG` of open_clip's own lists."""
    import open_clip
    from open_clip.pretrained import get_pretrained_cfg

    # Backbones import encoders, so at the top of the file this would be a circle.
    from wardround.models.backbones.sources import unknown

    model, _, tag = architecture.partition("/")
    name = prefixed(architecture)
    if (config := open_clip.get_model_config(model) if model in open_clip.list_models() else None) is None:
        raise unknown(prefixed(model), open_clip.list_models())
    if not tag:
        return Description(name, config)
    published: Config = get_pretrained_cfg(model, tag)
    if not published:
        tags = open_clip.list_pretrained_tags_by_model(model)
        raise InputError(f"model.backbone = {name!r}: unknown weights {tag!r}{suggestion(tag, tags)}")
    # The architecture's file has GELU where these weights were trained with its approximation.
    config["quick_gelu"] = bool(published.get("quick_gelu") or config.get("quick_gelu"))
    repository, _, file = published["hf_hub"].rpartition("/")
    return Description(name, config, published, repository, file)


def _of_repository(architecture: str) -> Description:
    """`hf-hub:ORG/NAME`."""
    from open_clip.pretrained import download_pretrained_from_hf

    name, repository = prefixed(architecture), architecture.removeprefix(HUB)
    file = from_hub(name, "its configuration", lambda: download_pretrained_from_hf(repository, CONFIG_FILE))
    config, preprocessing = _read(name, Path(file))
    return Description(name, config, preprocessing, repository)


def _of_file(name: str, file: Path, is_folder: bool) -> Description:
    """A configuration on this machine; the words and the text network that it names may lie beside it."""
    config, preprocessing = _read(name, file)
    text = config["text_cfg"]
    for key in ("hf_model_name", "hf_tokenizer_name"):
        if text.get(key) and (file.parent / text[key]).exists():
            text[key] = str(file.parent / text[key])
    beside = is_folder and (file.parent / "tokenizer_config.json").is_file()
    if beside and text.get("hf_tokenizer_name"):
        text["hf_tokenizer_name"] = str(file.parent)
    return Description(name, config, preprocessing, folder=file.parent if is_folder else None)


def _read(name: str, file: Path) -> tuple[Config, Config]:
    """Network and preprocessing of a configuration, with or without a `model_cfg` around the first."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"model.backbone = {name!r}: {file} cannot be read ({error})") from error
    config = content.get("model_cfg", content) if isinstance(content, dict) else {}
    missing = [key for key in TOWERS if key not in config]
    if missing:
        raise InputError(
            f"model.backbone = {name!r}: {file} is no configuration of open_clip, it lacks {', '.join(missing)}"
        )
    preprocessing = content.get("preprocess_cfg", {})
    return copy.deepcopy(config), preprocessing


def _weights_in(folder: Path) -> Path | None:
    """The file of weights in a copied repository, the safe format first."""
    candidates = (folder / f"{stem}{ending}" for ending in ENDINGS for stem in WEIGHTS)
    return next((file for file in candidates if file.is_file()), None)


def _choices(about: Description) -> str:
    """`take open_clip:ViT-B-32/openai (...), or `, where open_clip publishes weights for the architecture."""
    import open_clip

    tags = open_clip.list_pretrained_tags_by_model(about.name.partition(":")[2])
    return f"take {about.name}/{tags[0]} (or another of {', '.join(tags)}), or " if tags else ""


def from_hub(name: str, what: str, ask: Callable[[], T]) -> T:
    """What `ask` gets out of the hub's cache or, where that fails, off the hub.

    Raises:
        InputError: neither has it; within seconds where there is no network.
    """
    import huggingface_hub

    try:
        with _cache_alone():
            return ask()
    except OSError:
        pass  # not in the cache
    try:
        with downloading(name, huggingface_hub.constants.ENDPOINT):
            return ask()
    except InputError as error:
        cause = error.__cause__ or error
        raise InputError(
            f"model.backbone = {name!r}: {what} could not be downloaded from {huggingface_hub.constants.ENDPOINT} "
            f"({type(cause).__name__}: {cause}). What helps: network access once, after which the hub's cache is used; "
            f"or the repository's files in a folder, model.backbone = {prefixed('PATH/TO/FOLDER')!r}; "
            'for weights alone model.pretrained = "a/local/file.safetensors" or false'
        ) from cause


@contextmanager
def _cache_alone() -> Iterator[None]:
    """Keep the hub's client, and with it transformers, from asking a server."""
    import huggingface_hub

    constants: Any = huggingface_hub.constants
    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before
