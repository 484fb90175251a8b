from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tomllib
import warnings
from pathlib import Path
from typing import Any

import duckdb
import fsspec
import pytest

from catalog import layout, schema
from catalog.lake import extensions, lake
from catalog.versions.commit import commit_version
from infra.errors import InputError, IntegrityError, UsageError
from infra.home import Home

ROOT = Path(__file__).parents[3]
EXTENSIONS = ("ducklake", "httpfs", "postgres-scanner", "sqlite-scanner")


def test_a_reader_of_no_catalog_gets_one_sentence_and_makes_nothing(home: Home) -> None:
    sentence = "There is no catalog at .* yet. The first `goodviews ingest` makes it"
    with pytest.raises(InputError, match=sentence), lake.reading(home):
        pass
    assert not os.path.exists(home.url)


@pytest.mark.parametrize("what", ["empty file", "empty database"])
def test_a_reader_of_a_catalog_that_was_never_finished_gets_the_same_sentence(home: Home, what: str) -> None:
    import sqlite3

    os.makedirs(home.url)
    if what == "empty file":
        Path(home.catalog).touch()
    else:
        connection = sqlite3.connect(home.catalog)
        connection.execute("CREATE TABLE t (a)")
        connection.close()
    with pytest.raises(InputError, match="There is no catalog at"), lake.reading(home):
        pass


def test_a_damaged_catalog_is_named_with_the_way_out(home: Home) -> None:
    os.makedirs(home.url)
    Path(home.catalog).write_bytes(b"this is not a database" * 100)
    with pytest.raises(IntegrityError, match="catalog rebuild"), lake.reading(home):
        pass


def test_g5_every_table_and_view_of_an_empty_catalog_answers_with_no_rows(home: Home) -> None:
    with lake.writing(home):
        pass
    names = sorted({*layout.tables(), *layout.VIEWS} - layout.HIDDEN)
    assert len(names) == 20
    with lake.reading(home) as reader:
        for name in names:
            cursor = reader.connection.execute(f"SELECT * FROM {name}")
            assert cursor.description and cursor.fetchall() == [], name


def test_the_columns_of_scenes_rejects_and_states_are_those_of_the_arrow_schema(home: Home) -> None:
    with lake.writing(home) as writer:
        for name, arrow in schema.SCHEMAS.items():
            for relation in (f"versions.{name}", f"main.{name}"):
                found = writer.rows(f"DESCRIBE {relation}")
                assert [row[0] for row in found] == arrow.names
                types = [re.sub(r'"(\w+)"', r"\1", row[1]) for row in found]
                assert types == [re.sub(r'"(\w+)"', r"\1", layout.sql_type(f.type)) for f in arrow]


def test_every_table_and_view_says_what_it_holds(home: Home) -> None:
    assert set(layout.DESCRIPTIONS) == {*layout.tables(), *layout.VIEWS} - layout.HIDDEN
    with lake.writing(home) as writer:
        query = "SELECT comment FROM duckdb_tables() WHERE database_name = 'lake' UNION ALL SELECT comment FROM duckdb_views() WHERE database_name = 'lake' AND view_name <> 'layout'"
        comments = [row[0] for row in writer.rows(query)]
    assert sorted(comments) == sorted(layout.DESCRIPTIONS.values())


def test_compaction_is_off_and_stays_off_for_plain_clients(home: Home, publish: Any) -> None:
    """DuckLake's merge would move our shards into its own folder and schedule them for deletion."""
    made = publish()
    commit_version(home, made.dataset, made.version)
    paths = [os.path.join(made.folder, schema.scenes_path("train", i)) for i in range(2)]
    with lake.writing(home) as client:
        client.connection.execute("CALL ducklake_merge_adjacent_files('lake')")
        client.connection.execute("CHECKPOINT lake")
        client.connection.execute("CALL ducklake_cleanup_old_files('lake', cleanup_all => true)")
        client.connection.execute("CALL ducklake_delete_orphaned_files('lake', cleanup_all => true)")
        registered = {
            row[0]
            for row in client.rows("SELECT data_file FROM ducklake_list_files('lake', 'scenes', schema => 'versions')")
        }
    assert registered == set(paths)
    assert all(os.path.exists(path) for path in paths)


