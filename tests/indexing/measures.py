"""Single measures of two tables, as the formulas of the tests name them."""

from __future__ import annotations

from indexing.align.kernels import CKA, SVCCA
from indexing.align.layers import Layers
from indexing.align.score import AlignConfig, Scored, Side, score_sides
from infra.vectors import Table


def cka(x_ND: Table, y_NE: Table) -> float:
    """Biased; in [0, 1]."""
    return CKA(x_ND, y_NE, unbiased=False).value()


def unbiased_cka(x_ND: Table, y_NE: Table) -> float:
    """0 on average for independent tables, so it may be negative."""
    return CKA(x_ND, y_NE, unbiased=True).value()


def svcca(x_ND: Table, y_NE: Table) -> float:
    """In [0, 1]."""
    return SVCCA(x_ND, y_NE).value()


def score(left: Layers, right: Layers, config: AlignConfig) -> list[Scored]:
    """The metrics of `config` between two encoders, in its order; number of a layer -> rows (N, D)."""
    return score_sides(Side(left, config), Side(right, config), config)
