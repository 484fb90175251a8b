"""Open the DuckLake of a HOME for reading or for one commit.

Only this module and `extensions` import duckdb.
Invariants: a reader is attached READ_ONLY and creates nothing; a writer holds the commit lock; DuckLake's merge, expire
and cleanup functions are never called, because they rewrite and delete registered files, which are our shards.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import duckdb
import orjson

from catalog import layout
from catalog.lake import database, extensions
from catalog.lake.lock import TIMEOUT_S, commit_lock
from infra import storage
from infra.errors import InputError, IntegrityError, StorageError, UsageError
from infra.home import Home

Connection: TypeAlias = duckdb.DuckDBPyConnection
Statement: TypeAlias = duckdb.Statement
SELECT: Final = duckdb.StatementType.SELECT
DatabaseError: TypeAlias = duckdb.Error
TransactionConflict: TypeAlias = duckdb.TransactionException
QueryError: Final = (
    duckdb.ParserException,
    duckdb.BinderException,
    duckdb.CatalogException,
    duckdb.InvalidInputException,
)
"Errors of a wrong query, in contrast to those of a broken file or disk."

ALIAS: Final = "lake"
METADATA: Final = f"__ducklake_metadata_{ALIAS}"
BUSY_TIMEOUT_MS: Final = 30_000


class OtherHomeError(IntegrityError):
    """The catalog belongs to another HOME than the one that was named."""


@dataclass(frozen=True, kw_only=True)
class Lake:
    """An attached lake. `root` is HOME as the catalog itself spells it, so that registered paths compare as text."""

    connection: Connection
    root: str
    check_lock: Callable[[], None]
    "Raises ConflictError when the commit lock was lost; does nothing for readers."
    uncommitted: dict[str, bytes] = field(default_factory=dict)
    "Bytes by URL of the files that the lake itself wrote in the open transaction; see `sync_table`."

    def rows(self, query: str, values: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        """All rows of one query."""
        return self.connection.execute(query, list(values)).fetchall()

    def records(self, query: str, values: Sequence[object] = (), *, decode: Sequence[str] = ()) -> list[dict[str, Any]]:
        """All rows of one query as dictionaries. decode: columns of JSON objects; NULL becomes an empty object."""
        cursor = self.connection.execute(query, list(values))
        names = [str(column[0]) for column in cursor.description or []]
        found = [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]
        for row in found:
            row.update({name: orjson.loads(row[name] or "{}") for name in decode})
        return found

    def current_snapshot(self) -> int:
        """Id of the newest snapshot."""
        return int(self.rows(f"SELECT * FROM ducklake_current_snapshot({quote(ALIAS)})")[0][0])

    def insert(self, table: str, row: Mapping[str, object]) -> None:
        """Insert one row. Columns in `_at` take seconds since the epoch; mappings and tuples become JSON."""
        names = ", ".join(identifier(name) for name in row)
        marks = ", ".join("to_timestamp(?)" if name.endswith("_at") else "?" for name in row)
        values = [_as_json(value) if isinstance(value, (Mapping, tuple)) else value for value in row.values()]
        self.connection.execute(f"INSERT INTO {table} ({names}) VALUES ({marks})", values)


@contextlib.contextmanager
def reading(home: Home, *, any_home: bool = False) -> Iterator[Lake]:
    """The catalog, read-only. Raises InputError when there is none yet, IntegrityError when it belongs to another HOME.

    any_home: accept a catalog of another HOME, and look for the lake's own files below this one (HOME was moved).
    """
    if not database.is_postgres(home) and not _is_filled(home.catalog):
        raise _no_catalog(home)
    with contextlib.closing(_connect([home.url], *_metadata_extension(home))) as connection:
        moved = f", DATA_PATH {quote(home.lake_data + '/')}, OVERRIDE_DATA_PATH true" if any_home else ""
        _attach(connection, home, "READ_ONLY, CREATE_IF_NOT_EXISTS false" + moved)
        try:
            number = _layout_number(connection)
            root = home.url if any_home or number is None else _root(connection, home)
        except DatabaseError as error:
            raise _attach_error(home, str(error)) from None
        if number is None:
            raise _no_catalog(home)
        yield Lake(connection=connection, root=root, check_lock=lambda: None)


@contextlib.contextmanager
def writing(home: Home, *, timeout_s: float = TIMEOUT_S) -> Iterator[Lake]:
    """The catalog under the commit lock, created if there is none. Raises ConflictError, StorageError."""
    with (
        commit_lock(home, timeout_s=timeout_s) as check_lock,
        contextlib.closing(_connect([home.url], *_metadata_extension(home))) as connection,
    ):
        _attach_writer(connection, home)
        try:
            _bring_layout(connection, home)
            root = _root(connection, home)
        except DatabaseError as error:
            message = (
                f"The catalog {database.shown(home)} could not be opened for writing: "
                f"{database.scrub(home, str(error))}. Rerun."
            )
            raise StorageError(message) from error
        yield Lake(connection=connection, root=root, check_lock=check_lock)


@contextlib.contextmanager
def parquet_reader(urls: Sequence[str], *, memory_limit: str) -> Iterator[Connection]:
    """A connection without a lake that can read these files and spills to a temporary folder beyond `memory_limit`."""
    roots = sorted({_store_root(url) for url in urls if storage.is_remote(url)})
    with contextlib.closing(_connect(roots)) as connection, bounded(connection, memory_limit=memory_limit):
        yield connection


@contextlib.contextmanager
def bounded(connection: Connection, *, memory_limit: str) -> Iterator[None]:
    """Let this connection hold at most `memory_limit` and spill the rest to a folder of its own below TMPDIR.

    Raises UsageError when `memory_limit` is no size or less than is held already.
    """
    with tempfile.TemporaryDirectory(prefix="goodviews-spill-") as spill:
        try:
            connection.execute(f"SET memory_limit = {quote(memory_limit)}")
        except duckdb.OutOfMemoryException:
            message = (
                f"The memory limit {memory_limit!r} is too small: what is open already needs more. Write it as `1GB`."
            )
            raise UsageError(message) from None
        except DatabaseError:
            raise UsageError(f"The memory limit {memory_limit!r} is no size. Write it as `1GB`.") from None
        connection.execute(f"SET temp_directory = {quote(spill)}")
        # Order of rows costs memory and is not asked for.
        connection.execute("SET preserve_insertion_order = false")
        yield


def _as_json(value: Mapping[str, Any] | tuple[Any, ...]) -> str:
    # dict(): orjson refuses other mappings.
    plain = dict(value) if isinstance(value, Mapping) else value
    return orjson.dumps(plain, option=orjson.OPT_SORT_KEYS).decode()


def quote(text: str) -> str:
    """A SQL string literal."""
    return "'" + text.replace("'", "''") + "'"


def quote_list(texts: Sequence[str]) -> str:
    """A SQL list of string literals."""
    return "[" + ", ".join(quote(text) for text in texts) + "]"


def identifier(name: str) -> str:
    """A quoted SQL identifier."""
    return '"' + name.replace('"', '""') + '"'


def exact(url: str) -> str:
    """`url` such that DuckDB's glob matches this one file, whatever characters its name holds."""
    return "".join(f"[{c}]" if c in "*?[" else c for c in url)


