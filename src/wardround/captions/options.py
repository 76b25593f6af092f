"""The `[captions]` section of an experiment file."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from wardround.options import Options

ProviderName = Literal["none", "template", "file", "callable"]
PUBMEDBERT = "hf:microsoft/BiomedNLP-BiomedBERT-base-uncased-abstract"


class CaptionOptions(Options):
    """Where captions come from, which are used, and how (caption-enhanced learning of FM²).

    The paper gives the text encoder, the fusion's two heads and its width. Temperature, weight, dropout, and that
    predictions are made from the image alone, are readings of ours.

    Any method takes captions that trains a network on a loss of its own images; see `Method.takes_captions`.
    """

    provider: ProviderName = Field(
        "none",
        description="none: images alone; template: from modality and class; file: sentences that someone wrote;"
        " callable: a function of yours, such as one that asks a language model",
    )
    file: str | None = Field(None, description="file: a JSONL file, one {image = ..., text = ...} a line")
    states_label: bool = Field(
        True,
        description="file: whether its sentences may state the class; then they are for training images alone."
        " false says that whoever wrote them saw the image and not the label",
    )
    callable: str | None = Field(
        None, description='callable: "module:function" of image, prompt and temperature that gives a text'
    )
    phrases: dict[str, str] = Field(
        default_factory=dict, description='a modality in plain words, as mri_t1 = "T1-weighted brain MRI slice"'
    )
    coverage: float = Field(1.0, ge=0, le=1, description="share of the images that have a caption, chosen by the seed")
    filter: Literal["auto", "on", "off"] = Field(
        "auto",
        description="leave out captions that are too short or long, do not name the modality, refuse, or name another"
        " class alone; auto: those of file and callable are looked at",
    )
    min_words: int = Field(8, ge=1, description="fewest words that the filter lets pass")
    max_words: int = Field(60, ge=1, description="most words that the filter lets pass")
    max_duplicates: int | None = Field(
        None, ge=1, description="the filter: images of a client that may have the same caption; none: any number"
    )
    text_encoder: str = Field(
        PUBMEDBERT,
        description="hf:NAME or hf:FOLDER: a model of the Hugging Face hub, or a copy of its files; minilm: the"
        " sentence encoder of the extra `weights`; tiny: a random vector for each word, built in",
    )
    tokens: Literal["all", "sentence"] = Field(
        "all", description="what fusion attends to: every token, or their mean, which takes a fraction of the memory"
    )
    fusion: bool = Field(True, description="fuse captions with image features; without, they only add a loss")
    width: int = Field(256, ge=1, description="of the space that images and captions are projected to")
    heads: int = Field(2, ge=1, description="of the fusion's cross-attention; they divide the width")
    dropout: float = Field(
        0.3, ge=0, le=1, description="share of training images whose caption is hidden from the fusion, anew each time"
    )
    in_mixtures: bool = Field(
        False,
        description="fm2: the mixtures train on features fused with captions too, hidden as often as dropout says;"
        " false: on features of images alone, as in a test",
    )
    alpha: float = Field(0.5, ge=0, description="weight of the contrastive loss (alpha)")
    temperature: float = Field(0.07, gt=0, description="of the contrastive loss (tau)")
    multi_positive: Literal["auto"] | bool = Field(
        "auto",
        description="all captions of a batch that say the same count as right, not the image's own alone; auto: for"
        " templates",
    )
    at_test: bool = Field(
        False,
        description="at the end, judge personal models with captions too, beside the figures without; only for captions"
        " that were made from the image alone",
    )

    @property
    def looks_at_images_alone(self) -> bool:
        """Whether captions are made without the label."""
        return self.provider == "callable" or (self.provider == "file" and not self.states_label)

    @property
    def positives_by_meaning(self) -> bool:
        """`multi_positive`, decided."""
        return self.provider == "template" if self.multi_positive == "auto" else self.multi_positive

    @property
    def filters(self) -> bool:
        """`filter`, decided."""
        return self.provider in ("file", "callable") if self.filter == "auto" else self.filter == "on"

    @model_validator(mode="after")
    def _provider_has_what_it_needs(self) -> Self:
        for key, value in (("file", self.file), ("callable", self.callable)):
            if (self.provider == key) != (value is not None):
                raise ValueError(f'captions.{key} goes with captions.provider = "{key}", and only with it')
        if not self.states_label and self.provider != "file":
            raise ValueError('captions.states_label is for captions.provider = "file"')
        return self

    @model_validator(mode="after")
    def _label_stays_out_of_tests(self) -> Self:
        if self.at_test and not self.looks_at_images_alone:
            raise ValueError(
                f'captions.at_test = true: provider = "{self.provider}" states the label, and a test that is told the '
                "answer means nothing (allowed: callable, or file with states_label = false)"
            )
        if self.at_test and not self.fusion:
            raise ValueError("captions.at_test = true needs captions.fusion = true: nothing else reads a caption")
        return self

    @model_validator(mode="after")
    def _numbers_fit(self) -> Self:
        if self.width % self.heads:
            raise ValueError(f"captions.width = {self.width} is not divided by captions.heads = {self.heads}")
        if self.min_words > self.max_words:
            raise ValueError("captions.min_words is above captions.max_words")
        if not (self.fusion or self.alpha):
            raise ValueError("captions.fusion = false and captions.alpha = 0 leave captions nothing to do")
        if self.in_mixtures and not self.fusion:
            raise ValueError("captions.in_mixtures = true needs captions.fusion = true: features have no captions else")
        return self
