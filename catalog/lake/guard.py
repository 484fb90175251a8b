"""Check that a query of `catalog sql` is one harmless SELECT over the catalog's tables.

Two barriers protect the files: DuckDB's settings (READ_ONLY attachment, no access outside HOME, locked configuration),
and a check of the parsed statement that allows tables by name and table functions by list. The settings alone would let
COPY write below HOME and `ducklake_cleanup_old_files` delete files.
Invariant: the statement that was checked is the object that runs; its text is never parsed again.
"""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from typing import Any, Final

from catalog.lake import lake
from catalog.lake.lake import Connection, Lake, Statement
from infra import storage
from infra.errors import UsageError

TABLE_FUNCTIONS: Final = frozenset(
    [
        "range",
        "generate_series",
        "unnest",
        "repeat",
        "repeat_row",
        "json_each",
        "json_tree",
        "duckdb_columns",
        "duckdb_tables",
        "duckdb_views",
        "ducklake_snapshots",
        "ducklake_current_snapshot",
        "ducklake_list_files",
        "ducklake_table_info",
        "ducklake_table_insertions",
        "ducklake_table_deletions",
        "ducklake_table_changes",
    ]
)
"""All others are refused, known or not: those that write, read files, open databases or run text as SQL among them."""

REFUSED_SCALARS: Final = frozenset(
    [
        "getenv",
        "current_setting",
        "nextval",
        "currval",
        "write_log",
        "sleep_ms",
        "pg_sleep",
        "json_execute_serialized_sql",
        "json_serialize_plan",
        "which_secret",
        "getvariable",
        "setseed",
    ]
)
TABLE_NODES: Final = frozenset(
    ["BASE_TABLE", "EMPTY", "SUBQUERY", "JOIN", "EXPRESSION_LIST", "PIVOT", "TABLE_FUNCTION", "SHOW_REF"]
)
SCHEMAS: Final = frozenset(("", "main", "versions", "information_schema", lake.ALIAS))
SHOWN: Final = frozenset(("", '"tables"', "__show_tables_expanded"))
"What SHOW may name; DESCRIBE and SUMMARIZE carry a query, which is checked like any other."

RULE: Final = "`goodviews catalog sql` takes exactly one SELECT"


def lock_down(reader: Lake, catalog: str) -> None:
    """Let this connection read HOME and the catalog file, and never change its mind about it."""
    roots = [reader.root + "/"]
    paths = [] if catalog.startswith("postgres:") else [catalog, catalog + "-wal", catalog + "-shm"]
    if not storage.is_remote(reader.root):
        roots.append(os.path.realpath(reader.root) + "/")
    reader.connection.execute(f"SET allowed_directories = {lake.quote_list(roots)}")
    reader.connection.execute(f"SET allowed_paths = {lake.quote_list(paths)}")
    reader.connection.execute("SET enable_external_access = false")
    reader.connection.execute("SET lock_configuration = true")


def check_select(reader: Lake, sql: str) -> Statement:
    """The one statement of `sql`, found harmless. Raises UsageError that says what is refused and why."""
    try:
        statements = reader.connection.extract_statements(sql)
    except lake.DatabaseError as error:
        raise UsageError(f"DuckDB cannot parse the query: {error}") from None
    if len(statements) != 1:
        raise UsageError(f"{RULE}; this is {len(statements)} statements. Run them one by one.")
    tree = _tree(reader.connection, sql)
    if statements[0].type != lake.SELECT or tree is None:
        raise UsageError(f"{RULE}; this is {_kind(sql)}. The catalog is written by jobs only.")
    if statements[0].named_parameters:
        raise UsageError(f"{RULE} without placeholders; {min(statements[0].named_parameters)!r} has no value here.")
    known = {row[0].lower() for row in reader.rows(_KNOWN, [lake.ALIAS, lake.ALIAS])}
    nodes = list(_nodes(tree))
    inner = {name.lower() for node in nodes for name in _cte_names(node)}
    for node in nodes:
        _check_node(node, known=known, inner=inner)
    return statements[0]


_KNOWN: Final = """SELECT table_name FROM duckdb_tables() WHERE database_name = ? AND NOT internal
    UNION SELECT view_name FROM duckdb_views() WHERE database_name = ? AND NOT internal"""


def _kind(sql: str) -> str:
    word = re.match(r"(?:\s|;|--[^\n]*\n|/\*.*?\*/)*([A-Za-z]+)", sql, re.DOTALL)
    return word[1].upper() if word else "something else"


def _tree(connection: Connection, sql: str) -> Any:
    """The statement as DuckDB's parser sees it; None when it is not a plain SELECT."""
    text = connection.execute("SELECT json_serialize_sql(?::VARCHAR)", [sql]).fetchall()[0][0]
    try:
        tree = json.loads(text)
    except (RecursionError, ValueError):
        raise UsageError("The query is nested too deeply to be checked. Write it with fewer levels.") from None
    return None if tree["error"] or len(tree["statements"]) != 1 else tree["statements"][0]


def _nodes(tree: Any) -> Iterator[dict[str, Any]]:
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, dict):
            yield node
            waiting.extend(node.values())
        elif isinstance(node, list):
            waiting.extend(node)


def _cte_names(node: dict[str, Any]) -> Iterator[str]:
    for entry in (node.get("cte_map") or {}).get("map", []):
        # A CTE named like a file would let a file of that name be read where the CTE is out of scope.
        if not re.fullmatch(r"\w+", entry["key"]):
            raise UsageError(f"The name {entry['key']!r} in WITH is refused: use letters, digits and underscores.")
        yield entry["key"]


def _check_node(node: dict[str, Any], *, known: AbstractSet[str], inner: AbstractSet[str]) -> None:
    kind = node.get("type")
    if node.get("class") in ("FUNCTION", "WINDOW"):
        name = node["function_name"].lower()
        if name in REFUSED_SCALARS:
            raise UsageError(f"{RULE} over its tables; the function {name} reaches outside.")
    elif "class" not in node and {"alias", "sample"} <= node.keys():
        if kind not in TABLE_NODES:
            raise UsageError(f"{RULE} over its tables; {kind} after FROM is not known to be harmless.")
        if kind == "BASE_TABLE":
            _check_table(node, known=known, inner=inner)
        elif kind == "TABLE_FUNCTION":
            _check_function(node["function"])
        elif kind == "SHOW_REF" and node["table_name"] not in SHOWN:
            raise UsageError(f"{RULE}; of SHOW only SHOW TABLES is taken.")


def _check_table(node: dict[str, Any], *, known: AbstractSet[str], inner: AbstractSet[str]) -> None:
    catalog, schema, name = (node[key].lower() for key in ("catalog_name", "schema_name", "table_name"))
    is_ours = catalog in ("", lake.ALIAS) and schema in SCHEMAS
    if is_ours and (schema == "information_schema" or name in known or (not catalog + schema and name in inner)):
        return
    written = ".".join(part for part in (node["catalog_name"], node["schema_name"], node["table_name"]) if part)
    near = difflib.get_close_matches(name, sorted(known), n=1)
    hint = f" Did you mean {near[0]}?" if near else " See `goodviews catalog tables`."
    raise UsageError(f"The catalog has no table or view {written!r}, and files are not read.{hint}")


def _check_function(function: dict[str, Any]) -> None:
    name = str(function.get("function_name", function.get("type"))).lower()
    if name not in TABLE_FUNCTIONS or function.get("schema") or function.get("catalog"):
        raise UsageError(f"{RULE} over its tables; the table function {name} may write, read files or run other SQL.")