def spelled(url: str) -> str:
    """`url` as text that can be compared: some fsspec stores give `memory:///x` back for `memory://x`."""
    protocol, separator, rest = url.partition("://")
    return f"{protocol}://{rest.lstrip('/')}" if separator else url


def connect_lines(home: Home) -> list[str]:
    """SQL that opens the catalog in a plain DuckDB client of this version; holds no password."""
    kind = "postgres" if database.is_postgres(home) else "sqlite"
    lines = [f"-- DuckDB {duckdb.__version__}; the catalog is opened read-only.", "INSTALL ducklake;", "LOAD ducklake;"]
    lines += [f"INSTALL {kind};", f"LOAD {kind};"]
    if _is_s3(home.url):
        lines += [
            "INSTALL httpfs;",
            "LOAD httpfs;",
            "INSTALL aws;",
            "LOAD aws;",
            f"CREATE SECRET ({', '.join(_s3_place(home.url))}, PROVIDER credential_chain);",
        ]
    elif storage.is_remote(home.url):
        protocol = home.url.partition("://")[0]
        lines.append(f"-- first, in Python: connection.register_filesystem(fsspec.filesystem('{protocol}'))")
    if database.is_postgres(home):
        lines.append("-- the password, if one is needed, is read from PGPASSWORD or ~/.pgpass")
    lines.append(f"ATTACH {quote(_address(home))} AS {ALIAS} (READ_ONLY, CREATE_IF_NOT_EXISTS false);")
    return [*lines, f"USE {ALIAS};"]


def _connect(urls: Sequence[str], *loaded: str) -> Connection:
    """A private in-memory database that can reach these URLs, with these extensions loaded."""
    names = [*loaded, *(["httpfs"] if any(map(_is_s3, urls)) else [])]
    config: dict[str, str | bool | int | float | list[str]] = {
        # DuckDB must not download extensions by itself, and a query must not read variables of this program.
        "autoinstall_known_extensions": False,
        "autoload_known_extensions": False,
        "python_enable_replacements": False,
        "allow_unsigned_extensions": extensions.are_checked(names),
    }
    connection = duckdb.connect(config=config)
    # A SET of it fails in a Jupyter kernel without ipywidgets.
    connection.execute("PRAGMA disable_progress_bar")
    connection.execute("SET TimeZone = 'UTC'")
    # The default is `.tmp` in whatever folder the user stands in. DuckDB removes it at the end.
    connection.execute(
        f"SET temp_directory = {quote(os.path.join(tempfile.gettempdir(), f'goodviews-duckdb-{os.getpid()}'))}"
    )
    for name in names:
        extensions.load(connection, name)
    for url in urls:
        if storage.is_remote(url):
            _open_store(connection, url)
    return connection


