"""Checks and tiles of tables of vectors that scores and maps share.

Invariant: a table that holds NaN or an infinity is refused with the number of a row, never scored as if it held zeros.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from infra.errors import InputError
from infra.vectors import Floats, Table, unit_rows

TILE_CELLS: Final = 1 << 23
"Cells of a tile: 64 MiB of float64."


def check_rows(x_ND: Table, y_NE: Table) -> None:
    """Raises InputError unless both are tables with the same number of rows."""
    if x_ND.ndim != 2 or y_NE.ndim != 2 or len(x_ND) != len(y_NE):
        raise InputError(
            f"The two tables have shapes {x_ND.shape} and {y_NE.shape}; row i must be the same item in both. "
            "Join them by key first."
        )


def check_finite(x_ND: Table, of: str = "") -> None:
    """Raises InputError for rows that hold NaN or an infinity. of: which table, such as ` of the left side`."""
    bad = np.flatnonzero(~np.isfinite(x_ND).all(axis=1))
    if len(bad):
        raise InputError(
            f"{len(bad):,} of {len(x_ND):,} rows{of} hold NaN or an infinity, among them row {bad[0]}. "
            "Embed them again, or leave them out."
        )


def finite_unit_rows(x_ND: Table) -> Floats:
    """`infra.vectors.unit_rows` of rows that are checked. Raises InputError for NaN and infinities."""
    x = np.asarray(x_ND, np.float64)
    check_finite(x)
    return unit_rows(x)


def tiles_of(n: int, cells_a_row: int, cells: int | None = None) -> list[slice]:
    """Slices of n rows, each with at most so many cells (TILE_CELLS) of a table that is `cells_a_row` wide."""
    step = max(1, (cells or TILE_CELLS) // cells_a_row)
    return [slice(start, min(n, start + step)) for start in range(0, n, step)]
