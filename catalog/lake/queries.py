"""Run the read-only queries of `catalog`: a SELECT, the list of tables or of snapshots."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import IO, Any

import pyarrow as pa

from catalog import layout
from catalog.lake import answers, database, guard, lake
from infra.errors import StorageError, UsageError
from infra.home import Home

Answer = tuple[list[str], list[tuple[Any, ...]]]


def run_select(
    home: Home, sql: str, *, out: IO[str], as_csv: bool = False, as_json: bool = False, limit: int | None = None
) -> int:
    """Check and run one SELECT and write its rows to `out`; returns their number.

    Raises UsageError for anything but one harmless SELECT, and for a query that DuckDB cannot bind.
    """
    if as_csv and as_json:
        raise UsageError("--csv and --json exclude each other. Name one.")
    with _selected(home, sql) as cursor:
        names = [str(column[0]) for column in cursor.description or []]
        rows: Iterator[answers.Row] = answers.in_batches(cursor.fetchmany)
        if as_json:
            return answers.write_json(out, names, _first(rows, limit))
        if as_csv:
            return answers.write_csv(out, names, _first(rows, limit))
        cut = limit or (answers.TERMINAL_ROWS if out.isatty() else None)
        count = answers.write_table(out, names, _first(rows, cut))
        if count == cut and next(rows, None) is not None:
            print(
                (
                    f"More rows follow; these are the first {count:,}. Ask for others with --limit, --csv or LIMIT "
                    "and OFFSET."
                ),
                file=sys.stderr,
            )
        return count


def select_table(home: Home, sql: str) -> pa.Table:
    """The rows of one SELECT as a table of Arrow. Raises like `run_select`."""
    with _selected(home, sql) as cursor:
        return cursor.to_arrow_table()


def list_tables(home: Home) -> Answer:
    """(names, rows) of name, kind, rows, what it holds; views count the current versions."""
    names = ["name", "kind", "rows", "holds"]
    query = """SELECT schema_name, table_name, 'table', comment FROM duckdb_tables()
            WHERE database_name = ? AND NOT internal
        UNION ALL SELECT schema_name, view_name, 'view', comment FROM duckdb_views()
            WHERE database_name = ? AND NOT internal ORDER BY ALL"""
    with lake.reading(home) as reader, _sentences(home):
        rows = []
        for schema, name, kind, comment in reader.rows(query, [lake.ALIAS, lake.ALIAS]):
            if f"{schema}.{name}" in layout.HIDDEN:
                continue
            count = reader.rows(f"SELECT count(*) FROM {lake.identifier(schema)}.{lake.identifier(name)}")[0][0]
            rows.append((name if schema == "main" else f"{schema}.{name}", kind, count, comment))
    return names, rows


def list_snapshots(home: Home) -> Answer:
    """(names, rows) of snapshot, time, author, message and changes, oldest first."""
    names = ["snapshot", "time", "author", "message", "changes"]
    query = f"""SELECT snapshot_id, snapshot_time, author, commit_message, changes
        FROM ducklake_snapshots({lake.quote(lake.ALIAS)}) ORDER BY snapshot_id"""
    tables = f"""SELECT t.table_id, s.schema_name || '.' || t.table_name
        FROM {lake.METADATA}.ducklake_table t JOIN {lake.METADATA}.ducklake_schema s USING (schema_id)"""
    with lake.reading(home) as reader, _sentences(home):
        table_names = {str(number): name.removeprefix("main.") for number, name in reader.rows(tables)}
        return names, [(*row[:4], _changes(row[4], table_names)) for row in reader.rows(query)]


@contextlib.contextmanager
def _selected(home: Home, sql: str) -> Iterator[lake.Connection]:
    """The result of a query that passed the guard, on a read-only connection that it cannot leave."""
    with lake.reading(home) as reader, _sentences(home):
        guard.lock_down(reader, home.catalog)
        yield reader.connection.execute(guard.check_select(reader, sql))


def _changes(changes: dict[str, list[str]], table_names: dict[str, str]) -> str:
    """DuckLake's map of changes as text, with table names for numbers and only the length of long lists."""
    parts = []
    for what, items in (changes or {}).items():
        named = sorted({table_names.get(item, item) for item in items})
        parts.append(f"{what.replace('_', ' ')}: {', '.join(named) if len(named) <= 5 else len(named)}")
    return "; ".join(parts)


def _first(rows: Iterator[answers.Row], limit: int | None) -> Iterator[answers.Row]:
    if limit is None:
        yield from rows
        return
    for _ in range(limit):
        try:
            yield next(rows)
        except StopIteration:
            return


@contextlib.contextmanager
def _sentences(home: Home) -> Iterator[None]:
    """Turn DuckDB's errors into ours, without the password."""
    try:
        yield
    except lake.QueryError as error:
        raise UsageError(f"DuckDB cannot run the query: {database.scrub_lines(home, str(error))}") from None
    except lake.DatabaseError as error:
        message = (
            f"The catalog {database.shown(home)} failed to answer: {database.scrub(home, str(error))}. If a file of "
            "it is missing or changed, `goodviews catalog verify` says which."
        )
        raise StorageError(message) from None
