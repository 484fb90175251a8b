"""The one place that starts or joins Ray, and the one loop that runs tasks on it.

Invariant: a task may run twice (a worker died, an OSError came), so its outputs must be idempotent; its result is
handed out once. When `map` ends, by error or interrupt too, no task of it is running any more.

Three places, one interface: in this process (`num_cpus=0`: no Ray at all, for small jobs, tests and debuggers), a Ray
of this machine (the default, about 6 s to start), a Ray cluster (`address`, or RAY_ADDRESS inside `ray job submit`).
Ray's token authentication stays on. `working_dir` is never set: it would change the workers' folder and hide modules.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import reprlib
import secrets
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from infra.errors import GoodviewsError, StorageError, TransientStorageError, UsageError

Task = TypeVar("Task")
Result = TypeVar("Result")

CANCEL_WAIT_S = 5.0
KNOCK_TIMEOUT_S = 10.0

_log = logging.getLogger(__name__)
_short = reprlib.Repr()
_short.maxstring = _short.maxother = 160


class TaskFailure(Exception):
    """A task raised what no sentence was written for: a bug. Names the task and holds the worker's traceback."""


class Workers(ABC):
    """Where tasks run. `slots` is the number that can run at once."""

    slots: int

    @abstractmethod
    def map(
        self, function: Callable[[Task], Result], tasks: Iterable[Task], *, retries: int = 3
    ) -> Iterator[tuple[int, Result]]:
        """Yield (place of the task, result) as tasks finish, in no particular order.

        Tasks are drawn lazily, a few more than `slots` at a time, so 94,000 of them need not exist at once. `function`
        and tasks are pickled: keep tasks small. A dead worker and an OSError are tried again, `retries` times.
        The first failure ends the map: a GoodviewsError is raised as it was in the task, an OSError as StorageError,
        anything else as TaskFailure.
        """


@contextlib.contextmanager
def open_workers(*, address: str | None, num_cpus: int | None) -> Iterator[Workers]:
    """Start or join Ray for the time of the block; `num_cpus=0` runs the tasks in this process instead.

    num_cpus: None for all there are. On a cluster it bounds how many tasks are under way.
    A Ray that this process has already opened is joined and left running.
    Raises UsageError when the address does not answer or the token is wrong.
    """
    if num_cpus is not None and num_cpus < 0:
        raise UsageError(
            f"--num-cpus is {num_cpus}, but must be 0 (in this process) or more. Leave it out for all CPUs."
        )
    if num_cpus == 0:
        if address is not None:
            raise UsageError(f"--num-cpus 0 means no Ray, but --address {address} names one. Give one of the two.")
        yield _InProcess()
        return

    joined = address or os.environ.get("RAY_ADDRESS")
    joined = None if joined == "local" else joined
    if joined and has_token():
        # Ray itself turns authentication on for a local start only, and reads this when it is imported.
        os.environ.setdefault("RAY_AUTH_MODE", "token")
    import ray

    if ray.is_initialized():
        yield _OnRay(_slots(num_cpus), exact=num_cpus is not None)
        return
    try:
        if joined:
            _join(joined)
        else:
            _start(num_cpus)
        yield _OnRay(_slots(num_cpus if joined else None), exact=bool(joined) and num_cpus is not None)
    finally:
        ray.shutdown()


class _InProcess(Workers):
    slots = 1

    def map(
        self, function: Callable[[Task], Result], tasks: Iterable[Task], *, retries: int = 3
    ) -> Iterator[tuple[int, Result]]:
        for index, task in enumerate(tasks):
            yield index, _attempts(function, task, index, retries)


def _attempts(function: Callable[[Task], Result], task: Task, index: int, retries: int) -> Result:
    for attempt in range(retries + 1):
        try:
            return function(task)
        except TransientStorageError:
            if attempt == retries:
                raise
        except GoodviewsError:
            raise
        except OSError as error:
            if attempt == retries:
                raise _exhausted(_name(function, task, index), error, retries) from error
        except Exception as error:
            raise TaskFailure(f"{_name(function, task, index)} raised {type(error).__name__}: {error}") from error
    raise ValueError(f"retries is {retries}, but must be 0 or more")


class _OnRay(Workers):
    def __init__(self, slots: int, *, exact: bool) -> None:
        self.slots = slots
        # Some tasks wait at the workers, so that a finished one is followed at once; never many, as each holds memory.
        self.in_flight = slots if exact else 2 * slots + 2

    def map(
        self, function: Callable[[Task], Result], tasks: Iterable[Task], *, retries: int = 3
    ) -> Iterator[tuple[int, Result]]:
        import ray

        options = {"num_cpus": 1, "max_retries": retries, "retry_exceptions": [OSError, TransientStorageError]}
        remote: Any = ray.remote(_call).options(**options)
        shared = ray.put(function)
        numbered = enumerate(tasks)
        pending: dict[Any, tuple[int, Task]] = {}
        try:
            while True:
                for index, task in itertools.islice(numbered, self.in_flight - len(pending)):
                    pending[remote.remote(shared, task)] = (index, task)
                if not pending:
                    return
                ready, _ = ray.wait(list(pending), num_returns=1)
                index, task = pending.pop(ready[0])
                yield index, _result(ready[0], _name(function, task, index), retries)
        finally:
            _cancel(list(pending))


