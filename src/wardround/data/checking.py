"""Is this table or folder fit for use, and what is wrong with it: everything at once."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from wardround.data.bladder_mri import IMAGES
from wardround.data.brats import GRADES, ROOT
from wardround.data.fed_isic import FOLD_FILES
from wardround.data.federation import SPLITS
from wardround.data.findings import SEVERITIES, DataReport, Finding, Severity, finding
from wardround.data.isic2019 import TRUTH_FILE
from wardround.data.narrowing import narrowed
from wardround.data.options import ColumnNames, DataOptions, Source
from wardround.data.probes import Probe, probe_images
from wardround.data.read import keep_sites, list_records
from wardround.data.records import Listing, Record, natural_order
from wardround.data.rsna_ich import LABEL_FILE
from wardround.data.tables import TABLE_NAME, listing, needed_columns, read_sheet, table_file
from wardround.errors import InputError

FEW_TEST_IMAGES = 5
ODD_SIZE_FACTOR = 4.0


@dataclass(frozen=True)
class Checked:
    """All that a check looks at: the records, and what each image is."""

    listing: Listing
    probes: Sequence[Probe]

    @property
    def readable(self) -> list[tuple[Record, Probe]]:
        """The records whose image can be read, with what it is."""
        pairs = zip(self.listing.records, self.probes, strict=True)
        return [(record, probe) for record, probe in pairs if not probe.fault]


def check_data(path: Path, options: DataOptions | None = None) -> DataReport:
    """Look at every row and every image of a source and report all that is wrong or noteworthy.

    Args:
        path: a table (CSV file or folder with `metadata.csv`), a folder `site/class/image`, an `.npz` file,
            or the folder of a benchmark that is read by name.
        options: how the source is read; guessed from `path` when None. Its `path` is not used.
    """
    chosen = guess_options(path) if options is None else options.model_copy(update={"path": str(path)})
    try:
        source, found = _list(path, chosen)
        source = narrowed(keep_sites(source, chosen.sites), chosen)
    except InputError as error:
        return DataReport(str(path), 0, (), (), (Finding("error", "unreadable-source", str(error)),))
    found += _notes(source)
    checked = Checked(source, probe_images([record.image for record in source.records]))
    for check in CHECKS:
        found += check(checked)
    if chosen.split not in ("group", "lesion"):
        for check in SPLIT_CHECKS:
            found += check(checked)
    found.sort(key=lambda one: SEVERITIES.index(one.severity))
    sites = natural_order({record.site for record in source.records} - {""})
    return DataReport(str(path), len(source.records), sites, source.label_space, tuple(found))


def guess_options(path: Path) -> DataOptions:
    """Options for a source known only by its path: `.npz`, a benchmark's folder, a table, or folders."""
    if path.suffix == ".npz":
        return DataOptions(source="medmnist", path=str(path))
    for source, marks in MARKS.items():
        if any((path / mark).exists() for mark in marks):
            return DataOptions(source=source, path=str(path))
    return DataOptions(source="table" if path.is_file() else "folders", path=str(path))


# What lies in the folder of a source, the surest sign first.
MARKS: dict[Source, tuple[str, ...]] = {
    "fed-isic": FOLD_FILES,
    "isic2019": (TRUTH_FILE,),
    "brats": (ROOT, *GRADES),
    "rsna-ich": (LABEL_FILE,),
    "table": (TABLE_NAME,),
    "bladder-mri": (f"Center_1/{IMAGES}", f"Center1/{IMAGES}"),
}


def _list(path: Path, options: DataOptions) -> tuple[Listing, list[Finding]]:
    """The records, and what is wrong with the table itself."""
    if options.source != "table":
        return list_records(options), []
    sheet = read_sheet(table_file(path))
    missing = [name for name in needed_columns(options.columns) if name not in sheet.header]
    found = finding("error", "missing-column", f"columns are missing from {', '.join(sheet.header)}", missing)
    found += finding("error", "ragged-row", f"rows do not have {len(sheet.header)} cells", sheet.ragged)
    present = {role: name for role, name in options.columns if name in sheet.header}
    source = listing(sheet, ColumnNames(**present))
    return source, found


