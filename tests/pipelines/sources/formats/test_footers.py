from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.errors import InputError
from pipelines.records import Input
from pipelines.sources.formats import footers


@given(st.lists(st.integers(0, 300_000), max_size=12), st.integers(0, 2_000_000))
def test_cuts_cover_the_rows_once_in_order_and_are_not_large(row_groups: list[int], rows: int) -> None:
    rows = min(rows, sum(row_groups))
    cuts = list(footers.cuts(row_groups, rows))
    assert all(0 < stop - start <= footers.PIECE_ROWS * 3 // 2 for start, stop in cuts)
    assert [start for start, _ in cuts] == [0, *(stop for _, stop in cuts[:-1])][: len(cuts)]
    assert (cuts[-1][1] if cuts else 0) == rows


def test_small_row_groups_share_a_piece_and_a_large_one_is_cut_in_equal_parts() -> None:
    assert list(footers.cuts([100] * 3_000, 300_000)) == [(0, 131_000), (131_000, 262_000), (262_000, 300_000)]
    assert list(footers.cuts([10, 400_000, 10], 400_020)) == [
        (0, 10),
        (10, 100_010),
        (100_010, 200_010),
        (200_010, 300_010),
        (300_010, 400_010),
        (400_010, 400_020),
    ]


def test_only_the_row_groups_of_the_range_are_opened(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(
        pa.table({"n": np.arange(100), "text": ["x" * 40] * 100}), path, row_group_size=10, compression="none"
    )
    # Damage every row group but the fourth: reading rows 30 to 40 must not notice.
    metadata = pq.read_metadata(path)
    data = bytearray(path.read_bytes())
    for group in range(10):
        column = metadata.row_group(group).column(0)
        if group != 3:
            start = column.dictionary_page_offset or column.data_page_offset
            data[start : start + column.total_compressed_size] = b"\xff" * column.total_compressed_size
    path.write_bytes(bytes(data))
    source = Input(uri="a.parquet", url=str(path))
    ((first, rows),) = footers.read_rows(source, 32, 38, ["n", "absent"])
    assert first == 32 and rows.column("n").to_pylist() == [32, 33, 34, 35, 36, 37]
    assert rows.schema.names == ["n"]
    with pytest.raises(InputError, match=r"Cannot read rows from 0 of a\.parquet: .*damaged"):
        list(footers.read_rows(source, 0, 5, ["n"]))


@given(st.integers(0, 99), st.integers(1, 60))
def test_any_range_gives_its_rows(start: int, length: int) -> None:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"n": np.arange(100)}), sink, row_group_size=7)
    import fsspec

    with fsspec.open("memory://footers/a.parquet", "wb") as file:
        file.write(sink.getvalue().to_pybytes())
    source = Input(uri="a.parquet", url="memory://footers/a.parquet")
    stop = min(100, start + length)
    numbers: list[int] = []
    for first, rows in footers.read_rows(source, start, stop, ["n"]):
        assert first == start + len(numbers)
        numbers += rows.column("n").to_pylist()
    assert numbers == list(range(start, stop))


def test_c2_large_rows_make_small_batches(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    captions = [[f"{i:04d}" * 1_000] * 10 for i in range(100)]
    pq.write_table(pa.table({"captions": captions}), path, use_dictionary=False, compression="none")
    source = Input(uri="a.parquet", url=str(path))
    batches = [rows.num_rows for _, rows in footers.read_rows(source, 0, 100, ["captions"], batch_bytes=1 << 20)]
    assert sum(batches) == 100
    # A row has 40,000 bytes.
    assert 20 <= max(batches) <= (1 << 20) // 40_000
    assert [rows.num_rows for _, rows in footers.read_rows(source, 0, 100, ["captions"])] == [100]


def _damaged(path: Path, data: bytes) -> Input:
    path.write_bytes(data)
    return Input(uri=path.name, url=str(path))


def test_c7_a_file_that_is_no_whole_parquet_is_refused_with_what_it_is(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"n": np.arange(1_000)}), path)
    whole = path.read_bytes()
    cases: list[tuple[bytes, str]] = [
        (b"", r"a\.parquet is not a whole parquet file: it is empty \(0 bytes\)"),
        (whole[:-1], "without its end"),
        (whole[: len(whole) // 2], "without its end"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "Git LFS pointer"),
        (b"<!DOCTYPE html><html>not found</html>", "HTML"),
        (b"\x1f\x8b\x08\x00" + bytes(20), "gzip"),
        (b"id,caption\n1,a\n", r"begins with b'id,capti'"),
    ]
    for data, message in cases:
        with pytest.raises(InputError, match=message):
            footers.footers([_damaged(path, data)])


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file"):
        footers.footers([Input(uri="a.parquet", url=str(tmp_path / "a.parquet"))])


def test_columns_are_found_by_name_or_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    table: Any = pa.table({"caption": ["a"], "url": ["u"]})
    pq.write_table(table, path)
    (footer,) = footers.footers([Input(uri="a.parquet", url=str(path))])
    assert footers.column_type(footer, "caption") == pa.string()
    assert footer.rows == 1
    with pytest.raises(InputError, match=r"no column 'captions'\. Did you mean 'caption'\? Its columns: caption, url"):
        footers.column_type(footer, "captions")
