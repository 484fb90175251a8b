"""The catalog, its lock and DuckDB's extensions: fine, absent, and broken in every way that a job would meet."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Any

import pytest

from catalog import checks
from catalog.lake import extensions, lock
from catalog.versions.commit import commit_version
from infra.doctor.findings import Circumstances, Finding
from infra.errors import StorageError
from infra.home import Home
from tests.conftest import POSTGRES_PASSWORD


def look(home: Home | None) -> list[Finding]:
    found = list(checks.catalog(Circumstances(home=home)))
    assert POSTGRES_PASSWORD not in str(found) and "s3 cret" not in str(found)
    return found


def names(home: Home) -> set[str]:
    """What lies in HOME, but for the files that every reader of SQLite makes."""
    return {name for name in os.listdir(home.url) if not name.endswith(("-wal", "-shm"))}


def states(home: Home) -> dict[str, str]:
    return {finding.check: finding.state for finding in look(home)}


def test_a_catalog_that_is_not_there_yet_is_fine_and_stays_away(home: Home) -> None:
    assert states(home) == {"lock": "ok", "catalog": "ok"}
    assert "yet" in look(home)[1].found and not os.path.exists(home.url)
    assert look(None) == []


def test_a_catalog_that_answers_says_what_it_holds(home: Home, publish: Any) -> None:
    made = publish()
    commit_version(home, made.dataset, made.version)
    before = names(home)
    found = look(home)
    assert [f.state for f in found] == ["ok", "ok"] and "it holds 1 datasets" in found[1].found
    assert names(home) == before


def test_a_damaged_catalog_and_one_of_another_home_are_broken(home: Home, publish: Any) -> None:
    made = publish()
    commit_version(home, made.dataset, made.version)
    other = Home(url=home.url + "-other", catalog=home.catalog)
    assert states(other) == {"lock": "ok", "catalog": "broken"}
    # A rebuild would take the catalog away from the HOME that it belongs to.
    advice = str(look(other)[1].advice)
    assert "--home" in advice and "rebuild" not in advice
    Path(home.catalog).write_bytes(b"no database" * 1000)
    found = look(home)
    assert [f.state for f in found] == ["ok", "broken"] and "is damaged" in found[1].found
    assert "rebuild" in str(found[1].advice)


def test_a_folder_that_takes_no_file_is_no_failure_of_locks(home: Home) -> None:
    """Not even root makes a file in /proc."""
    (first, *_) = look(Home(url=home.url, catalog="/proc/nowhere/catalog.sqlite"))
    assert (first.check, first.state) == ("lock", "broken")
    assert "no file can be made in /proc" in first.found and "file locks" not in first.found


def test_d3_a_network_filesystem_is_named(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    mount = "36 35 98:0 / / rw - nfs4 server:/ rw"
    refuse = lock.refuse_network_filesystem
    monkeypatch.setattr(checks, "refuse_network_filesystem", lambda home: refuse(home, mount))
    (first, *_) = look(home)
    assert (first.check, first.state) == ("lock", "broken") and "(nfs4)" in first.found


def test_d3_locks_that_are_refused_or_shut_nobody_out_are_named(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "flock", lambda descriptor, how: None)
    assert "both granted" in look(home)[0].found and look(home)[0].state == "broken"

    def refuse(descriptor: int, how: int) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    (first, *_) = look(home)
    assert first.state == "broken" and "No locks available" in first.found
    assert os.listdir(os.path.dirname(home.url)) == []


def test_postgres_answers_and_its_password_is_never_said(postgres_catalog: str, tmp_path: Path) -> None:
    home = Home(url=str(tmp_path), catalog=postgres_catalog)
    assert states(home) == {"lock": "ok", "catalog": "ok"}
    with pytest.raises(StorageError) as caught:
        look(Home(url=str(tmp_path), catalog=postgres_catalog.replace("user=gv", "user=nobody")))
    assert POSTGRES_PASSWORD not in str(caught.value)


def test_the_extensions_load_from_wheels() -> None:
    (found,) = checks.duckdb(Circumstances(home=None))
    assert found.state == "ok" and all(name in found.found for name in extensions.NAMES)


def test_an_extension_without_its_wheel_is_broken_or_advised_against(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = extensions.wheel_file
    monkeypatch.setenv("HOME", str(tmp_path))  # where DuckDB keeps what it downloads
    monkeypatch.setattr(extensions, "wheel_file", lambda name: None if name == "httpfs" else real(name))
    first, _ = checks.duckdb(Circumstances(home=None))
    # Without a network it is broken; with one DuckDB fetches it, which the next machine may not be able to do.
    assert first.state in ("broken", "advice") and first.advice == f"Run `pip install {extensions.package('httpfs')}`."


def test_a_damaged_extension_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = extensions.wheel_file
    (tmp_path / "httpfs.duckdb_extension").write_bytes(b"no library" * 1000)
    damaged = str(tmp_path / "httpfs.duckdb_extension")
    monkeypatch.setattr(extensions, "wheel_file", lambda name: damaged if name == "httpfs" else real(name))
    first, second = checks.duckdb(Circumstances(home=None))
    assert (first.state, second.state) == ("broken", "ok")
    assert "httpfs" in first.found and "\n" not in first.found
