"""Errors of disks and stores as one sentence each, which names the file and the way out.

Invariant: what may pass on its own is a TransientStorageError, so that tasks try again; nothing that a client raises is
let out raw.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator
from typing import Final

from infra.errors import InputError, StorageError, TransientStorageError

_STORE_CLIENTS: Final = frozenset({"aiobotocore", "aiohttp", "azure", "botocore", "gcsfs", "google", "paramiko"})
"Packages of the stores' clients, whose own errors (no credentials, no connection) are no OSError."


@contextlib.contextmanager
def sentence(action: str, url: str) -> Iterator[None]:
    """Turn errors of the block into one sentence. action: read, publish or remove (no error if it is gone)."""
    try:
        yield
    except FileNotFoundError as error:
        if action == "read":
            raise InputError(
                f"Cannot read {url}: there is no such file. Check the path, or that the job that writes it has"
                " finished."
            ) from error
        if action == "remove":
            raise  # gone already, which is what was asked for
        message = (
            f"Cannot {action} {url}: its folder or bucket is not there. Check the name, and that no other job removes"
            f" it meanwhile.{_nothing(action)}"
        )
        raise TransientStorageError(message) from error
    except IsADirectoryError as error:
        raise InputError(f"Cannot {action} {url}: it is a folder. Name the files in it.") from error
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            message = (
                f"Cannot {action} {url}: the disk is full.{_nothing(action)} Free space and rerun, finished shards are"
                " kept."
            )
            raise StorageError(message) from error
        kind = TransientStorageError if _may_pass(error) else StorageError
        raise kind(f"Cannot {action} {url}: {error.strerror or error}.{_nothing(action)}") from error
    except Exception as error:
        if type(error).__module__.partition(".")[0] not in _STORE_CLIENTS:
            raise
        raise StorageError(f"Cannot {action} {url}: {str(error).rstrip('.')}.{_nothing(action)}") from error


def _may_pass(error: OSError) -> bool:
    passing = (errno.EIO, errno.EAGAIN, errno.EINTR, errno.EHOSTUNREACH, errno.ENETUNREACH)
    return isinstance(error, (ConnectionError, TimeoutError)) or error.errno in passing


def _nothing(action: str) -> str:
    return " Nothing was published under that name." if action == "publish" else ""
