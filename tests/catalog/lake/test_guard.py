"""What `catalog sql` refuses; the catalog and every file are the same afterwards."""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from catalog import schema
from catalog.lake import guard, lake, queries
from catalog.versions.commit import commit_version
from infra.errors import UsageError
from infra.home import Home


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory, publisher: Any) -> Iterator[Home]:
    folder = tmp_path_factory.mktemp("guard")
    home = Home(url=str(folder / "home"), catalog=str(folder / "home" / "catalog.sqlite"))
    made = publisher(home)()
    commit_version(home, made.dataset, made.version)
    (folder / "home" / "inside.csv").write_text("a\n1\n")
    (folder / "outside.csv").write_text("a\n1\n")
    before = digests(folder)
    yield home
    assert digests(folder) == before


def digests(folder: Path) -> dict[str, str]:
    """sha256 of every file; SQLite's shared memory is scratch that readers write to."""
    files = [path for path in folder.rglob("*") if path.is_file() and not path.name.endswith(("-shm", "-wal"))]
    assert files
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


STATEMENTS = """
DELETE FROM scenes
DELETE FROM versions.scenes
UPDATE datasets SET is_current = false
UPDATE __ducklake_metadata_lake.ducklake_snapshot SET snapshot_id = 1
INSERT INTO datasets (dataset) VALUES ('x')
MERGE INTO datasets USING (SELECT 1) s ON true WHEN MATCHED THEN DELETE
TRUNCATE datasets
DROP TABLE versions.scenes
DROP SCHEMA versions CASCADE
ALTER TABLE datasets ADD COLUMN x INT
COMMENT ON TABLE datasets IS 'x'
CREATE TABLE t (a INT)
CREATE TEMP TABLE t AS SELECT 1
CREATE OR REPLACE VIEW scenes AS SELECT 1
CREATE MACRO m() AS 1
CREATE SECRET s (TYPE s3)
ATTACH '{home}/new.db'
ATTACH '{home}/catalog.sqlite' AS w (TYPE sqlite)
DETACH lake
USE memory
PRAGMA version
PRAGMA database_list
PRAGMA enable_profiling
COPY (SELECT 1) TO '{shard}'
COPY versions.scenes TO '{shard}' (FORMAT parquet)
COPY datasets FROM '{home}/inside.csv'
EXPORT DATABASE '{home}/export'
IMPORT DATABASE '{home}/export'
INSTALL httpfs
LOAD httpfs
SET threads = 1
SET enable_external_access = true
RESET threads
CALL ducklake_snapshots('lake')
CALL ducklake_cleanup_old_files('lake', cleanup_all => true)
CALL lake.set_option('auto_compact', true)
CHECKPOINT
CHECKPOINT lake
VACUUM
ANALYZE
BEGIN
COMMIT
ROLLBACK
EXPLAIN SELECT 1
EXPLAIN ANALYZE SELECT 1
PREPARE p AS SELECT 1
EXECUTE p
SHOW DATABASES
PIVOT scenes ON split USING count(*)
WITH x AS (DELETE FROM scenes RETURNING *) SELECT * FROM x
WITH x AS (UPDATE datasets SET is_current = false RETURNING *) SELECT * FROM x
SELECT 1; SELECT 2
SELECT 1; DELETE FROM scenes
SELECT 1 INTO x
SELECT ?
SELECT $name
-- nothing
/* nothing */
;
not sql
"""

