"""Recap-DataComp-1B: web pictures by URL, each with its alt text and one or two captions by a LLaVA model.

Both configs (`default`, `condition_diverse_topk`) are read by their columns; a file may lack some and have others.
Invariant: a scene is named by the sha256 of the picture, else by its URL; never by `key`, which is the number of a row
in one download (UCSC-VLAA/Recap-DataComp-1B#11). Files of two uploads are refused together.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from infra.errors import InputError
from pipelines.records import Input
from pipelines.sources.formats import arrow_columns
from pipelines.sources.formats.footers import Footer
from pipelines.sources.formats.names import base, listed, normalise_url
from pipelines.sources.options import FALLBACK_SPLIT
from pipelines.sources.sets.web_parquet import URL, WebParquet

TEXTS: Final = {"org_caption": "alt", "re_caption": "recap", "re_caption_condition_diverse_topk": "recap_conditioned"}
"""The conditioned caption was generated from picture *and* alt text."""

IDS: Final = {"sha256": "scene id, image sha256", URL: "scene id where sha256 is missing, image uri"}

_PART = re.compile(r"(.*)-(\d+)-of-(\d+)\.parquet")


@dataclass(frozen=True, kw_only=True)
class RecapDataComp(WebParquet):
    """Recap-DataComp-1B parquet. No options: the columns of each file say what it holds."""

    name = "recap-datacomp"
    title = "Recap-DataComp parquet"
    hint = "Name its `train-*.parquet` files."
    bad_passes = 3
    repairs_byte_escapes = True
    texts = TEXTS
    ids = IDS

    def split_of(self, source: Input) -> str:
        """`preview` of the preview files, else train."""
        return "preview" if base(source.uri).startswith("preview") else FALLBACK_SPLIT

    def scene_ids(self, sha256: pa.Array, columns: Mapping[str, pa.Array]) -> pa.Array:
        """sha256, else the normalised URL, else null; only rows of the second kind pass through Python."""
        missing = sha256.is_null()
        if URL not in columns or not pc.any(missing).as_py():
            return sha256
        urls = arrow_columns.as_text(columns[URL])[0].filter(missing).to_pylist()
        ids = [None if url is None or not url.strip() else normalise_url(url) for url in urls]
        return pc.replace_with_mask(sha256, missing, pa.array(ids, pa.large_string()))

    def notes(self, inputs: Sequence[Input], found: Sequence[Footer]) -> list[str]:
        """What is incomplete or left out. Raises InputError for a mixture of uploads."""
        notes = _check_uploads([footer.input for footer in found])
        if len(found) < len(inputs):
            notes.append(f"{len(inputs) - len(found)} inputs that are not parquet are not read")
        for name in (*self.ids, *self.texts):
            lacking = [footer.input.uri for footer in found if name not in footer.schema.names]
            if 0 < len(lacking) < len(found):
                notes.append(f"{len(lacking)} of {len(found)} files have no column {name}: {listed(lacking)}")
        return notes


def _check_uploads(files: Sequence[Input]) -> list[str]:
    """Notes on incomplete uploads. Raises InputError for several uploads at once, or one part of one twice.

    The hub holds uploads of 3,550 and of 2,719 files side by side, and a glob `train-*` matches both.
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
                f"The inputs mix {len(totals)} uploads: {counts}. Most rows would be there twice; "
                f"name the files of one, for example `{stem}-*-of-{totals[-1]}.parquet`."
            )
        present, total = parts[stem, totals[0]], int(totals[0])
        twice = next((uris for uris in present.values() if len(uris) > 1), None)
        if twice:
            raise InputError(
                f"One part of the upload `{stem}-*-of-{totals[0]}` is there {len(twice)} times: {listed(twice)}. "
                "Its rows would be read as often; name one folder."
            )
        if len(present) < total:
            notes.append(f"{len(present):,} of {total:,} parts of the upload {stem}-*-of-{totals[0]}")
    return notes
