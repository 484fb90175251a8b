"""Metrics of linear kernels: CKA, unbiased CKA, CKNNA, and SVCCA.

Each metric of a pair of tables is a class with two methods: `value(order_N)` with the rows of the second table in this
order (None: as they are), for chance; and `weighted(weights_NB)` under each of B weightings of the items (B,), columns
of whole numbers that sum to N, for the bootstrap.
Invariant: no N x N matrix is ever whole in memory; the D x D forms equal the kernel forms of the sources, term by term.

Features are unit rows (a zero row stays zero). The public reference does not centre them, since HSIC centres the
kernels. Here they are centred as well: both HSIC estimators drop every term f(i) + f(j) of a kernel, so the numbers
stay the same, and the sums cancel before they are rounded.

Sources: CKA, Kornblith et al. 2019; unbiased HSIC, Song et al. 2012 (equation 5); CKNNA, Huh et al. 2024 (arXiv
2405.07987); SVCCA, Raghu et al. 2017. The 1e-6 in every denominator is that of the reference.
Legend: N items, D and E dims, B weightings, K(i, j) = x_i . x_j, L(i, j) = y_i . y_j; K~ is K with a zero diagonal.
"""

from __future__ import annotations

from typing import Final, TypeAlias

import numpy as np
import scipy.linalg
import scipy.sparse

from indexing.align.neighbours import NeighbourLists
from indexing.scores.tables import finite_unit_rows, tiles_of
from infra.errors import InputError
from infra.vectors import Floats, Ids, Table

EPSILON: Final = 1e-6
SVCCA_DIMS: Final = 10


class CKA:
    """Linear centred kernel alignment, HSIC(K, L) / (sqrt(HSIC(K, K) HSIC(L, L)) + 1e-6).

    Biased: HSIC = tr(K H L H) = |Xc' Yc|_F^2 with centred columns; for independent tables it grows with D / N.
    Unbiased: HSIC = [tr(K~ L~) + sum(K~) sum(L~) / ((N-1)(N-2)) - 2 / (N-2) 1' K~ L~ 1] / (N (N-3)).
    """

    def __init__(self, x_ND: Table, y_NE: Table, *, unbiased: bool) -> None:
        _check_items(len(x_ND), 4)
        self._x_ND, self._y_NE = _centred(finite_unit_rows(x_ND)), _centred(finite_unit_rows(y_NE))
        self._unbiased = unbiased
        self._own = np.sqrt(max(0.0, self._hsic(self._x_ND, self._x_ND) * self._hsic(self._y_NE, self._y_NE)))

    def value(self, order_N: Ids | None = None) -> float:
        y_NE = self._y_NE if order_N is None else self._y_NE[order_N]
        return float(self._hsic(self._x_ND, y_NE) / (self._own + EPSILON))

    def _hsic(self, x_ND: Floats, y_NE: Floats) -> float:
        n = len(x_ND)
        whole = _cross_square(x_ND, y_NE)
        if not self._unbiased:
            return whole
        x_diagonal_N, y_diagonal_N = (np.einsum("nd,nd->n", t, t) for t in (x_ND, y_NE))
        # Centred columns: K 1 = 0, so K~ 1 is minus the diagonal.
        sums = x_diagonal_N.sum() * y_diagonal_N.sum() / ((n - 1) * (n - 2))
        both = x_diagonal_N @ y_diagonal_N
        return float((whole - both + sums - 2 * both / (n - 2)) / (n * (n - 3)))

    def weighted(self, weights_NB: Floats) -> Floats:
        """The metric under each weighting (B,); O(N^2 (D + E + B)) time in tiles of rows.

        Two copies of one item are not a pair of items: their kernel stays out of the unbiased sums, and enters the
        biased ones once a copy, as a diagonal. As pairs they would raise every draw above the value itself.
        """
        n, b = weights_NB.shape
        products, crossed, totals = np.zeros((3, b)), np.zeros((3, b)), np.zeros((2, b))
        for tile in tiles_of(n, n):
            own_RB, sums, kernels, diagonals = weights_NB[tile], [], [], []
            for x in (self._x_ND, self._y_NE):
                kernel = x[tile] @ x.T
                rows = (np.arange(len(kernel)), np.arange(n)[tile])
                diagonals.append(np.zeros((len(kernel), 1)) if self._unbiased else kernel[rows][:, None])
                kernel[rows] = 0
                kernels.append(kernel)
                sums.append(kernel @ weights_NB + diagonals[-1])
            # The three HSIC of the formula: (K, L), (K, K) and (L, L).
            for place, (p, q) in enumerate(((0, 1), (0, 0), (1, 1))):
                pairs = (kernels[p] * kernels[q]) @ weights_NB + diagonals[p] * diagonals[q]
                products[place] += (own_RB * pairs).sum(axis=0)
                crossed[place] += (own_RB * sums[p] * sums[q]).sum(axis=0)
            totals += np.stack([(own_RB * part).sum(axis=0) for part in sums])
        squares = np.stack([totals[0] * totals[1], totals[0] ** 2, totals[1] ** 2])
        if self._unbiased:
            hsic = (products + squares / ((n - 1) * (n - 2)) - 2 * crossed / (n - 2)) / (n * (n - 3))
        else:
            hsic = products - 2 * crossed / n + squares / n**2
        return np.asarray(hsic[0] / (np.sqrt(np.maximum(hsic[1] * hsic[2], 0)) + EPSILON))


