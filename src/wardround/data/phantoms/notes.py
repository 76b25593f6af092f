"""Sentences for the report that say what the dials did, so that the truth about the skew is on the page."""

from __future__ import annotations

from wardround.data.phantoms.options import PhantomOptions
from wardround.data.phantoms.skew import exchange_levels


def notes(options: PhantomOptions) -> tuple[str, ...]:
    """Sentences for each dial that is not at 0, and one for a mixture of families."""
    dials = (
        ("Feature", options.feature_skew, "each site has its own scanner, through which all its images pass"),
        ("Label", options.label_skew, "each site has its own class proportions, in its test images too"),
        ("Quantity", options.quantity_skew, "sites differ in train and val size, not in test size"),
    )
    plain = (f"{name} skew {dial:g}: {meaning}." for name, dial, meaning in dials if dial > 0)
    return (*plain, *exchanges(options), *mixed(options))


def exchanges(options: PhantomOptions) -> tuple[str, ...]:
    """Which sites exchange which labels, and how many of their images."""
    levels = exchange_levels(options.clients, options.classes, options.concept_skew)
    return tuple(
        f"Concept skew {options.concept_skew:g}: site-{site + 1:02d} labels {levels[site, pair]:.0%} of its images of"
        f" classes {2 * pair} and {2 * pair + 1} (borderline ones first) as the other of the two."
        for site, pair in zip(*levels.nonzero(), strict=True)
    )


def mixed(options: PhantomOptions) -> tuple[str, ...]:
    """How a mixture of families shares the label space."""
    if options.family != "mixed":
        return ()
    return (
        f"Mixed families: site k has family k mod {min(options.clients, 5)}; every family has its own"
        f" {options.classes} classes, so each site sees only its family's part of the label space.",
    )
