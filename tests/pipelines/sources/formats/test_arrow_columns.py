from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.records import TEXTS
from pipelines.sources.formats import arrow_columns

TEXT = st.none() | st.text(max_size=3)


@given(st.data(), st.integers(0, 6))
def test_weaving_equals_a_loop_over_rows(data: st.DataObject, rows: int) -> None:
    one = data.draw(st.lists(TEXT, min_size=rows, max_size=rows))
    many = data.draw(st.lists(st.none() | st.lists(TEXT, max_size=3), min_size=rows, max_size=rows))
    two = data.draw(st.lists(TEXT, min_size=rows, max_size=rows))
    lists = data.draw(st.sampled_from([pa.list_(pa.string()), pa.large_list(pa.string())]))
    offset = data.draw(st.integers(0, rows))
    expected = []
    for record in range(rows - offset):
        row = offset + record
        expected.append((record, "one", "alt", one[row]))
        listed = many[row]
        if listed is None:
            expected.append((record, "many", "human", None))
        else:
            expected += [(record, f"many[{n}]", "human", text) for n, text in enumerate(listed)]
        expected.append((record, "two", "alt", two[row]))
    columns = [
        # A slice, because readers give slices.
        arrow_columns.text_column(pa.array(one, pa.string())[offset:], "one", "alt"),
        arrow_columns.text_column(pa.array(many, lists)[offset:], "many", "human"),
        arrow_columns.text_column(pa.array(two, pa.large_string())[offset:], "two", "alt"),
    ]
    texts = arrow_columns.text_table(columns, rows=rows - offset)
    assert texts.schema.equals(TEXTS)
    texts.validate(full=True)
    found = [
        (t["record"], t["field"], t["role"], None if t["text"] is None else t["text"].decode())
        for t in texts.to_pylist()
    ]
    assert found == expected


def test_fixed_size_lists_are_lists() -> None:
    array = pa.array([["a", "b"], None, ["c", None]], pa.list_(pa.string(), 2))
    texts = arrow_columns.text_table([arrow_columns.text_column(array, "x", "human")], rows=3).to_pylist()
    assert [(t["record"], t["field"], t["text"]) for t in texts] == [
        (0, "x[0]", b"a"),
        (0, "x[1]", b"b"),
        (1, "x", None),
        (2, "x[0]", b"c"),
        (2, "x[1]", None),
    ]


@given(st.lists(st.none() | st.binary(max_size=6), max_size=6))
def test_text_is_utf8_and_says_what_it_changed(values: list[bytes | None]) -> None:
    text, wrong = arrow_columns.as_text(pa.array(values, pa.binary()))
    text.validate(full=True)
    marks = [False] * len(values) if wrong is None else wrong.tolist()
    for value, shown, mark in zip(values, text.to_pylist(), marks, strict=True):
        assert (value is None) == (shown is None)
        if value is not None:
            assert (shown.encode() == value) != mark


@given(st.lists(st.sampled_from(["train", "val", "Val", "", None, "a b"]), max_size=8))
def test_split_names_are_legal_and_the_others_marked(names: list[str | None]) -> None:
    split, wrong = arrow_columns.as_split(pa.array(names, pa.string()), "train")
    split.validate(full=True)
    assert split.to_pylist() == [name if name in ("train", "val") else "train" for name in names]
    marks = [False] * len(names) if wrong is None else wrong.tolist()
    assert marks == [name not in ("train", "val") for name in names]


def test_hashes_are_lower_case_hex_of_sha256_or_null() -> None:
    good = "ab" * 32
    given_ = [good, good.upper(), good[:-1], good + "0", "zz" * 32, "", None]
    assert arrow_columns.as_sha256(pa.array(given_)).to_pylist() == [good, good, None, None, None, None, None]


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.binary(), pa.large_binary(), pa.string_view()])
def test_hashes_of_a_slice_are_those_of_its_rows(kind: pa.DataType) -> None:
    """h3: Arrow's `ascii_lower` gave null or other bytes for a slice that was cast to the large type."""
    hashes = [f"{number:064x}" for number in range(9)]
    for start in range(9):
        assert (
            arrow_columns.as_sha256(pa.array(hashes).cast(kind).slice(start, 3)).to_pylist()
            == hashes[start : start + 3]
        )


def test_numbers_that_are_no_pixels_become_null() -> None:
    for kind in (pa.int64(), pa.float64()):
        assert arrow_columns.as_int32(pa.array([5, -1, 2**31, None], kind)).to_pylist() == [5, None, None, None]
    for kind in (pa.float16(), pa.float32(), pa.float64()):
        numbers = pa.array(np.array([float("nan"), 7.0, -1.0, float("inf")]).astype(kind.to_pandas_dtype()), kind)
        assert arrow_columns.as_int32(numbers).to_pylist() == [None, 7, None, None]
    assert arrow_columns.as_int32(pa.nulls(2)).to_pylist() == [None, None]