def test_an_older_layout_is_brought_to_this_one_and_a_newer_one_is_refused(
    home: Home, publish: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = publish()
    commit_version(home, made.dataset, made.version)
    newer = dict(layout.VIEWS) | {
        "main.leaderboard": "SELECT 7 AS place",
        "versions.layout": f"SELECT {layout.NUMBER + 1} AS number",
    }
    with monkeypatch.context() as future:
        future.setattr(layout, "NUMBER", layout.NUMBER + 1)
        future.setattr(layout, "VIEWS", newer)
        with lake.writing(home) as writer:
            assert writer.rows("SELECT * FROM leaderboard") == [(7,)]
            assert writer.rows("SELECT count(*) FROM scenes") == [(8,)]
    with (
        pytest.raises(IntegrityError, match=f"has layout {layout.NUMBER + 1}, this release writes {layout.NUMBER}"),
        lake.writing(home),
    ):
        pass


def test_a_catalog_of_another_home_is_refused_instead_of_showing_its_files(
    home: Home, publish: Any, tmp_path: Path
) -> None:
    made = publish()
    commit_version(home, made.dataset, made.version)
    shutil.copytree(home.url, tmp_path / "copy")
    copy = Home(url=str(tmp_path / "copy"), catalog=str(tmp_path / "copy" / "catalog.sqlite"))
    sentence = rf"belongs to HOME {re.escape(home.url)}, not to .*copy.*rebuild"
    with pytest.raises(IntegrityError, match=sentence), lake.reading(copy):
        pass
    with pytest.raises(IntegrityError, match="belongs to HOME"):
        commit_version(copy, made.dataset, made.version)


def test_one_home_by_two_paths_is_one_catalog(home: Home, publish: Any, tmp_path: Path) -> None:
    first, second = publish("one"), publish("two")
    os.symlink(home.url, tmp_path / "link")
    link = Home(url=str(tmp_path / "link"), catalog=str(tmp_path / "link" / "catalog.sqlite"))
    commit_version(home, first.dataset, first.version)
    assert commit_version(link, first.dataset, first.version).was_there
    commit_version(link, second.dataset, second.version)
    with lake.reading(link) as reader:
        assert reader.rows("SELECT count(*) FROM scenes") == [(16,)]


def test_g6_views_answer_from_another_working_directory(
    home: Home, publish: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = publish()
    commit_version(home, made.dataset, made.version)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    with lake.reading(home) as reader:
        assert reader.rows("SELECT count(*) FROM captions") == [(made.captions,)]
        assert reader.rows("SELECT scenes FROM scene_stats") == [(made.scenes,)]
    assert os.listdir(elsewhere) == []


def test_g1_a_reader_opens_and_answers_while_a_writer_is_inside_a_transaction(home: Home, publish: Any) -> None:
    made = publish()
    commit_version(home, made.dataset, made.version)
    script = "import sys; from catalog.lake import lake; from infra.home import Home\nwith lake.reading(Home(url=sys.argv[1], catalog=sys.argv[2])) as r: print(r.rows('SELECT count(*) FROM runs'))"
    with lake.writing(home) as writer:
        writer.connection.execute("BEGIN")
        writer.connection.execute("INSERT INTO main.runs (run_id) VALUES ('r')")
        done = subprocess.run(
            [sys.executable, "-c", script, home.url, home.catalog],
            check=False,
            capture_output=True,
            text=True,
            cwd=ROOT,
        )
        writer.connection.execute("ROLLBACK")
    assert done.stdout == "[(0,)]\n", done.stderr


@pytest.mark.parametrize(
    ("limit", "sentence"), [("1KB", "'1KB' is too small"), ("0GB", "too small"), ("much", "no size")]
)
def test_a_memory_limit_that_cannot_be_is_one_sentence(home: Home, publish: Any, limit: str, sentence: str) -> None:
    made = publish()
    commit_version(home, made.dataset, made.version)
    with lake.reading(home) as reader, pytest.raises(UsageError, match=sentence):  # noqa: SIM117
        with lake.bounded(reader.connection, memory_limit=limit):
            pass


def test_g8_a_filesystem_is_registered_on_the_connection_that_reads(publish: Any, tmp_path: Path) -> None:
    """A HOME on an fsspec store that DuckDB does not know by itself."""
    store = f"memory://goodviews-{os.getpid()}/home"
    home = Home(url=store, catalog=str(tmp_path / "catalog.sqlite"))
    publish.home = home
    made = publish()
    commit_version(home, made.dataset, made.version)
    # The default connection of the module knows nothing of it.
    with pytest.raises(duckdb.Error):
        duckdb.execute(f"SELECT * FROM '{made.folder}/scenes/train/00000.parquet'")
    with lake.reading(home) as reader:
        assert reader.rows("SELECT count(*) FROM captions") == [(made.captions,)]
        assert reader.rows("SELECT count(*) FROM shards") == [(2,)]
    fsspec.filesystem("memory").rm(store, recursive=True)


def test_a_remote_home_whose_name_is_a_pattern_is_refused(tmp_path: Path) -> None:
    home = Home(url="memory://bucket/a*b", catalog=str(tmp_path / "catalog.sqlite"))
    with pytest.raises(UsageError, match="cannot address in an object store"), lake.writing(home):
        pass


def test_g16_duckdb_and_its_extensions_are_pinned_to_one_version_and_the_lake_to_one_format(home: Home) -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        declared = tomllib.load(file)["project"]["dependencies"]
    pins = dict(line.split("==") for line in declared if line.startswith("duckdb"))
    assert set(pins) == {"duckdb", *(f"duckdb-extension-{name}" for name in EXTENSIONS)}
    assert set(pins.values()) == {duckdb.__version__}
    for name in EXTENSIONS:
        assert importlib.metadata.version(f"duckdb-extension-{name}") == duckdb.__version__
    with lake.writing(home) as writer:
        assert writer.rows(f"SELECT value FROM {lake.METADATA}.ducklake_metadata WHERE key = 'version'") == [("1.0",)]


def test_an_extension_is_checked_once_a_process_and_again_when_its_file_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, home: Home
) -> None:
    def unsigned_allowed() -> str:
        with lake.writing(home) as writer:
            return str(writer.rows("SELECT current_setting('allow_unsigned_extensions')")[0][0])

    monkeypatch.setattr(extensions, "_checked", set())
    assert [unsigned_allowed(), unsigned_allowed()] == ["False", "True"]
    real = extensions.wheel_file
    copy = tmp_path / "ducklake.duckdb_extension"
    shutil.copy(str(real("ducklake")), copy)
    monkeypatch.setattr(extensions, "wheel_file", lambda name: str(copy) if name == "ducklake" else real(name))
    assert [unsigned_allowed(), unsigned_allowed()] == ["False", "True"]
    with copy.open("r+b") as file:
        file.seek(-1000, os.SEEK_END)
        file.write(b"changed")
    with pytest.raises(duckdb.Error, match="signature|metadata"):
        unsigned_allowed()


def plain_client(folder: Path) -> duckdb.DuckDBPyConnection:
    """A DuckDB connection as a stranger has it, with the extension wheels in the place of a download."""
    connection = duckdb.connect(config={"extension_directory": str(folder)})
    platform = connection.execute("PRAGMA platform").fetchall()[0][0]
    target = folder / f"v{duckdb.__version__}" / platform
    target.mkdir(parents=True)
    for name in ("ducklake", "sqlite_scanner", "postgres_scanner", "httpfs"):
        package = __import__(f"duckdb_extension_{name}")
        file = f"{name}.duckdb_extension"
        shutil.copy(Path(package.__path__[0]) / "extensions" / f"v{duckdb.__version__}" / file, target / file)
    return connection


def test_the_printed_lines_open_the_catalog_in_a_plain_client(tmp_path: Path, publish: Any) -> None:
    home = Home(url=str(tmp_path / "it's here"), catalog=str(tmp_path / "it's here" / "catalog.sqlite"))
    publish.home = home
    made = publish()
    commit_version(home, made.dataset, made.version)
    lines = lake.connect_lines(home)
    with plain_client(tmp_path / "extensions") as client:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            client.execute("\n".join(lines))
        assert client.execute("SELECT count(*) FROM captions").fetchall() == [(made.captions,)]
        with pytest.raises(duckdb.Error, match="read-only"):
            client.execute("DELETE FROM datasets")


def test_the_printed_lines_for_a_team_hold_no_password_and_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIDEXAMPLE")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hush")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://store:9000")
    home = Home(url="s3://bucket/home", catalog="postgres:dbname=lake host=db user=me password='se cret'")
    text = "\n".join(lake.connect_lines(home))
    assert "se cret" not in text and "hush" not in text and "AKIDEXAMPLE" not in text
    assert "host=db" in text and "ENDPOINT 'store:9000'" in text and "USE_SSL false" in text