def _notes(source: Listing) -> list[Finding]:
    empty = finding("error", "no-images", "no images are listed", () if source.records else (source.origin,))
    return empty + [Finding("note", "source", note) for note in source.notes]


def check_cells(checked: Checked) -> list[Finding]:
    """Rows that name no image, label or site."""
    records = checked.listing.records
    nameless, unlabelled, siteless = (
        [record.where for record in records if not getattr(record, name)] for name in ("name", "label", "site")
    )
    found = finding("error", "empty-image", "rows name no image", nameless)
    found += finding("error", "empty-label", "rows have no label", unlabelled)
    if len(siteless) == len(records):
        message = "no sites are recorded: clients must come from data.partition (dirichlet, column, modality, ...)"
        return found + finding("warning", "no-sites", message, siteless[:1])
    return found + finding("error", "empty-site", "rows have no site", siteless)


def check_files(checked: Checked) -> list[Finding]:
    """Missing files, and images that do not decode."""
    pairs = zip(checked.listing.records, checked.probes, strict=True)
    faulty = [probe for record, probe in pairs if probe.fault and record.name]
    missing = (probe.fault for probe in faulty if probe.missing)
    broken = (probe.fault for probe in faulty if not probe.missing)
    return finding("error", "missing-file", "image files are missing", missing) + finding(
        "error", "unreadable-image", "image files are damaged or no images", broken
    )


def check_duplicates(checked: Checked) -> list[Finding]:
    """Images with the same pixels: across splits (leakage), with two labels, across sites, or merely twice."""
    by_digest: dict[str, list[Record]] = defaultdict(list)
    for record, probe in checked.readable:
        by_digest[probe.digest].append(record)
    cases: dict[str, list[str]] = defaultdict(list)
    for same in by_digest.values():
        if len(same) > 1:
            cases[_duplicate_kind(same)].append(" = ".join(_tagged(record) for record in same))
    return [found for kind in DUPLICATES for found in finding(*DUPLICATES[kind], cases[kind])]


DUPLICATES: dict[str, tuple[Severity, str, str]] = {
    "split": ("error", "duplicate-across-splits", "leakage: the same image is in several splits"),
    "label": ("error", "duplicate-labels", "the same image has several labels"),
    "site": ("warning", "duplicate-across-sites", "the same image is at several sites"),
    "": ("warning", "duplicate", "the same image is listed several times"),
}


def _duplicate_kind(same: Sequence[Record]) -> str:
    """The first of split, label and site in which the records differ; empty where they differ in none."""
    return next((name for name in ("split", "label", "site") if len(_values(same, name)) > 1), "")


def _values(records: Iterable[Record], name: str) -> set[str]:
    return {getattr(record, name) for record in records}


def _tagged(record: Record) -> str:
    tags = ", ".join(tag for tag in (record.site, record.split, record.label) if tag)
    return f"{record.where} [{tags}]" if tags else record.where


def check_groups(checked: Checked) -> list[Finding]:
    """Groups (patients, lesions) whose images are at several sites."""
    spread = _spread(checked.listing.records, "site")
    return finding("warning", "group-across-sites", "groups have images at several sites", spread)


def check_group_splits(checked: Checked) -> list[Finding]:
    """Groups (patients, lesions) whose images are in several splits."""
    spread = _spread(checked.listing.records, "split")
    return finding("error", "group-across-splits", "leakage: groups have images in several splits", spread)


def _spread(records: Iterable[Record], name: str) -> list[str]:
    """Groups whose records differ in the attribute `name`, with its values."""
    groups: dict[str, set[str]] = defaultdict(set)
    for record in records:
        if record.group:
            groups[record.group].add(getattr(record, name))
    return [f"{group} ({', '.join(sorted(values))})" for group, values in groups.items() if len(values) > 1]


def check_classes(checked: Checked) -> list[Finding]:
    """Classes that a site does not have."""
    seen = {(record.site, record.label) for record in checked.listing.records}
    sites = natural_order({site for site, _ in seen} - {""})
    absent = [
        f"{label} at {site}" for site in sites for label in checked.listing.label_space if (site, label) not in seen
    ]
    return finding("warning", "class-absent-from-site", "sites have no image of a class", absent)