def try_extension(name: str) -> None:
    """Load one extension as every connection does. Raises StorageError, or DatabaseError for a damaged file."""
    _connect([], name).close()


def _metadata_extension(home: Home) -> tuple[str, str]:
    return "ducklake", "postgres_scanner" if database.is_postgres(home) else "sqlite_scanner"


def _open_store(connection: Connection, url: str) -> None:
    """Let DuckDB reach the object store with the settings that fsspec uses; a secret lives in this connection only."""
    if not _is_s3(url):
        # A filesystem must be registered on the connection that reads; this instance caches no listings.
        connection.register_filesystem(storage.filesystem(url)[0])
        return
    options = _s3_place(url)
    session = importlib.import_module("botocore.session").get_session()
    if credentials := session.get_credentials():
        frozen = credentials.get_frozen_credentials()
        options += [f"KEY_ID {quote(frozen.access_key)}", f"SECRET {quote(frozen.secret_key)}"]
        options += [f"SESSION_TOKEN {quote(frozen.token)}"] if frozen.token else []
    try:
        connection.execute(
            f"CREATE OR REPLACE SECRET {identifier('goodviews ' + url)} ({', '.join(options)}, PROVIDER config)"
        )
    except duckdb.Error:
        # The message would quote the statement.
        raise StorageError(
            f"DuckDB refused the credentials for {url}. Check AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and "
            "AWS_ENDPOINT_URL."
        ) from None


def _is_s3(url: str) -> bool:
    return url.startswith(("s3://", "s3a://"))


def _store_root(url: str) -> str:
    protocol, _, rest = url.partition("://")
    return f"{protocol}://{rest.split('/')[0]}"


def _s3_place(url: str) -> list[str]:
    options = ["TYPE s3", f"SCOPE {quote(_store_root(url))}"]
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    options += [f"REGION {quote(region)}"] if region else []
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    if endpoint:
        scheme, _, host = endpoint.rstrip("/").rpartition("://")
        options += [f"ENDPOINT {quote(host)}", "URL_STYLE 'path'", f"USE_SSL {str(scheme != 'http').lower()}"]
    return options


def _address(home: Home) -> str:
    if database.is_postgres(home):
        return f"ducklake:postgres:{database.public_conninfo(home)}"
    return f"ducklake:sqlite:{home.catalog}"


def _attach(connection: Connection, home: Home, options: str) -> None:
    if database.is_postgres(home) and (secret := database.password(home)):
        # In a secret and not in the path: DuckDB shows paths in duckdb_databases() and in messages.
        connection.execute(f"CREATE OR REPLACE SECRET goodviews_metadata (TYPE postgres, PASSWORD {quote(secret)})")
        options += ", META_SECRET 'goodviews_metadata'"
    try:
        connection.execute(f"ATTACH {quote(_address(home))} AS {ALIAS} ({options})")
        connection.execute(f"USE {ALIAS}")
    except duckdb.Error as error:
        raise _attach_error(home, str(error)) from None


def _attach_writer(connection: Connection, home: Home) -> None:
    if database.is_postgres(home):
        options = ""
    else:
        os.makedirs(os.path.dirname(home.catalog), exist_ok=True)
        database.refuse_foreign(home)
        options = f"META_JOURNAL_MODE 'WAL', META_BUSY_TIMEOUT {BUSY_TIMEOUT_MS}, "
    if storage.is_remote(home.url) and any(c in home.url for c in "*?["):
        raise UsageError(
            f"HOME {home.url} holds one of `*?[`, which DuckDB cannot address in an object store. Choose another name."
        )
    try:
        _attach(connection, home, options + "CREATE_IF_NOT_EXISTS false")
    except InputError:
        _attach(connection, home, f"{options}DATA_PATH {quote(home.lake_data + '/')}")


def _attach_error(home: Home, text: str) -> Exception:
    shown, reason = database.shown(home), database.scrub(home, text)
    if "explicitly disabled" in text:
        return _no_catalog(home)
    if "not a database" in text or "malformed" in text:
        return IntegrityError(
            f"The catalog {shown} is damaged ({reason}). Rebuild it with `goodviews catalog rebuild`."
        )
    if "unable to open database" in text and not os.path.exists(home.catalog):
        return _no_catalog(home)
    return StorageError(f"Cannot open the catalog {shown}: {reason}. Check that it can be reached, and rerun.")


