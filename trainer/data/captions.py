"""Tokenised captions grouped by scene: the arrays that the token cache holds and that views are cut from.

Invariant: offsets start at 0, never fall and end at the length of what they cut; the captions of a scene are adjacent,
in the order of the tar, and so are their tokens. Shapes: S scenes, C captions of all of them, T tokens of all captions;
N ranges.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from infra.errors import InputError
from trainer.data.ragged import offsets_of

I64: TypeAlias = NDArray[np.int64]
U64: TypeAlias = NDArray[np.uint64]
Tokens: TypeAlias = NDArray[np.uint16] | NDArray[np.int32]
"uint16 while the vocabulary fits, which halves the cache; views are int32."


@dataclass(frozen=True, eq=False)
class Captions:
    """S scenes with their captions. Arrays may lie in a memory-mapped file; nothing here writes to them."""

    tokens: Tokens
    "(T,)"
    caption_offsets: I64
    "(C + 1,) into tokens"
    caption_index: I64
    "(C,) the caption's own number in its scene, which no removal of a sibling shifts"
    roles: NDArray[np.int8]
    "(C,) place in `catalog.schema.ROLES`"
    scene_offsets: I64
    "(S + 1,) into captions"
    scene_hashes: U64
    "(S,) `infra.seeds.hash_keys` of the scene keys"

    def __len__(self) -> int:
        return len(self.scene_hashes)

    @property
    def counts(self) -> I64:
        """Captions of each scene, (S,)."""
        return np.diff(self.scene_offsets)

    @property
    def lengths(self) -> I64:
        """Tokens of each caption, (C,)."""
        return np.diff(self.caption_offsets)

    def take(self, rows: I64) -> Captions:
        """The scenes `rows` in that order, copied. Raises InputError for a row outside 0 .. S-1."""
        if rows.size and not (0 <= int(rows.min()) and int(rows.max()) < len(self)):
            raise InputError(
                f"Scenes {int(rows.min())} to {int(rows.max())} are asked of {len(self):,}. The plan and the shard"
                " disagree; delete the token cache."
            )
        first, last = self.scene_offsets[rows], self.scene_offsets[rows + 1]
        captions = ranges(first, last - first)
        # A scene's captions are adjacent, so its tokens are one range, whatever their number.
        starts = self.caption_offsets[first]
        tokens = ranges(starts, self.caption_offsets[last] - starts)
        return Captions(
            tokens=self.tokens[tokens],
            caption_offsets=offsets_of(self.caption_offsets[captions + 1] - self.caption_offsets[captions]),
            caption_index=self.caption_index[captions],
            roles=self.roles[captions],
            scene_offsets=offsets_of(last - first),
            scene_hashes=self.scene_hashes[rows],
        )

    def where(self, keep_C: NDArray[np.bool_]) -> Captions:
        """The same scenes with only the captions that are True in `keep_C` (C,); a scene may be left with none."""
        captions = np.flatnonzero(keep_C)
        lengths = self.lengths[captions]
        kept = offsets_of(keep_C.astype(np.int64))
        return Captions(
            tokens=self.tokens[ranges(self.caption_offsets[captions], lengths)],
            caption_offsets=offsets_of(lengths),
            caption_index=self.caption_index[captions],
            roles=self.roles[captions],
            scene_offsets=kept[self.scene_offsets],
            scene_hashes=self.scene_hashes,
        )

    @classmethod
    def concatenate(cls, parts: Sequence[Captions]) -> Captions:
        """The scenes of all parts (at least one), one part after another."""
        if len(parts) == 1:
            return parts[0]
        return cls(
            tokens=np.concatenate([p.tokens for p in parts]),
            caption_offsets=offsets_of(np.concatenate([p.lengths for p in parts])),
            caption_index=np.concatenate([p.caption_index for p in parts]),
            roles=np.concatenate([p.roles for p in parts]),
            scene_offsets=offsets_of(np.concatenate([p.counts for p in parts])),
            scene_hashes=np.concatenate([p.scene_hashes for p in parts]),
        )


def ranges(starts: NDArray[np.integer[Any]], lengths: I64) -> I64:
    """starts[0], starts[0] + 1, .. (lengths[0] numbers), starts[1], ..: the places of N ranges, one after another."""
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    places: I64 = np.arange(total, dtype=np.int64) + np.repeat(starts - (ends - lengths), lengths)
    return places
