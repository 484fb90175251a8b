"""Columns of Arrow tables as contiguous arrays that NumPy can view; no value is changed."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

Ints: TypeAlias = NDArray[np.int64]


def column(table: pa.Table, name: str) -> pa.Array:
    """A column of a table as one contiguous array."""
    return contiguous(table[name])


def contiguous(array: pa.Array | pa.ChunkedArray) -> pa.Array:
    """The same values in one array."""
    if not isinstance(array, pa.ChunkedArray):
        return array
    return array.chunk(0) if array.num_chunks == 1 else array.combine_chunks()


def offsets_of(array: pa.Array) -> Ints:
    """Offsets (N + 1,) of a large_string or large_binary array, of any slice of one too."""
    return np.frombuffer(array.buffers()[1], np.int64)[array.offset : array.offset + len(array) + 1]


def run_starts(values: NDArray[np.generic]) -> Ints:
    """First place of each run of equal values (N,) or rows (N, D)."""
    if len(values) == 0:
        return np.zeros(0, np.int64)
    differs = values[1:] != values[:-1]
    return np.flatnonzero(np.concatenate([[True], differs.any(axis=1) if differs.ndim == 2 else differs]))


def run_lengths(starts: Ints, total: int) -> Ints:
    """Length of each run of `total` values, from the first places that `run_starts` gives."""
    return np.diff(np.append(starts, total))


def is_none(values: NDArray[np.object_]) -> NDArray[np.bool_]:
    """Which entries (N,) of an object array are None."""
    return np.asarray(np.equal(values, None), np.bool_)  # type: ignore[call-overload]  # numpy's stubs know no objects
