"""Shared data of the pipeline tests: real files where they exist, and Recap-DataComp files with their real quirks."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The folder of small real data sets; the test is skipped where it is absent."""
    folder = Path(os.environ.get("GOODVIEWS_REAL_DATA", Path(__file__).parents[3] / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"the real data is not at {folder} (set GOODVIEWS_REAL_DATA)")
    return folder


def sha(name: str) -> str:
    """A sha256 that stands for the picture of this name."""
    return hashlib.sha256(name.encode()).hexdigest()


def _text(values: Sequence[str | bytes | None], kind: pa.DataType) -> pa.Array:
    # Parquet does not promise UTF-8, so neither does the fixture: bytes are written into a string column as they are.
    raw = [value.encode() if isinstance(value, str) else value for value in values]
    return pa.array(raw, pa.large_binary() if kind == pa.large_string() else pa.binary()).view(kind)


Row = tuple[str | None, str | None, str | bytes | None, str | None, str | None]
"""(sha256, url, alt text, first recaption, second recaption)."""

RECAP_ROWS: list[Row] = [
    (sha("dog"), "https://a.example/dog.jpg", "My dog", "A brown dog.", "A dog on grass."),
    # A1: literal byte escapes of a faulty str(bytes), as published.
    (sha("clr"), "https://a.example/clr.jpg", r"CLR\xc2\xae Mold Remover", "A bottle.", None),
    # One picture under two URLs that differ in the query, with much the same alt text.
    (sha("red"), "https://b.example/red.jpg?w=1", "Red chair", "A red chair.", "A chair."),
    (sha("red"), "https://b.example/red.jpg?w=2", "Red chair, used", "One red chair.", ""),
    # A2: the "not available" picture of a host, under pages that have nothing to do with one another.
    (sha("gone"), "https://c.example/1.jpg", "Wedding cake recipe", "A grey box.", "Text."),
    (sha("gone"), "https://c.example/2.jpg", "Truck tyres for sale", "A blank image.", "Grey."),
    (sha("gone"), "https://c.example/3.jpg", "Madrid hotel lobby", "No image here.", "Sign."),
    (sha("gone"), "https://c.example/4.jpg", "Knitting pattern pdf", "A placeholder.", "Icon."),
    # No hash: named by the URL, which is one and the same after normalisation.
    ("", "HTTP://User@D.Example:80/A%7e.jpg?Size=2#top", "A bay", "Sea.", "A bay."),
    (None, "http://User@d.example/A%7e.jpg?Size=2", None, "nan", "Bay."),
    (sha("upper").upper(), "https://e.example/u.jpg", b"Caf\x92 menu", "A menu.", "A list."),
    ("not-a-hash", "https://e.example/x.jpg", "An x", "A letter.", "Letter x."),
    ("", None, "Nobody's", "Nothing.", "None"),
]
"""Rows of the config `condition_diverse_topk`, one quirk of formats.md 1.1 after another."""


def recap_table(rows: Sequence[Row], kind: pa.DataType) -> pa.Table:
    """The published columns with their published types; `kind` is the type of the texts."""
    n = len(rows)
    sha256, url, alt, recap, conditioned = zip(*rows, strict=True)
    columns: dict[str, Any] = {
        "url": _text(url, kind),
        "re_caption": _text(recap, kind),
        "org_caption": _text(alt, kind),
        "sha256": _text(sha256, kind),
        "key": _text([f"{i:09d}" for i in range(n)], kind),
        "re_clip_score": pa.array([0.3] * n, pa.float64()),
        "org_clip_score": pa.array([0.2] * n, pa.float64()),
        "re_length": pa.array([9] * n, pa.int64()),
        "org_length": pa.array([3] * n, pa.int64()),
        "re_gpt4v_score": pa.array([None] * n, pa.int64()),
        "org_gpt4v_score": pa.array([None] * n, pa.int64()),
        "re_caption_condition_diverse_topk": _text(conditioned, kind),
    }
    return pa.table(columns)


@pytest.fixture
def recap_files(tmp_path: Path) -> list[Path]:
    """Two parts of one upload with different schemas: a column absent, one extra, another order, other types."""
    folder = tmp_path / "recap"
    folder.mkdir(parents=True, exist_ok=True)
    first, second = folder / "train-00000-of-02719.parquet", folder / "train-00001-of-02719.parquet"
    pq.write_table(recap_table(RECAP_ROWS, pa.string()), first, row_group_size=5)
    rows: list[Row] = [
        (sha("dog"), "https://f.example/dog.jpg", "My dog again", "A dog sits.", None),
        (sha("owl"), "https://f.example/owl.jpg", "Owl", "An owl.", None),
    ]
    table = recap_table(rows, pa.large_string()).drop_columns(["re_caption_condition_diverse_topk", "re_gpt4v_score"])
    table = table.append_column("uid", pa.array(["0" * 32, "1" * 32]))
    pq.write_table(table.select(table.column_names[::-1]), second)
    return [first, second]


@pytest.fixture
def recap_old_upload(tmp_path: Path) -> Path:
    """A part of the upload of June 2024, which a glob `train-*` catches together with `recap_files`."""
    path = tmp_path / "recap" / "train-00000-of-03550.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(recap_table(RECAP_ROWS[:2], pa.string()), path)
    return path
