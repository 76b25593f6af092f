"""CLIP as the transformers library writes it, which is how PubMedCLIP is published, under open_clip's names."""

from __future__ import annotations

import re

import torch
from torch import Tensor

State = dict[str, Tensor]

RENAMED = (
    (r"^vision_model\.embeddings\.class_embedding$", "visual.class_embedding"),
    (r"^vision_model\.embeddings\.patch_embedding\.", "visual.conv1."),
    (r"^vision_model\.embeddings\.position_embedding\.weight$", "visual.positional_embedding"),
    (r"^vision_model\.pre_layrnorm\.", "visual.ln_pre."),  # so spelled in the library
    (r"^vision_model\.post_layernorm\.", "visual.ln_post."),
    (r"^vision_model\.encoder\.layers\.", "visual.transformer.resblocks."),
    (r"^visual_projection\.weight$", "visual.proj"),
    (r"^text_model\.embeddings\.token_embedding\.", "token_embedding."),
    (r"^text_model\.embeddings\.position_embedding\.weight$", "positional_embedding"),
    (r"^text_model\.final_layer_norm\.", "ln_final."),
    (r"^text_model\.encoder\.layers\.", "transformer.resblocks."),
    (r"^text_projection\.weight$", "text_projection"),
    (r"\.layer_norm([12])\.", r".ln_\1."),
    (r"\.mlp\.fc1\.", ".mlp.c_fc."),
    (r"\.mlp\.fc2\.", ".mlp.c_proj."),
    (r"\.self_attn\.out_proj\.", ".attn.out_proj."),
)
"""Pattern -> replacement, in order."""


def from_transformers(state: State) -> State:
    """Rename the entries of a `CLIPModel`; any other state is returned as it is."""
    if "vision_model.embeddings.patch_embedding.weight" not in state:
        return state
    state = {name: value for name, value in state.items() if not name.endswith("position_ids")}
    renamed = {_renamed(name): value for name, value in _with_joint_projections(state).items()}
    # Both are matrices to multiply by here, and weights of linear layers there.
    turned = {name: renamed[name].T.contiguous() for name in ("visual.proj", "text_projection") if name in renamed}
    return renamed | turned


def _with_joint_projections(state: State) -> State:
    """Queries, keys and values of each attention in one tensor, in this order."""
    joint = dict(state)
    for name in state:
        if match := re.fullmatch(r"(.*\.self_attn)\.q_proj\.(weight|bias)", name):
            stem, kind = match.groups()
            parts = [f"{stem}.{letter}_proj.{kind}" for letter in "qkv"]
            if all(part in joint for part in parts):
                joint[f"{stem.removesuffix('self_attn')}attn.in_proj_{kind}"] = torch.cat([joint.pop(p) for p in parts])
    return joint


def _renamed(name: str) -> str:
    """One entry's name in open_clip."""
    for pattern, replacement in RENAMED:
        name = re.sub(pattern, replacement, name)
    return name