def _call(function: Callable[[Task], Result], task: Task) -> Result:
    return function(task)


def _name(function: Callable[..., Any], task: object, index: int) -> str:
    function = getattr(function, "func", function)
    return f"Task {index} of {getattr(function, '__qualname__', function)} ({_short.repr(task)})"


def _result(reference: Any, name: str, retries: int) -> Any:
    import ray
    from ray.exceptions import RayError, RayTaskError

    try:
        return ray.get(reference)
    except RayTaskError as error:
        cause = error.cause
        if isinstance(cause, GoodviewsError):
            _log.debug("%s failed on its worker:\n%s", name, error)
            # The user needs the sentence, not the way it came through Ray.
            raise cause from None
        if isinstance(cause, OSError):
            raise _exhausted(name, cause, retries) from error
        raise TaskFailure(f"{name} failed on its worker:\n{error}") from error
    except RayError as error:
        reason = " ".join(str(error).split())
        message = (
            f"{name} was lost {retries + 1} times with its worker ({type(error).__name__}: {reason}). Most often the "
            "system ended it for want of memory. Give the machine more, or use fewer CPUs or smaller shards, and rerun."
        )
        raise GoodviewsError(message) from error


def _exhausted(name: str, error: OSError, retries: int) -> StorageError:
    message = f"{name} failed {retries + 1} times, the last time with {type(error).__name__}: {error}."
    return StorageError(f"{message} Check the disk or the store and rerun; finished work is kept.")


def _cancel(references: list[Any]) -> None:
    """End tasks that nobody waits for, so that none writes after its job has failed."""
    import ray

    if not references or not ray.is_initialized():
        return
    for reference in references:
        ray.cancel(reference, force=False)
    _, running = ray.wait(references, num_returns=len(references), timeout=CANCEL_WAIT_S)
    for reference in running:
        # It is deep in native code and did not notice. Killing it is safe: what it writes is published whole or not.
        ray.cancel(reference, force=True)
    if running:
        ray.wait(running, num_returns=len(running), timeout=CANCEL_WAIT_S)


def _slots(limit: int | None) -> int:
    import ray

    resources: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
    cpus = int(resources.get("CPU", 0))
    if cpus == 0:
        raise UsageError("The Ray cluster has no CPU for tasks. Add a node with CPUs, or do without Ray: --num-cpus 0.")
    return cpus if limit is None else min(limit, cpus)


def _start(num_cpus: int | None) -> None:
    import ray
    from ray.exceptions import RayError

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    settings: dict[str, Any] = {"include_dashboard": False, "logging_level": logging.ERROR, "log_to_driver": False}
    try:
        _keep_token_private()
        # "local" never looks for a cluster that somebody else has left running on this machine.
        ray.init(address="local", num_cpus=num_cpus, **settings)
    except (OSError, RayError, RuntimeError) as error:
        reason = " ".join(str(error).split()).rstrip(".")
        message = f"Ray did not start on this machine: {reason}. Mend that, or do without Ray: --num-cpus 0."
        raise GoodviewsError(message) from error


def _join(address: str) -> None:
    import ray
    from ray.exceptions import RayError

    _knock(address)
    try:
        ray.init(address=address, logging_level=logging.ERROR, log_to_driver=False)
    except (OSError, RayError, ValueError, RuntimeError, ImportError) as error:
        reason = " ".join(str(error).split()).rstrip(".")
        message = (
            f"Cannot join the Ray cluster at {address}: {reason}. If it runs, most often the token is missing or wrong:"
            " put it into RAY_AUTH_TOKEN, into the file named by RAY_AUTH_TOKEN_PATH, or into ~/.ray/auth_token."
        )
        raise UsageError(message) from error


def _knock(address: str) -> None:
    """Refuse an address where nobody listens; Ray itself kept trying for over four minutes, without a word."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=KNOCK_TIMEOUT_S).close()
    except (OSError, OverflowError) as error:
        message = (
            f"Nobody answers at the Ray address {address} ({error}). Check the address, and that the cluster runs."
        )
        raise UsageError(message) from error


def token_path() -> Path:
    """Where Ray keeps the token of its authentication when no variable names one."""
    return Path.home() / ".ray" / "auth_token"


def has_token() -> bool:
    """Whether Ray has a token to show: RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH or its own file."""
    named = os.environ.get("RAY_AUTH_TOKEN") or os.environ.get("RAY_AUTH_TOKEN_PATH")
    return bool(named) or token_path().is_file()


def _keep_token_private() -> None:
    """Make Ray's token readable by its owner only; Ray itself would create it readable by everybody."""
    path = token_path()
    if not has_token():
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(secrets.token_hex(32))
        # A link, because a rename would replace the token of a Ray that started just now.
        with contextlib.suppress(FileExistsError):
            os.link(temporary, path)
        temporary.unlink()
    with contextlib.suppress(FileNotFoundError):
        path.chmod(0o600)
