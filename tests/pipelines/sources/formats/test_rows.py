"""`pipelines.sources.formats.rows`: records in order, in batches of bounded size."""

from __future__ import annotations

from pipelines.sources.formats.arrow_columns import BATCH_RECORDS
from pipelines.sources.formats.rows import BATCH_BYTES, Record, batches, malformed


def test_a_batch_is_bounded_in_records() -> None:
    records = (Record(source_id=str(row), split="train", row=row) for row in range(BATCH_RECORDS + 1))
    found = list(batches("a", records))
    assert [batch.records.num_rows for batch in found] == [BATCH_RECORDS, 1]
    assert [row for batch in found for row in batch.records["source_row"].to_pylist()] == list(range(BATCH_RECORDS + 1))


def test_a_batch_is_bounded_in_bytes_of_texts_and_pictures() -> None:
    half = bytes(BATCH_BYTES // 2)
    text = ("caption", "human", half, None)
    records = [Record(source_id=None, split="train", row=row, texts=[text]) for row in range(3)]
    pictures = [Record(source_id=None, split="train", row=row, columns={"image": half}) for row in range(3)]
    for given in (records, pictures):
        assert [batch.records.num_rows for batch in batches("a", given)] == [2, 1]


def test_columns_that_a_record_lacks_are_null() -> None:
    records = [
        Record(source_id="a", split="train", row=0),
        Record(source_id="b", split="val", row=1, texts=[("x", "alt", b"t", None)], columns={"width": 7}),
        malformed("train", 2, b"raw", "why"),
    ]
    (batch,) = batches("a", records)
    assert batch.records["width"].to_pylist() == [None, 7, None]
    assert batch.records["source_id"].to_pylist() == ["a", "b", None]
    assert batch.texts["record"].to_pylist() == [1, 2]
    assert batch.texts["broken"].to_pylist() == [None, "malformed_record: why"]


def test_no_records_give_no_batch() -> None:
    assert list(batches("a", [])) == []
