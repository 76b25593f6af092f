"""Tensors as a safetensors file in one copy: the library's own writer makes four of every tensor on the way."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

_NAMES = {torch.float32: "F32", torch.float16: "F16", torch.int64: "I64", torch.bool: "BOOL"}


def safetensors_parts(tensors: Mapping[str, Tensor]) -> list[Any]:
    """The pieces of a safetensors file, to be joined: the header, then each tensor's own memory where it can be used.

    Joined, they are byte for byte what `safetensors.torch.save` gives. The pieces must be joined before the tensors
    change.

    Args:
        tensors: float32, float16, int64 or bool, on any device, in any layout; they may share memory.
    """
    header, data, end = {}, [], 0
    for name in sorted(tensors, key=lambda name: (-tensors[name].element_size(), name)):
        tensor = tensors[name].detach().cpu().contiguous()
        start, end = end, end + tensor.nbytes
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
        array = tensor.numpy()
        data.append(array.astype(array.dtype.newbyteorder("<"), copy=False))
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return [len(text).to_bytes(8, "little"), text, *data]
