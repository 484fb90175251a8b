"""Session: the same loop with Ray and without, each result once, each failure as one clear error, nothing left running."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from infra import session
from infra.errors import GoodviewsError, InputError, RejectBudgetError, StorageError, UsageError
from infra.session import TaskFailure, Workers, open_workers

REPOSITORY = Path(session.__file__).parents[1]


@pytest.fixture(params=["in this process", "on Ray"])
def workers(request: pytest.FixtureRequest) -> Iterator[Workers]:
    """Both kinds of workers."""
    if request.param == "on Ray":
        yield request.getfixturevalue("ray_workers")
        return
    with open_workers(address=None, num_cpus=0) as made:
        yield made


# Functions for workers are made inside functions, so that they travel by value: workers do not import test modules.


def counting(folder: Path) -> Callable[[int], int]:
    """A task that counts its own runs in a file."""

    def count(task: int) -> int:
        path = folder / f"runs-{task}"
        runs = len(path.read_text()) + 1 if path.exists() else 1
        path.write_text("x" * runs)
        return runs

    return count


def test_every_result_comes_once_with_the_place_of_its_task(workers: Workers) -> None:
    def double(task: str) -> str:
        return task * 2

    results = list(workers.map(double, (f"t{i}" for i in range(50))))
    assert len(results) == 50
    assert dict(results) == {i: f"t{i}t{i}" for i in range(50)}


def test_no_tasks_give_no_results(workers: Workers) -> None:
    assert list(workers.map(abs, [])) == []


def test_tasks_are_drawn_lazily(workers: Workers) -> None:
    drawn = []

    def tasks() -> Iterator[int]:
        for i in range(1000):
            drawn.append(i)
            yield i

    results = workers.map(abs, tasks())
    next(results)
    assert 1 <= len(drawn) <= 2 * workers.slots + 3
    assert len(list(results)) == 999
    assert len(drawn) == 1000


@pytest.mark.parametrize("kind", [InputError, RejectBudgetError])
def test_an_error_with_a_sentence_arrives_as_itself(workers: Workers, kind: type[GoodviewsError]) -> None:
    def fail(task: int) -> int:
        if task == 3:
            raise kind("File three is broken.")
        return task

    with pytest.raises(kind) as caught:
        list(workers.map(fail, range(20)))
    assert type(caught.value) is kind
    assert str(caught.value) == "File three is broken."


def test_a_bug_in_a_task_names_the_task(workers: Workers) -> None:
    def divide(task: int) -> float:
        return 1 / task

    with pytest.raises(TaskFailure) as caught:
        list(workers.map(divide, [2, 1, 0]))
    assert "Task 2 of" in str(caught.value)
    assert "divide (0)" in str(caught.value)
    assert "ZeroDivisionError" in str(caught.value)


def test_an_os_error_is_tried_again(workers: Workers, tmp_path: Path) -> None:
    count = counting(tmp_path)

    def flaky(task: int) -> int:
        runs = count(task)
        if runs < 3:
            raise ConnectionResetError("dropped")
        return runs

    assert dict(workers.map(flaky, range(2), retries=3)) == {0: 3, 1: 3}


def test_an_os_error_that_stays_is_a_storage_error_after_the_retries(workers: Workers, tmp_path: Path) -> None:
    count = counting(tmp_path)

    def refused(task: int) -> int:
        count(task)
        raise PermissionError(13, "no")

    with pytest.raises(StorageError, match=r"Task 0 of .*refused \(7\) failed 2 times.*PermissionError"):
        list(workers.map(refused, [7], retries=1))
    assert (tmp_path / "runs-7").read_text() == "xx"


def test_an_error_with_a_sentence_is_not_tried_again(workers: Workers, tmp_path: Path) -> None:
    count = counting(tmp_path)

    def fail(task: int) -> int:
        count(task)
        raise StorageError("The disk is full.")

    with pytest.raises(StorageError, match="The disk is full"):
        list(workers.map(fail, [7]))
    assert (tmp_path / "runs-7").read_text() == "x"


def test_a_killed_worker_is_replaced_and_its_task_done_again(ray_workers: Workers, tmp_path: Path) -> None:
    count = counting(tmp_path)

    def die_once(task: int) -> int:
        if count(task) == 1 and task == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return task

    assert sorted(ray_workers.map(die_once, range(4))) == [(i, i) for i in range(4)]
    assert (tmp_path / "runs-1").read_text() == "xx"


def test_a_task_that_always_kills_its_worker_is_one_sentence(ray_workers: Workers) -> None:
    def die(task: int) -> int:
        os.kill(os.getpid(), signal.SIGKILL)
        return task

    with pytest.raises(GoodviewsError, match=r"die \(5\) was lost 1 times with its worker"):
        list(ray_workers.map(die, [5], retries=0))


def test_the_first_failure_ends_the_tasks_that_run(ray_workers: Workers, tmp_path: Path) -> None:
    def work(task: int) -> None:
        if task == 0:
            while not (tmp_path / "started").exists():
                time.sleep(0.01)
            raise InputError("zero")
        (tmp_path / "started").write_text(str(os.getpid()))
        for _ in range(6000):
            time.sleep(0.01)
        (tmp_path / "ended").write_text("x")

    with pytest.raises(InputError, match="zero"):
        list(ray_workers.map(work, [0, 1]))
    # Its worker is free again (or gone), long before the 60 s that the task would have taken.
    assert dict(ray_workers.map(abs, [-1, -2, -3])) == {0: 1, 1: 2, 2: 3}
    assert not (tmp_path / "ended").exists()


def test_a_consumer_that_stops_early_leaves_nothing_running(ray_workers: Workers, tmp_path: Path) -> None:
    def work(task: int) -> int:
        if task:
            for _ in range(6000):
                time.sleep(0.01)
            (tmp_path / "ended").write_text("x")
        return task

    results = ray_workers.map(work, range(4))
    assert next(results) == (0, 0)
    results.close()  # type: ignore[attr-defined]
    assert dict(ray_workers.map(abs, [-1, -2])) == {0: 1, 1: 2}
    assert not (tmp_path / "ended").exists()


def test_an_open_ray_is_joined_and_left_running(ray_workers: Workers) -> None:
    import ray

    with open_workers(address=None, num_cpus=1) as joined:
        assert joined.slots == 1
        assert dict(joined.map(abs, [-1, -2, -3])) == {0: 1, 1: 2, 2: 3}
    assert ray.is_initialized()
    assert dict(ray_workers.map(abs, [-1])) == {0: 1}


def test_a_bound_on_cpus_of_a_joined_ray_bounds_what_runs_at_once(ray_workers: Workers, tmp_path: Path) -> None:
    def alone(task: int) -> bool:
        mark = tmp_path / f"running-{task}"
        mark.write_text("x")
        time.sleep(0.05)
        alone = [p.name for p in tmp_path.iterdir()] == [mark.name]
        mark.unlink()
        return alone

    with open_workers(address=None, num_cpus=1) as one:
        assert [r for _, r in one.map(alone, range(6))] == [True] * 6


def test_the_token_of_ray_is_readable_by_its_owner_only(ray_workers: Workers) -> None:
    assert ray_workers.slots == 2
    if os.environ.get("RAY_AUTH_TOKEN") or os.environ.get("RAY_AUTH_TOKEN_PATH"):
        pytest.skip("a token of the caller's own is in use")
    assert stat.S_IMODE((Path.home() / ".ray" / "auth_token").stat().st_mode) == 0o600
    assert os.environ["RAY_AUTH_MODE"] == "token"


def test_without_ray_nothing_of_ray_is_imported() -> None:
    code = (
        "import sys\nfrom infra.session import open_workers\n"
        "with open_workers(address=None, num_cpus=0) as w: print(list(w.map(abs, [-3])), 'ray' in sys.modules)"
    )
    done = run_python(code)
    assert done.stdout == "[(0, 3)] False\n", done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"address": None, "num_cpus": -1}, "--num-cpus is -1"),
        ({"address": "host:6379", "num_cpus": 0}, "Give one of the two"),
    ],
)
def test_a_wrong_number_of_cpus_is_a_usage_error(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words), open_workers(**arguments):
        pass


def test_an_address_where_nobody_listens_is_one_sentence_at_once() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    # In a process of its own, because this one may hold a Ray already.
    code = (
        "from infra.session import open_workers\nfrom infra.errors import UsageError\n"
        f"try:\n  with open_workers(address='{address}', num_cpus=None): print('joined')\n"
        "except UsageError as error: print(error)"
    )
    done = run_python(code)
    assert done.stdout.startswith(f"Nobody answers at the Ray address {address}"), done.stderr


INTERRUPTED = """
import sys, time
from infra.session import open_workers
def main():
    # Arguments do not travel to the workers, closures do.
    path = sys.argv[1]
    def nap(task):
        open(path, "w").close()
        for _ in range(6000): time.sleep(0.01)
    with open_workers(address="local", num_cpus=1) as workers:
        try:
            list(workers.map(nap, range(3)))
        except KeyboardInterrupt:
            print("interrupted", flush=True)
            print(sum(1 for _ in workers.map(abs, range(3))), flush=True)
main()
"""


def test_an_interrupt_ends_the_tasks_and_goes_on_up(tmp_path: Path) -> None:
    mark = tmp_path / "started"
    process = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED, str(mark)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=REPOSITORY
    )
    deadline = time.monotonic() + 100
    while not mark.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, error = process.communicate(timeout=100)
    assert out == b"interrupted\n3\n", error


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    """A fresh Python in the folder of the project."""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=REPOSITORY, check=False)
