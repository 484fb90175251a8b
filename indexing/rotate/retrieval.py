"""Retrieval: ranks of the right gallery rows of each query, recall at k, and the chance of both.

Invariant: ties go against the model. The rank of a query is the number of wrong rows that score at least as high as its
best right one, so a model that gives all rows the same score finds nothing (R@1 = 0), and not everything.

`Ranks.expected_hits` breaks ties at random instead: there a model that gives one score to all rows scores at chance.
M queries, G gallery rows, D dims. Queries and gallery rows with equal labels belong together; a query may have several
right rows (an image and its five captions), the best of which counts.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import scipy.special

from indexing.scores.tables import tiles_of
from infra.errors import InputError
from infra.vectors import Floats, Ids, Singles


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """Outcome of M queries.

    above_M: number of wrong rows that score higher than the best right one; tied_M: that score the same. picked_M:
    gallery row of the highest score, a wrong one where it is tied with the right one. best_M: score of the picked row.
    right_M: number of right rows of a query. gallery: G.
    """

    above_M: Ids
    tied_M: Ids
    picked_M: Ids
    best_M: Singles
    right_M: Ids
    gallery: int

    @property
    def ranks_M(self) -> Ids:
        """0 for the first place; ties against the model."""
        return self.above_M + self.tied_M

    @property
    def tie_rate(self) -> float:
        """Share of queries whose right row is tied with a wrong one."""
        return float((self.tied_M > 0).mean())

    @functools.cached_property
    def median_rank(self) -> float:
        """1-based; ties count half."""
        return float(np.median(self.above_M + self.tied_M / 2 + 1))

    def hits(self, k: int) -> Floats:
        """1 where the right row is among the first k (M,)."""
        return (self.ranks_M < k).astype(np.float64)

    def expected_hits(self, k: int) -> Floats:
        """Probability of a hit when ties are broken at random (M,); exact for one right row."""
        return np.clip((k - self.above_M) / (self.tied_M + 1), 0.0, 1.0)

    def chance(self, k: int) -> float:
        """Mean of the hits of a random order: 1 - C(G - r, k) / C(G, k) with r right rows."""
        wrong_M = self.gallery - self.right_M
        misses_M = _log_choose(wrong_M, k) - _log_choose(np.array([self.gallery]), k)
        return float(np.where(wrong_M >= k, -np.expm1(misses_M), 1.0).mean())


def rank(queries_MD: Floats, gallery_GD: Floats, query_labels_M: Ids, gallery_labels_G: Ids) -> Ranks:
    """Rank every query by the inner product with every gallery row.

    Scores are float64 products rounded to float32, so that equal rows tie wherever they stand; for cosines pass unit
    rows. Raises InputError when a query has no right row in the gallery, since its rank would mean nothing.
    """
    m, g = len(queries_MD), len(gallery_GD)
    if not m or not g:
        raise InputError(f"There are {m:,} queries and {g:,} to be found. Retrieval needs at least one of each.")
    labels, counts = np.unique(gallery_labels_G, return_counts=True)
    places_M = np.minimum(np.searchsorted(labels, query_labels_M), len(labels) - 1)
    lost = labels[places_M] != query_labels_M
    if lost.any():
        raise InputError(
            f"{int(lost.sum()):,} of {m:,} queries have no right one among the {g:,} that can be found. "
            "Join both sides first."
        )
    out = {name: np.empty(m, np.int64) for name in ("above", "tied", "picked")}
    best_M = np.empty(m, np.float32)
    for rows in tiles_of(m, g):
        scores_RG = (queries_MD[rows] @ gallery_GD.T).astype(np.float32)
        right_RG = query_labels_M[rows, None] == gallery_labels_G[None, :]
        own_R1 = np.where(right_RG, scores_RG, -np.inf).max(axis=1, keepdims=True)
        out["above"][rows] = ((scores_RG > own_R1) & ~right_RG).sum(axis=1)
        out["tied"][rows] = ((scores_RG == own_R1) & ~right_RG).sum(axis=1)
        best_R1 = scores_RG.max(axis=1, keepdims=True)
        # Among equal scores a wrong row comes before a right one, then the lower row.
        out["picked"][rows] = np.argmax((scores_RG == best_R1) * (2 - right_RG.astype(np.int8)), axis=1)
        best_M[rows] = best_R1[:, 0]
    return Ranks(
        above_M=out["above"],
        tied_M=out["tied"],
        picked_M=out["picked"],
        best_M=best_M,
        right_M=counts[places_M],
        gallery=g,
    )


def mean_by_label(values_M: Floats, labels_M: Ids, n: int) -> Floats:
    """Mean value of each label 0 .. n - 1 (N,); NaN where a label has no value.

    Five captions of one image are not five independent items, so intervals are drawn over these means.
    """
    counts_N = np.bincount(labels_M, minlength=n)
    sums_N = np.bincount(labels_M, weights=values_M, minlength=n)
    return np.asarray(np.divide(sums_N, counts_N, out=np.full(n, np.nan), where=counts_N > 0))


def _log_choose(n_M: Ids, k: int) -> Floats:
    # By logarithms, since the binomials of large galleries overflow.
    top_M = np.maximum(n_M, k)
    gammaln = scipy.special.gammaln
    return np.asarray(gammaln(top_M + 1) - gammaln(k + 1) - gammaln(top_M - k + 1))
