"""`goodviews train` and `goodviews runs` in one process: flags, outputs, the catalog rows, and what is refused."""

from __future__ import annotations

import fcntl
import json
import multiprocessing
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from catalog.lake.queries import run_select
from catalog.versions.rebuild import rebuild
from infra.errors import ConfigError, ConflictError, InputError, StorageError, UsageError
from infra.home import Home
from tests.trainer import training
from trainer.run import commands as run_commands
from trainer.run import records, train_commands

QUICK = [f"--set={text}" for text in (*training.SMALL, "plan.epochs=1") if not text.startswith("data.dataset")]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Home:
    return training.make_home(tmp_path_factory.mktemp("home"))


def invoke(app: Any, home: Home, *words: str) -> Result:
    return CliRunner().invoke(app, [*words, "--home", home.url], catch_exceptions=False)


def train(home: Home, *words: str) -> Result:
    return invoke(train_commands.app, home, "--recipe", "tiny-cpu", "--dataset", "toyworld", *QUICK, *words)


def select(home: Home, sql: str) -> list[dict[str, Any]]:
    import io

    out = io.StringIO()
    run_select(home, sql, out=out, as_json=True)
    rows: list[dict[str, Any]] = json.loads(out.getvalue())
    return rows


@pytest.fixture(scope="module")
def trained(home: Home) -> dict[str, Any]:
    result = train(home, "--run-id", "one", "--json")
    assert result.exit_code == 0
    finished: dict[str, Any] = json.loads(result.stdout)
    return finished


def test_a_training_prints_what_it_did(trained: dict[str, Any]) -> None:
    assert (trained["run_id"], trained["status"], trained["steps"], trained["samples"]) == ("one", "finished", 6, 96)
    assert trained["encoders"] == ["encoder", "encoder-epoch-001", "encoder-untrained"]
    assert Path(trained["url"], "encoder", "model.safetensors").exists()


def test_the_catalog_has_the_run_with_all_that_decided_it(home: Home, trained: dict[str, Any]) -> None:
    (row,) = select(home, "SELECT * FROM runs")
    record = records.read_record(home, "one")
    assert (row["run_id"], row["status"], row["steps"], row["samples"]) == ("one", "finished", 6, 96)
    assert (row["plan_digest"], row["snapshot_id"]) == (record.plan_digest, trained["snapshot_id"])
    assert json.loads(row["dataset_versions"]) == {"toyworld": record.version}
    assert json.loads(row["config"])["optimizer"]["lr"] == record.config["optimizer"]["lr"]
    losses = select(home, "SELECT step, value FROM metrics WHERE name = 'loss' ORDER BY step")
    assert [m["step"] for m in losses] == [4, 6]
    assert losses[-1]["value"] == pytest.approx(trained["metrics"]["loss"])


def test_runs_are_listed_shown_and_verified(home: Home, trained: dict[str, Any]) -> None:
    assert train(home, "--run-id", "two", "--views", "bad").exit_code == 0
    assert train(home, "--run-id", "three", "--seed", "3").exit_code == 0
    listed = json.loads(invoke(run_commands.app, home, "list", "--json").stdout)
    assert [(row["run_id"], row["arm"], row["seed"]) for row in listed] == [
        ("one", "good", 0),
        ("two", "bad", 0),
        ("three", "good", 3),
    ]
    assert "two" in invoke(run_commands.app, home, "list").stdout
    shown = json.loads(invoke(run_commands.app, home, "show", "one", "--json").stdout)
    assert (shown["ledger_steps"], shown["checkpoints"]) == (6, [6]) and shown["metrics"]["loss"] > 0
    assert "checkpoints" in invoke(run_commands.app, home, "show", "one").stdout
    same = invoke(run_commands.app, home, "verify", "one", "two")
    assert same.exit_code == 0 and "same scenes in the same order at all 6 steps" in same.stdout
    other = invoke(run_commands.app, home, "verify", "one", "three", "--json")
    assert other.exit_code == 1 and json.loads(other.stdout)["differs_at"] == 0


def test_rows_that_the_catalog_lost_are_written_again_from_the_files(home: Home, trained: dict[str, Any]) -> None:
    before = select(home, "SELECT * FROM metrics WHERE run_id = 'one' ORDER BY step, name")
    Path(home.catalog).unlink()
    for ending in ("-wal", "-shm"):
        Path(home.catalog + ending).unlink(missing_ok=True)
    assert invoke(run_commands.app, home, "record", "one").exit_code == 0
    assert select(home, "SELECT * FROM metrics WHERE run_id = 'one' ORDER BY step, name") == before
    assert [row["status"] for row in select(home, "SELECT status FROM runs")] == ["finished"]
    # The catalog decides which version is current, so a training needs its datasets back too.
    with pytest.raises(InputError, match="catalog rebuild"):
        train(home, "--run-id", "four")
    rebuild(home)


