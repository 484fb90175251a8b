"""Files of 16-byte keys in ascending order, each with a few bytes that belong to it, looked up by many tasks.

Owns: the format, publication, and the look-up in bounded memory. Does not own: what a key stands for (`catalog.overlap.identity`).
Invariant: a key stands in a file once; a look-up gives what the file holds for exactly these 16 bytes, never for a part.

A file: records of 16 + `width` bytes one after another, without a header. A task reads it block by block, and a process keeps
the last block, so that a file of one block (a million keys) is read once a process and not once a task.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from catalog.overlap.identity import KEY_BYTES
from infra import storage
from infra.errors import IntegrityError

BLOCK_RECORDS: Final = 1 << 20


def publish(url: str, blocks: Iterable[NDArray[np.uint8]]) -> None:
    """Write blocks of records (n, 16 + width), ascending by key over all blocks."""
    storage.publish(url, (np.ascontiguousarray(block).tobytes() for block in blocks))


def find(url: str, keys: Sequence[bytes], *, width: int) -> tuple[NDArray[np.bool_], NDArray[np.uint8]]:
    """Which of the keys (N,) the file holds, and the bytes (N, width) that belong to them; zeros where it does not.

    Raises InputError when the file is gone, IntegrityError when it is not of whole records.
    """
    wanted = key_bytes(keys)
    found = np.zeros(len(keys), np.bool_)
    values = np.zeros((len(keys), width), np.uint8)
    size, record = storage.size(url), KEY_BYTES + width
    if size % record:
        raise IntegrityError(
            f"{url} has {size:,} bytes, which is no whole number of records of {record}. Delete the work folder it is in and rerun."
        )
    for start in range(0, size if keys else 0, BLOCK_RECORDS * record):
        heads, block = _block(url, start, min(size, start + BLOCK_RECORDS * record), record)
        here, places = _places(heads, block, wanted)
        found[here] = True
        values[here] = block[places, KEY_BYTES:]
    return found, values


def _places(
    heads: NDArray[np.uint64], block: NDArray[np.uint8], wanted: NDArray[np.uint8]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Rows of `wanted` that the block holds, and where: by halves of the key, as NumPy orders no 16 bytes."""
    head = _heads(wanted)
    first, last = np.searchsorted(heads, head), np.searchsorted(heads, head, side="right")
    rows: list[NDArray[np.int64]] = []
    places: list[NDArray[np.int64]] = []
    # Two keys of one first half come once in 2^64, unless somebody makes them.
    for step in range(int((last - first).max(initial=0))):
        candidates = np.flatnonzero(first + step < last)
        place = first[candidates] + step
        same = np.all(block[place, 8:KEY_BYTES] == wanted[candidates, 8:], axis=1)
        rows.append(candidates[same])
        places.append(place[same])
    none = [np.zeros(0, np.int64)]
    return np.concatenate(rows or none), np.concatenate(places or none)


@functools.lru_cache(maxsize=1)
def _block(url: str, start: int, stop: int, record: int) -> tuple[NDArray[np.uint64], NDArray[np.uint8]]:
    block = np.frombuffer(storage.read_range(url, start, stop), np.uint8).reshape(-1, record)
    return _heads(block), block


def _heads(rows: NDArray[np.uint8]) -> NDArray[np.uint64]:
    """The first 8 bytes of each row as a number that orders as they do."""
    return np.ascontiguousarray(rows[:, :8]).view(">u8").reshape(-1).astype(np.uint64)


def key_bytes(keys: Sequence[bytes]) -> NDArray[np.uint8]:
    """Keys as bytes (N, 16)."""
    return np.frombuffer(b"".join(keys), np.uint8).reshape(-1, KEY_BYTES)