class CKNNA:
    """CKA restricted to pairs that are neighbours in both spaces: a(K, L) / (sqrt(a(K, K) a(L, L)) + 1e-6).

    a(K, L) is the unbiased HSIC of M o K and M o L, where M(i, j) = 1 if j is among the K nearest neighbours of i in
    both; in a(K, K) the mask is that of one space. M is not symmetric, so tr(K~ L~) counts mutual pairs only, as the
    reference does. Masked kernels have at most N * K entries, so they are sparse. NaN when a(K, K) a(L, L) < 0.
    """

    def __init__(self, x_ND: Table, y_NE: Table, lists: tuple[NeighbourLists, NeighbourLists]) -> None:
        _check_items(len(x_ND), 4)
        if lists[0].ids_NK.shape[1] < 2:
            raise InputError("CKNNA compares pairs of neighbours, so k must be at least 2.")
        self._kernels = [_masked(finite_unit_rows(t), found) for t, found in zip((x_ND, y_NE), lists, strict=True)]
        # Ties on both sides do not count, as in `indexing.align.neighbours`.
        self._tied = [_sparse(found, found.tied_NK.astype(np.float64)) for found in lists]
        self._own = self._alpha(self._kernels[0], self._kernels[0]) * self._alpha(self._kernels[1], self._kernels[1])

    def value(self, order_N: Ids | None = None) -> float:
        # The unbiased estimate of a restricted kernel may be negative, and then it has no root.
        if self._own < 0:
            return float("nan")
        return float(self._alpha(*self._shared(order_N)) / (np.sqrt(self._own) + EPSILON))

    def _shared(self, order_N: Ids | None) -> tuple[scipy.sparse.csr_array, scipy.sparse.csr_array]:
        """M o K and M o L."""
        (k, l), (k_tied, l_tied) = self._kernels, self._tied
        if order_N is not None:
            # Moving rows and columns of the sparse kernel is cheaper than computing it again.
            l, l_tied = (m[order_N][:, order_N].tocsr() for m in (l, l_tied))
        mask = _pattern(k).multiply(_pattern(l)) - k_tied.multiply(l_tied)
        return k.multiply(mask).tocsr(), l.multiply(mask).tocsr()

    @staticmethod
    def _alpha(k: scipy.sparse.csr_array, l: scipy.sparse.csr_array) -> float:
        return float(_weighted_alpha(k, l, np.ones((k.shape[0], 1)))[0])

    def weighted(self, weights_NB: Floats) -> Floats:
        """The metric under each weighting (B,); neighbours stay, and copies of an item are no neighbours."""
        k, l = self._kernels
        shared = _weighted_alpha(*self._shared(None), weights_NB)
        own = _weighted_alpha(k, k, weights_NB) * _weighted_alpha(l, l, weights_NB)
        with np.errstate(invalid="ignore"):
            return np.asarray(shared / (np.sqrt(own) + EPSILON))


class SVCCA:
    """Mean canonical correlation of the first 10 left singular vectors of both standardised tables.

    Columns are centred and divided by their standard deviation (N - 1) + 1e-8. The reference takes a randomised SVD and
    an iterative CCA; both converge to the singular values of U' V, which are computed here, the same on every run. A
    table of a lower rank uses fewer than 10 dims; a constant table scores 0.
    """

    def __init__(self, x_ND: Table, y_NE: Table) -> None:
        _check_items(len(x_ND), SVCCA_DIMS + 2)
        self._x_ND, self._y_NE = finite_unit_rows(x_ND), finite_unit_rows(y_NE)
        self._u_NC, self._v_NC = _leading(self._x_ND), _leading(self._y_NE)

    def value(self, order_N: Ids | None = None) -> float:
        return _correlation(self._u_NC, self._v_NC if order_N is None else self._v_NC[order_N])

    def weighted(self, weights_NB: Floats) -> Floats:
        """The metric under each weighting (B,): of the table that holds item i w_i times."""
        out = np.empty(weights_NB.shape[1])
        for b in range(len(out)):
            rows = np.repeat(np.arange(len(weights_NB)), weights_NB[:, b].astype(np.int64))
            out[b] = _correlation(_leading(self._x_ND[rows]), _leading(self._y_NE[rows]))
        return out


