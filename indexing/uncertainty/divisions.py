"""Random divisions of scenes into those that a map is fitted on and those that it is scored on.

Invariant: a scene is never on both sides. The order is that of a hash of the seed, the number of the division and the
key, so it depends neither on rows nor on the generator of a library.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from indexing.sets.joins import Keys
from infra import seeds
from infra.errors import InputError
from infra.vectors import Ids


@dataclass(frozen=True, kw_only=True)
class Division:
    """Rows to fit on, of which a smaller number of pairs takes the first, and rows to score."""

    fit: Ids
    scored: Ids


def hashed_order(keys_S: Keys, seed: int, number: int) -> Ids:
    """Rows of the keys in the order of division `number`."""
    salt = np.uint64(seeds.derive(seed, "indexing.division", number))
    draws_S = seeds.mix(seeds.hash_keys(keys_S.tolist()) ^ salt)
    # Equal draws are as good as impossible; the key decides between them all the same.
    return np.asarray(np.lexsort((keys_S.astype(str), draws_S)), np.int64)


def random_divisions(keys_S: Keys, fit_pairs: int, splits: int, seed: int) -> Iterator[Division]:
    """`splits` divisions with `fit_pairs` scenes to fit on, the rest to score.

    Raises InputError when one of the sides would have fewer than two scenes.
    """
    n = len(keys_S)
    if not 2 <= fit_pairs <= n - 2:
        raise InputError(
            f"{fit_pairs:,} fit pairs of {n:,} common scenes leave {max(0, n - fit_pairs):,} to score; "
            "both sides need 2 or more."
        )
    for number in range(splits):
        order = hashed_order(keys_S, seed, number)
        yield Division(fit=order[:fit_pairs], scored=np.sort(order[fit_pairs:]))
