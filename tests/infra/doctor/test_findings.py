"""Checks run apart: whatever one does, it is a line; secrets are struck out; the exit status tells broken from advice."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest

from infra.doctor import findings as doctor
from infra.doctor.findings import Circumstances
from infra.errors import UsageError
from infra.home import Home

CHECKS = """
import os, signal, sys, time
from infra.doctor.findings import advise, broken, ok
from infra.errors import InputError

def fine(c): yield ok("fine", f"{c.home.catalog if c.home else 'no home'}")
def noisy(c):
    print("[a library talks]")
    print("and warns", file=sys.stderr)
    yield advise("noisy", "it works", "Do this.")
def raising(c):
    yield ok("raising", "half of it")
    raise LookupError("several\\nlines")
def sentence(c):
    raise InputError("There is no such thing.")
    yield
def lacking(c):
    import a_package_that_is_not_there
    yield
def crashing(c): os.kill(os.getpid(), signal.SIGSEGV)
def leaving(c):
    print("the last word", file=sys.stderr)
    os._exit(7)
def hanging(c): time.sleep(600)
def telling(c): yield broken("telling", f"refused {os.environ['DOOR_PASSWORD']} at the door", "Try not " + os.environ["DOOR_PASSWORD"])
"""
NAMES = ("fine", "noisy", "raising", "sentence", "lacking", "crashing", "leaving", "hanging", "telling")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another distribution that offers checks of every kind, for this process and for its children."""
    folder = tmp_path / "site"
    information = folder / "odd_checks-1.dist-info"
    information.mkdir(parents=True)
    (folder / "odd_checks.py").write_text(CHECKS)
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: odd-checks\nVersion: 1\n")
    lines = "".join(f"{name} = odd_checks:{name}\n" for name in NAMES)
    (information / "entry_points.txt").write_text(f"[goodviews.checks]\n{lines}")
    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])


def findings(*names: str, home: Home | None = None, timeout_s: float = 60.0) -> list[tuple[str, str, str]]:
    found = doctor.examine(Circumstances(home=home), only=names, timeout_s=timeout_s)
    assert all((finding.advice is None) == (finding.state == "ok") for finding in found)
    return [(finding.check, finding.state, finding.found) for finding in found]


def test_a_check_that_raises_crashes_or_hangs_is_a_line(site: None) -> None:
    names = [name for name in NAMES if name not in ("hanging", "telling")]
    assert findings(*names) == [
        ("crashing", "broken", "the check ended by SIGSEGV: without a word"),
        ("fine", "ok", "no home"),
        ("lacking", "broken", "the package a_package_that_is_not_there is not installed"),
        ("leaving", "broken", "the check ended with exit status 7: the last word"),
        ("noisy", "advice", "it works"),
        ("raising", "broken", "the check raised LookupError: several lines"),
        ("sentence", "broken", "There is no such thing."),
    ]
    assert findings("hanging", timeout_s=1.0) == [("hanging", "broken", "the check did not end within 1 s")]


def test_secrets_are_struck_out_and_on_no_command_line(site: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOOR_PASSWORD", "hush-hush")
    (found,) = doctor.examine(Circumstances(home=None), only=["telling"])
    assert (found.found, found.advice) == ("refused *** at the door", "Try not ***")
    started: list[Any] = []
    real = subprocess.run

    def run(command: list[str], **options: Any) -> Any:
        started.append(command)
        return real(command, **options)

    monkeypatch.setattr(subprocess, "run", run)
    home = Home(url="/nowhere", catalog="postgres:password=open-sesame")
    assert findings("fine", home=home) == [("fine", "ok", "postgres:password=open-sesame")]
    assert len(started) == 1 and "open-sesame" not in str(started)


def test_an_unknown_check_is_a_usage_error_that_names_the_others(site: None) -> None:
    with pytest.raises(UsageError, match=r"no check 'fien'. Checks: catalog, .*, fine, "):
        doctor.examine(Circumstances(home=None), only=["fien"])


def goodviews_doctor(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "infra.cli", "doctor", *words],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_exit_status_is_1_only_when_something_is_broken(site: None, tmp_path: Path) -> None:
    home = str(tmp_path / "home")
    advice = goodviews_doctor("--only", "noisy", "--only", "fine", "--home", home)
    assert (advice.returncode, advice.stderr) == (0, "")
    assert advice.stdout.splitlines() == [
        f"ok      fine   {home}/catalog.sqlite",
        "advice  noisy  it works  Do this.",
    ]
    bad = goodviews_doctor("--only", "noisy", "--only", "leaving", "--json", "--home", home)
    assert bad.returncode == 1
    assert [(f["check"], f["state"]) for f in json.loads(bad.stdout)] == [("leaving", "broken"), ("noisy", "advice")]


def test_a_home_that_cannot_be_named_is_a_line_too(site: None) -> None:
    done = goodviews_doctor("--only", "fine", "--json", "--home", "s3://bucket/home")
    assert done.returncode == 1
    home, fine = json.loads(done.stdout)
    assert home["state"] == "broken" and "Name a Postgres catalog" in home["found"]
    assert (fine["state"], fine["found"]) == ("ok", "no home")


def test_every_check_of_ours_answers_here(tmp_path: Path) -> None:
    done = goodviews_doctor("--json", "--home", str(tmp_path / "home"))
    assert "Traceback" not in done.stdout + done.stderr
    found = json.loads(done.stdout)
    ours = {entry.name for entry in entry_points(group=doctor.GROUP)}
    assert ours >= {"catalog", "cuda", "disk", "duckdb", "faiss", "machine", "ray", "store", "versions"}
    assert {f["check"] for f in found} >= ours | {"clock", "lock"}
    assert [f for f in found if f["state"] == "broken"] == [] and done.returncode == 0
    assert list(tmp_path.iterdir()) == []
