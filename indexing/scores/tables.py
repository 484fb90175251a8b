"""Checks of tables of vectors that scores, maps and probes share.

Invariant: a table that holds NaN or an infinity is refused with the number of a row, and never scored as if it held zeros.
"""

from __future__ import annotations

import numpy as np

from infra.errors import InputError
from infra.vectors import Table


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
