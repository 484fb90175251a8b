"""The metadata database of a catalog: a SQLite path or a Postgres conninfo.

Invariant: nothing that `shown` or `public_conninfo` returns holds a password.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import urllib.parse
from typing import Any, Final

from infra.errors import ConflictError, StorageError, UsageError
from infra.home import Home

CONNECT_TIMEOUT_S: Final = 30
SECRET_FIELDS: Final = ("password", "sslpassword")


def is_postgres(home: Home) -> bool:
    """Whether the catalog is a Postgres database rather than a SQLite file."""
    return home.catalog.startswith("postgres:")


def shown(home: Home) -> str:
    """The catalog as logs and error messages may name it."""
    return f"postgres:{public_conninfo(home)}" if is_postgres(home) else home.catalog


def public_conninfo(home: Home) -> str:
    """The conninfo (`dbname=x host=y`) without its password."""
    from psycopg.conninfo import make_conninfo

    return make_conninfo("", **{k: v for k, v in _fields(home).items() if k not in SECRET_FIELDS})


def password(home: Home) -> str | None:
    """The password in the catalog string; None when libpq is to find it in PGPASSWORD or ~/.pgpass."""
    value = _fields(home).get("password")
    return None if value is None else str(value)


def connect_postgres(home: Home, *, name: str) -> Any:
    """A psycopg connection in autocommit mode; `name` (63 bytes at most) is what pg_stat_activity shows of it.

    Raises StorageError without the password when the server does not let us in.
    """
    import psycopg

    fields = {"connect_timeout": CONNECT_TIMEOUT_S, **_fields(home), "application_name": name[:63]}
    try:
        return psycopg.connect("", autocommit=True, **fields)
    except psycopg.Error as error:
        raise StorageError(f"Cannot connect to the catalog {shown(home)}: {scrub(home, str(error))}.") from None


def check(home: Home) -> None:
    """Find before a job what its commit would find after it: a server that does not answer, a file of somebody else.

    Raises StorageError or ConflictError.
    """
    if is_postgres(home):
        connect_postgres(home, name="goodviews check").close()
    refuse_foreign(home)


def refuse_foreign(home: Home) -> None:
    """Raises ConflictError when the SQLite file of the catalog holds tables that are not a catalog's.

    A Postgres database may be shared: nothing there is ever replaced. A file that is no database passes; opening it
    reports that.
    """
    if is_postgres(home) or not os.path.isfile(home.catalog):
        return
    # Names that SQLite and DuckLake keep for themselves.
    query = (
        "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT GLOB 'sqlite_*' AND name NOT GLOB "
        "'ducklake_*'"
    )
    address = f"file:{urllib.parse.quote(os.path.abspath(home.catalog))}?mode=ro"
    try:
        with contextlib.closing(sqlite3.connect(address, uri=True, timeout=CONNECT_TIMEOUT_S)) as connection:
            names = sorted(str(name) for (name,) in connection.execute(query))
    except sqlite3.DatabaseError:
        return
    if names:
        raise ConflictError(
            f"The file {home.catalog} holds tables that are not a catalog's ({', '.join(names[:5])}"
            f"{', ...' if len(names) > 5 else ''}). Name another file with --catalog; nothing was changed."
        )


def scrub(home: Home, text: str) -> str:
    """`text` on one line, without the final period and without the password of the catalog."""
    return " ".join(scrub_lines(home, text).split()).rstrip(".")


def scrub_lines(home: Home, text: str) -> str:
    """`text` without the password of the catalog. Line breaks stay: DuckDB marks an error below the query."""
    if is_postgres(home) and (secret := password(home)):
        text = text.replace(secret, "***")
    return text.rstrip()


def _fields(home: Home) -> dict[str, Any]:
    from psycopg import ProgrammingError
    from psycopg.conninfo import conninfo_to_dict

    text = home.catalog.removeprefix("postgres:")
    try:
        return dict(conninfo_to_dict("postgresql:" + text if text.startswith("//") else text))
    except ProgrammingError:
        # libpq's message quotes the string, password and all.
        message = (
            "The catalog string after `postgres:` is not a Postgres conninfo. Write it like "
            "`postgres:dbname=goodviews host=db` or `postgresql://db/goodviews`."
        )
        raise UsageError(message) from None
