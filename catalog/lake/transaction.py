"""Write rows to the catalog in one commit, and retry when another writer interferes.

Invariant: what `write` did is in the catalog once when `commit_rows` returns, and not at all when it raises.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterator
from typing import Final, TypeVar

from catalog.lake import database, lake
from catalog.lake.lake import Lake
from catalog.lake.lock import TIMEOUT_S
from infra.errors import ConflictError, StorageError
from infra.home import Home

Result = TypeVar("Result")

ATTEMPTS: Final = 5


def commit_rows(home: Home, message: str, write: Callable[[Lake], Result], *, timeout_s: float = TIMEOUT_S) -> Result:
    """Run `write` in one transaction under the commit lock; returns what it returns. It may run several times.

    message: kept with the snapshot. Raises ConflictError when the lock cannot be had within `timeout_s` or others
    wrote each time, StorageError when the catalog cannot take the rows.
    """
    with lake.writing(home, timeout_s=timeout_s) as writer:
        for attempt in range(1, ATTEMPTS + 1):
            try:
                return _transaction(writer, message, write)
            except lake.TransactionConflict as error:
                if attempt == ATTEMPTS:
                    reason = database.scrub(home, str(error))
                    text = (
                        f"The catalog {database.shown(home)} refused {message!r} {ATTEMPTS} times because others "
                        f"wrote to it: {reason}. Rerun."
                    )
                    raise ConflictError(text) from error
                time.sleep(random.uniform(0.05, 0.5) * attempt)
            except lake.DatabaseError as error:
                reason = database.scrub(home, str(error))
                text = (
                    f"The catalog {database.shown(home)} could not take {message!r}: {reason}. The files below HOME "
                    "are kept; rerun."
                )
                raise StorageError(text) from error
    raise AssertionError("unreachable: the last attempt returns or raises")


def _transaction(writer: Lake, message: str, write: Callable[[Lake], Result]) -> Result:
    with rolled_back_on_error(writer):
        outcome = write(writer)
        commit(writer, message)
    return outcome


@contextlib.contextmanager
def rolled_back_on_error(writer: Lake) -> Iterator[None]:
    """Begin a transaction, and roll it back when the block raises. The block itself must end it."""
    writer.connection.execute("BEGIN")
    try:
        yield
    except BaseException:
        # The first error is what matters; after a broken connection the ROLLBACK fails too.
        with contextlib.suppress(lake.DatabaseError):
            writer.connection.execute("ROLLBACK")
        raise


def commit(writer: Lake, message: str) -> None:
    """Commit the open transaction, if the lock is still held."""
    lake.set_message(writer.connection, message)
    writer.check_lock()
    lake.commit(writer)
