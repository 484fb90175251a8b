"""Write the report: its sections in order, as one self-contained HTML page, and each figure as PNG and SVG.

Invariants: the page requests nothing from the network and runs no script; every text is escaped, because captions come
from outside; the same snapshot and files below HOME give the same bytes.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import importlib.resources
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from catalog.lake import database, lake
from catalog.lake.lake import Lake
from catalog.report import map_sections, score_sections, theory, trainings
from catalog.report.canvas import Figure, Palette
from catalog.report.contents import Contents, read_contents
from catalog.report.gallery import encoders_of, read_gallery, read_neighbourhoods
from catalog.report.scores import group
from catalog.report.sections import Neighbourhoods, Piece, Section
from infra import storage
from infra.errors import StorageError
from infra.home import Home
from infra.version import code_version

PAGE: Final = "index.html"
DEFAULT_TITLE: Final = "Good views and how alike their encoders are"


@dataclass(frozen=True, kw_only=True)
class ReportConfig:
    """out: folder or URL of the report; None: below HOME/reports, named for the snapshot and the digest of the page."""

    out: str | None = None
    title: str = DEFAULT_TITLE


@dataclass(frozen=True, kw_only=True)
class Report:
    """A report that was written. shown: sections that hold something; absent: those that hold a sentence instead."""

    url: str
    page: str
    bytes: int
    snapshot_id: int
    figures: Sequence[str]
    shown: Sequence[str]
    absent: Sequence[str]


def write_report(home: Home, config: ReportConfig) -> Report:
    """Read the catalog and publish the page, its figures first.

    Raises InputError without a catalog, IntegrityError when a file beside it is not what its record says.
    """
    with lake.reading(home) as reader:
        try:
            contents = read_contents(reader)
            sections = make_sections(home, reader, contents)
        except lake.DatabaseError as error:
            raise StorageError(
                f"The catalog {database.shown(home)} failed to answer: {database.scrub(home, str(error))}. "
                "`goodviews catalog verify` says whether a file is missing."
            ) from None
    page = render(config.title, contents, sections).encode()
    name = f"snapshot-{contents.snapshot}-{hashlib.sha256(page).hexdigest()[:8]}"
    url = storage.absolute(config.out) if config.out else storage.join(home.url, "reports", name)
    figures = [piece for section in sections for piece in section.pieces if isinstance(piece, Figure)]
    for figure in figures:
        storage.publish(storage.join(url, f"{figure.name}.svg"), figure.svg)
        storage.publish(storage.join(url, f"{figure.name}.png"), figure.png)
    storage.publish(storage.join(url, PAGE), page)
    return Report(
        url=url,
        page=storage.join(url, PAGE),
        bytes=len(page),
        snapshot_id=contents.snapshot,
        figures=[figure.name for figure in figures],
        shown=[section.anchor for section in sections if section.pieces],
        absent=[section.anchor for section in sections if not section.pieces],
    )


def make_sections(home: Home, reader: Lake, contents: Contents) -> list[Section]:
    """All sections in the order of the page: what came out, what it looks like, how it was made, what theory says."""
    palette = Palette()
    # First what can refuse: drawing takes longer.
    shown = [_gallery(home, reader, contents), _neighbours(home, reader, contents)]
    return [
        score_sections.alignment(contents, palette),
        map_sections.retrieval(contents, palette),
        map_sections.pairs_curve(contents, palette),
        score_sections.probes(contents, palette),
        *shown,
        trainings.trainings(contents, palette),
        trainings.data(contents),
        theory.theory(contents.checks),
    ]


def _gallery(home: Home, reader: Lake, contents: Contents) -> Section:
    found = read_gallery(home, reader, contents.scores)
    return Section(
        anchor="gallery",
        title="Which caption does each encoder pick for a picture?",
        lead=(
            "The picture is mapped into the text space. The answer is the nearest caption there, among the "
            "captions of all scored scenes."
        ),
        pieces=[found] if found is not None else [],
        query="",
        absent=(
            "No map between pictures and captions keeps its picks. `goodviews rotate` between a set of pictures and "
            "one of captions does."
        ),
    )


def _neighbours(home: Home, reader: Lake, contents: Contents) -> Section:
    groups = group(s for s in contents.scores if s.metric == score_sections.MAIN_METRIC and s.anchor is not None)
    pieces: list[Piece] = []
    for found in sorted(groups, key=lambda g: -len(g.scores)):
        members = read_neighbourhoods(home, reader, encoders_of(found.scores))
        if members:
            pieces = [Neighbourhoods(members=members, anchor=found.first.against)]
            break
    return Section(
        anchor="neighbours",
        title="Who are the neighbours?",
        lead=(
            "The neighbours that mutual k-NN counts, for a few scenes drawn by the hash of their key: the "
            "nearest scenes in one space and in the other."
        ),
        pieces=pieces,
        query="",
        absent="No score keeps its neighbours. `goodviews align` with the metric mutual_knn does.",
    )


# --- the page -----------------------------------------------------------------------------------------------------


def render(title: str, contents: Contents, sections: Sequence[Section]) -> str:
    """The whole page as HTML."""
    import jinja2
    import markupsafe

    folder = importlib.resources.files("catalog.report")
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True, loader=None
    )
    environment.filters["svg_uri"] = _svg_uri
    environment.filters["kinds"] = _kinds
    template = environment.from_string(folder.joinpath("page.html.jinja").read_text(encoding="utf-8"))
    html = template.render(
        title=title,
        contents=contents,
        sections=sections,
        # Ours, and the one text that must not be escaped.
        css=markupsafe.Markup(folder.joinpath("page.css").read_text(encoding="utf-8")),
        release=code_version(),
        code_versions=sorted({str(score.row["code_version"]) for score in contents.scores}),
    )
    return html.lstrip()


def _svg_uri(svg: bytes) -> str:
    return "data:image/svg+xml;base64," + base64.b64encode(svg).decode()


def _kinds(pieces: Iterable[Piece]) -> list[tuple[str, Any]]:
    return [(type(piece).__name__, piece) for piece in pieces]


def plain(report: Report) -> dict[str, Any]:
    """For --json."""
    return dataclasses.asdict(report)
