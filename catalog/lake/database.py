"""The metadata database of a catalog: a SQLite path or a Postgres conninfo.

Invariant: nothing that `shown` or `public_conninfo` returns holds a password.
"""

from __future__ import annotations

from typing import Any, Final

from infra.errors import StorageError, UsageError
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
