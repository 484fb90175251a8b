"""`goodviews train` on Ray: a rank or a whole node dies in the middle, and the run is still the uninterrupted one.

The command and the cluster run as processes of their own, so that no other Ray of the test session is in their way.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from infra.home import Home
from tests.trainer import training
from trainer.run import checkpoint, records

pytestmark = pytest.mark.timeout(900)  # a cluster starts, loses a node and notices; two tests may share two cores

EPOCHS = 10
STEPS = EPOCHS * 6
"97 training scenes in batches of 16."
SETS = (f"plan.epochs={EPOCHS}", "run.keep_checkpoints=2", "run.loader_workers=1")
DEADLINE_S = 240


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Home:
    """The toy world, and `plain`: the same training on two ranks that Ray never saw."""
    folder = tmp_path_factory.mktemp("home")
    made = training.make_home(folder)
    training.train_ranks(training.make_job(made, training.small_recipe(*SETS), "plain"), 2, folder)
    return made


def train_command(home: Home, run_id: str, *options: str, sets: tuple[str, ...] = SETS) -> list[str]:
    command = [sys.executable, "-m", "infra.cli", "train", "--recipe", "tiny-cpu", "--run-id", run_id]
    command += ["--home", home.url, "--num-workers", "2", *options]
    return command + [word for text in (*training.SMALL, *sets) for word in ("--set", text)]


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", **more}


@contextlib.contextmanager
def running(command: list[str], log: Path, env: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """The command in the background, its output in `log`; whatever it left is killed at the end."""
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=env, start_new_session=True)
        try:
            yield process
        finally:
            for child in [*family(process.pid), psutil.Process(process.pid)] if process.poll() is None else []:
                with contextlib.suppress(psutil.Error):
                    child.kill()
            process.wait()


def family(pid: int) -> list[psutil.Process]:
    with contextlib.suppress(psutil.Error):
        children: list[psutil.Process] = psutil.Process(pid).children(recursive=True)
        return children
    return []


def ranks_of(pid: int) -> list[psutil.Process]:
    """The ranks of a training among what a process has started, whichever node's raylet it is."""
    return [child for child in family(pid) if "RayTrainWorker" in " ".join(child.cmdline())]


def wait_for_checkpoint(home: Home, run_id: str, process: subprocess.Popen[bytes], log: Path) -> int:
    """The step of the first checkpoint of a run, once it is published and the run has not ended."""
    folder = Path(records.runs_url(home, run_id))
    deadline = time.monotonic() + DEADLINE_S
    while True:
        if (folder / "run.json").exists():
            record = records.read_record(home, run_id)
            if checkpoint.published_steps(records.checkpoints_url(str(folder), record)):
                return last_checkpoint(home, run_id)
        assert process.poll() is None and time.monotonic() < deadline, log.read_text()
        time.sleep(0.005)


@contextlib.contextmanager
def stopped(process: psutil.Process) -> Iterator[None]:
    """The rank stands still, and the others wait for it in their next sum: however fast the machine is, the run is not
    over before it loses this one."""
    process.suspend()
    try:
        yield
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.resume()


def last_checkpoint(home: Home, run_id: str) -> int:
    record = records.read_record(home, run_id)
    return max(checkpoint.published_steps(records.checkpoints_url(records.runs_url(home, run_id), record)))


def assert_it_is_the_plain_run(home: Home, run_id: str) -> None:
    verdict = records.verify(home, "plain", run_id)
    assert verdict.differs_at is None and verdict.same_views and verdict.same_losses
    status = records.read_status(records.runs_url(home, run_id))
    assert status is not None and (status.status, status.steps) == ("finished", STEPS)


def test_a_rank_killed_on_ray_is_replaced_and_the_run_is_bit_identical(home: Home, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with running(train_command(home, "rank-killed", "--num-cpus", "2"), log, environment()) as process:
        step = wait_for_checkpoint(home, "rank-killed", process, log)
        ranks = ranks_of(process.pid)
        assert len(ranks) == 2, [p.cmdline() for p in family(process.pid)]
        with stopped(ranks[1]):
            lost_at = last_checkpoint(home, "rank-killed")
            os.kill(ranks[1].pid, signal.SIGKILL)
        assert process.wait(DEADLINE_S) == 0, log.read_text()
    assert step <= lost_at < STEPS
    assert_it_is_the_plain_run(home, "rank-killed")


def test_a_node_lost_from_a_cluster_of_two_leaves_the_run_as_it_was(home: Home, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("6f" * 32)
    token.chmod(0o600)
    env = environment(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN_PATH=str(token))
    log = tmp_path / "log"
    nodes = [sys.executable, str(Path(__file__).with_name("two_nodes.py"))]
    pipe = subprocess.PIPE
    with subprocess.Popen(nodes, stdin=pipe, stdout=pipe, text=True, env=env) as cluster:
        assert cluster.stdin is not None and cluster.stdout is not None
        address, raylet = cluster.stdout.readline().split()
        with running(train_command(home, "node-lost", "--address", address), log, env) as process:
            step = wait_for_checkpoint(home, "node-lost", process, log)
            there = ranks_of(int(raylet))
            assert len(there) == 1, [p.cmdline() for p in family(int(raylet))]
            with stopped(there[0]):
                cluster.stdin.write("lose\n")
                cluster.stdin.flush()
                assert cluster.stdout.readline().strip() == "lost"
                lost_at = last_checkpoint(home, "node-lost")
            _, alive = psutil.wait_procs(there, DEADLINE_S)
            assert not alive
            assert process.wait(DEADLINE_S) == 0, log.read_text()
        cluster.stdin.close()
    assert step <= lost_at < STEPS
    assert_it_is_the_plain_run(home, "node-lost")


def test_a_sentence_of_a_rank_comes_back_through_ray(home: Home, tmp_path: Path) -> None:
    """A learning rate of 1e30 makes the loss not finite: exit code 1 and that sentence, not a trace of Ray's."""
    log = tmp_path / "log"
    sets = (*SETS, "optimizer.lr=1e30", "optimizer.warmup_share=0.0", "run.log_every_steps=1")
    command = train_command(home, "diverged", "--num-cpus", "2", sets=sets)
    with running(command, log, environment()) as process:
        code = process.wait(DEADLINE_S)
    said = log.read_text()
    assert code == 1 and "error: Step 1 gave loss nan" in said and "Traceback" not in said, said
