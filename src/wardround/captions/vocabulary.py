"""Classes and modalities in words: for templates, for prompts, and to see what a caption speaks of."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from wardround.errors import InputError, suggestion

GRADES = {
    "0": "no diabetic retinopathy",
    "1": "mild non-proliferative diabetic retinopathy",
    "2": "moderate non-proliferative diabetic retinopathy",
    "3": "severe non-proliferative diabetic retinopathy",
    "4": "proliferative diabetic retinopathy",
}
"""RetinaMNIST's classes, which have numbers for names (the grades of the DeepDRiD challenge)."""

UNKNOWN = "image"
"""The modality of images whose source does not name one."""

SYNONYMS: dict[str, tuple[str, ...]] = {
    "fundus": ("retina",),
    "dermatoscope": ("dermoscop", "dermato", "skin"),
    "dermoscopy": ("dermato", "skin"),
    "microscope": ("microscop", "micrograph"),
    "microscopy": ("microscop", "micrograph"),
    "blood": ("smear",),
    "kidney": ("renal",),
    "colon": ("colorectal",),
    "pathology": ("histo", "patholog"),
    "histopathology": ("histo", "patholog"),
    "histology": ("histo", "patholog"),
    "x-ray": ("xray", "radiograph"),
    "xray": ("x-ray", "radiograph"),
    "ct": ("computed tomograph",),
    "oct": ("optical coherence",),
    "mri": ("mr", "magnetic resonance"),
    "ultrasound": ("sonogra", "echogra"),
}
"""A word in a modality's name, and beginnings of other words that name the same."""

SAYS_LITTLE = {"image", "images", "picture", "slice", "scan", "view", "axial", "coronal", "sagittal", "medical"}
"""Words of a phrase that name no modality."""


@dataclass(frozen=True)
class Vocabulary:
    """A federation's words.

    Attributes:
        classes: the federation's.
        modalities: the federation's.
        names: a class in plain words, where its own name is none.
        phrases: a modality in plain words, where its own name with "image" behind it will not do.

    Raises:
        InputError: `phrases` speaks of a modality that does not exist.
    """

    classes: Sequence[str]
    modalities: Sequence[str]
    names: Mapping[str, str] = field(default_factory=dict)
    phrases: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for modality in self.phrases:
            if modality not in self.modalities:
                raise InputError(
                    f"captions.phrases: there is no modality {modality!r}{suggestion(modality, self.modalities)}"
                )

    def finding(self, label: int, modality: int) -> str:
        """A class in plain words.

        Without a name of its own, `SET:CLASS` and `family: class` lose what is before the colon, and a number is a
        grade of retinopathy on a fundus image and "class 3" elsewhere.
        """
        label_name = self.classes[label]
        if label_name in self.names:
            return self.names[label_name]
        plain = re.sub(r"^[^:]+:\s*", "", label_name).replace("_", " ")
        if not plain.isdecimal():
            return plain
        return GRADES.get(plain, f"grade {plain}") if "fundus" in self.modalities[modality] else f"class {plain}"

    def phrase(self, modality: int) -> str:
        """What images of a modality are: `blood microscope image`."""
        name = self.modalities[modality]
        plain = "medical" if name == UNKNOWN else name.replace("_", " ")
        return self.phrases.get(name, f"{plain} image")

    def names_modality(self, text: str, modality: int) -> bool:
        """Whether a text says how the image was taken; every text does where the modality is not known."""
        name = self.modalities[modality]
        if name == UNKNOWN and name not in self.phrases:
            return True
        return any(_occurs(word, text) for word in self._words(modality))

    def _words(self, modality: int) -> set[str]:
        """Beginnings of words that name the modality."""
        parts = f"{self.modalities[modality]} {self.phrase(modality)}".lower().replace("_", " ").split()
        words = set(parts) - SAYS_LITTLE
        return words.union(*(SYNONYMS.get(word, ()) for word in words))


def _occurs(beginning: str, text: str) -> bool:
    """Whether a word of `text` begins so; one of three letters or fewer has to be the whole word."""
    end = r"(?!\w)" if len(beginning) <= 3 else ""
    return re.search(rf"(?<!\w){re.escape(beginning)}{end}", text, re.IGNORECASE) is not None
