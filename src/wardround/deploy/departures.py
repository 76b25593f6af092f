"""The dry run: exactly what would leave a hospital, before anything does."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from wardround.deploy.hospital import Hospital
from wardround.federation.messages import Schema
from wardround.federation.reports import Report
from wardround.federation.rules import Owner


def departures(hospital: Hospital) -> dict[str, Any]:
    """All that would leave: what is said at joining; by exchange every tensor and every scalar.

    `tensors` has a line for each name, with shape, type and bytes before coding, and under `withheld` why it stays.
    """
    side, answerer = hospital.answerer.side, hospital.answerer
    phases = dict.fromkeys((*side.phases(1), *side.phases(2), *side.closing_phases()))
    return {
        "client": hospital.settings.name,
        "server": hospital.settings.server,
        "codec": answerer.codec.name,
        "min_count": hospital.settings.min_count,
        "joining": hospital.said.model_dump(),
        "tensors": [line for phase in phases for line in _tensors(hospital, phase, side.reply_schema(phase))],
        "scalars": {name: _meaning(name) for name in Report.model_fields},
        "stays": sorted(side.rules.names(Owner.LOCAL, Owner.FROZEN)),
        "notes": list(hospital.notes),
    }


def _tensors(hospital: Hospital, phase: str, schema: Schema) -> Iterator[dict[str, Any]]:
    for name, spec in schema.items():
        yield {
            "exchange": phase,
            "name": name,
            "shape": list(spec.shape),
            "type": str(spec.dtype).removeprefix("torch."),
            "bytes": math.prod(spec.shape) * spec.dtype.itemsize,
            "withheld": _withheld(hospital, name),
        }


def _withheld(hospital: Hospital, name: str) -> str:
    """Why a tensor stays; empty where it goes."""
    images, least = len(hospital.answerer.federation.clients[0].train), hospital.settings.min_count
    if not name.startswith("statistic/") or images >= least:
        return ""
    return f"made of {images} images, fewer than {least}"


def _meaning(name: str) -> str:
    """What a scalar of a reply is, from the docstring that documents them."""
    lines = [line.strip() for line in (Report.__doc__ or "").splitlines()]
    return next((line.partition(": ")[2] for line in lines if line.startswith(f"{name}: ")), "")


def departures_text(hospital: Hospital) -> str:
    """The same for a person to read."""
    found = departures(hospital)
    lines = [f"{found['client']} would send to {found['server']}, coded as {found['codec']}, and nothing else:", ""]
    lines.append("once, when it joins:")
    for split, counts in found["joining"]["splits"].items():
        table = "images per class withheld" if counts["by_class"] is None else f"per class {counts['by_class']}"
        lines.append(f"  {split}: {counts['n']} images, {table}")
    lines += ["  its version of wardround; hashes of the agreement and of the frozen network; its min_count", ""]
    for phase in dict.fromkeys(line["exchange"] for line in found["tensors"]):
        lines += _phase_lines(phase, [line for line in found["tensors"] if line["exchange"] == phase])
    lines.append("scalars of every reply:")
    lines += [f"  {name}: {meaning}" for name, meaning in found["scalars"].items()]
    lines += [
        "",
        f"withheld: whatever sums up fewer than {found['min_count']} images (metrics, tables by class, statistics)",
    ]
    lines.append(
        "stays here: images, captions, labels, predictions, "
        f"{len(found['stays'])} entries of the model that are local or frozen"
    )
    return "\n".join([*lines, *(f"note: {note}" for note in found["notes"])])


def _phase_lines(phase: str, tensors: list[dict[str, Any]]) -> list[str]:
    total = sum(line["bytes"] for line in tensors if not line["withheld"])
    width = max((len(line["name"]) for line in tensors), default=0)
    head = f"in every exchange {phase!r}: {len(tensors)} tensors, {total:,} bytes"
    return [head, *(f"  {_tensor_line(line, width)}" for line in tensors), ""]


def _tensor_line(line: dict[str, Any], width: int) -> str:
    shape = "x".join(map(str, line["shape"])) or "1"
    stays = f"  STAYS HERE: {line['withheld']}" if line["withheld"] else ""
    return f"{line['name']:{width}}  {line['type']:8} {shape:>14} {line['bytes']:>12,} bytes{stays}"
