"""A CLIP with few and narrow layers, as a configuration and as weights in a file."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

TINY: dict[str, Any] = {
    "embed_dim": 24,
    "vision_cfg": {"image_size": 32, "layers": 2, "width": 32, "head_width": 16, "patch_size": 16},
    "text_cfg": {"context_length": 24, "vocab_size": 49408, "width": 16, "heads": 2, "layers": 2},
}
"""Few and narrow layers, and the whole vocabulary."""


def written(folder: Path, **changes: Any) -> str:
    """A backbone's name for a file with the tiny configuration."""
    file = folder / "config.json"
    file.write_text(json.dumps(TINY | changes))
    return f"open_clip:{file}"


def saved_weights(folder: Path) -> str:
    """A file of random weights for it."""
    import open_clip

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = open_clip.CLIP(**copy.deepcopy(TINY))
    save_file(network.state_dict(), folder / "weights.safetensors")
    return str(folder / "weights.safetensors")
