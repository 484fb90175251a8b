"""`indexing.rotate.rotation`: maps are what their formulas say, and see nothing but their fit pairs."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from scipy.stats import ortho_group

from indexing.rotate import perceptron
from indexing.rotate.retrieval import rank
from indexing.rotate.rotation import (
    KINDS,
    FittedMap,
    MapConfig,
    fit,
    polar,
    prepared,
    random_rotation,
    ridge,
)
from infra.errors import InputError, UsageError
from infra.vectors import unit_rows
from tests.indexing.embedding_sets import related

Floats = npt.NDArray[np.float64]


def recall(fitted: FittedMap, x: npt.NDArray[np.generic], y: npt.NDArray[np.generic]) -> float:
    places = np.arange(len(x))
    return float(rank(fitted.map_rows(x), fitted.target_rows(y), places, places).hits(1).mean())


@pytest.mark.parametrize("centre", [False, True])
def test_a_rotation_is_recovered_exactly_from_as_many_pairs_as_dims(centre: bool) -> None:
    """k pairs in general position fix an orthogonal map of k dims; the centring takes one more."""
    d = 12
    q = ortho_group.rvs(d, random_state=0)
    g = np.random.default_rng(1)
    x = g.normal(size=(200, d))
    n = d + centre
    fitted = fit(x[:n], x[:n] @ q, MapConfig(centre=centre))
    assert fitted.weights["w"] == pytest.approx(q, abs=1e-9)
    assert fitted.facts["rank"] == d
    assert recall(fitted, x, x @ q) == 1.0
    one_less = fit(x[: n - 2], x[: n - 2] @ q, MapConfig(centre=centre))
    assert one_less.facts["rank"] == d - 2
    assert one_less.weights["w"] != pytest.approx(q, abs=1e-3)


@pytest.mark.parametrize("dims", [(9, 5), (5, 9), (7, 7)])
def test_a_rotation_is_semi_orthogonal_and_has_the_largest_trace(dims: tuple[int, int]) -> None:
    x, y = related(0, 60, *dims)
    w = fit(x, y, MapConfig()).weights["w"]
    small = min(dims)
    assert (w.T @ w if dims[0] >= dims[1] else w @ w.T) == pytest.approx(np.eye(small), abs=1e-10)
    centred = [t.astype(np.float64) - t.astype(np.float64).mean(axis=0) for t in (x, y)]
    cross = centred[0].T @ centred[1]
    best = np.trace(w.T @ cross)
    assert best == pytest.approx(np.linalg.svd(cross, compute_uv=False).sum())
    assert all(np.trace(random_rotation(*dims, seed).T @ cross) < best for seed in range(20))


def test_mapped_rows_have_length_one_even_where_the_map_projects() -> None:
    x, y = related(0, 50, 9, 4)
    fitted = fit(x, y, MapConfig())
    for rows in (fitted.map_rows(x), fitted.target_rows(y)):
        assert np.linalg.norm(rows, axis=1) == pytest.approx(np.ones(50))


@pytest.mark.parametrize("kind", [k for k in KINDS if k != "random"])
def test_related_spaces_are_found_and_the_controls_are_at_chance(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(perceptron, "EPOCHS", 20)
    monkeypatch.setattr(perceptron, "HIDDEN", 128)
    x, y = related(3, 900, 12, 10, noise=0.3)
    fit_rows, scored = slice(0, 400), slice(400, 900)
    config = MapConfig(kind=kind)
    assert recall(fit(x[fit_rows], y[fit_rows], config), x[scored], y[scored]) > 0.1
    shuffled = y[:400][np.random.default_rng(0).permutation(400)]
    for control in (fit(x[:400], shuffled, config), fit(x[:400], y[:400], MapConfig(kind="random"))):
        assert recall(control, x[scored], y[scored]) < 0.012  # chance is .002; 6 of 500 is beyond four deviations


def test_centre_and_weights_come_from_the_fit_rows_alone() -> None:
    x, y = related(0, 40, 6, 5)
    config = MapConfig(unit=True)
    fitted = fit(x[:20], y[:20], config)
    assert fitted.x_mean_D == pytest.approx(x[:20].astype(np.float64).mean(axis=0))
    assert fitted.y_mean_E == pytest.approx(y[:20].astype(np.float64).mean(axis=0))
    before = fitted.map_rows(x[:30])
    assert np.array_equal(fitted.map_rows(x)[:30], before) or fitted.map_rows(x)[:30] == pytest.approx(before)


def test_ridge_is_its_formula_in_both_forms_and_goes_to_least_squares() -> None:
    g = np.random.default_rng(0)
    for n, d in ((30, 8), (8, 30)):
        x, y = g.normal(size=(n, d)), g.normal(size=(n, 4))
        s = np.trace(x.T @ x) / (n * d)
        for alpha in (0.01, 1.0):
            plain = np.linalg.inv(x.T @ x + alpha * n * s * np.eye(d)) @ x.T @ y
            assert ridge(x, y, alpha) == pytest.approx(plain, abs=1e-9)
            assert ridge(100 * x, y, alpha) * 100 == pytest.approx(plain, abs=1e-9)
    x, y = g.normal(size=(30, 8)), g.normal(size=(30, 4))
    assert ridge(x, y, 1e-12) == pytest.approx(np.linalg.pinv(x) @ y, abs=1e-6)


def test_linear_is_the_minimum_norm_solution() -> None:
    g = np.random.default_rng(0)
    x, y = g.normal(size=(9, 20)), g.normal(size=(9, 4))
    found = fit(x, y, MapConfig(kind="linear", centre=False))
    assert found.weights["w"] == pytest.approx(np.linalg.pinv(x) @ y, abs=1e-9)
    assert found.facts["rank"] == 9


def test_ridge_chooses_a_stronger_penalty_for_noisier_pairs() -> None:
    g = np.random.default_rng(0)
    x, w = g.normal(size=(100, 75)), g.normal(size=(75, 5))
    pairs = [x @ w + noise * g.normal(size=(100, 5)) for noise in (0.01, 10)]
    alphas = [fit(x, y, MapConfig(kind="ridge")).facts["alpha"] for y in pairs]
    assert alphas[0] < alphas[1]


def test_the_perceptron_is_reproducible_and_reads_what_no_rotation_can(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second space holds absolute values, which no linear map makes."""
    monkeypatch.setattr(perceptron, "EPOCHS", 40)
    monkeypatch.setattr(perceptron, "HIDDEN", 256)
    g = np.random.default_rng(0)
    x = g.normal(size=(500, 4))
    y = np.abs(x) - np.abs(x).mean(axis=0)
    config = MapConfig(kind="mlp")
    mlp, again = fit(x[:400], y[:400], config), fit(x[:400], y[:400], config)
    assert all(np.array_equal(mlp.weights[name], again.weights[name]) for name in mlp.weights)
    linear = recall(fit(x[:400], y[:400], MapConfig(kind="linear")), x[400:], y[400:])
    assert recall(mlp, x[400:], y[400:]) > linear + 0.2


