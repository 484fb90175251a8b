"""Metadata of DataComp: web pictures by URL with their alt text, in parquet files named by 32 hex digits.

Invariant: a scene is named by the sha256 of the picture, so that it joins Recap-DataComp-1B, else by DataComp's uid.
The subsets in .npy files are not read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from pipelines.records import Input
from pipelines.sources.formats import arrow_columns
from pipelines.sources.options import FALLBACK_SPLIT
from pipelines.sources.sets.web_parquet import WebParquet

TEXTS: Final = {"text": "alt"}
IDS: Final = {"sha256": "scene id, image sha256", "uid": "scene id where sha256 is missing"}
OTHERS: Final = {"url": "image uri", "original_width": "image width", "original_height": "image height"}


@dataclass(frozen=True, kw_only=True)
class DataComp(WebParquet):
    """DataComp metadata parquet. No options: everything is of the split train."""

    name = "datacomp"
    title = "DataComp metadata"
    hint = "Name the folder of its `<32 hex digits>.parquet` files."
    texts = TEXTS
    ids = IDS
    others = OTHERS

    def split_of(self, source: Input) -> str:
        """DataComp has no splits."""
        return FALLBACK_SPLIT

    def scene_ids(self, sha256: pa.Array, columns: Mapping[str, pa.Array]) -> pa.Array:
        """sha256, else uid, else null."""
        if "uid" not in columns:
            return sha256
        uid = arrow_columns.as_text(columns["uid"])[0]
        uid = pc.if_else(pc.equal(pc.utf8_trim_whitespace(uid), ""), pa.scalar(None, pa.large_string()), uid)
        return pc.coalesce(sha256, uid)