FUNCTIONS = """
ducklake_cleanup_old_files('lake', cleanup_all => true)
ducklake_delete_orphaned_files('lake', cleanup_all => true)
ducklake_merge_adjacent_files('lake')
ducklake_rewrite_data_files('lake')
ducklake_expire_snapshots('lake', older_than => now())
ducklake_flush_inlined_data('lake')
ducklake_add_data_files('lake', 'scenes', '{shard}', schema => 'versions')
ducklake_set_option('lake', 'auto_compact', true)
ducklake_set_commit_message('lake', 'a', 'b')
ducklake_commit('lake')
lake.merge_adjacent_files()
lake.cleanup_old_files(cleanup_all => true)
checkpoint()
force_checkpoint('lake')
query('SELECT 1')
query_table('datasets')
json_execute_serialized_sql(json_serialize_sql('SELECT 1'))
read_text('/etc/passwd')
read_blob('{home}/datasets/toy/current.json')
read_csv('{home}/inside.csv')
read_json('{home}/datasets/toy/current.json')
read_parquet('{shard}')
parquet_scan('{shard}')
parquet_metadata('{shard}')
sniff_csv('{home}/inside.csv')
glob('/*')
sqlite_scan('{home}/catalog.sqlite', 'ducklake_table')
sqlite_query('__ducklake_metadata_lake', 'DELETE FROM ducklake_table RETURNING *')
sqlite_attach('{home}/catalog.sqlite')
postgres_query('__ducklake_metadata_lake', 'SELECT 1')
postgres_execute('__ducklake_metadata_lake', 'SELECT 1')
postgres_scan('', 'public', 't')
duckdb_databases()
duckdb_secrets()
duckdb_settings()
duckdb_logs
enable_logging()
enable_profiling()
pragma_database_size()
which_secret('s3://x', 's3')
python_map_function(1)
pandas_scan(0)
arrow_scan(0, 0, 0)
test_all_types()
'{home}/inside.csv'
"{home}/inside.csv"
'{home}/../outside.csv'
'{shard}'
'/etc/passwd'
duckdb_databases
duckdb_settings
pg_catalog.pg_class
sqlite_master
__ducklake_metadata_lake.ducklake_snapshot
memory.main.x
no_such_table
home
"""

PLACES = """
SELECT * FROM {f}
FROM {f}
SELECT (SELECT count(*) FROM {f})
SELECT 1 WHERE EXISTS (FROM {f})
SELECT * FROM datasets WHERE dataset IN (SELECT 'x' FROM {f})
SELECT * FROM datasets ORDER BY (SELECT count(*) FROM {f})
SELECT * FROM datasets LIMIT (SELECT count(*) FROM {f})
SELECT * FROM (VALUES ((SELECT count(*) FROM {f})))
SELECT * FROM datasets, LATERAL (SELECT * FROM {f})
SELECT * FROM datasets NATURAL JOIN {f}
SELECT * FROM datasets AT (VERSION => (SELECT count(*) FROM {f}))
SELECT * FROM (SUMMARIZE FROM {f})
SELECT 1 UNION ALL SELECT 1 FROM {f}
SELECT list_transform([1], lambda x: (SELECT count(*) FROM {f}))
SELECT max(1) FILTER (WHERE EXISTS (FROM {f}))
SELECT sum(1) OVER (PARTITION BY (SELECT count(*) FROM {f}))
SELECT CASE WHEN EXISTS (FROM {f}) THEN 1 END
SELECT COLUMNS(c -> c IN (SELECT 'x' FROM {f})) FROM datasets
SELECT * REPLACE ((SELECT count(*) FROM {f}) AS dataset) FROM datasets
SELECT 1 QUALIFY EXISTS (FROM {f})
SELECT dataset FROM datasets GROUP BY ALL HAVING EXISTS (FROM {f})
WITH x AS (SELECT * FROM {f}) SELECT * FROM x
WITH RECURSIVE r AS (SELECT 1 UNION ALL SELECT 1 FROM {f}) SELECT * FROM r
DESCRIBE SELECT * FROM {f}
SUMMARIZE SELECT * FROM {f}
"""

SCALARS = """
SELECT getenv('HOME')
SELECT GETENV('HOME')
SELECT system.main.getenv('HOME')
SELECT current_setting('temp_directory')
SELECT nextval('s')
SELECT write_log('x')
SELECT sleep_ms(1)
SELECT json_serialize_plan('SELECT 1')
SELECT * FROM datasets WHERE getenv('x') IS NULL
WITH "{home}/inside.csv" AS (SELECT 1) SELECT * FROM "{home}/inside.csv"
"""

ALLOWED = """
SELECT * FROM scenes
FROM datasets
TABLE datasets
VALUES (1)
SELECT 1;
SELECT count(*) FROM lake.main.scenes
SELECT count(*) FROM lake.versions.scenes
SELECT count(*) FROM versions.scenes AT (VERSION => 2)
FROM SCENES LIMIT 1
WITH x AS (SELECT 1 AS a) SELECT * FROM x
WITH RECURSIVE r(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM r WHERE n < 5) SELECT * FROM r
SELECT [x * 2 FOR x IN [1, 2]]
SELECT * FROM range(3)
SELECT unnest(map_entries(captions_per_scene)) FROM scene_stats
SELECT role, count(*) FROM captions GROUP BY ALL ORDER BY ALL
SELECT config->>'$.source' FROM jobs
UNPIVOT (SELECT 1 AS a, 2 AS b) ON a, b
SHOW TABLES
DESCRIBE scenes
SUMMARIZE datasets
SELECT * FROM information_schema.tables
SELECT * FROM ducklake_snapshots('lake')
"""