def check_splits(checked: Checked) -> list[Finding]:
    """Splits that are none, or that are missing."""
    records = checked.listing.records
    present = {record.split for record in records}
    if present <= {""}:
        return finding("note", "no-split", "no split is recorded: one is drawn, groups whole", ["train, val, test"])
    strange = [f"{record.where} {record.split!r}" for record in records if record.split not in SPLITS]
    absent = [split for split in SPLITS if split not in present]
    return finding("error", "unknown-split", "rows have a split that is none of train, val, test", strange) + finding(
        "note", "missing-split", "splits are not recorded; data.val_fraction and test_fraction make them", absent
    )


def check_split_classes(checked: Checked) -> list[Finding]:
    """Classes that a split lacks, that are only tested, or that few test images stand for."""
    records = [record for record in checked.listing.records if record.split in SPLITS and record.label]
    seen = {(record.split, record.label) for record in records}
    splits, labels = sorted({split for split, _ in seen}), checked.listing.label_space
    absent = [f"{label} in {split}" for split in splits for label in labels if (split, label) not in seen]
    lost = [record.where for record in records if splits and ("train", record.label) not in seen]
    found = finding("error", "label-not-trained", "labels are seen only in val or test", lost)
    return found + finding("warning", "class-absent-from-split", "splits have no image of a class", absent)


def check_few_tested(checked: Checked) -> list[Finding]:
    """Classes that a handful of test images stand for at a site."""
    tests = Counter((r.label, r.site) for r in checked.listing.records if r.split == "test" and r.label)
    few = [
        f"{label}{f' at {site}' if site else ''} ({count})"
        for (label, site), count in sorted(tests.items())
        if count < FEW_TEST_IMAGES
    ]
    message = f"classes have fewer than {FEW_TEST_IMAGES} test images at a site; their recall is a coarse figure"
    return finding("note", "few-test-images", message, few)


def check_colours(checked: Checked) -> list[Finding]:
    """Grey and colour images in one source, 16-bit images, files with several pictures."""
    readable = checked.readable
    grey = [record.where for record, probe in readable if probe.grey]
    rare = grey if 2 * len(grey) <= len(readable) else [r.where for r, probe in readable if not probe.grey]
    message = f"grey and colour images are mixed: {len(grey)} grey, {len(readable) - len(grey)} colour; the rarer are"
    deep = (record.where for record, probe in readable if probe.deep)
    many = (f"{record.where} ({probe.frames})" for record, probe in readable if probe.frames > 1)
    return [
        *finding("warning", "grey-and-colour", message, rare),
        *finding("note", "deep-image", "images of more than 8 bits are stretched to their own range", deep),
        *finding("warning", "several-frames", "files hold several pictures; the first is used", many),
    ]


def check_sizes(checked: Checked) -> list[Finding]:
    """Images much smaller, larger or longer than the others."""
    readable = checked.readable
    if not readable:
        return []
    usual = median(min(probe.width, probe.height) for _, probe in readable)
    odd = [f"{record.where} ({p.width}x{p.height})" for record, p in readable if _is_odd(p, usual)]
    sizes = Counter(f"{probe.width}x{probe.height}" for _, probe in readable)
    listed = [f"{size} ({count})" for size, count in sizes.most_common()] if len(sizes) > 1 else []
    message = f"images whose shorter side is {ODD_SIZE_FACTOR:g} times off the usual {usual:g} pixels, or as elongated"
    return finding("warning", "odd-size", message, odd) + finding("note", "sizes", "images differ in size", listed)


def _is_odd(probe: Probe, usual: float) -> bool:
    shorter, longer = sorted((probe.width, probe.height))
    ratios = (usual / shorter, shorter / usual, longer / shorter)
    return max(ratios) >= ODD_SIZE_FACTOR


Check = Callable[[Checked], list[Finding]]
CHECKS: tuple[Check, ...] = (
    check_cells,
    check_files,
    check_duplicates,
    check_groups,
    check_classes,
    check_colours,
    check_sizes,
)
SPLIT_CHECKS: tuple[Check, ...] = (check_splits, check_group_splits, check_split_classes, check_few_tested)
