from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from catalog.commands import app
from catalog.versions.commit import commit_version
from infra import storage
from infra.errors import InputError, IntegrityError, UsageError
from infra.home import Home

ROOT = Path(__file__).parents[2]


@pytest.fixture
def filled(home: Home, publish: Any) -> Home:
    made = publish()
    commit_version(home, made.dataset, made.version)
    return home


def call(home: Home, *arguments: str) -> Result:
    return CliRunner().invoke(app, [*arguments, "--home", home.url, "--catalog", home.catalog])


def test_importing_the_commands_imports_no_database() -> None:
    script = "import sys, catalog.commands; print(sorted({'duckdb', 'pyarrow', 'ray', 'torch', 'psycopg'} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", script],
        check=False,
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_sql_prints_a_table_csv_or_json(filled: Home) -> None:
    query = "SELECT dataset, scenes FROM datasets"
    assert json.loads(call(filled, "sql", query, "--json").stdout) == [{"dataset": "toy", "scenes": 8}]
    assert call(filled, "sql", query, "--csv").stdout == "dataset,scenes\ntoy,8\n"
    table = call(filled, "sql", query).stdout
    assert "dataset" in table and "toy" in table and "8" in table


def test_sql_refuses_in_an_error_of_ours_with_exit_code_2(filled: Home) -> None:
    for query in ("DELETE FROM scenes", "ATTACH 'x'", "PRAGMA version", "COPY (SELECT 1) TO 'x'", "SELECT 1; SELECT 2"):
        error = call(filled, "sql", query).exception
        assert isinstance(error, UsageError) and error.exit_code == 2


def test_every_command_on_no_catalog_says_so(home: Home) -> None:
    for arguments in (["sql", "SELECT 1"], ["tables"], ["snapshots"], ["verify"]):
        assert isinstance(call(home, *arguments).exception, InputError), arguments


def test_tables_and_snapshots_are_json_on_request(filled: Home) -> None:
    tables = json.loads(call(filled, "tables", "--json").stdout)
    assert {row["name"]: row["rows"] for row in tables}["scenes"] == 8
    snapshots = json.loads(call(filled, "snapshots", "--json").stdout)
    assert [row["snapshot"] for row in snapshots] == list(range(len(snapshots))) and "add toy@" in snapshots[-1][
        "message"
    ]


def test_verify_prints_one_line_a_problem_and_fails(filled: Home) -> None:
    sound = call(filled, "verify")
    assert sound.exit_code == 0 and sound.stdout.endswith("0 problems\n")
    path = Path(filled.datasets("toy", "0123456789abcdef"), "views/good/train-00000.tar")
    path.write_bytes(path.read_bytes()[:-1])
    found = call(filled, "verify")
    assert isinstance(found.exception, IntegrityError) and "1 problems" in str(found.exception)
    assert len(found.stdout.splitlines()) == 2 and "views/good/train-00000.tar" in found.stdout
    [problem] = json.loads(call(filled, "verify", "--json", "--quick").stdout)["problems"]
    assert problem["dataset"] == "toy" and problem["path"] == "views/good/train-00000.tar"


def test_gc_lists_and_then_removes(filled: Home) -> None:
    storage.publish(filled.work("job", "part"), b"x")
    assert "0 files" in call(filled, "gc").stdout
    listed = call(filled, "gc", "--older-than-hours", "0")
    assert "work/job/part" in listed.stdout and "would be removed" in listed.stdout
    assert len(json.loads(call(filled, "gc", "--older-than-hours", "0", "--json").stdout)) == 1
    assert "1 files, 1 bytes removed" in call(filled, "gc", "--older-than-hours", "0", "--delete").stdout
    assert storage.list_files(filled.work()) == []


def test_rebuild_says_what_it_registered(filled: Home) -> None:
    os.unlink(filled.catalog)
    assert "1 versions registered" in call(filled, "rebuild").stdout
    assert json.loads(call(filled, "rebuild", "--json").stdout)["versions"] == 1
    assert call(filled, "verify").exit_code == 0


def test_connect_prints_sql(filled: Home) -> None:
    lines = call(filled, "connect").stdout.splitlines()
    assert lines[-1] == "USE lake;" and f"ducklake:sqlite:{filled.catalog}" in lines[-2]
