"""A workspace answers what the catalog and the files of HOME hold, and changes neither."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import duckdb
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest

import goodviews as gv
from infra import cli


def test_sql_gives_the_rows_that_the_command_prints(home: str, capsys: pytest.CaptureFixture[str]) -> None:
    query = "SELECT scene_key, index, text FROM captions ORDER BY scene_key, index"
    assert cli.run(["catalog", "sql", query, "--json", "--home", home]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert len(printed) > 100
    assert gv.open(home).sql(query).to_pylist() == printed


def test_a_result_is_taken_by_pandas_polars_duckdb_and_arrow(home: str) -> None:
    rows = gv.open(home).sql("SELECT scene_key, split FROM scenes ORDER BY scene_key")
    keys = rows["scene_key"].to_pylist()
    assert len(rows) == len(keys) == 60
    assert isinstance(rows.arrow, pa.Table)
    assert isinstance(rows.df(), pd.DataFrame)
    assert rows.df()["scene_key"].tolist() == keys
    assert pa.table(rows).equals(rows.arrow)
    assert pl.DataFrame(rows)["scene_key"].to_list() == keys
    assert [row[0] for row in duckdb.sql("SELECT scene_key FROM rows ORDER BY 1").fetchall()] == keys
    assert copy.deepcopy(rows).arrow.equals(rows.arrow)
    assert repr(rows) == repr(rows.arrow)
    with pytest.raises(AttributeError):
        rows.no_such_thing  # noqa: B018


@pytest.mark.parametrize(
    "query",
    ["DELETE FROM datasets", "SELECT 1; SELECT 2", "SELECT * FROM read_parquet('/etc/passwd')", "SELECT nothing"],
)
def test_sql_refuses_what_the_command_refuses(home: str, query: str) -> None:
    with pytest.raises(gv.UsageError):
        gv.open(home).sql(query)


def test_the_tables_are_there_and_empty_where_nothing_was_made(home: str) -> None:
    workspace = gv.open(home)
    assert workspace.datasets["dataset"].to_pylist() == ["toyworld"]
    for name in ("runs", "embeddings", "leaderboard"):
        assert isinstance(getattr(workspace, name), gv.Result)


def test_scenes_are_read_shard_after_shard(home: str) -> None:
    workspace = gv.open(home)
    batches = list(workspace.scenes("toyworld", "train"))
    assert len(batches) == 3
    table = pa.Table.from_batches(batches)
    wanted = workspace.sql("SELECT scene_key FROM scenes WHERE split = 'train' ORDER BY 1")
    assert sorted(table["scene_key"].to_pylist()) == wanted["scene_key"].to_pylist()
    texts = [caption["text"] for captions in table["captions"].to_pylist() for caption in captions]
    known = workspace.sql("SELECT text FROM captions WHERE split = 'train'")["text"].to_pylist()
    assert sorted(texts) == sorted(known)


def test_what_is_not_there_is_named_at_once(home: str, tmp_path: Path) -> None:
    workspace = gv.open(home)
    with pytest.raises(gv.InputError, match="no split 'dev'.*test, train, val"):
        workspace.scenes("toyworld", "dev")
    with pytest.raises(gv.InputError, match="no dataset 'toyword'.*toyworld"):
        workspace.scenes("toyword")
    with pytest.raises(gv.InputError, match="did not finish"):
        workspace.scenes("toyworld", version="0" * 16)
    with pytest.raises(gv.InputError, match="There is no catalog"):
        gv.open(str(tmp_path / "nowhere")).datasets  # noqa: B018
    assert not (tmp_path / "nowhere").exists()
    with pytest.raises(gv.UsageError, match="catalog"):
        gv.open("s3://bucket/home")
    assert repr(workspace) == f"goodviews.open({home!r})"


def test_threads_share_a_workspace_and_processes_get_a_copy(home: str) -> None:
    workspace = copy.deepcopy(gv.open(home))
    assert repr(workspace) == repr(gv.open(home))
    with ThreadPoolExecutor(4) as pool:
        counts = list(pool.map(lambda _: workspace.sql("SELECT count(*) AS n FROM scenes").to_pylist(), range(8)))
    assert counts == [[{"n": 60}]] * 8


IN_A_KERNEL = """
import sys, types

# What DuckDB takes for a Jupyter kernel.
shell = types.SimpleNamespace(config={"IPKernelApp": {}})
sys.modules["IPython"] = types.SimpleNamespace(get_ipython=lambda: shell)

import goodviews as gv

print(gv.open(sys.argv[1]).datasets.num_rows)
"""


def test_a_notebook_without_widgets_can_ask(home: str) -> None:
    # DuckDB refuses to change its progress bar there, and with it every connection failed.
    done = subprocess.run([sys.executable, "-c", IN_A_KERNEL, home], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr
