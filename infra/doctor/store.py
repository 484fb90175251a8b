"""Checks of HOME's store: does it keep what atomic publication relies on, and does its clock agree with ours.

Invariant: nothing is left behind, and nothing but the probe's own folder is touched. A local HOME that is not there yet
is not made; the nearest folder above it is asked.

Relied on: a file appears whole or not at all, replaces an older one in one step, is read and listed as soon as it is
there, and is gone as soon as it is removed. Bounds: S3 refuses requests 15 min off; `catalog gc` compares the store's
times with ours.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterator
from typing import Final

from infra import storage
from infra.doctor.findings import Circumstances, Finding, advise, broken, ok
from infra.doctor.machine import existing_parent
from infra.errors import GoodviewsError

SKEW_S: Final = 5.0
WORST_SKEW_S: Final = 900.0


def store(circumstances: Circumstances) -> Iterator[Finding]:
    """Publish, replace, list and remove a probe in HOME; says what does not hold."""
    home = circumstances.home
    if home is None:
        return
    parent = home.url if storage.is_remote(home.url) else existing_parent(home.url)
    folder = storage.join(parent, f".goodviews-doctor-{secrets.token_hex(6)}")
    where = f"HOME {home.url}" if parent == home.url else f"{parent} (HOME {home.url} is not there yet)"
    try:
        before = time.time()
        failures = list(_failures(folder))
        skew = _skew_s(folder, before)
    except GoodviewsError as error:
        yield broken(
            "store", str(error), "Check the path, the rights on it and, for a store, credentials and endpoint."
        )
        return
    finally:
        _remove(folder)
    for failure in failures:
        yield broken(
            "store", f"{where}: {failure}", "Shards would be lost or read half. Choose another place with --home."
        )
    if not failures:
        case = "" if storage.is_remote(parent) or not _ignores_case(parent) else "; names differ in more than case only"
        yield ok("store", f"{where}: files appear whole, replace each other and are listed at once{case}")
    yield _clock(skew)


def _failures(folder: str) -> Iterator[str]:
    """A sentence for each promise that the store does not keep."""
    url = storage.join(folder, "probe")
    seen: list[bool] = []

    def parts() -> Iterator[bytes]:
        for _ in range(2):
            yield b"x" * 1000
            seen.append(storage.exists(url))

    first = storage.publish(url, parts())
    if any(seen):
        yield "a file can be seen before it is complete"
    if storage.digest(url) != first:
        yield "what is read back is not what was written"
    if storage.list_files(folder) != ["probe"]:
        yield f"a listing after a write shows {storage.list_files(folder)} instead of the one file"
    second = storage.publish(url, b"other bytes")
    if storage.digest(url) != second or storage.size(url) != second.bytes:
        yield "a file that was replaced is still read in its old state"
    if storage.list_files(folder) != ["probe"]:
        yield f"after a file was replaced the folder holds {storage.list_files(folder)}"
    storage.remove(url)
    if storage.exists(url) or storage.list_files(folder):
        yield "a file that was removed can still be seen"


def _skew_s(folder: str, before: float) -> float:
    """Seconds by which the store's clock is ahead of ours; 0 within the second in which stores count."""
    url = storage.join(folder, "clock")
    storage.publish(url, b"x")
    stamped, after = storage.modified_s(url), time.time()
    # Stores keep whole seconds, cut off.
    if before - 1 <= stamped <= after + 1:
        return 0.0
    return stamped - after if stamped > after else stamped - before


def _clock(skew: float) -> Finding:
    shown = f"the clock of HOME's store is {abs(skew):,.0f} s {'ahead of' if skew > 0 else 'behind'} ours"
    if abs(skew) > WORST_SKEW_S:
        return broken("clock", shown, "Set the clock of this machine by NTP; stores refuse requests so far off.")
    if abs(skew) > SKEW_S:
        return advise("clock", shown, "Set the clocks by NTP; `goodviews catalog gc` judges age by them.")
    return ok("clock", "this machine and HOME's store agree on the time")


def _ignores_case(parent: str) -> bool:
    name = os.path.basename(parent)
    return name.swapcase() != name and os.path.exists(os.path.join(os.path.dirname(parent), name.swapcase()))


def _remove(folder: str) -> None:
    try:
        storage.remove_folder(folder)
    except GoodviewsError:
        return  # the store did not answer before either, which has been said
