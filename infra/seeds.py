"""Seeds and hashes that decide content: the same on every machine, worker count and library version.

Owns: derived seeds by (root, stage, shard), the 64-bit hash of keys, the seeded permutation of a scene's captions.
Python's `hash`, NumPy's generators and DuckDB's `hash()` may change between releases, so none of them decides bytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

U64: TypeAlias = NDArray[np.uint64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def derive(root: int, stage: str, *parts: int | str) -> int:
    """A 63-bit seed for one stage and shard, from the root seed: blake2b over the unambiguous joined parts.

    Raises ValueError for a part that holds the separator (U+001F), because two lists of parts could then give one seed.
    """
    words = [str(root), stage, *map(str, parts)]
    if any("\x1f" in word for word in words):
        raise ValueError(f"A part of a seed may not hold U+001F: {words!r}")
    text = "\x1f".join(words)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def hash_keys(keys: Sequence[str | bytes]) -> U64:
    """blake2b-64 of each key (UTF-8), as uint64 of shape (len(keys),); about 1 microsecond a key."""
    blake = hashlib.blake2b
    digests = [blake(k.encode() if isinstance(k, str) else k, digest_size=8).digest() for k in keys]
    return np.frombuffer(b"".join(digests), dtype=">u8").astype(np.uint64)


def mix(values: U64) -> U64:
    """splitmix64 finaliser (Steele, Lea, Flood 2014): a bijection of 64 bits with full avalanche."""
    with np.errstate(over="ignore"):
        z = values + _GOLDEN
        z = (z ^ (z >> np.uint64(30))) * _MIX_1
        z = (z ^ (z >> np.uint64(27))) * _MIX_2
        return z ^ (z >> np.uint64(31))


def permutation_places(scene_hashes: U64, caption_indices: NDArray[np.int64], seed: int) -> NDArray[np.int64]:
    """Place of each caption in the seeded permutation of its own scene.

    scene_hashes (N,): `hash_keys(scene_key)` of each caption's scene; captions of one scene are adjacent.
    caption_indices (N,): the captions' own indices, which no removal of a sibling shifts.
    Returns (N,) places 0 .. n-1 within each scene: captions sorted by mix(hash, seed, index).
    """
    n = len(scene_hashes)
    if n == 0:
        return np.zeros(0, np.int64)
    salt = mix(np.full(1, seed, np.uint64))[0]
    with np.errstate(over="ignore"):
        draws = mix(mix(scene_hashes ^ salt) + caption_indices.astype(np.uint64))
    starts = np.flatnonzero(np.concatenate([[True], scene_hashes[1:] != scene_hashes[:-1]]))
    scene = np.cumsum(np.concatenate([[True], scene_hashes[1:] != scene_hashes[:-1]])) - 1
    order = np.lexsort((caption_indices, draws, scene))
    places = np.empty(n, np.int64)
    places[order] = np.arange(n) - starts[scene[order]]
    return places
