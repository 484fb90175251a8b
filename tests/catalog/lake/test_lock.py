from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from catalog.lake import lock
from catalog.versions import commit
from infra.errors import ConflictError, StorageError
from infra.home import Home

ROOT = Path(__file__).parents[3]
HOLD = """
import sys
from catalog.lake.lock import commit_lock
from infra.home import Home
with commit_lock(Home(url=sys.argv[1], catalog=sys.argv[2])):
    print("held", flush=True)
    sys.stdin.read()
"""

MOUNTS = r"""22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
30 22 0:40 / /shared rw,relatime - nfs4 server:/export rw
31 30 8:2 / /shared/local rw - xfs /dev/sdb rw
32 22 0:41 / /mnt/with\040blank rw - cifs //server/share rw
33 22 0:42 / /twice rw - ext4 /dev/sdc rw
34 22 0:43 / /twice rw - fuse.sshfs host: rw
35 22 0:44 / /data rw - ext4 /dev/sdd rw
"""


def hold(home: Home) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, home.url, home.catalog],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=ROOT,
    )
    assert process.stdout is not None and process.stdout.readline() == b"held\n"
    return process


def end(process: subprocess.Popen[bytes]) -> None:
    process.communicate(b"")


def test_waiting_is_bounded_and_the_error_names_the_holder(home: Home) -> None:
    holder = hold(home)
    try:
        sentence = rf"held by process {holder.pid} on \S+; waited 0.2 s"
        with pytest.raises(ConflictError, match=sentence), lock.commit_lock(home, timeout_s=0.2):
            pass
    finally:
        end(holder)
    with lock.commit_lock(home, timeout_s=0.2):
        pass


def test_a_killed_holder_lets_go(home: Home) -> None:
    holder = hold(home)
    holder.kill()
    holder.communicate()
    with lock.commit_lock(home, timeout_s=5):
        pass


def test_two_threads_of_one_process_exclude_each_other(home: Home) -> None:
    inside, most = [0], [0]

    def work() -> None:
        for _ in range(5):
            with lock.commit_lock(home, timeout_s=60):
                inside[0] += 1
                most[0] = max(most[0], inside[0])
                inside[0] -= 1

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1] and inside == [0]


def test_a_lock_file_that_was_removed_meanwhile_is_noticed(home: Home) -> None:
    with lock.commit_lock(home) as check:
        check()
        os.unlink(home.catalog + ".lock")
        with pytest.raises(ConflictError, match="was removed while it was held"):
            check()


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/home/me/catalog.sqlite", "ext4"),
        ("/shared/home/catalog.sqlite", "nfs4"),
        ("/shared", "nfs4"),
        ("/sharedness/catalog.sqlite", "ext4"),
        ("/shared/local/catalog.sqlite", "xfs"),
        ("/mnt/with blank/catalog.sqlite", "cifs"),
        ("/twice/catalog.sqlite", "fuse.sshfs"),
    ],
)
def test_d3_the_filesystem_under_a_path_is_that_of_its_longest_mount_point(path: str, kind: str) -> None:
    assert lock.filesystem_type(path, MOUNTS) == kind


@pytest.mark.parametrize("folder", ["/shared", "/mnt/with blank", "/twice"])
def test_d3_sqlite_on_a_network_filesystem_is_refused_with_a_way_out(folder: str) -> None:
    home = Home(url="/data/home", catalog=f"{folder}/catalog.sqlite")
    with pytest.raises(StorageError, match="network filesystem.*Postgres"):
        lock.refuse_network_filesystem(home, MOUNTS)


def test_d3_a_local_filesystem_is_fine() -> None:
    lock.refuse_network_filesystem(Home(url="/data/home", catalog="/data/home/catalog.sqlite"), MOUNTS)


def test_a_commit_that_lost_its_lock_is_rolled_back(home: Home, publish: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made = publish()
    real = commit._insert_dataset

    def insert_and_lose_lock(*arguments: Any) -> None:
        real(*arguments)
        os.unlink(home.catalog + ".lock")

    monkeypatch.setattr(commit, "_insert_dataset", insert_and_lose_lock)
    with pytest.raises(ConflictError, match="was removed while it was held"):
        commit.commit_version(home, made.dataset, made.version)
    monkeypatch.undo()
    assert not commit.commit_version(home, made.dataset, made.version).was_there