def _no_catalog(home: Home) -> InputError:
    message = (
        f"There is no catalog at {database.shown(home)} yet. The first `goodviews ingest` makes it; or name another "
        "with --home or --catalog."
    )
    return InputError(message)


def _is_filled(path: str) -> bool:
    return os.path.exists(path) and os.path.getsize(path) > 0


def _layout_number(connection: Connection) -> int | None:
    query = (
        "SELECT count(*) FROM duckdb_views() WHERE database_name = ? AND schema_name = 'versions' AND view_name = "
        "'layout'"
    )
    found = connection.execute(query, [ALIAS]).fetchall()
    if not found[0][0]:
        return None
    return int(connection.execute("SELECT number FROM versions.layout").fetchall()[0][0])


def _bring_layout(connection: Connection, home: Home) -> None:
    """Create what is missing, in one transaction; a killed creation is finished by the next writer."""
    number = _layout_number(connection)
    if number is not None and number > layout.NUMBER:
        message = (
            f"The catalog {database.shown(home)} has layout {number}, this release writes {layout.NUMBER}. Use the "
            "newer release of goodviews."
        )
        raise IntegrityError(message)
    if number != layout.NUMBER:
        connection.execute("BEGIN")
        # Off for every client of this lake: compaction would move our shards into the lake's own folder.
        connection.execute(f"CALL {ALIAS}.set_option('auto_compact', false)")
        connection.execute(f"CALL {ALIAS}.set_option('data_inlining_row_limit', 0)")
        for statement in layout.statements():
            connection.execute(statement)
        set_message(connection, f"layout {layout.NUMBER}")
        connection.execute("COMMIT")
    # DuckLake sets options of a table only after its creation is committed; until then a table makes more files.
    query = (
        f"SELECT count(*) FROM ducklake_options({quote(ALIAS)}) WHERE option_name = 'data_inlining_row_limit' AND "
        "scope = 'TABLE'"
    )
    if connection.execute(query).fetchall()[0][0] < len(layout.INLINED):
        for name in layout.INLINED:
            connection.execute(
                f"CALL {ALIAS}.set_option('data_inlining_row_limit', {layout.INLINE_ROWS}, schema => 'main', "
                f"table_name => {quote(name)})"
            )


def set_message(connection: Connection, message: str) -> None:
    """Author and message of the snapshot that the open transaction will make."""
    connection.execute(f"CALL ducklake_set_commit_message({quote(ALIAS)}, 'goodviews', {quote(message)})")


def sync_table(writer: Lake, schema: str, table: str) -> None:
    """Flush the files that the lake itself wrote of a table in this transaction, and hold their bytes until `commit`.

    DuckDB does not flush them before COMMIT flushes the metadata that names them.
    """
    folder = storage.join(writer.root, "lake", schema, table)
    tables = (f"{METADATA}.ducklake_data_file", f"{METADATA}.ducklake_delete_file")
    rows = writer.rows(" UNION ALL ".join(f"SELECT path FROM {name} WHERE path_is_relative" for name in tables))
    named = {str(path).rsplit("/", 1)[-1] for (path,) in rows}
    for name in storage.list_names(folder):
        if name in named or not name.endswith(".parquet"):
            continue
        url = storage.join(folder, name)
        if not storage.is_remote(url):
            storage.sync(url)
        writer.uncommitted[url] = storage.read_bytes(url)
    if not storage.is_remote(folder) and os.path.isdir(folder):
        storage.sync(folder)


def commit(writer: Lake) -> None:
    """COMMIT, and keep the lake's own files in case the commit landed but its answer was lost.

    When the answer to COMMIT is lost, DuckLake assumes failure and deletes the files it wrote. They are written again
    here; if the commit did not land, nothing names them and `gc` removes them.
    """
    try:
        writer.connection.execute("COMMIT")
    except BaseException:
        for url, data in writer.uncommitted.items():
            if not storage.exists(url):
                storage.publish(url, data)
        raise
    finally:
        writer.uncommitted.clear()


def _root(connection: Connection, home: Home) -> str:
    stored = connection.execute(f"SELECT data_path FROM ducklake_settings({quote(ALIAS)})").fetchall()[0][0]
    root = str(stored).rstrip("/").removesuffix("/lake")
    if root != home.url and (storage.is_remote(home.url) or os.path.realpath(root) != os.path.realpath(home.url)):
        message = (
            f"The catalog {database.shown(home)} belongs to HOME {root}, not to {home.url}, and would show the files "
            f"there. Name that one with `--home`, or, if HOME was moved or copied, run `goodviews catalog rebuild`."
        )
        raise OtherHomeError(message)
    return root
