"""`trainer.theory.grid`: the reference grid, claims that hold on it, and a result that sees when one does not."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest

from infra.errors import ConfigError
from trainer.theory import grid
from trainer.theory.grid import GridConfig, GridResult, GridRow, MismatchRow

SMALL = GridConfig(states=12, dims=3, worlds=3, steps=8, mismatches=12)


def below(config: GridConfig) -> int:
    """Rows below the threshold, from the values of the worlds alone."""
    strengths = np.linspace(0, 1, config.steps + 1)[:-1]
    worlds = (grid.grid_world(config, number) for number in range(config.worlds))
    return sum(int((strengths < world.values[config.dims - 1]).sum()) for world in worlds)


@pytest.fixture(scope="module")
def small() -> tuple[list[GridRow], list[MismatchRow]]:
    return list(grid.run_grid(SMALL)), list(grid.run_mismatches(SMALL))


def test_a_grid_has_a_row_a_world_and_strength_and_keeps_every_claim(
    small: tuple[list[GridRow], list[MismatchRow]],
) -> None:
    rows, mismatches = small
    result = grid.judge(SMALL, rows, mismatches)
    assert result.failures(SMALL) == []
    assert (result.rows_below, result.rows_above) == (below(SMALL), 24 - below(SMALL))
    assert 0 < result.rows_below < 24
    special = [row for row in rows if row.regime == "special"]
    assert [row.world for row in special] == [0, 1, 2]
    assert [row.beta for row in special] == pytest.approx([1.0] * 3)
    assert result.special_error == pytest.approx(6, abs=1e-12)
    assert (result.special_r, result.special_naive_r) == (3, 2)
    assert sum(result.above_r.values()) == result.rows_above
    assert (result.mismatch_checks, result.mismatch_violations) == (12, 0)
    assert 0 < (result.mismatch_tightness_median or 0) < (result.mismatch_tightness_max or 0) <= 1


def test_a_grid_is_a_function_of_its_settings(small: tuple[list[GridRow], list[MismatchRow]]) -> None:
    assert list(grid.run_grid(SMALL)) == small[0]
    other = list(grid.run_grid(dataclasses.replace(SMALL, seed=1)))
    assert [row.alpha for row in other] != [row.alpha for row in small[0]]
    # More worlds leave the first ones as they are.
    assert list(grid.run_grid(dataclasses.replace(SMALL, worlds=1))) == small[0][:9]


def test_the_count_of_rows_below_is_that_of_the_reference_grid_within_the_spread_of_seeds() -> None:
    """Another grid of 20 worlds had 434, 530 and 624 of 800 rows below at bandwidths .35, .30 and .25.

    How it drew its worlds is not recorded. It lies 2 to 4 standard deviations of our seeds below their mean (466, 568,
    667), so its worlds were made a little differently; a wrong bandwidth, kernel or count would be off by ten.
    """
    for bandwidth, reference in ((0.35, 434), (0.30, 530), (0.25, 624)):
        counts = np.array([below(GridConfig(bandwidth=bandwidth, seed=seed)) for seed in range(30)])
        assert abs(counts.mean() - reference) <= 4 * counts.std(ddof=1), (bandwidth, counts.mean(), counts.std())
    assert below(GridConfig()) == 475


@pytest.mark.parametrize(
    ("change", "claim"),
    [
        ({"regime": "below", "error": 1e-11}, "agree below the threshold"),
        ({"regime": "below", "good_error": 2e-12}, "good views agree"),
        ({"regime": "above", "error": 2.0 + 1e-11}, "the error above is 2r"),
        ({"regime": "above", "predicted_lost": 0, "error": 0.0, "lost": 0.0}, "a direction is lost"),
        ({"regime": "above", "least_error": 3.0}, "at least the lower bound"),
        ({"regime": "above", "lost": 1.01}, "as many directions are lost"),
        ({"regime": "special", "error": 5.9}, "the error is 6"),
        ({"regime": "special", "predicted_lost": 2, "lost": 2.0}, "all 3 directions"),
    ],
)
def test_one_wrong_row_fails_its_claim(
    small: tuple[list[GridRow], list[MismatchRow]], change: dict[str, float | str], claim: str
) -> None:
    rows, mismatches = small
    sound = {"good_error": 0.0, "error": 0.0, "lost": 0.0, "predicted_lost": 0, "least_error": 0.0}
    if change["regime"] == "above":
        sound |= {"error": 2.0, "lost": 1.0, "predicted_lost": 1}
    if change["regime"] == "special":
        sound |= {"error": 6.0, "lost": 3.0, "predicted_lost": 3}
    wrong = dataclasses.replace(rows[0], **{**sound, **change})  # type: ignore[arg-type]
    (failed,) = judged([*rows, wrong], mismatches).failures(SMALL)
    assert claim in failed


def test_one_pair_of_worlds_beyond_its_bound_fails_the_claim(
    small: tuple[list[GridRow], list[MismatchRow]],
) -> None:
    rows, mismatches = small
    for name in ("by_both", "by_one"):
        wrong = dataclasses.replace(mismatches[0], **{name: mismatches[0].error / 2})  # type: ignore[arg-type]
        (failed,) = judged(rows, [*mismatches, wrong]).failures(SMALL)
        assert "other positives" in failed


def judged(rows: Sequence[GridRow], mismatches: Sequence[MismatchRow]) -> GridResult:
    return grid.judge(SMALL, rows, mismatches)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"dims": 0}, "dims is 0"),
        ({"worlds": 0}, "worlds is 0"),
        ({"steps": 0}, "steps is 0"),
        ({"seed": -1}, "seed is -1"),
        ({"states": 5, "dims": 4}, "at least 6"),
        ({"bandwidth": 0.0}, "bandwidth is 0.0"),
        ({"bandwidth": float("nan")}, "bandwidth is nan"),
    ],
)
def test_settings_without_a_meaning_are_refused(change: dict[str, float], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        GridConfig(**change)  # type: ignore[arg-type]