def run(home: Home, sql: str) -> int:
    return queries.run_select(home, sql, out=io.StringIO(), as_csv=True)


def fill(home: Home, text: str) -> str:
    shard = os.path.join(home.datasets("toy", "0123456789abcdef"), schema.scenes_path("train", 0))
    return text.replace("{home}", home.url).replace("{shard}", shard)


def lines(text: str) -> list[str]:
    return [line for line in text.strip().splitlines() if line]


@pytest.fixture(scope="module")
def reader(filled: Home) -> Iterator[lake.Lake]:
    with lake.reading(filled) as opened:
        guard.lock_down(opened, filled.catalog)
        yield opened


@pytest.mark.parametrize("sql", lines(STATEMENTS))
def test_anything_but_one_select_is_refused(filled: Home, reader: lake.Lake, sql: str) -> None:
    with pytest.raises(UsageError):
        reader.connection.execute(guard.check_select(reader, fill(filled, sql))).fetchall()


@pytest.mark.parametrize("source", lines(FUNCTIONS))
def test_a_source_that_is_not_a_table_of_the_catalog_is_refused(filled: Home, reader: lake.Lake, source: str) -> None:
    with pytest.raises(UsageError, match="takes exactly one SELECT|has no table or view"):
        guard.check_select(reader, f"SELECT * FROM {fill(filled, source)}")


@pytest.mark.parametrize("place", lines(PLACES))
@pytest.mark.parametrize("source", ["glob('*')", "'{home}/inside.csv'"])
def test_it_is_refused_wherever_it_stands_in_the_query(
    filled: Home, reader: lake.Lake, source: str, place: str
) -> None:
    with pytest.raises(UsageError, match="takes exactly one SELECT|has no table or view"):
        guard.check_select(reader, place.replace("{f}", fill(filled, source)))
    # The place itself is fine, so that the refusal is of the source.
    guard.check_select(reader, place.replace("{f}", "datasets AS x"))


@pytest.mark.parametrize("sql", lines(SCALARS))
def test_functions_that_reach_outside_are_refused(filled: Home, reader: lake.Lake, sql: str) -> None:
    with pytest.raises(UsageError, match="reaches outside|in WITH is refused"):
        guard.check_select(reader, fill(filled, sql))


@pytest.mark.parametrize("sql", lines(ALLOWED))
def test_queries_over_the_catalog_run(reader: lake.Lake, sql: str) -> None:
    assert reader.connection.execute(guard.check_select(reader, sql)).fetchall()


def test_without_the_check_the_settings_alone_keep_files_outside_home_and_the_catalog_shut(
    filled: Home, reader: lake.Lake
) -> None:
    """The first wall by itself, were the check ever to miss something."""
    for sql in (
        "SELECT * FROM read_text('/etc/passwd')",
        fill(filled, "SELECT * FROM '{home}/../outside.csv'"),
        fill(filled, "COPY (SELECT 1) TO '{home}/../written.csv'"),
        fill(filled, "ATTACH '{home}/../new.db'"),
        "DELETE FROM versions.scenes",
        "UPDATE __ducklake_metadata_lake.ducklake_snapshot SET snapshot_id = 1",
        "CALL ducklake_expire_snapshots('lake', older_than => now())",
        "SET enable_external_access = true",
        "SET allowed_directories = ['/']",
        "LOAD httpfs",
    ):
        with pytest.raises(lake.DatabaseError):
            reader.connection.execute(sql).fetchall()


def test_a_whole_run_is_refused_in_one_sentence(filled: Home) -> None:
    with pytest.raises(UsageError, match="takes exactly one SELECT; this is DELETE"):
        run(filled, "DELETE FROM scenes")
    with pytest.raises(UsageError, match="Did you mean scenes"):
        run(filled, "SELECT * FROM scene")
    with pytest.raises(UsageError, match="nope"):
        run(filled, "SELECT nope FROM scenes")
    assert run(filled, "SELECT * FROM scenes") == 8


def test_a_query_nested_beyond_measure_is_refused_and_not_a_crash(reader: lake.Lake) -> None:
    with pytest.raises(UsageError):
        guard.check_select(reader, "SELECT * FROM (" * 2000 + "SELECT 1" + ")" * 2000)
