"""What a machine brings, judged from facts that are given, so that every verdict is seen on every machine."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from infra.doctor import machine
from infra.doctor.findings import Circumstances
from infra.errors import StorageError
from infra.home import Home
from infra.session import Workers

ANYWHERE = Circumstances(home=None)


@pytest.mark.parametrize(
    ("build", "runtime", "count", "seen", "state", "words"),
    [
        ("2.9.0+cpu", "none", 0, [], "ok", "no GPU: CPU only"),
        ("2.9.0", "12.8", 0, [], "ok", "no GPU: CPU only .* built for CUDA 12.8"),
        ("2.9.0+cpu", "none", 0, ["H200, 143771 MiB, 570.1"], "advice", "built without CUDA"),
        ("2.9.0", "12.8", 0, ["H200, 143771 MiB, 470.1"], "broken", "can use none"),
        ("2.9.0", "12.8", 1, ["H200, 143771 MiB, 570.1"], "ok", "1 GPUs usable"),
    ],
)
def test_torch_and_the_driver_are_compared(
    monkeypatch: pytest.MonkeyPatch, build: str, runtime: str, count: int, seen: list[str], state: str, words: str
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    (found,) = machine.judge_cuda(build, runtime, count, seen)
    assert found.state == state
    assert re.search(words, found.found), found.found


def test_hidden_gpus_are_no_fault_of_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (found,) = machine.judge_cuda("2.9.0", "12.8", 0, ["H200"])
    assert found.state == "advice" and "hides 1 GPUs" in found.found


def test_a_version_outside_its_range_and_a_missing_package_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ["numpy>=9000", "pyarrow>=20", "a-package-that-is-not-there>=1", 'another-one>=1; extra == "gpu"']
    monkeypatch.setattr(machine, "requires", lambda name: lines)
    all_right, *wrong = machine.versions(ANYWHERE)
    assert all_right.state == "ok" and "pyarrow " in all_right.found
    assert [(f.state, f.advice) for f in wrong] == [
        ("broken", "Run `pip install 'numpy>=9000'`."),
        ("broken", "Run `pip install 'a-package-that-is-not-there>=1'`."),
    ]


def test_this_environment_is_what_the_project_asks_for() -> None:
    assert [found.found for found in machine.versions(ANYWHERE) if found.state != "ok"] == []


@pytest.mark.parametrize(
    ("files", "cpus"),
    [
        ({"cpu.max": "150000 100000\n"}, 1.5),
        ({"cpu.max": "max 100000\n"}, None),
        ({"cpu/cpu.cfs_quota_us": "200000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 2.0),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        ({}, None),
    ],
)
def test_the_limit_of_a_container_is_read(tmp_path: Path, files: dict[str, str], cpus: float | None) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert machine.cpu_quota(str(tmp_path)) == cpus


def test_the_memory_of_a_container_is_its_limit(tmp_path: Path) -> None:
    whole = machine.memory_bytes(str(tmp_path))
    assert whole > 1 << 28
    (tmp_path / "memory.max").write_text("1000\n")
    assert machine.memory_bytes(str(tmp_path)) == 1000
    (tmp_path / "memory.max").write_text("max\n")
    assert machine.memory_bytes(str(tmp_path)) == whole


@pytest.mark.parametrize(
    ("quota", "threads", "state", "words"),
    [
        (None, None, "ok", "OMP_NUM_THREADS=unset"),
        (0.5, None, "advice", "0.5 allowed by the container"),
        (0.5, "1", "ok", "OMP_NUM_THREADS=1"),
        (None, "4096", "advice", "OMP_NUM_THREADS=4096"),
    ],
)
def test_more_threads_than_processors_are_advised_against(
    monkeypatch: pytest.MonkeyPatch, quota: float | None, threads: str | None, state: str, words: str
) -> None:
    monkeypatch.setattr(machine, "cpu_quota", lambda: quota)
    monkeypatch.setattr(machine, "memory_bytes", lambda: 8 << 30)
    monkeypatch.delenv("OMP_NUM_THREADS")
    if threads is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", threads)
    (found,) = machine.machine(ANYWHERE)
    assert found.state == state and words in found.found


def disk_with(free_bytes: int, free_files: int) -> Callable[[str], Any]:
    facts = os.statvfs("/")
    values = list(facts)
    values[1], values[4], values[5], values[7] = 1, free_bytes, 10**9, free_files
    return lambda folder: os.statvfs_result(values)


@pytest.mark.parametrize(
    ("free_bytes", "free_files", "state"),
    [(100 << 30, 10**6, "ok"), (1 << 30, 10**6, "advice"), (100 << 20, 10**6, "broken"), (100 << 30, 5, "advice")],
)
def test_d4_a_disk_that_is_nearly_full_is_named_before_a_job_fills_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free_bytes: int, free_files: int, state: str
) -> None:
    monkeypatch.setattr(os, "statvfs", disk_with(free_bytes, free_files))
    home = Home(url=str(tmp_path / "not" / "yet"), catalog="x")
    found = list(machine.disk(Circumstances(home=home)))
    assert [f.state for f in found] == [state, state]
    assert str(tmp_path) in found[0].found and "temporary files" in found[1].found
    remote = Circumstances(home=Home(url="s3://bucket/home", catalog="postgres:"))
    assert len(list(machine.disk(remote))) == 1


def test_a_file_in_the_place_of_home_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(StorageError, match="file is no folder"):
        machine.existing_parent(str(tmp_path / "file" / "home"))


def test_an_open_ray_and_a_token_that_others_can_read_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    assert [f.state for f in machine.ray(ANYWHERE)] == ["ok"]
    token = tmp_path / ".ray" / "auth_token"
    token.parent.mkdir()
    token.write_text("hush-hush")
    token.chmod(0o644)
    first, _ = machine.ray(ANYWHERE)
    assert first.state == "advice" and first.advice == f"Run `chmod 600 {token}`." and "hush" not in first.found
    token.chmod(0o600)
    assert [f.state for f in machine.ray(ANYWHERE)] == ["ok"]
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    assert [f.state for f in machine.ray(ANYWHERE)] == ["broken", "ok"]
    monkeypatch.delenv("RAY_AUTH_MODE")
    token.unlink()
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    first, second = machine.ray(ANYWHERE)
    assert "no token" in first.found and "head:6379" in second.found


def test_a_ray_that_starts_answers(ray_workers: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert "a task answered from" in list(machine.ray(Circumstances(home=None, with_ray=True)))[-1].found