Kernel: TypeAlias = CKA | CKNNA | SVCCA


def _check_items(n: int, least: int) -> None:
    if n < least:
        raise InputError(f"There are {n:,} items, and this metric needs at least {least}. Score more items.")


def _centred(x_ND: Floats) -> Floats:
    return np.asarray(x_ND - x_ND.mean(axis=0))


def _cross_square(x_ND: Floats, y_NE: Floats) -> float:
    """|X' Y|_F^2 = sum_ij K_ij L_ij, by the cheaper of two forms: D x E, or N x N in tiles."""
    n, d, e = len(x_ND), x_ND.shape[1], y_NE.shape[1]
    if d * e <= n * (d + e):
        return float(np.square(x_ND.T @ y_NE).sum())
    return sum(float(np.vdot(x_ND[rows] @ x_ND.T, y_NE[rows] @ y_NE.T)) for rows in tiles_of(n, n))


def _sparse(lists: NeighbourLists, values_NK: Floats) -> scipy.sparse.csr_array:
    n, k = lists.ids_NK.shape
    known = lists.ids_NK >= 0
    rows = np.broadcast_to(np.arange(n)[:, None], (n, k))[known]
    return scipy.sparse.csr_array((values_NK[known], (rows, lists.ids_NK[known])), shape=(n, n))


def _masked(x_ND: Floats, lists: NeighbourLists) -> scipy.sparse.csr_array:
    n, k = lists.ids_NK.shape
    values_NK = np.empty((n, k))
    # One neighbour at a time: all at once would gather N * K * D values.
    for place in range(k):
        values_NK[:, place] = np.einsum("nd,nd->n", x_ND, x_ND[lists.ids_NK[:, place]])
    return _sparse(lists, values_NK)


def _pattern(matrix: scipy.sparse.csr_array) -> scipy.sparse.csr_array:
    return scipy.sparse.csr_array((np.ones_like(matrix.data), matrix.indices, matrix.indptr), shape=matrix.shape)


def _weighted_alpha(k: scipy.sparse.csr_array, l: scipy.sparse.csr_array, weights_NB: Floats) -> Floats:
    """Unbiased HSIC (B,) of two sparse kernels without diagonal, under item weights; see `CKA`."""
    n = k.shape[0]
    products = (weights_NB * (k.multiply(l.T).tocsr() @ weights_NB)).sum(axis=0)
    k_columns, l_rows = k.T @ weights_NB, l @ weights_NB
    totals = (weights_NB * k_columns).sum(axis=0) * (weights_NB * l_rows).sum(axis=0)
    crossed = (weights_NB * k_columns * l_rows).sum(axis=0)
    return np.asarray((products + totals / ((n - 1) * (n - 2)) - 2 * crossed / (n - 2)) / (n * (n - 3)))


def _leading(x_ND: Floats) -> Floats:
    """Left singular vectors (N, C) of the standardised table for its C <= 10 largest singular values that are not 0."""
    x = _centred(x_ND)
    x /= x.std(axis=0, ddof=1) + 1e-8
    n, d = x.shape
    most = min(SVCCA_DIMS, n, d)
    # The smaller of the two Gram matrices has the same eigenvalues, the squares of the singular values.
    gram = x.T @ x if d <= n else x @ x.T
    squares, vectors = scipy.linalg.eigh(gram, subset_by_index=[len(gram) - most, len(gram) - 1])
    kept = squares > max(squares[-1], 1e-12) * 1e-10
    if d > n:
        return np.asarray(vectors[:, kept])
    return np.asarray(x @ vectors[:, kept] / np.sqrt(squares[kept]))


def _correlation(u_NC: Floats, v_NC: Floats) -> float:
    if not u_NC.shape[1] or not v_NC.shape[1]:
        return 0.0
    # Both are orthonormal and centred, so these are the canonical correlations.
    return float(scipy.linalg.svdvals(u_NC.T @ v_NC).mean())
