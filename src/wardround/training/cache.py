"""The cache of frozen-block outputs: in memory up to a budget, in mapped files beyond it, shared between runs."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import safetensors.torch
import torch
from filelock import FileLock
from safetensors import SafetensorError, safe_open
from torch import Tensor

from wardround import seeds
from wardround.data import Samples
from wardround.data.transforms import Policy
from wardround.federation.files import write_atomically
from wardround.models.classifier import Classifier
from wardround.training.arithmetic import layout
from wardround.training.inputs import PREFIX_BATCH, CachedInputs, ImageInputs, Inputs, prefix_outputs
from wardround.training.options import TrainingOptions

OUTPUTS = "outputs"  # the tensor's name in a file


@dataclass
class PrefixCache:
    """Makes `Inputs` for any split, from the cache where possible.

    Attributes:
        model: its frozen blocks are what is cached.
        options: `cache`, `cache_type`, `augment_views`.
        size: side of the images that the network sees, in pixels.
        policy: name of the augmentation of training images.
        seed: decides the augmented views.
        device: where batches are needed.
        budget: bytes of cached outputs that may stay in memory.
        folder: where files go; None keeps everything in memory.
    """

    model: Classifier
    options: TrainingOptions
    size: int
    policy: Policy
    seed: int
    device: torch.device
    budget: int
    folder: Path | None
    _weights: str = ""

    def inputs(self, client: str, samples: Samples, training: bool) -> Inputs:
        """Inputs for `samples`: a training split (augmented as configured) or one to evaluate on."""
        augmented = training and self.policy != "none"
        precision = self.options.frozen_precision
        images = ImageInputs(self.model, samples, self.size, self.policy, self.device, precision)
        views = self.options.augment_views if augmented else 1
        if not self.options.cache or not len(self.model.frozen) or views == 0 or len(samples) == 0:
            return images if augmented else replace(images, policy="none")
        parts = [self._view(client, images, view if augmented else None) for view in range(views)]
        return CachedInputs(parts, self.device, layout(self.options))

    def _view(self, client: str, images: ImageInputs, view: int | None) -> Tensor:
        """Outputs `(N, ...)` for one view: from a file when one has them, else computed and kept in one."""
        if self.folder is None:
            return self._compute(client, images, view)
        file = self.folder / "prefix" / f"{self._key(client, images, view)}.safetensors"
        kept = _load(file)
        if kept is None:
            with _one_process(file):
                kept = _load(file)  # another process may have just written it
                if kept is None:
                    computed = self._compute(client, images, view)
                    kept = _load(file) if _save(file, computed) else None
            if kept is None:
                return computed
        if kept.nbytes <= self.budget:
            self.budget -= kept.nbytes
            kept = kept.clone()
        return kept

    def _compute(self, client: str, images: ImageInputs, view: int | None) -> Tensor:
        stream = None if view is None else seeds.numpy_stream(self.seed, "view", view, client)
        return prefix_outputs(images, stream, self._dtype)

    @property
    def _dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.options.cache_type)
        return dtype

    def _key(self, client: str, images: ImageInputs, view: int | None) -> str:
        """A digest of all that the outputs depend on: weights, images, size, type, library, augmentation."""
        if not self._weights:
            self._weights = _weights_digest(self.model.frozen)
        frozen_layout = "channels_last" if _is_channels_last(self.model.frozen) else "contiguous"
        parts = [
            self._weights,
            _images_digest(images.samples),
            self.size,
            self.options.cache_type,
            PREFIX_BATCH,
        ]
        parts += [
            self.model.normalise.scale.tolist(),
            self.model.normalise.shift.tolist(),
            torch.__version__,
            self.device.type,
            frozen_layout,
        ]
        if self.options.frozen_precision != "float32":
            parts.append(self.options.frozen_precision)
        if view is not None:
            parts += [images.policy, view, self.seed, client]
        return hashlib.sha256("|".join(map(str, parts)).encode()).hexdigest()[:32]


def _weights_digest(module: torch.nn.Module) -> str:
    digest = hashlib.sha256(str(module).encode())
    for name, tensor in module.state_dict().items():
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def _images_digest(samples: Samples) -> str:
    digest = hashlib.sha256(str(samples.images.shape).encode())
    digest.update(np.ascontiguousarray(samples.images).data)
    return digest.hexdigest()


def _is_channels_last(module: torch.nn.Module) -> bool:
    weights = [p for p in module.parameters() if p.dim() == 4]
    return any(not w.is_contiguous() and w.is_contiguous(memory_format=torch.channels_last) for w in weights)


def _load(file: Path) -> Tensor | None:
    """The outputs in `file`, mapped so that writing to them would not reach the file; None if unreadable."""
    with contextlib.suppress(OSError, SafetensorError), safe_open(file, framework="pt") as opened:
        outputs: Tensor = opened.get_tensor(OUTPUTS)
        return outputs
    return None


@contextlib.contextmanager
def _one_process(file: Path) -> Iterator[None]:
    """One process at a time makes `file`; the lock of one that dies is free. On a disk without locks nobody waits."""
    lock = FileLock(f"{file}.lock")
    with contextlib.suppress(OSError, NotImplementedError):
        file.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _save(file: Path, tensor: Tensor) -> bool:
    """Keep `tensor` in `file`; False when the disk does not let us, which costs time but no result."""
    try:
        write_atomically(file, safetensors.torch.save({OUTPUTS: tensor}), durable=False)
    except OSError:
        return False
    return True
