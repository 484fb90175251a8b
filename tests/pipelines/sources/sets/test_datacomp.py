"""`pipelines.sources.sets.datacomp`: scenes by the hash of the picture, else by uid."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from infra.errors import InputError
from pipelines.sources.sets.datacomp import DataComp
from pipelines.sources.sets.recap import RecapDataComp

A, B = "a" * 64, "b" * 64
ROWS = pa.table(
    {
        "uid": ["u1", "u2", "u3", ""],
        "url": ["http://x/1.jpg", "http://x/2.jpg", None, "http://x/4.jpg"],
        "text": ["untitled image", None, "nan", "a dog"],
        "original_width": pa.array([980, -1, None, 10], pa.int64()),
        "original_height": pa.array([405, 5, None, 10], pa.int64()),
        "clip_l14_similarity_score": pa.array([0.1, 0.2, 0.3, 0.4], pa.float32()),
        "face_bboxes": pa.array([[], [[0.1, 0.2, 0.3, 0.4]], [], []], pa.list_(pa.list_(pa.float64()))),
        "sha256": [A.upper(), "", B, ""],
    }
)


def test_rows_are_named_by_sha256_else_uid_never_by_their_number(write_parquet: Any, read_whole: Any) -> None:
    whole = read_whole(DataComp(), write_parquet("00000000000000000000000000000000.parquet", ROWS))
    assert whole.ids == [A, "u2", B, None]
    assert [t["text"] for t in whole.texts] == [b"untitled image", None, b"nan", b"a dog"]
    assert {t["role"] for t in whole.texts} == {"alt"}
    assert [(r["width"], r["height"]) for r in whole.records] == [(980, 405), (None, 5), (None, None), (10, 10)]
    assert whole.survey.columns["text"] == "text:alt" and "face_bboxes" not in whole.survey.columns


def test_a3_the_same_picture_joins_recap_datacomp(write_parquet: Any, read_whole: Any) -> None:
    recap = pa.table({"url": ["http://x/1.jpg?v=2"], "org_caption": ["x"], "sha256": [A], "key": ["000000001"]})
    ids = read_whole(RecapDataComp(), write_parquet("train-00000-of-00001.parquet", recap)).ids
    assert ids == read_whole(DataComp(), write_parquet("a.parquet", ROWS)).ids[:1]


def test_columns_may_be_absent_or_all_null(write_parquet: Any, read_whole: Any) -> None:
    bare = read_whole(DataComp(), write_parquet("a.parquet", ROWS.select(["uid", "text"])))
    assert bare.ids == ["u1", "u2", "u3", None] and bare.records[0]["image_uri"] is None
    null = ROWS.set_column(7, "sha256", pa.nulls(4))
    assert read_whole(DataComp(), write_parquet("b.parquet", null)).ids == ["u1", "u2", "u3", None]


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (ROWS.drop_columns(["text"]), "has no column 'text'"),
        (ROWS.drop_columns(["sha256", "uid"]), "neither `sha256` nor `uid`"),
        (ROWS.set_column(2, "text", pa.array([1, 2, 3, 4])), "Column 'text' of a.parquet is int64, not a text"),
        (ROWS.set_column(3, "original_width", pa.array(["a"] * 4)), "Column 'original_width' of a.parquet is string"),
    ],
)
def test_another_table_is_refused(table: pa.Table, message: str, write_parquet: Any, inputs: Any) -> None:
    with pytest.raises(InputError, match=message):
        DataComp().survey(inputs(write_parquet("a.parquet", table)), None)


def test_a_limit_counts_rows_over_files(write_parquet: Any, read_whole: Any) -> None:
    paths = [write_parquet("a.parquet", ROWS, row_group_size=3), write_parquet("b.parquet", ROWS)]
    for limit in range(1, 10):
        assert len(read_whole(DataComp(), *paths, limit=limit).records) == min(limit, 8)
