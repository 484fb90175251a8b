"""Unit rows and their means: length 1, or zero where there is no direction, whatever the scale of the input."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from infra import vectors
from infra.vectors import VANISHING, mean_of_sums, mean_of_unit_rows, unit_rows

FIRST = np.array([0])


def drawn(rows: int, dims: int = 16, seed: int = 0) -> NDArray[np.float64]:
    return np.random.Generator(np.random.PCG64(seed)).standard_normal((rows, dims))


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_rows_have_length_one_in_float64(dtype: type[np.floating[Any]]) -> None:
    x = drawn(50).astype(dtype)
    unit = unit_rows(x)
    assert unit.dtype == np.float64
    wide = x.astype(np.float64)
    np.testing.assert_array_equal(unit, wide / np.linalg.norm(wide, axis=1, keepdims=True))


@pytest.mark.parametrize("exponent", [-1000, -600, -466, -400, 0, 400, 466, 600, 1000])
def test_the_scale_of_a_row_changes_no_bit(exponent: int) -> None:
    x = drawn(20)
    np.testing.assert_array_equal(unit_rows(np.ldexp(x, exponent)), unit_rows(x))


def test_the_largest_and_smallest_numbers_have_a_direction() -> None:
    x = np.array([[np.finfo(np.float64).max] * 4, [5e-324, 0, 0, 0], [0, -5e-324, 0, 0]])
    np.testing.assert_allclose(unit_rows(x), np.array([[0.5] * 4, [1, 0, 0, 0], [0, -1, 0, 0]]))


def test_zero_rows_stay_zero_and_others_are_not_touched_by_them() -> None:
    x = drawn(3)
    x[1] = 0
    kept = x.copy()
    unit = unit_rows(x)
    assert not unit[1].any()
    np.testing.assert_allclose(np.linalg.norm(unit[[0, 2]], axis=1), 1)
    np.testing.assert_array_equal(x, kept)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_becomes_nan_and_so_does_its_mean(value: float) -> None:
    x = drawn(4)
    x[1, 3] = value
    assert np.isnan(unit_rows(x)).all(axis=1).tolist() == [False, True, False, False]
    assert np.isnan(mean_of_unit_rows(x, np.array([0, 2]))).all(axis=1).tolist() == [True, False]


def test_no_rows_and_no_groups_give_empty_tables() -> None:
    assert unit_rows(np.zeros((0, 3))).shape == (0, 3)
    assert mean_of_unit_rows(np.zeros((0, 3)), np.zeros(0, np.int64)).shape == (0, 3)
    assert unit_rows(np.zeros((2, 0))).shape == (2, 0)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("scale", [1.0, 3.0, 1e-3])
def test_a_mean_of_opposite_rows_vanishes(dtype: type[np.floating[Any]], scale: float) -> None:
    v = drawn(1)
    # Both rounded to the dtype, so that in float32 a residue of about 1e-7 is left.
    pair = np.concatenate([v, -v * (1 + 1e-7)]).astype(dtype) * dtype(scale)
    assert not mean_of_unit_rows(pair, FIRST).any()


def test_a_mean_just_above_the_bound_is_a_direction() -> None:
    for angle, vanishes in ((0.9 * VANISHING, True), (1.1 * VANISHING, False)):
        pair = np.array([[np.cos(angle), np.sin(angle)], [-np.cos(angle), np.sin(angle)]])
        mean = mean_of_unit_rows(pair, FIRST)
        np.testing.assert_allclose(mean, [[0, 0]] if vanishes else [[0, 1]], atol=1e-9)


def test_the_mean_of_one_row_is_its_unit_row_and_rows_of_all_scales_weigh_the_same() -> None:
    x = drawn(3)
    np.testing.assert_allclose(mean_of_unit_rows(x, np.arange(3)), unit_rows(x), rtol=1e-6)
    scaled = x * np.array([[1e-300], [1.0], [1e300]])
    np.testing.assert_allclose(mean_of_unit_rows(scaled, FIRST), mean_of_unit_rows(x, FIRST), rtol=1e-6)


def test_zero_rows_of_a_group_leave_the_direction_of_the_others() -> None:
    x = drawn(3)
    x[1:] = 0
    np.testing.assert_allclose(mean_of_unit_rows(x, FIRST), unit_rows(x[:1]), rtol=1e-6)
    assert not mean_of_unit_rows(np.zeros((3, 4)), FIRST).any()


def test_blocks_and_sums_made_elsewhere_give_the_same_means(monkeypatch: pytest.MonkeyPatch) -> None:
    x, starts = drawn(40), np.array([0, 1, 9, 10, 30])
    whole = mean_of_unit_rows(x, starts)
    np.testing.assert_allclose(np.linalg.norm(whole, axis=1), 1, rtol=1e-6)
    owner = np.searchsorted(starts, np.arange(40), side="right") - 1
    sums = np.zeros((5, 16))
    np.add.at(sums, owner, unit_rows(x))
    np.testing.assert_allclose(mean_of_sums(sums, np.bincount(owner)), whole, rtol=1e-6)
    for rows in (1, 7, 20):
        monkeypatch.setattr(vectors, "BLOCK_ROWS", rows)
        np.testing.assert_array_equal(mean_of_unit_rows(x, starts), whole)
