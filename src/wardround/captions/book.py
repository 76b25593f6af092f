"""The captions of a client's images: asked for, looked at, and counted."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from wardround.captions.caption import Caption, Provider
from wardround.captions.coverage import place
from wardround.captions.filtering import EMPTY, REPEATS, Filter
from wardround.captions.options import CaptionOptions
from wardround.data.federation import WITHHELD, ClientData, SplitName


@dataclass(frozen=True)
class CaptionBook:
    """The captions of one split of one client, in the order of its images.

    Attributes:
        client: whose.
        split: of which images.
        captions: None for an image that has none.
        rejected: how many captions were left out, for each reason.
    """

    client: str
    split: SplitName
    captions: tuple[Caption | None, ...]
    rejected: Mapping[str, int] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.captions)

    @property
    def captioned(self) -> int:
        """How many images have a caption."""
        return sum(caption is not None for caption in self.captions)

    @property
    def texts(self) -> tuple[str, ...]:
        """Distinct texts in the order in which they first occur."""
        return tuple(dict.fromkeys(caption.text for caption in self.captions if caption is not None))

    def numbered(self, by_meaning: bool) -> NDArray[np.int64]:
        """For every image the number of its text, or of its meaning, from 0; -1 without a caption. `(N,)`.

        Texts have their place in `texts`.
        """
        words = [None if c is None else c.meaning if by_meaning else c.text for c in self.captions]
        numbers = {word: number for number, word in enumerate(dict.fromkeys(w for w in words if w is not None))}
        return np.array([-1 if word is None else numbers[word] for word in words], dtype=np.int64)


def write_book(
    provider: Provider, client: ClientData, split: SplitName, options: CaptionOptions, seed: int
) -> CaptionBook:
    """Ask for the captions of a split, for as many images as `coverage` says, and leave out what is not fit for use.

    Outside training the filter does not look at labels either.

    Raises:
        CaptionLeak: the provider may not be asked about this split.
        InputError, RunError: the provider failed.
    """
    samples = client.split(split)
    places = [place(seed, name) for name in samples.names]
    covered = [row for row in range(len(samples)) if places[row] < options.coverage]
    asked = {row: caption for row in covered if (caption := provider.get(client, split, row)) is not None}
    faults = _faults(provider, client, split, options, asked)
    sound = {row: caption for row, caption in asked.items() if row not in faults}
    if options.filters and options.max_duplicates is not None:
        faults |= dict.fromkeys(_repeats(sound, places, options.max_duplicates), REPEATS)
    captions = tuple(None if row in faults else asked.get(row) for row in range(len(samples)))
    return CaptionBook(client.name, split, captions, Counter(faults.values()))


def _faults(
    provider: Provider, client: ClientData, split: SplitName, options: CaptionOptions, asked: Mapping[int, Caption]
) -> dict[int, str]:
    """What is wrong with captions, by row."""
    if not options.filters:
        return {row: EMPTY for row, caption in asked.items() if not caption.text.strip()}
    samples, judge = client.split(split), Filter.of(options, provider.vocabulary)
    rivals = classes_by_modality(client)
    faults = {}
    for row, caption in asked.items():
        modality = int(samples.modality[row])
        # Outside training, which captions are left out must not depend on the label.
        label = int(samples.labels[row]) if split == "train" and samples.labels[row] != WITHHELD else None
        fault = judge.fault(caption.text, modality, label, rivals.get(modality, ()))
        if fault is not None:
            faults[row] = fault
    return faults


def classes_by_modality(client: ClientData) -> dict[int, Collection[int]]:
    """The classes that a client's training images of each modality show."""
    found: dict[int, set[int]] = defaultdict(set)
    for modality, label in zip(client.train.modality.tolist(), client.train.labels.tolist(), strict=True):
        if label != WITHHELD:
            found[modality].add(label)
    return dict(found)


def _repeats(captions: Mapping[int, Caption], places: Sequence[float], most: int) -> list[int]:
    """Rows whose caption `most` others have that come before them in the order of coverage.

    In this order, so that a smaller share of captions stays a part of a larger one.
    """
    seen: Counter[str] = Counter()
    repeats = []
    for row in sorted(captions, key=lambda row: places[row]):
        seen[captions[row].text] += 1
        if seen[captions[row].text] > most:
            repeats.append(row)
    return repeats