@pytest.mark.parametrize("kind", KINDS)
def test_f24_a_collapsed_encoder_finds_nothing(kind: str) -> None:
    """All rows equal: what the centring leaves is rounding, which is no direction."""
    _, y = related(0, 60, 6, 5)
    for constant in (np.full((60, 6), 0.1), np.full((60, 6), 1e6), np.zeros((60, 6))):
        fitted = fit(constant[:30], y[:30], MapConfig(kind=kind))
        places = np.arange(30)
        found = rank(fitted.map_rows(constant[30:]), fitted.target_rows(y[30:]), places, places)
        assert found.hits(1).sum() == 0 and found.tie_rate == 1.0
        assert found.expected_hits(1).mean() == pytest.approx(1 / 30)
        assert fitted.target_rows(y[30:]).any()


def test_rounding_left_by_the_centring_is_zero_and_small_signals_are_not() -> None:
    x = np.array([[1.0, 1.0], [1.0, 1.0 + 1e-6], [1.0, 1.0]])
    assert prepared(x, np.ones(2), unit=True).tolist() == [[0, 0], [0, 1], [0, 0]]
    assert unit_rows(np.zeros((2, 3))).tolist() == [[0] * 3] * 2


def test_polar_of_a_rank_deficient_matrix_says_so_and_is_still_orthonormal() -> None:
    g = np.random.default_rng(0)
    w, found = polar(g.normal(size=(9, 3)) @ g.normal(size=(3, 5)))
    assert found == 3
    assert w.T @ w == pytest.approx(np.eye(5), abs=1e-9)
    assert polar(np.zeros((4, 2)))[1] == 0


def test_wrong_pairs_are_refused() -> None:
    x, y = related(0, 20, 6, 5)
    with pytest.raises(InputError, match=r"\(20, 6\) and \(19, 5\)"):
        fit(x, y[:19], MapConfig())
    with pytest.raises(InputError, match="1 fit pairs"):
        fit(x[:1], y[:1], MapConfig())
    with pytest.raises(InputError, match="4 fit pairs, and ridge needs 5"):
        fit(x[:4], y[:4], MapConfig(kind="ridge"))
    x[7, 1] = np.nan
    with pytest.raises(InputError, match="left side .* row 7"):
        fit(x, y, MapConfig())
    with pytest.raises(InputError, match="fitted for 6 dims"):
        fit(related(0, 20, 6, 5)[0], y, MapConfig()).map_rows(y)
    with pytest.raises(UsageError, match="'spin'"):
        MapConfig(kind="spin")


def test_rows_of_nan_are_refused_where_they_are_scored_and_not_only_where_they_are_fitted() -> None:
    x, y = related(0, 20, 6, 5)
    fitted = fit(x, y, MapConfig())
    x[3, 0] = y[4, 1] = np.nan
    with pytest.raises(InputError, match="among them row 3"):
        fitted.map_rows(x)
    with pytest.raises(InputError, match="among them row 4"):
        fitted.target_rows(y)
