"""`trainer.data.ragged`: rows come back as they were put in, and groups of like length cost the least padding."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.errors import InputError
from trainer.data.ragged import Ragged, length_groups, offsets_of, padding_share

ROWS = st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=6), max_size=8)
LENGTHS = st.lists(st.integers(1, 9), min_size=1, max_size=9)


def as_lists(ragged: Ragged) -> list[list[int]]:
    return [ragged.row(i).tolist() for i in range(len(ragged))]


@given(ROWS)
def test_rows_come_back_as_given(rows: list[list[int]]) -> None:
    ragged = Ragged.from_rows(rows)
    assert as_lists(ragged) == rows
    assert ragged.lengths.tolist() == [len(row) for row in rows]


@given(ROWS, st.data())
def test_take_equals_indexing_a_list(rows: list[list[int]], data: st.DataObject) -> None:
    picks = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=12)) if rows else []
    taken = Ragged.from_rows(rows).take(np.array(picks, np.int64))
    assert as_lists(taken) == [rows[i] for i in picks]


@given(st.lists(ROWS, max_size=4))
def test_concatenation_keeps_every_row_in_order(parts: list[list[list[int]]]) -> None:
    whole = Ragged.concatenate([Ragged.from_rows(part) for part in parts])
    assert as_lists(whole) == [row for part in parts for row in part]
    assert whole.tokens.dtype == np.int32


@pytest.mark.parametrize("rows", [[-1], [3], [0, 1, 5]])
def test_take_refuses_rows_outside(rows: list[int]) -> None:
    ragged = Ragged.from_rows([[1], [2, 3], [4]])
    with pytest.raises(InputError, match="asked of 3 sequences"):
        ragged.take(np.array(rows))
    with pytest.raises(InputError, match="There is no row"):
        ragged.row(rows[-1] if rows[-1] < 0 else 3)


@pytest.mark.parametrize("offsets", [[], [1, 3], [0, 2], [0, 4], [0, 2, 1, 3]])
def test_offsets_that_do_not_cut_the_tokens_are_refused(offsets: list[int]) -> None:
    with pytest.raises(InputError, match="do not cut its 3 tokens"):
        Ragged(tokens=np.arange(3, dtype=np.int32), offsets=np.array(offsets, np.int64))


def test_other_integer_types_are_refused_not_cast() -> None:
    with pytest.raises(InputError, match="int64 offsets"):
        Ragged(tokens=np.arange(3, dtype=np.int64), offsets=np.array([0, 3]))  # type: ignore[arg-type]
    with pytest.raises(InputError, match="int64 offsets"):
        Ragged(tokens=np.arange(3, dtype=np.int32), offsets=np.array([0, 3], np.int32))


@given(LENGTHS, st.integers(1, 4))
def test_groups_hold_every_row_once_and_rise_in_length(lengths: list[int], groups: int) -> None:
    found = length_groups(np.array(lengths), groups)
    assert 1 <= len(found) <= groups
    assert sorted(np.concatenate(found).tolist()) == list(range(len(lengths)))
    ordered = np.array(lengths)[np.concatenate(found)]
    assert (np.diff(ordered) >= 0).all()


@given(LENGTHS, st.integers(1, 4))
def test_no_other_cut_pads_less(lengths: list[int], groups: int) -> None:
    ordered = sorted(lengths)

    def positions(cuts: tuple[int, ...]) -> int:
        edges = [0, *cuts, len(ordered)]
        return sum((b - a) * ordered[b - 1] for a, b in itertools.pairwise(edges) if b > a)

    best = min(positions(cuts) for cuts in itertools.combinations_with_replacement(range(len(ordered) + 1), groups - 1))
    assert padding_share(np.array(lengths), groups) == pytest.approx(1 - sum(lengths) / best)


def test_padding_share_of_known_lengths() -> None:
    lengths = np.array([2, 8, 2, 4])
    assert padding_share(lengths, 1) == 1 - 16 / 32
    assert padding_share(lengths, 2) == 1 - 16 / 20
    assert padding_share(lengths, 3) == 0.0
    assert padding_share(np.zeros(0, np.int64), 3) == 0.0
    assert length_groups(np.zeros(0, np.int64), 3) == []
    with pytest.raises(InputError, match="0 groups"):
        length_groups(lengths, 0)


def test_offsets_are_64_bit() -> None:
    assert offsets_of(np.full(3, 2**31 - 1))[-1] == 3 * (2**31 - 1)
