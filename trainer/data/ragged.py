"""Sequences of different length without padding, and the arithmetic of padding them in groups.

Invariant: row i of a `Ragged` is tokens[offsets[i]:offsets[i+1]], offsets start at 0, never fall, and end at
len(tokens). Shapes: N sequences, T tokens of all of them, G groups.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from infra.errors import InputError

I32 = NDArray[np.int32]
I64 = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Ragged:
    """N token sequences: tokens (T,) int32, one after another, and offsets (N+1,) int64.

    Raises InputError when the offsets do not describe the tokens.
    """

    tokens: I32
    offsets: I64

    def __post_init__(self) -> None:
        tokens, offsets = self.tokens, self.offsets
        if tokens.ndim != 1 or offsets.ndim != 1 or tokens.dtype != np.int32 or offsets.dtype != np.int64:
            raise InputError(
                f"A Ragged needs one-dimensional int32 tokens and int64 offsets, not {tokens.dtype}{tokens.shape} and "
                f"{offsets.dtype}{offsets.shape}. Convert them first: a silent cast could wrap an offset."
            )
        if len(offsets) == 0 or offsets[0] != 0 or offsets[-1] != len(tokens) or bool(np.any(np.diff(offsets) < 0)):
            raise InputError(
                f"The {len(offsets)} offsets of a Ragged do not cut its {len(tokens):,} tokens into sequences: they "
                "must start at 0, never fall, and end at the number of tokens. Rebuild the token cache."
            )

    @classmethod
    def from_rows(cls, rows: Sequence[Sequence[int]]) -> Ragged:
        """The given sequences, in their order."""
        lengths = np.fromiter(map(len, rows), np.int64, len(rows))
        tokens = np.fromiter(itertools.chain.from_iterable(rows), np.int32, int(lengths.sum()))
        return cls(tokens=tokens, offsets=offsets_of(lengths))

    @classmethod
    def concatenate(cls, parts: Sequence[Ragged]) -> Ragged:
        """The sequences of all parts, one part after another."""
        # The empty arrays give the result its type when there is no part.
        tokens = np.concatenate([np.zeros(0, np.int32), *(part.tokens for part in parts)])
        lengths = np.concatenate([np.zeros(0, np.int64), *(part.lengths for part in parts)])
        return cls(tokens=tokens, offsets=offsets_of(lengths))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> I64:
        """Tokens of each sequence, (N,) int64."""
        return np.diff(self.offsets)

    def row(self, index: int) -> I32:
        """Sequence `index` as a view of the tokens. Raises InputError outside 0 .. N-1."""
        if not 0 <= index < len(self):
            raise InputError(
                f"There is no row {index} among {len(self):,} sequences. Count rows from 0, not backwards."
            )
        return self.tokens[self.offsets[index] : self.offsets[index + 1]]

    def take(self, rows: NDArray[np.integer]) -> Ragged:
        """The sequences `rows` (M,), in that order, repeats allowed; no Python loop over rows.

        Raises InputError for a row outside 0 .. N-1, because a negative one would be read from the end.
        """
        rows = np.asarray(rows, np.int64)
        if rows.size and not (0 <= int(rows.min()) and int(rows.max()) < len(self)):
            raise InputError(
                f"Rows {int(rows.min())} to {int(rows.max())} are asked of {len(self):,} sequences. "
                "Count rows from 0, not backwards."
            )
        offsets = offsets_of(self.lengths[rows])
        # Token j of new row i comes from start(old row) + (j - start(new row)).
        shift = np.repeat(self.offsets[rows] - offsets[:-1], np.diff(offsets))
        return Ragged(tokens=self.tokens[np.arange(len(shift)) + shift], offsets=offsets)


def offsets_of(lengths: I64) -> I64:
    """Offsets (N+1,) of sequences of the given lengths (N,)."""
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def length_groups(lengths: I64, groups: int) -> list[I64]:
    """Rows in at most `groups` groups of like length, so that padding each to its longest costs the fewest tokens.

    lengths: (N,). Returns row numbers by group, shorter groups first; within a group by length, then row. Every row is
    in one group. Exact, by dynamic programming over the distinct lengths: best[g, j] = min over i of best[g-1, i] +
    n(i..j) * length j.
    """
    if groups < 1:
        raise InputError(
            f"Sequences cannot be padded in {groups} groups. Set the number of length groups to 1 or more."
        )
    if len(lengths) == 0:
        return []
    order = np.argsort(lengths, kind="stable").astype(np.int64)
    distinct, counts = np.unique(lengths, return_counts=True)
    below = offsets_of(counts.astype(np.int64))
    # cost[i, j]: tokens, padding included, of one group that holds the distinct lengths i .. j.
    cost = np.where(
        np.tri(len(distinct), dtype=bool).T,
        (below[None, 1:] - below[:-1, None]) * distinct[None, :],
        np.iinfo(np.int64).max // 4,
    )
    best, cuts = cost[0], [np.zeros(len(distinct), np.int64)]
    for _ in range(1, min(groups, len(distinct))):
        # A group that starts at i stands on the best cover of everything below i.
        table = cost + np.concatenate([[0], best[:-1]])[:, None]
        cuts.append(np.argmin(table, axis=0))
        best = table[cuts[-1], np.arange(len(distinct))]
    edges, stop = [len(order)], len(distinct) - 1
    for starts in reversed(cuts):
        start = int(starts[stop])
        edges.append(int(below[start]))
        if start == 0:
            break
        stop = start - 1
    edges.reverse()
    return [order[a:b] for a, b in itertools.pairwise(edges)]


def padding_share(lengths: I64, groups: int) -> float:
    """Share of padding among the positions of the padded blocks of `length_groups`, in [0, 1); 0 for no sequences."""
    positions = sum(int(lengths[rows].max()) * len(rows) for rows in length_groups(lengths, groups))
    return 1.0 - int(lengths.sum()) / positions if positions else 0.0
