"""A study's tables, and its page in Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from wardround.evaluation.tables import Cell, Column, Row, Table, spread_cell, with_ranks
from wardround.report import uploads
from wardround.report.figures import EPOCHS
from wardround.report.markdown import ranked
from wardround.report.sections import OWNERS, PARAMETERS
from wardround.report.study_figures import HELD_OUT, PER_CLIENT, POOLED, WEIGHTED
from wardround.report.words import MISSING, duration, signed, size

Record = dict[str, Any]  # `study.json`

MINUTES = "Minutes of one run by the clock, mean over seeds; runs beside each other slow each other down."
HEADINGS = {
    "accuracy": "accuracy",
    "balanced_accuracy": "balanced accuracy",
    "auroc": "macro AUROC",
    WEIGHTED["accuracy"]: "accuracy, weighted",
    WEIGHTED["balanced_accuracy"]: "balanced accuracy, weighted",
    POOLED: "pooled bal. acc.",
    HELD_OUT: "Global",
}
APART = ("isolated",)


def study_tables(record: Record) -> list[Table]:
    """How good the systems are, and what they take; none before anything has finished."""
    return [_quality(record), _resources(record)] if record["parts"] else []


def study_markdown(record: Record) -> str:
    """`study.md`."""
    lead = f"{record['question']} After: {record['source']}."
    parts = [f"# {record['title']}", lead, *([f"    {record['command']}"] if record["command"] else [])]
    parts += [ranked(table) for table in study_tables(record)] or ["Nothing has finished yet."]
    said = list(sentences(record))
    parts += ["## Is it more than noise?", "\n".join(f"- {text}" for text in said)] if said else []
    curves = list(_curves(record))
    parts += ["## Convergence", EPOCHS, *curves] if curves else []
    links = "\n".join(f"- [{name}]({path})" for name, path in _reports(record))
    return "\n\n".join([*parts, *(["## Reports", links] if links else [])]) + "\n"


def sentences(record: Record) -> Iterator[str]:
    """What the comparisons say of each system beside the reference, in words."""
    for part in record["parts"]:
        for system in part["systems"]:
            if system["sentence"]:
                yield f"{part['part']}: {system['sentence']}" if part["part"] else system["sentence"]


def _curves(record: Record) -> Iterator[str]:
    """The picture of every part."""
    for part in record["parts"]:
        name = part["part"] or record["title"]
        if part["convergence"]:
            yield f"![{name}: accuracy over local epochs, a line a system]({part['convergence']})"


def _reports(record: Record) -> Iterator[tuple[str, str]]:
    """Name and relative path of the report of every part."""
    for part in record["parts"]:
        yield part["part"] or record["title"], f"{part['folder']}/report.html" if part["folder"] else "report.html"


def _quality(record: Record) -> Table:
    """Accuracies in percent; ranks are those within a part."""
    systems = list(_systems(record))
    held_out = any(HELD_OUT in system["figures"] for _, system in systems)
    names = [*PER_CLIENT, *WEIGHTED.values(), POOLED, *([HELD_OUT] if held_out else [])]
    against = [record["reference"]] if any(system["difference"] for _, system in systems) else []
    columns = (
        *(Column(HEADINGS[name]) for name in names),
        *(Column(f"− {label}", ranked=False) for label in against),
        *(Column(heading, ranked=False) for heading in ("bytes", "time")),
    )
    rows = [row for part in record["parts"] for row in _ranked_part(record, part, names, bool(against), columns)]
    return Table(record["title"], columns, tuple(rows), _caption(systems, held_out, against), _corner(record))


def _ranked_part(
    record: Record, part: Record, names: Sequence[str], against: bool, columns: Sequence[Column]
) -> list[Row]:
    """The rows of one part; one system alone has no rank."""
    rows = [
        Row(_label(part, system), tuple(_cells(system, names, against)), system["method"] not in APART)
        for system in part["systems"]
    ]
    return with_ranks(rows, columns) if len(rows) > 1 else rows


def _cells(system: Record, names: Sequence[str], against: bool) -> Iterator[Cell]:
    """One system's figures, its difference from the reference, its bytes and time."""
    several = len(system["seeds"]) > 1
    for name in names:
        yield spread_cell(system["figures"].get(name, {"mean": None, "std": None}), 100.0, several)
    if against:
        yield _difference(system["difference"])
    taken = system["resources"]
    yield _plain(size(taken["bytes_up"] + taken["bytes_down"]))
    yield _plain(duration(taken["seconds"]))


