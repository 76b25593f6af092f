"""The report: one HTML file that needs nothing else, no network and no script."""

from __future__ import annotations

import base64
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import wardround
from wardround.evaluation.tables import SUMMARY_COLUMNS, results_table
from wardround.report import figures, findings, heatmaps, images, sections, series
from wardround.report.reading import Record, load

if TYPE_CHECKING:
    import jinja2

MOST_SHEETS = 24
MOST_CLIENTS = 40


def write_report(folder: Path) -> Path:
    """Write `folder/report.html` from what a run or a comparison has left in `folder`, finished or not.

    Returns:
        The page's path.

    Raises:
        InputError: `folder` is neither a run nor a comparison, or a file in it is damaged.
    """
    page = render(load(folder))
    target = folder / "report.html"
    draft = folder / ".report.html.new"
    draft.write_text(page, encoding="utf-8")
    return draft.replace(target)


def render(record: Record) -> str:
    """The page as text."""
    template = _environment().get_template("template.html.j2")
    parts = (_words(record), _federation(record), _results(record), _course(record), _means(record))
    context: dict[str, Any] = {}
    for part in parts:
        context |= part
    return template.render(record=record, version=wardround.__version__, **context)


def _environment() -> jinja2.Environment:
    """Jinja with the package's templates: everything is escaped, and an unknown name is an error."""
    import jinja2
    from markupsafe import Markup

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("wardround", "report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    # Only drawings of svg.py pass through this filter; they escape what they write.
    environment.filters["drawn"] = Markup
    environment.filters["breakable"] = lambda text: Markup("<wbr>").join(re.split(r"(?<=[_:=])", text))
    return environment


def _words(record: Record) -> dict[str, Any]:
    """Heading, summary and warnings."""
    return {
        "title": findings.title(record),
        "summary": findings.summary(record),
        "warnings": findings.warnings(record),
    }


def _federation(record: Record) -> dict[str, Any]:
    """Who takes part: labels, sizes, images, distances."""
    roster = record.roster
    if roster is None:
        return {"roster": None}
    names, counts = roster.clients[:MOST_CLIENTS], roster.counts["train"][:MOST_CLIENTS]
    shown = images.columns(roster.counts["train"])
    return {
        "roster": roster,
        "more_clients": len(roster.clients) - len(names),
        "labels": heatmaps.label_heatmap(names, roster.classes, counts),
        "size_bars": figures.sizes(roster, MOST_CLIENTS),
        "size_table": sections.sizes(roster),
        "sheets": {name: data_uri(path) for name, path in list(record.samples.items())[:MOST_SHEETS]},
        "more_sheets": max(0, len(record.samples) - MOST_SHEETS),
        "sheet_classes": [roster.classes[c] for c in shown],
        "skew": record.skew,
        "distances": figures.skew(record.skew, MOST_CLIENTS) if record.skew else [],
        "skew_p_values": sections.skew_p_values(record.skew) if record.skew else None,
        "recommendation": record.skew.get("recommendation") if record.skew else None,
        "trained": sections.trained(record.trained) if record.trained else None,
        "trained_distances": figures.trained(record.trained, MOST_CLIENTS) if record.trained else [],
    }


def data_uri(path: Path) -> str:
    """A JPEG file as a URI that holds its bytes."""
    return "data:image/jpeg;base64," + base64.b64encode(path.read_bytes()).decode("ascii")


def _results(record: Record) -> dict[str, Any]:
    """Tables and dots of the final figures, and what the comparison found."""
    done = [system.results for system in record.systems if system.results is not None]
    comparison = record.comparison
    so_far = None if done or record.kind == "compare" else series.so_far(record.systems[0], record.clients)
    shown = [so_far] if so_far else done
    return {
        "table": results_table(shown) if shown else None,
        "summary_columns": len(SUMMARY_COLUMNS),
        "provisional": so_far is not None,
        "overview": sections.overview(record),
        "held_out": sections.held_out(record),
        "served": sections.served(record),
        "metrics": [grid for grid in map(sections.all_metrics, record.systems) if grid],
        "dots": figures.dots(record),
        "dot_keys": figures.dot_keys(record),
        "comparison": comparison,
        "pairs": sections.pairs(comparison) if comparison else None,
        "forest": figures.forest(comparison) if comparison else None,
        "smallest": findings.smallest_differences(comparison) if comparison else "",
        "own_intervals": sections.own_intervals(comparison) if comparison else None,
        "every_pair": sections.every_pair(comparison) if comparison else None,
        "confusions": figures.confusions(record),
        "reliabilities": figures.reliabilities(record),
    }


def _course(record: Record) -> dict[str, Any]:
    """How the runs went, round by round."""
    each = [panels for panels in (figures.by_model(record, system) for system in record.systems) if panels]
    return {
        "convergence": figures.convergence(record) if record.kind == "compare" else None,
        "by_method": figures.by_method(record) if record.kind == "compare" else None,
        "by_model": each,
        "diagnostics": figures.diagnostics(record),
    }


def _means(record: Record) -> dict[str, Any]:
    """What it cost, on what it ran, and how to do it again."""
    return {
        "traffic": figures.traffic(record),
        "communication": sections.communication(record),
        "parameters": sections.parameters(record),
        "client_traffic": [grid for grid in map(sections.client_traffic, record.systems) if grid],
        "seconds": figures.seconds(record),
        "times": sections.times(record),
        "configurations": [(s.label, s.runs[0].seed, s.runs[0].config_text) for s in record.systems],
        "differing": sections.differing_options(record) if record.kind == "compare" else None,
        "environment": sections.environment(record),
        "rerun": sections.rerun(record),
    }