def test_a_run_id_that_is_taken_and_a_finished_run_are_conflicts(home: Home, trained: dict[str, Any]) -> None:
    with pytest.raises(ConflictError, match="--resume one"):
        train(home, "--run-id", "one")
    with pytest.raises(ConflictError, match="is finished"):
        invoke(train_commands.app, home, "--resume", "one")


def test_a_failed_run_says_so_and_can_be_resumed_with_other_resources_only(home: Home, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(StorageError, match="publish"):
        train(home, "--run-id", "failed", "--set", f"run.checkpoints={tmp_path}/file")
    status = records.read_status(records.runs_url(home, "failed"))
    assert status is not None and status.status == "failed" and "publish" in str(status.message)
    assert select(home, "SELECT status FROM runs WHERE run_id = 'failed'") == [{"status": "failed"}]
    with pytest.raises(UsageError, match="Only keys of `run.`"):
        invoke(train_commands.app, home, "--resume", "failed", "--set", "optimizer.lr=0.5")
    with pytest.raises(UsageError, match="--recipe cannot be combined"):
        invoke(train_commands.app, home, "--resume", "failed", "--recipe", "tiny-cpu")
    assert (
        invoke(train_commands.app, home, "--resume", "failed", "--set", f"run.checkpoints={tmp_path}/folder").exit_code
        == 0
    )
    verdict = json.loads(invoke(run_commands.app, home, "verify", "one", "failed", "--json").stdout)
    assert verdict["differs_at"] is None and verdict["same_losses"]


def test_a_job_killed_at_an_epoch_end_is_resumed_by_its_id(home: Home) -> None:
    """SIGKILL of the whole job ends the lock; the run is found by its files and ends like an uninterrupted one."""
    sets = [f"--set={text}" for text in (*training.SMALL, "plan.epochs=20", "run.keep_checkpoints=30")]
    words = ["--recipe", "tiny-cpu", *sets, "--home", home.url]
    assert CliRunner().invoke(train_commands.app, [*words, "--run-id", "whole"]).exit_code == 0
    process = multiprocessing.get_context("fork").Process(
        target=train_commands.app, args=([*words, "--run-id", "killed"],)
    )
    process.start()
    record = Path(records.runs_url(home, "killed"), "checkpoints", "step-000000006", "state.json")
    deadline = time.monotonic() + 120
    while not record.exists() and time.monotonic() < deadline:
        time.sleep(0.002)
    training.kill([process])
    status = records.read_status(records.runs_url(home, "killed"))
    assert status is not None and status.status == "running" and status.steps < 120
    assert invoke(train_commands.app, home, "--resume", "killed").exit_code == 0
    verdict = records.verify(home, "whole", "killed")
    assert verdict.differs_at is None and verdict.same_views and verdict.same_losses
    assert select(home, "SELECT steps FROM runs WHERE run_id = 'killed'") == [{"steps": 120}]


def test_a_run_that_is_being_trained_is_not_trained_twice(home: Home, trained: dict[str, Any]) -> None:
    with open(Path(trained["url"], "lock"), "a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        Path(trained["url"], "status.json").unlink()
        with pytest.raises(ConflictError, match="being trained by another process"):
            invoke(train_commands.app, home, "--resume", "one")


def test_a_plan_is_printed_and_starts_nothing(home: Home) -> None:
    before = records.list_run_ids(home)
    found = json.loads(train(home, "--plan", "--json", "--num-workers", "2").stdout)
    assert (found["facts"]["steps"], found["ranks"], found["batch_per_rank"]) == (6, 2, 8)
    text = train(home, "--plan", "--objective", "ntp").stdout
    for word in ("steps", "samples", "tokens", "padding", "memory", "SIGReg", "cost", "dropped", "repeated"):
        assert word in text
    assert records.list_run_ids(home) == before


@pytest.mark.parametrize(
    ("words", "error", "match"),
    [
        (["--views", "worse"], UsageError, "--views is 'worse'"),
        (["--views", "1.5"], UsageError, "--views is '1.5'"),
        (["--objective", "clip"], ConfigError, "objective"),
        (["--roles", "humans"], ConfigError, "no role 'humans'"),
        (["--dataset", "nowhere"], InputError, "no dataset 'nowhere'"),
        (["--split", "dev"], InputError, "no split 'dev'"),
        (["--run-id", "../x"], UsageError, "run id"),
        (["--num-workers", "-1"], UsageError, "--num-workers is -1"),
        (["--address", "somewhere:1"], UsageError, "--num-workers 0 trains in this process"),
        (["--num-workers", "3"], ConfigError, "3 ranks do not divide"),
        (["--arm", "ugly"], UsageError, "no arm 'ugly'"),
    ],
)
def test_what_cannot_start_is_refused_with_a_sentence(
    home: Home, words: list[str], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        train(home, *words)


def test_neither_recipe_nor_run_is_refused(home: Home) -> None:
    with pytest.raises(UsageError, match="Name a recipe"):
        invoke(train_commands.app, home, "--plan")
