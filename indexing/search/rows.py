"""A table of vectors: float32 unit rows to search with, and the exact cosines that decide.

Invariant: a score depends on the two rows alone. It is the cosine

    sum_D(x * y) / (sqrt(sum_D(x * x)) * sqrt(sum_D(y * y)))

of the rows as given, in float64 and in one fixed order (NumPy's pairwise sum over a contiguous row; the order of a BLAS
product would follow the shape of the call), and rounded to float32 once. Rows that are not float16 or float32 are first
converted to float64 and scaled by a power of two, so that no square overflows.

N, M: rows. D: dimensions. B: rows of a block. C: candidates a query.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Executor
from typing import Any, Final, TypeVar

import numpy as np

from infra.errors import InputError
from infra.vectors import Floats, Ids, Singles, Table

Block = TypeVar("Block")

BLOCK_BYTES: Final = 1 << 20
"Size of float64 temporaries; a block that stays in the processor's cache is 3 times as fast."

SHOWN: Final = 10
"Row numbers that a message names."

_UNIT: Final = 2.0**-24
"Relative error of one rounding to float32."


def error_bound(dims: int) -> float:
    """Largest distance of a float32 product of two unit rows from their score, in any order of summation.

    gamma_n = n u / (1 - n u) with u = 2^-24 bounds the dot product of n rounded terms relative to sum |x y| <= 1
    (Higham, Accuracy and Stability of Numerical Algorithms, 3.1). Beside the D terms n counts one rounding of each side
    to float32, the rounding of the score, and five more, so that every comparison with the bound is strict.
    """
    n = dims + 8
    return n * _UNIT / (1 - n * _UNIT)


class Rows:
    """The rows x_ND of a table; nothing is copied until a tile or a block is asked for.

    values: anything that NumPy can view (a memmap, a slice, a read-only array) and tensors of torch, also on a GPU or
    in bfloat16. name: of the table, for messages. first_row: number of its first row in the table that it is a part of.
    Raises InputError when it is no table of real numbers.
    """

    def __init__(self, values: Any, *, name: str, first_row: int = 0) -> None:
        self.x_ND = _as_table(values, name)
        self.name = name
        self.first_row = first_row
        self._norms_N: Floats | None = None

    def __len__(self) -> int:
        return int(self.x_ND.shape[0])

    @property
    def dims(self) -> int:
        return int(self.x_ND.shape[1])

    @property
    def norms_N(self) -> Floats:
        """Length of each row, after scaling; 0 marks an undefined row. Reads the table once.

        Raises InputError for rows that hold NaN or an infinity, with their numbers.
        """
        if self._norms_N is None:
            norms_N = np.empty(len(self), np.float64)
            for start, stop in self._blocks(0, len(self)):
                norms_N[start:stop] = _norms(_double(self.x_ND[start:stop]))
            if not np.isfinite(norms_N).all():
                self._refuse(np.flatnonzero(~np.isfinite(norms_N)))
            self._norms_N = norms_N
        return self._norms_N

    @property
    def n_undefined(self) -> int:
        """Number of zero rows, which have no direction: they have no neighbours, and no row has them."""
        return len(self) - int(np.count_nonzero(self.norms_N))

    def unit(self, start: int, stop: int, threads: Executor | None = None) -> Singles:
        """Rows [start, stop) divided by their length, as contiguous float32; undefined rows stay zero."""
        unit_BD = np.empty((stop - start, self.dims), np.float32)
        norms_N = self.norms_N

        def fill(block: tuple[int, int]) -> None:
            low, high = block
            unit_BD[low - start : high - start] = _divided(_double(self.x_ND[low:high]), norms_N[low:high])

        _each(fill, self._blocks(start, stop), threads)
        return unit_BD

    def gather(self, rows_B: Ids) -> Floats:
        """The rows with these numbers, in any order, as contiguous float64, scaled."""
        return _double(self.x_ND[rows_B])

    def gather_unit(self, rows_B: Ids) -> Singles:
        """The same rows divided by their length, in float32; undefined rows stay zero."""
        return _divided(self.gather(rows_B), self.norms_N[rows_B]).astype(np.float32)

    def _blocks(self, start: int, stop: int) -> list[tuple[int, int]]:
        step = max(1, BLOCK_BYTES // (8 * self.dims))
        return [(low, min(low + step, stop)) for low in range(start, stop, step)]

    def _refuse(self, bad: Ids) -> None:
        shown = ", ".join(f"{row + self.first_row:,}" for row in bad[:SHOWN]) + (", ..." if len(bad) > SHOWN else "")
        raise InputError(
            f"{len(bad):,} of {len(self):,} rows of the {self.name} hold NaN or an infinity (rows {shown}), so they "
            "have no cosine with anything. Remove or embed them again; rows of zeros may stay."
        )


def cosines(queries: Rows, base: Rows, rows_M: Ids, ids_MC: Ids, threads: Executor | None = None) -> Singles:
    """Scores of the queries `rows_M` with C rows of the base each; -inf where the id is -1 or a row is undefined.

    Beside the result this takes the memory of one block a thread. Blocks and threads do not change the result.
    """
    scores_MC = np.full(ids_MC.shape, -np.inf, np.float32)
    if ids_MC.size == 0:
        return scores_MC
    step = max(1, BLOCK_BYTES // (8 * base.dims * ids_MC.shape[1]))
    norms = queries.norms_N, base.norms_N  # computed here, so that no two threads compute them

    def fill(start: int) -> None:
        part = slice(start, start + step)
        ids_BC, rows_B = ids_MC[part], rows_M[part]
        known = ids_BC >= 0
        # Missing candidates gather row 0 and are masked below, so that the block stays one array.
        found_BCD = base.gather(np.where(known, ids_BC, 0).ravel()).reshape(*ids_BC.shape, base.dims)
        np.multiply(found_BCD, queries.gather(rows_B)[:, None, :], out=found_BCD)
        length_BC = norms[0][rows_B][:, None] * norms[1][np.where(known, ids_BC, 0)]
        known &= length_BC > 0
        np.divide(np.add.reduce(found_BCD, axis=-1), length_BC, out=length_BC, where=known)
        scores_MC[part][known] = length_BC[known].astype(np.float32)

    _each(fill, range(0, len(rows_M), step), threads)
    return scores_MC


def _each(function: Callable[[Block], None], blocks: Iterable[Block], threads: Executor | None) -> None:
    for _ in threads.map(function, blocks) if threads is not None else map(function, blocks):
        pass


def _as_table(values: Any, name: str) -> Table:
    if hasattr(values, "detach") and hasattr(values, "cpu"):
        # `cpu` waits for pending work on the stream; NumPy has no bfloat16.
        values = values.detach().cpu()
        values = values.float() if str(values.dtype) == "torch.bfloat16" else values
    x_ND = np.asarray(values)
    if x_ND.ndim != 2 or x_ND.dtype.kind not in "fiu":
        raise InputError(
            f"The {name} is an array of shape {x_ND.shape} and type {x_ND.dtype}, but neighbours need one row of real "
            "numbers an item. Give a table of shape (items, dimensions)."
        )
    if x_ND.shape[1] == 0:
        raise InputError(f"The {name} has {len(x_ND):,} rows of 0 dimensions, so no row has a direction.")
    return x_ND


def _double(x_BD: Table) -> Floats:
    """A contiguous float64 copy; rows wider than float32 are scaled to a largest component in [.5, 1)."""
    double_BD: Floats = np.array(x_BD, dtype=np.float64, order="C")
    if x_BD.dtype.kind == "f" and x_BD.dtype.itemsize <= 4:
        return double_BD
    # A power of two is exact, so a cosine keeps its value.
    _, exponent_B1 = np.frexp(np.max(np.abs(double_BD), axis=-1, keepdims=True))
    return np.asarray(np.ldexp(double_BD, -exponent_B1))


def _norms(double_BD: Floats) -> Floats:
    return np.asarray(np.sqrt(np.add.reduce(double_BD * double_BD, axis=-1)))


def _divided(double_BD: Floats, norms_B: Floats) -> Floats:
    return np.asarray(double_BD / np.where(norms_B > 0, norms_B, 1)[:, None])
