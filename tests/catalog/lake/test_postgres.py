"""The same promises with Postgres metadata; without a server (`postgres_catalog`) the tests are skipped."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from catalog.lake import database, lake, lock, queries
from catalog.versions import audit, collect, rebuild
from catalog.versions.commit import commit_version
from infra.errors import ConflictError, InputError, StorageError, UsageError
from infra.home import Home
from tests.conftest import POSTGRES_PASSWORD as PASSWORD

ROOT = Path(__file__).parents[3]


@pytest.fixture
def home(postgres_catalog: str, tmp_path: Path) -> Home:
    """A HOME on disk with a database of its own."""
    return Home(url=str(tmp_path / "home"), catalog=postgres_catalog)


def rows(home: Home, query: str) -> list[tuple[Any, ...]]:
    with lake.reading(home) as reader:
        return reader.rows(query)


def test_a_commit_is_whole_and_repeats_add_nothing(home: Home, publish: Any) -> None:
    with pytest.raises(InputError, match="There is no catalog at"):
        rows(home, "SELECT 1")
    made = publish()
    first = commit_version(home, made.dataset, made.version)
    again = commit_version(home, made.dataset, made.version)
    assert (first.was_there, again.was_there) == (False, True) and first.snapshot_id == again.snapshot_id
    assert rows(home, "SELECT count(*) FROM captions") == [(made.captions,)]
    assert rows(home, "SELECT captions_per_scene FROM shards") == [({1: 2, 2: 1, 3: 1},)] * 2
    assert audit.verify(home).problems == []
    assert collect.collect(home, older_than_hours=0).strays == []


COMMIT = """
import json, sys
from catalog.versions.commit import commit_version
from infra.home import Home
done = commit_version(Home(url=sys.argv[1], catalog=sys.argv[2]), sys.argv[3], sys.argv[4])
print(json.dumps(done.was_there))
"""


def test_d8_four_processes_that_commit_at_once_land_once(home: Home, publish: Any) -> None:
    """Without the lock, two Postgres transactions that both see a version missing both insert it."""
    same, other = publish("same"), publish("other")
    pairs = [(same.dataset, same.version)] * 3 + [(other.dataset, other.version)]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", COMMIT, home.url, home.catalog, *pair],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        for pair in pairs
    ]
    results = [process.communicate(timeout=280) for process in processes]
    assert [process.returncode for process in processes] == [0] * 4, results
    assert sorted(json.loads(out) for out, _ in results) == [False, False, True, True]
    assert rows(
        home, "SELECT (SELECT count(*) FROM scenes), (SELECT count(*) FROM jobs), (SELECT count(*) FROM datasets)"
    ) == [(16, 2, 2)]
    assert audit.verify(home).problems == []


def test_waiting_for_the_lock_is_bounded_names_the_holder_and_hides_the_password(home: Home) -> None:
    with (
        lock.commit_lock(home),
        pytest.raises(ConflictError, match=rf"held by goodviews process {os.getpid()} on .*Postgres session") as caught,
        lock.commit_lock(home, timeout_s=0.2),
    ):
        pass
    assert PASSWORD not in str(caught.value)
    with lock.commit_lock(home, timeout_s=0.2) as check:
        check()


def test_a_commit_whose_lock_session_broke_is_rolled_back(
    home: Home, publish: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from catalog.versions import commit

    made = publish()
    real = commit._insert_dataset

    def insert_and_break(*arguments: Any) -> None:
        real(*arguments)
        with database.connect_postgres(home, name="killer") as killer:
            killer.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name LIKE 'goodviews process%'"
            )

    with monkeypatch.context() as broken:
        broken.setattr(commit, "_insert_dataset", insert_and_break)
        with pytest.raises(ConflictError, match="session that held the commit lock .* broke"):
            commit_version(home, made.dataset, made.version)
    assert not commit_version(home, made.dataset, made.version).was_there
    assert rows(home, "SELECT count(*) FROM versions.scenes") == [(8,)]


def test_the_password_appears_nowhere(home: Home, publish: Any, capsys: pytest.CaptureFixture[str]) -> None:
    made = publish()
    commit_version(home, made.dataset, made.version)
    texts = ["\n".join(lake.connect_lines(home)), database.shown(home), repr(home)]
    with lake.reading(home) as reader:
        for query in (
            "FROM duckdb_databases()",
            "FROM duckdb_secrets()",
            "FROM duckdb_settings()",
            "FROM ducklake_options('lake')",
        ):
            texts.append(str(reader.rows(query)))
        assert reader.rows("SELECT count(*) FROM duckdb_secrets()") == [(1,)]
    for wrong in (home.catalog.replace("port=", "port=1"), home.catalog.replace("user=gv", "user=nobody")):
        for open_it in (lake.reading, lake.writing):
            there = Home(url=home.url, catalog=wrong)
            with pytest.raises((StorageError, InputError)) as caught, open_it(there):
                pass
            texts.append(str(caught.value) + repr(caught.value.__cause__))
    with pytest.raises(UsageError) as usage:
        database.shown(Home(url=home.url, catalog=f"postgres:password='{PASSWORD}"))
    texts.append(str(usage.value))
    for text in texts:
        assert PASSWORD not in text and "s3 cret" not in text, text


def test_sql_stays_a_select_on_postgres_too(home: Home, publish: Any) -> None:
    made = publish()
    commit_version(home, made.dataset, made.version)
    out = io.StringIO()
    assert queries.run_select(home, "SELECT count(*) AS n FROM captions", out=out, as_json=True) == 1
    assert json.loads(out.getvalue()) == [{"n": made.captions}]
    for sql in (
        "SELECT * FROM postgres_query('__ducklake_metadata_lake', 'DELETE FROM ducklake_table RETURNING *')",
        "CALL postgres_execute('__ducklake_metadata_lake', 'DELETE FROM ducklake_table')",
        "SELECT * FROM duckdb_databases()",
        "DELETE FROM __ducklake_metadata_lake.ducklake_snapshot",
    ):
        with pytest.raises(UsageError):
            queries.run_select(home, sql, out=out)
    # The first wall alone: the session of a reader is read-only in Postgres itself.
    with lake.reading(home) as reader, pytest.raises(lake.DatabaseError, match="read-only"):
        reader.connection.execute("CALL postgres_execute('__ducklake_metadata_lake', 'DELETE FROM ducklake_table')")


def test_rebuild_fills_an_empty_database_and_refuses_a_filled_one(home: Home, publish: Any) -> None:
    made = publish()
    commit_version(home, made.dataset, made.version)
    with pytest.raises(ConflictError, match="createdb"):
        rebuild.rebuild(home)
    sqlite = Home(url=home.url, catalog=os.path.join(home.url, "catalog.sqlite"))
    assert rebuild.rebuild(sqlite).versions == 1
    assert rows(sqlite, "SELECT count(*) FROM captions") == rows(home, "SELECT count(*) FROM captions")


def test_rebuild_into_an_empty_database_registers_all_versions(home: Home, publish: Any) -> None:
    publish("one"), publish("two")
    assert rebuild.rebuild(home).versions == 2
    assert rows(home, "SELECT count(*) FROM scenes") == [(16,)]


def test_a_url_is_as_good_as_a_conninfo(home: Home, publish: Any) -> None:
    from urllib.parse import quote

    from psycopg.conninfo import conninfo_to_dict

    made = publish()
    commit_version(home, made.dataset, made.version)
    fields = conninfo_to_dict(home.catalog.removeprefix("postgres:"))
    url = f"postgres://{fields['user']}:{quote(PASSWORD, safe='')}@{fields['host']}:{fields['port']}/{fields['dbname']}"
    assert rows(Home(url=home.url, catalog=url), "SELECT count(*) FROM scenes") == [(8,)]
