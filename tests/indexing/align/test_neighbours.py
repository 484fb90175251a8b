"""`indexing.align.neighbours` and `indexing.align.kernels` against the public formulas, restated here plainly and slowly; and their laws."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.cross_decomposition import CCA as SklearnCCA

from indexing.align import kernels
from indexing.align.neighbours import NEIGHBOUR_METRICS, NeighbourLists, mutual_knn, mutual_shares, neighbour_lists
from indexing.scores import tables as tables_module
from infra.errors import InputError
from tests.indexing import measures

Floats = npt.NDArray[np.float64]


def tables(seed: int, n: int = 60, d: int = 12, e: int = 9, noise: float = 0.7) -> tuple[Floats, Floats]:
    """Two views of one latent table."""
    g = np.random.default_rng(seed)
    z = g.normal(size=(n, 5))
    return (
        z @ g.normal(size=(5, d)) + noise * g.normal(size=(n, d)) + 0.5,
        z @ g.normal(size=(5, e)) + noise * g.normal(size=(n, e)),
    )


# --- the public procedure, one number at a time -------------------------------------------------------------------


def unit(x: Floats) -> Floats:
    return np.array([row / max(float(np.sqrt(sum(v * v for v in row))), 1e-12) for row in x])


def listed(x: Floats, k: int) -> list[list[int]]:
    """Neighbours by a full sort of the similarities; self can never be one."""
    f = unit(x)
    similarity = f @ f.T
    return [
        [int(j) for j in sorted(range(len(f)), key=lambda j: (-similarity[i, j], j)) if j != i][:k]
        for i in range(len(f))
    ]


def lcs(a: list[int], b: list[int]) -> int:
    if not a or not b:
        return 0
    if a[0] == b[0]:
        return 1 + lcs(a[1:], b[1:])
    return max(lcs(a[1:], b), lcs(a, b[1:]))


def levenshtein(a: list[int], b: list[int]) -> int:
    if not a or not b:
        return len(a) + len(b)
    return min(levenshtein(a[1:], b) + 1, levenshtein(a, b[1:]) + 1, levenshtein(a[1:], b[1:]) + (a[0] != b[0]))


def plain_neighbour_metric(name: str, x: Floats, y: Floats, k: int) -> float:
    a, b = listed(x, k), listed(y, k)
    each: dict[str, Callable[[int], float]] = {
        "mutual_knn": lambda i: len(set(a[i]) & set(b[i])) / k,
        "cycle_knn": lambda i: float(any(i in a[j] for j in b[i])),
        "lcs_knn": lambda i: float(lcs(a[i], b[i])),
        "edit_distance_knn": lambda i: 1 - levenshtein(a[i], b[i]) / k,
    }
    return sum(each[name](i) for i in range(len(a))) / len(a)


def hsic_unbiased(k: Floats, l: Floats) -> float:
    m = len(k)
    k, l = k - np.diag(np.diag(k)), l - np.diag(np.diag(l))
    value = np.trace(k @ l) + k.sum() * l.sum() / ((m - 1) * (m - 2)) - 2 * (k @ l).sum() / (m - 2)
    return float(value / (m * (m - 3)))


def hsic_biased(k: Floats, l: Floats) -> float:
    h = np.eye(len(k)) - 1 / len(k)
    return float(np.trace(k @ h @ l @ h))


def plain_cka(x: Floats, y: Floats, hsic: Callable[[Floats, Floats], float]) -> float:
    k, l = unit(x) @ unit(x).T, unit(y) @ unit(y).T
    return float(hsic(k, l) / (np.sqrt(hsic(k, k) * hsic(l, l)) + 1e-6))


def plain_cknna(x: Floats, y: Floats, k_nearest: int) -> float:
    k, l = unit(x) @ unit(x).T, unit(y) @ unit(y).T
    masks = []
    for table in (x, y):
        mask = np.zeros_like(k)
        for i, row in enumerate(listed(table, k_nearest)):
            mask[i, row] = 1
        masks.append(mask)

    def alpha(p: Floats, p_mask: Floats, q: Floats, q_mask: Floats) -> float:
        return hsic_unbiased(p_mask * q_mask * p, p_mask * q_mask * q)

    own = alpha(k, masks[0], k, masks[0]) * alpha(l, masks[1], l, masks[1])
    return float(alpha(k, masks[0], l, masks[1]) / (np.sqrt(own) + 1e-6))


def plain_svcca(x: Floats, y: Floats) -> float:
    parts = []
    for table in (unit(x), unit(y)):
        table = table - table.mean(axis=0)
        table = table / (table.std(axis=0, ddof=1) + 1e-8)
        parts.append(np.linalg.svd(table, full_matrices=False)[0][:, :10])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its iterations
        u, v = SklearnCCA(n_components=10, max_iter=20_000, tol=1e-14).fit(*parts).transform(*parts)
    return float(np.mean([np.corrcoef(u[:, i], v[:, i])[0, 1] for i in range(10)]))


@pytest.mark.parametrize("name", list(NEIGHBOUR_METRICS))
@pytest.mark.parametrize("seed", [0, 1])
def test_neighbour_metrics_equal_the_public_formulas(name: str, seed: int) -> None:
    x, y = tables(seed)
    for k in (1, 2, 5):
        found = NEIGHBOUR_METRICS[name](neighbour_lists(x, k=k), neighbour_lists(y, k=k)).mean()
        assert found == pytest.approx(plain_neighbour_metric(name, x, y, k), abs=1e-12)


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("shape", [(60, 12, 9), (40, 90, 70)])
def test_kernel_metrics_equal_the_public_formulas(seed: int, shape: tuple[int, int, int]) -> None:
    x, y = tables(seed, *shape)
    assert measures.cka(x, y) == pytest.approx(plain_cka(x, y, hsic_biased), abs=1e-9)
    assert measures.unbiased_cka(x, y) == pytest.approx(plain_cka(x, y, hsic_unbiased), abs=1e-9)
    lists = neighbour_lists(x, k=10), neighbour_lists(y, k=10)
    assert kernels.CKNNA(x, y, lists).value() == pytest.approx(plain_cknna(x, y, 10), abs=1e-9)


@pytest.mark.parametrize("seed", [0, 1])
def test_svcca_is_what_the_iterative_procedure_converges_to(seed: int) -> None:
    x, y = tables(seed, 80, 30, 25)
    assert measures.svcca(x, y) == pytest.approx(plain_svcca(x, y), abs=1e-5)


def test_tiles_of_kernels_do_not_change_the_value(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = tables(3, 50, 40, 40)
    weights = np.random.default_rng(0).multinomial(50, np.full(50, 1 / 50), size=4).T.astype(float)
    metrics = [kernels.CKA(x, y, unbiased=unbiased) for unbiased in (False, True)]
    whole = [(m.value(), m.weighted(weights)) for m in metrics]
    monkeypatch.setattr(tables_module, "TILE_CELLS", 7 * 50)
    for (value, weighted), m in zip(whole, metrics, strict=True):
        assert m.value() == pytest.approx(value, abs=1e-12)
        assert m.weighted(weights) == pytest.approx(weighted, abs=1e-12)


# --- laws ---------------------------------------------------------------------------------------------------------


def rotation(d: int, seed: int) -> Floats:
    return np.asarray(np.linalg.qr(np.random.default_rng(seed).normal(size=(d, d)))[0])


def all_metrics(x: Floats, y: Floats, k: int = 5) -> Iterator[tuple[str, float]]:
    lists = neighbour_lists(x, k=k), neighbour_lists(y, k=k)
    for name, contribute in NEIGHBOUR_METRICS.items():
        yield name, float(contribute(*lists).mean())
    yield "cka", measures.cka(x, y)
    yield "unbiased_cka", measures.unbiased_cka(x, y)
    yield "cknna", kernels.CKNNA(x, y, lists).value()
    yield "svcca", measures.svcca(x, y)


def test_a_space_agrees_with_itself() -> None:
    x, _ = tables(0, noise=1.0)
    found = dict(all_metrics(x, x))
    assert found.pop("lcs_knn") == 5
    assert 0 <= found.pop("cycle_knn") <= 1  # neighbourhood is not mutual, so even at home some items do not return
    assert len(found) == 6
    assert list(found.values()) == pytest.approx([1.0] * 6, abs=1e-4)


def test_no_metric_sees_a_scale_or_the_order_of_items_and_all_but_svcca_no_rotation() -> None:
    x, y = tables(1)
    order = np.random.default_rng(5).permutation(len(x))
    before = dict(all_metrics(x, y))
    assert len(before) == 8
    for other in (all_metrics(3.5 * x, 0.02 * y), all_metrics(x[order], y[order])):
        assert dict(other) == pytest.approx(before, abs=1e-9)
    turned = dict(all_metrics(x @ rotation(12, 0), y @ rotation(9, 1)))
    # SVCCA standardises each coordinate, so it depends on the axes.
    assert turned.pop("svcca") != pytest.approx(before.pop("svcca"), abs=1e-6)
    assert turned == pytest.approx(before, abs=1e-9)


def test_mutual_knn_of_noise_is_at_chance_within_its_spread() -> None:
    n, k, repeats = 200, 10, 40
    g = np.random.default_rng(7)
    values = [mutual_knn(g.normal(size=(n, 16)), g.normal(size=(n, 16)), k=k) for _ in range(repeats)]
    assert np.mean(values) == pytest.approx(k / (n - 1), abs=4 * np.std(values) / np.sqrt(repeats))


def test_unbiased_cka_of_independent_tables_is_zero_within_spread_and_biased_cka_is_not() -> None:
    g = np.random.default_rng(8)
    pairs = [(g.normal(size=(50, 40)), g.normal(size=(50, 30))) for _ in range(60)]
    values = [measures.unbiased_cka(x, y) for x, y in pairs]
    assert np.mean(values) == pytest.approx(0, abs=4 * np.std(values) / np.sqrt(60))
    assert min(measures.cka(x, y) for x, y in pairs) > 0.2


# --- defined answers ----------------------------------------------------------------------------------------------


def test_f24_two_collapsed_spaces_agree_on_nothing() -> None:
    constant = np.ones((30, 4))
    lists = neighbour_lists(constant, k=5)
    assert lists.tie_rate == 1.0
    found = dict(all_metrics(constant, 2 * constant))
    assert len(found) == 8
    assert found == dict.fromkeys(found, 0.0)


def test_one_collapsed_space_scores_what_its_row_numbers_hit() -> None:
    _, y = tables(0, 200)
    assert mutual_knn(np.ones((200, 4)), y, k=10) == pytest.approx(10 / 199, abs=0.02)


def test_a_tie_on_one_side_keeps_its_canonical_neighbours() -> None:
    # Rows 1 and 2 are equal, so the nearest of row 0 is a tie, which the lower row wins.
    x = np.array([[1.0, 0.0], [1.0, 0.1], [1.0, 0.1], [0.0, 1.0], [-1.0, 0.3]])
    y = np.array([[1.0, 0.0], [1.0, 0.1], [1.0, 0.2], [0.0, 1.0], [-1.0, 0.3]])
    a, b = neighbour_lists(x, k=1), neighbour_lists(y, k=1)
    assert a.tied_NK[:, 0].tolist() == [True, False, False, False, False]
    assert not b.tied_NK.any()
    assert mutual_shares(a, b)[0] == 1
    assert mutual_shares(a, a)[0] == 0


def test_a_zero_row_has_no_neighbours_adds_nothing_and_is_counted() -> None:
    x, y = tables(2, 40)
    x[3] = y[3] = 0
    lists = neighbour_lists(x, k=5), neighbour_lists(y, k=5)
    assert lists[0].n_undefined == 1 and (lists[0].ids_NK[3] == -1).all()
    for name, contribute in NEIGHBOUR_METRICS.items():
        assert contribute(*lists)[3] == 0, name
    assert np.isfinite(kernels.CKNNA(x, y, lists).value())
    assert np.isfinite([measures.cka(x, y), measures.unbiased_cka(x, y), measures.svcca(x, y)]).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_f11_a_row_that_is_not_finite_is_refused_by_every_metric(bad: float) -> None:
    x, y = tables(0)
    x[4, 2] = bad
    for metric in (measures.cka, measures.unbiased_cka, measures.svcca, lambda a, b: mutual_knn(a, b, k=5)):
        with pytest.raises(InputError, match="4"):
            metric(x, y)


def test_too_few_items_are_refused_with_the_numbers() -> None:
    x, y = tables(0, 11)
    with pytest.raises(InputError, match="k is 10 for 11 items"):
        mutual_knn(x, y, k=10)
    with pytest.raises(InputError, match="3 items"):
        measures.unbiased_cka(x[:3], y[:3])
    with pytest.raises(InputError, match=r"\(11, 12\) and \(10, 9\)"):
        mutual_knn(x, y[:10], k=2)
    with pytest.raises(InputError, match="at least 2"):
        kernels.CKNNA(x, y, (neighbour_lists(x, k=1), neighbour_lists(y, k=1)))


# --- permutations and weights -------------------------------------------------------------------------------------


@given(st.integers(0, 10**6), st.integers(1, 6))
def test_relabelled_lists_are_those_of_the_permuted_table(seed: int, k: int) -> None:
    _, y = tables(seed, 20)
    y[7], y[3:6] = 0, y[2]
    order = np.random.default_rng(seed).permutation(20)
    relabelled, searched = neighbour_lists(y, k=k).permuted(order), neighbour_lists(y[order], k=k)
    assert np.array_equal(relabelled.tied_NK, searched.tied_NK)
    # Equal rows are listed by row number: within a list their order may differ, and which of them a cut tie lists.
    named = [np.sort(np.where(lists.tied_NK, -2, lists.ids_NK), axis=1) for lists in (relabelled, searched)]
    assert np.array_equal(named[0], named[1])
    assert searched.n_undefined == relabelled.n_undefined == 1


def test_permuted_kernels_are_those_of_the_permuted_table() -> None:
    x, y = tables(4)
    order = np.random.default_rng(4).permutation(len(y))
    a, b, c = (neighbour_lists(t, k=6) for t in (x, y, y[order]))
    pairs: list[tuple[kernels.Kernel, kernels.Kernel]] = [
        (kernels.CKA(x, y, unbiased=False), kernels.CKA(x, y[order], unbiased=False)),
        (kernels.CKA(x, y, unbiased=True), kernels.CKA(x, y[order], unbiased=True)),
        (kernels.CKNNA(x, y, (a, b)), kernels.CKNNA(x, y[order], (a, c))),
        (kernels.SVCCA(x, y), kernels.SVCCA(x, y[order])),
    ]
    for one, other in pairs:
        assert one.value(order) == pytest.approx(other.value(), abs=1e-9)
        assert one.value(order) != pytest.approx(one.value(), abs=1e-3)


def test_equal_weights_give_the_value_and_whole_weights_that_of_copied_rows() -> None:
    x, y = tables(5, 30)
    lists = neighbour_lists(x, k=6), neighbour_lists(y, k=6)
    weights = np.random.default_rng(1).multinomial(30, np.full(30, 1 / 30), size=3).T.astype(float)
    made: list[kernels.Kernel] = [
        kernels.CKA(x, y, unbiased=False),
        kernels.CKA(x, y, unbiased=True),
        kernels.CKNNA(x, y, lists),
        kernels.SVCCA(x, y),
    ]
    for metric in made:
        assert metric.weighted(np.ones((30, 2))) == pytest.approx([metric.value()] * 2, abs=1e-9)
    for b in range(3):
        rows = np.repeat(np.arange(30), weights[:, b].astype(int))
        assert made[0].weighted(weights)[b] == pytest.approx(cka_of_copies(x, y, rows, unbiased=False), abs=1e-9)
        assert made[1].weighted(weights)[b] == pytest.approx(cka_of_copies(x, y, rows, unbiased=True), abs=1e-9)
        assert made[3].weighted(weights)[b] == pytest.approx(measures.svcca(x[rows], y[rows]), abs=1e-9)


def cka_of_copies(x: Floats, y: Floats, rows: npt.NDArray[np.int64], *, unbiased: bool) -> float:
    """CKA of centred kernels of these rows in which an item and its other copies are no pair."""
    k, l = ((unit(t) - unit(t).mean(0))[rows] for t in (x, y))
    apart = rows[:, None] != rows[None, :]
    if not unbiased:
        np.fill_diagonal(apart, True)
    k, l = (t @ t.T * apart for t in (k, l))
    n = len(rows)

    def hsic(p: Floats, q: Floats) -> float:
        if unbiased:
            return hsic_unbiased(p, q)
        return float((p * q).sum() - 2 / n * (p.sum(1) * q.sum(1)).sum() + p.sum() * q.sum() / n**2)

    return float(hsic(k, l) / (np.sqrt(hsic(k, k) * hsic(l, l)) + 1e-6))


def test_lists_of_all_pairs_of_orders_have_the_right_lcs_and_edit_distance() -> None:
    """All orders of three neighbours of one item against each other, beside two items that never matter."""
    for p, q in itertools.product(itertools.permutations([1, 2, 3]), repeat=2):
        a, b = (NeighbourLists(ids_NK=np.array([row]), tied_NK=np.zeros((1, 3), bool), n_undefined=0) for row in (p, q))
        assert NEIGHBOUR_METRICS["lcs_knn"](a, b)[0] == lcs(list(p), list(q))
        assert NEIGHBOUR_METRICS["edit_distance_knn"](a, b)[0] == 1 - levenshtein(list(p), list(q)) / 3
