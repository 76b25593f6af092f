"""What a report says about captions: how many there are, what was left out, and how far their loss can fall."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from wardround.captions.book import CaptionBook
from wardround.captions.options import CaptionOptions

NO_CAPTION = "captions: no image has one, so training is on images alone"
IMAGES_ALONE = "captions: in training alone; every validation and test figure is of predictions from images alone"
BOTH = f"{IMAGES_ALONE}, but for `captions.with_captions` in results.json"


def notes(books: Sequence[CaptionBook], options: CaptionOptions, batch_size: int) -> tuple[str, ...]:
    """Sentences for the report; none where no captions were asked for.

    Args:
        books: of all clients' training images.
        options: the `[captions]` section.
        batch_size: images in a batch.
    """
    if options.provider == "none":
        return ()
    rejected = _rejected(books)
    if not any(book.captioned for book in books):
        return (NO_CAPTION, *rejected)
    used = BOTH if options.at_test else IMAGES_ALONE
    return (_counted(books), used, *rejected, *_floors(books, options, batch_size))


def _counted(books: Sequence[CaptionBook]) -> str:
    have, images = sum(book.captioned for book in books), sum(len(book) for book in books)
    parts = ", ".join(f"{book.client} {book.captioned} of {len(book)}" for book in books)
    distinct = len({text for book in books for text in book.texts})
    return f"captions: {have} of {images} training images have one ({parts}); {distinct} different texts"


def _rejected(books: Sequence[CaptionBook]) -> tuple[str, ...]:
    counts: Counter[str] = Counter()
    for book in books:
        counts.update(book.rejected)
    if not counts:
        return ()
    reasons = "; ".join(f"{number}: {reason}" for reason, number in counts.most_common())
    return (f"captions: {sum(counts.values())} were left out ({reasons})",)


def _floors(books: Sequence[CaptionBook], options: CaptionOptions, batch_size: int) -> tuple[str, ...]:
    """Where captions repeat: below what the contrastive loss cannot fall, and why."""
    floors = {book.client: expected_floor(_sizes(book, options.positives_by_meaning), batch_size) for book in books}
    if not any(floor >= 0.005 for floor in floors.values()):  # shown to two decimals
        return ()
    shown = ", ".join(f"{client} {floor:.2f}" for client, floor in floors.items())
    what = "say the same" if options.positives_by_meaning else "have the same text"
    return (
        f"captions: where n captions of a batch {what}, none of them can get more than 1/n of the softmax. In batches "
        f"of {batch_size} the contrastive loss cannot fall below about {shown} (the mean of log n); what counts is how "
        "far above that it is",
    )


def _sizes(book: CaptionBook, by_meaning: bool) -> list[int]:
    """How many captions there are of each thing that is said."""
    numbers = book.numbered(by_meaning)
    sizes: list[int] = np.bincount(numbers[numbers >= 0]).tolist()
    return sizes


def expected_floor(sizes: Sequence[int], batch_size: int) -> float:
    """The mean of `loss_floor` over batches that are drawn without replacement.

    Of n captions, c say the same as a given one, that one included; a batch of B then holds 1 + k of them, with k
    hypergeometric. Images without a caption are left out of the count, as if batches were of captioned ones alone.

    Args:
        sizes: how many of a client's captions say the same, for each thing that is said; each 1 or more.
        batch_size: images in a batch.
    """
    from scipy.stats import hypergeom

    total = sum(sizes)
    drawn = min(batch_size, total) - 1
    if drawn < 1:
        return 0.0
    k = np.arange(drawn + 1)
    different, times = np.unique(np.asarray(sizes), return_counts=True)
    means = [float(np.log1p(k) @ hypergeom(total - 1, size - 1, drawn).pmf(k)) for size in different.tolist()]
    return float(np.average(means, weights=different * times))