def _difference(found: Record | None) -> Cell:
    """In points of balanced accuracy, with its interval."""
    if found is None:
        return _plain(MISSING)
    return _plain(f"{signed(found['difference'])} [{signed(found['low'])}, {signed(found['high'])}]")


def _plain(text: str) -> Cell:
    return Cell(text, None, None)


def _caption(systems: Sequence[tuple[Record, Record]], held_out: bool, against: Sequence[str]) -> str:
    seeds = sorted({len(system["seeds"]) for _, system in systems})
    spread = "one seed" if seeds == [1] else f"mean ± standard deviation over {' or '.join(map(str, seeds))} seeds"
    said = [
        f"In percent, {spread}: means over clients of each client's own model on its own test images, every client the "
        "same or weighted by its training images, and the balanced accuracy of all their images in one pool. Bytes: "
        "both ways, a whole run."
    ]
    if held_out:
        said.append("Global: balanced accuracy of what is shared alone, at sites that never trained.")
    if against:
        said.append(f"− {against[0]}: difference in balanced accuracy, in points, with its 95 % interval.")
    return " ".join(said)


def _resources(record: Record) -> Table:
    """Minutes, rounds, what travels a client and round, parameters: one row a system."""
    uncoded, units = record["uncoded"], {part["part"]: _unit(part) for part in record["parts"]}
    headings = ["minutes", "rounds", "local epochs", "up, a client and round", "down, a client and round"]
    headings += ["up, uncoded", "down, uncoded"] if uncoded else []
    headings += [uploads.NUMBERS_UP, *([uploads.TIMES] if any(units.values()) else []), "trainable", *OWNERS]
    rows = tuple(
        Row(_label(part, system), tuple(map(_plain, _taken(system, part, uncoded, units))))
        for part, system in _systems(record)
    )
    columns = tuple(Column(heading, ranked=False) for heading in headings)
    caption = f"{MINUTES} {uploads.EXPLANATION} {PARAMETERS}"
    return Table("What it takes", columns, rows, caption, _corner(record))


def _unit(part: Record) -> int | None:
    """What a client sends in federated averaging, where the part compares others with that."""
    return uploads.unit_of((s["method"], s["resources"]["numbers_up"]) for s in part["systems"])


def _taken(system: Record, part: Record, uncoded: str | None, units: Mapping[str, int | None]) -> Iterator[str]:
    """The cells of one system."""
    found, raw = system["resources"], _raw(part, uncoded)
    yield MISSING if found["seconds"] is None else f"{found['seconds'] / 60:.3g}"
    yield str(system["rounds"])
    yield str(system["local_epochs"])
    for each in (found, *([raw] if raw is not None else [])):
        yield size(each.get("up_each"))
        yield size(each.get("down_each"))
    yield uploads.counted(found["numbers_up"])
    if any(units.values()):
        yield uploads.times(found["numbers_up"], units[part["part"]])
    counts = found["parameters"]
    yield f"{counts['shared'] + counts['local']:,}" if counts else MISSING
    yield from (f"{counts[owner]:,}" if counts else MISSING for owner in OWNERS)


def _raw(part: Record, uncoded: str | None) -> Record | None:
    """The resources of the part's uncoded system: nothing in them where it has not finished, None where none is."""
    if uncoded is None:
        return None
    found: Record = next((s["resources"] for s in part["systems"] if s["label"] == uncoded), {})
    return found


def _systems(record: Record) -> Iterator[tuple[Record, Record]]:
    """Every system with its part."""
    for part in record["parts"]:
        for system in part["systems"]:
            yield part, system


def _label(part: Record, system: Record) -> str:
    """What a row is called: the part where it has one system, both where it has several."""
    if not part["part"]:
        return str(system["label"])
    return str(part["part"]) if len(part["systems"]) == 1 else f"{part['part']}: {system['label']}"


def _corner(record: Record) -> str:
    return "part" if any(part["part"] for part in record["parts"]) else "system"
