"""Backbones by name, each cut into a sequence of blocks of which the last n can be fine-tuned."""

from wardround.models.backbones.backbone import Backbone
from wardround.models.backbones.registry import load_backbone

__all__ = ["Backbone", "load_backbone"]
