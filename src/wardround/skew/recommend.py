"""Which methods to try first on a federation, from how its clients differ: a rule of thumb, with its reasons.

Each method says which kinds of skew it addresses (`Method.skews`). Those that address most of what is strong here
come first. Nothing about a method's quality is known to this rule; a comparison finds that out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from wardround.skew.strength import FEW_PER_CLASS, Kind, Level, Strength, strengths, tiny_clients

Skews = Mapping[str, Sequence[str]]  # of each method by name, in the order of the registry

PLAIN, ALONE = "fedavg", "isolated"
MOST_FIRST = 4  # as many as a first comparison with a few seeds can train in an evening
WEIGHTS: dict[Level, int] = {"strong": 2, "some": 1, "little": 0, "unknown": 0}
FAMILIES: dict[Kind, str] = {
    "feature": "keep normalisation at the client, or align features",
    "label": "correct loss or logits for each client's label counts, or keep the head at the client",
    "quantity": 'hold clients of unequal size together (`method.weights = "uniform"` gives all the same say)',
    "concept": "leave each client a head or a model of its own, as no shared head can give one image two labels",
}
# What our own study of made-up images adds to the authors' claims (docs/which-method.md).
EVIDENCE: dict[Kind, str] = {
    "label": "Where only labels differed, on phantoms, federated averaging with class weights "
    '(`training.class_weights = "balanced"`, the default) stood above all that correct logits by counts, by 20 points '
    "of balanced accuracy: try it first.",
    "concept": "Where only labels' meaning differed, on phantoms, what keeps a head at the client gained most.",
}
CAUTION = "This is a rule of thumb from a few figures and no result: `wardround compare` on these images decides."


def recommend(skew: Mapping[str, Any], methods: Skews) -> dict[str, Any]:
    """The section `recommendation` of `skew.json`.

    Args:
        skew: the rest of it.
        methods: the kinds of skew that each method addresses, by its name; no other method is ever named.

    Returns:
        `kinds`: of each kind of skew its level, value, thresholds, reason and methods; `tiny_clients`; `first`: the
        methods to try first; `text`: all of it in sentences.
    """
    found, tiny = strengths(skew), tiny_clients(skew)
    first = first_methods(found, methods)
    return {
        "kinds": [_described(one, methods) for one in found],
        "tiny_clients": tiny,
        "first": first,
        "text": [*(_sentence(one, methods) for one in found), *_share_more(tiny), _try(first, methods), CAUTION],
    }


def first_methods(found: Sequence[Strength], methods: Skews) -> list[str]:
    """At most `MOST_FIRST` methods, those that address most first; federated averaging where there is little skew.

    A kind that is strong counts 2, one of which there is some 1, and half as much after each method that is chosen
    for it, so that each has its turn. Of equals, those come first that address nothing besides, as what is not needed
    costs and can harm; then those that name what is needed first.
    """
    weight: dict[str, float] = {one.kind: WEIGHTS[one.level] for one in found}
    if not any(weight.values()):
        return [PLAIN] if PLAIN in methods else []
    left = {name: kinds for name, kinds in methods.items() if any(weight.get(kind) for kind in kinds)}
    chosen: list[str] = []
    while left and len(chosen) < MOST_FIRST:
        chosen.append(min(left, key=lambda name: _rank(left[name], weight)))
        for kind in left.pop(chosen[-1]):
            weight[kind] = weight.get(kind, 0) / 2
    return chosen


def _rank(kinds: Sequence[str], weight: Mapping[str, float]) -> tuple[float, int, int]:
    """A method's place in the order, the smallest first, from the kinds of skew that it addresses."""
    needed = [bool(weight.get(kind)) for kind in kinds]
    return -sum(weight.get(kind, 0) for kind in kinds), needed.count(False), needed.index(True)


def _addressing(kind: Kind, methods: Skews) -> list[str]:
    return [name for name, kinds in methods.items() if kind in kinds]


def _described(one: Strength, methods: Skews) -> dict[str, Any]:
    """One kind of skew for `skew.json`; its methods are only named where there is some of it."""
    return {
        "kind": one.kind,
        "level": one.level,
        "value": one.value,
        "some_from": one.scale.some,
        "strong_from": one.scale.strong,
        "why": one.why,
        "methods": _addressing(one.kind, methods) if WEIGHTS[one.level] else [],
    }


def _sentence(one: Strength, methods: Skews) -> str:
    """One kind of skew in words: level, figures, thresholds, what helps."""
    if one.level == "unknown":
        return f"{one.kind.capitalize()} skew could not be judged: {one.why}."
    amount = {"strong": "is strong", "some": "is there", "little": "is little"}[one.level]
    scale = f"some begins at {one.scale.some:g}, strong at {one.scale.strong:g}"
    text = f"{one.kind.capitalize()} skew {amount}: {one.why}; {scale}."
    if not WEIGHTS[one.level]:
        return text
    names = ", ".join(_addressing(one.kind, methods)) or "none here"
    evidence = f" {EVIDENCE[one.kind]}" if one.kind in EVIDENCE else ""
    return f"{text} Methods that {FAMILIES[one.kind]}: {names}.{evidence}"


def _share_more(tiny: Sequence[str]) -> list[str]:
    """Advice for clients whose own images are too few for parts of their own."""
    if not tiny:
        return []
    named = ", ".join(tiny[:5]) + (f" and {len(tiny) - 5} more" if len(tiny) > 5 else "")
    return [
        f"Fewer than {FEW_PER_CLASS} images a class at {named}: share more, as parts that stay at a client learn from "
        'its own images alone (`model.head = "shared"`, a small `model.finetune_blocks`).'
    ]


def _try(first: Sequence[str], methods: Skews) -> str:
    """The methods to try first, and what to hold against them."""
    yardsticks = [name for name in (ALONE, PLAIN) if name in methods and name not in first]
    beside = f", beside {' and '.join(yardsticks)}" if yardsticks else ""
    if not first:
        return f"No method addresses what is strong here{beside}."
    named = (f"{name} ({', '.join(methods[name])})" if methods[name] else name for name in first)
    return f"Worth trying first: {', '.join(named)}{beside}."
