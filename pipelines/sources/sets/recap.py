"""Recap-DataComp-1B: web pictures by URL, each with its alt text and one or two captions by a LLaVA model.

Owns: which of its columns are texts, the identity of a picture, and the refusal of mixed uploads. Does not own: the repair
of literal byte escapes in alt texts and the quarantine of placeholder pictures (cleaning and grouping).
Both configs (`default`, `condition_diverse_topk`) are read by their columns; a file may lack some and have others.
Invariant: a scene is named by the sha256 of the picture, else by its URL; never by `key`, which is the number of a row in one
download (UCSC-VLAA/Recap-DataComp-1B#11).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from infra.errors import InputError
from pipelines.records import Batch, Input, Piece, Source, Survey
from pipelines.sources.formats import arrow_columns, footers
from pipelines.sources.formats.names import NO_WRITERS, base, listed, nearest

TEXT_ROLES: Final = {
    "org_caption": "alt",
    "re_caption": "recap",
    "re_caption_condition_diverse_topk": "recap_conditioned",
}
"""Text columns in the order of their fields. The conditioned one was generated from picture *and* alt text."""

ID_COLUMNS: Final = {"sha256": "scene id, image sha256", "url": "scene id where sha256 is missing, image uri"}
DEFAULT_PORTS: Final = {"http": "80", "https": "443"}

_PART = re.compile(r"(.*)-(\d+)-of-(\d+)\.parquet")
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://([^/?#]*)([^#]*)")


@dataclass(frozen=True, kw_only=True)
class RecapDataComp(Source):
    """Recap-DataComp-1B parquet. No options: the columns of each file say what it holds."""

    name = "recap-datacomp"
    bad_passes = 3
    grouped = True
    needs_input = True
    repairs_byte_escapes = True
    writers = NO_WRITERS

    def reads(self, name: str) -> bool:
        """Parquet only."""
        return name.endswith(".parquet")

    def survey(self, inputs: Sequence[Input], limit: int | None) -> Survey:
        """Footers only. Raises InputError for a mixture of uploads, and for a file without texts or without ids."""
        files = sorted((i for i in inputs if i.uri.endswith(".parquet")), key=lambda i: i.uri)
        if not files:
            raise InputError(
                f"Recap-DataComp is parquet, and none of the inputs is: {listed([i.uri for i in inputs])}. Name its `train-*.parquet` files."
            )
        notes = _check_generations(files)
        if len(files) < len(inputs):
            notes.append(f"{len(inputs) - len(files)} inputs that are not parquet are not read")
        found = footers.footers(files)
        for footer in found:
            _check_columns(footer)
        every = {name for footer in found for name in footer.schema.names}
        meanings = {**ID_COLUMNS, **{name: f"text:{role}" for name, role in TEXT_ROLES.items()}}
        for name in meanings:
            lacking = [footer.input.uri for footer in found if name not in footer.schema.names]
            if lacking and name in every:
                notes.append(f"{len(lacking)} of {len(found)} files have no column {name}: {listed(lacking)}")
        pieces, left = [], limit
        for footer in found:
            rows = footer.rows if left is None else min(left, footer.rows)
            left = None if left is None else left - rows
            split = _split(footer.input)
            for start, stop in footers.cuts(footer.row_groups, rows):
                pieces.append(Piece(input=footer.input, start=start, stop=stop, scenes_by_split={split: stop - start}))
        return Survey(
            format=f"Recap-DataComp parquet, {len(found)} files, {sum(f.rows for f in found):,} rows by their footers",
            pieces=pieces,
            columns={name: meaning for name, meaning in meanings.items() if name in every},
            notes=notes,
        )

    def read(self, piece: Piece) -> Iterator[Batch]:
        """Rows of one piece; a text column that the file lacks is no field of its records."""
        source = piece.input
        if source is None:
            raise InputError("A piece of Recap-DataComp names no input.")
        split = _split(source)
        for first, rows in footers.read_rows(source, piece.start, piece.stop, [*ID_COLUMNS, *TEXT_ROLES]):
            strands = [
                arrow_columns.strand(rows.column(name), name, role)
                for name, role in TEXT_ROLES.items()
                if name in rows.schema.names
            ]
            count = rows.num_rows
            absent = pa.nulls(count, pa.large_string())
            sha256 = arrow_columns.as_sha256(rows.column("sha256")) if "sha256" in rows.schema.names else absent
            url = arrow_columns.as_text(rows.column("url"))[0] if "url" in rows.schema.names else absent
            yield arrow_columns.batch(
                count,
                {
                    "source_id": _ids(sha256, url),
                    "split": arrow_columns.constant(split, count),
                    "source_uri": arrow_columns.constant(source.uri, count),
                    "source_row": pa.array(np.arange(first, first + count, dtype=np.int64)),
                    "image_uri": url,
                    "image_sha256": sha256,
                },
                strands,
            )


def _split(source: Input) -> str:
    return "preview" if base(source.uri).startswith("preview") else "train"


def _check_generations(files: Sequence[Input]) -> list[str]:
    """Notes on incomplete uploads. Raises InputError for several uploads at once, or one part of one twice.

    The hub holds uploads of 3,550 and of 2,719 files side by side, and a glob `train-*` catches both.
    """
    parts: dict[tuple[str, str], dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
    for file in files:
        if match := _PART.fullmatch(base(file.uri)):
            parts[match[1], match[3]][int(match[2])].append(file.uri)
    notes = []
    for stem in sorted({stem for stem, _ in parts}):
        totals = sorted(total for s, total in parts if s == stem)
        if len(totals) > 1:
            counts = " and ".join(f"{sum(map(len, parts[stem, t].values())):,} of `{stem}-*-of-{t}`" for t in totals)
            raise InputError(
                f"The inputs mix {len(totals)} uploads: {counts}. Most rows would be there twice; name the files of one, for example `{stem}-*-of-{totals[-1]}.parquet`."
            )
        present, total = parts[stem, totals[0]], int(totals[0])
        twice = next((uris for uris in present.values() if len(uris) > 1), None)
        if twice:
            raise InputError(
                f"One part of the upload `{stem}-*-of-{totals[0]}` is there {len(twice)} times: {listed(twice)}. Its rows would be read as often; name one folder."
            )
        if len(present) < total:
            notes.append(f"{len(present):,} of {total:,} parts of the upload {stem}-*-of-{totals[0]}")
    return notes


def _check_columns(footer: footers.Footer) -> None:
    known = footer.schema.names
    texts = [name for name in TEXT_ROLES if name in known]
    ids = [name for name in ID_COLUMNS if name in known]
    if not texts:
        message = f"{footer.input.uri} has none of the text columns {', '.join(TEXT_ROLES)}.{nearest('org_caption', known)} Its columns: {listed(known)}. Read other parquet with the source `table`."
        raise InputError(message)
    if not ids:
        message = f"{footer.input.uri} has neither `sha256` nor `url`, so its rows name no picture. Its columns: {listed(known)}."
        raise InputError(message)
    for name in (*texts, *ids):
        kind = footers.column_type(footer, name)
        if not arrow_columns.is_text(kind):
            raise InputError(
                f"Column {name} of {footer.input.uri} is {kind}, not text. Is it a file of Recap-DataComp?"
            )


def _ids(sha256: pa.Array, url: pa.Array) -> pa.Array:
    """sha256 of the picture, else its normalised URL, else null; only rows of the second kind pass through Python."""
    missing = sha256.is_null()
    if not pc.any(missing).as_py():
        return sha256
    urls = [None if u is None or not u.strip() else normalise_url(u) for u in url.filter(missing).to_pylist()]
    return pc.replace_with_mask(sha256, missing, pa.array(urls, pa.large_string()))


def normalise_url(url: str) -> str:
    """The URL with lower-case scheme and host, and without default port and fragment.

    The query is kept, because many hosts name the picture in it; percent-encoding is left as it is, because servers may tell
    `%7E` from `~`. What does not look like a URL is returned without white space at its ends.
    """
    match = _URL.match(url.strip())
    if not match:
        return url.strip()
    scheme, authority, rest = match[1].lower(), match[2], match[3]
    user, at, host = authority.rpartition("@")
    name, colon, port = host.rpartition(":")
    if colon and port in ("", DEFAULT_PORTS.get(scheme)) and not name.endswith(":"):
        host = name
    return f"{scheme}://{user}{at}{host.lower()}{rest}".rstrip()
