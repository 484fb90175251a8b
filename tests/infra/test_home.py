"""HOME and catalog: arguments before environment before defaults; one place means one thing; no password is shown."""

from __future__ import annotations

from pathlib import Path

import pytest

from infra import home
from infra.errors import UsageError


@pytest.fixture(autouse=True)
def _bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GOODVIEWS_HOME", raising=False)
    monkeypatch.delenv("GOODVIEWS_CATALOG", raising=False)
    monkeypatch.chdir(tmp_path)


def test_the_default_is_beside_the_caller(tmp_path: Path) -> None:
    assert home.resolve() == home.Home(
        url=str(tmp_path / "goodviews-home"), catalog=str(tmp_path / "goodviews-home" / "catalog.sqlite")
    )


def test_arguments_win_over_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOODVIEWS_HOME", str(tmp_path / "env"))
    monkeypatch.setenv("GOODVIEWS_CATALOG", "postgres:dbname=env")
    assert home.resolve() == home.Home(url=str(tmp_path / "env"), catalog="postgres:dbname=env")
    named = home.resolve("named", "named.sqlite")
    assert named == home.Home(url=str(tmp_path / "named"), catalog=str(tmp_path / "named.sqlite"))


def test_empty_environment_variables_are_as_good_as_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOODVIEWS_HOME", "")
    monkeypatch.setenv("GOODVIEWS_CATALOG", "")
    assert home.resolve().catalog == str(tmp_path / "goodviews-home" / "catalog.sqlite")


def test_a_remote_home_needs_a_postgres_catalog() -> None:
    with pytest.raises(UsageError, match="Name a Postgres catalog"):
        home.resolve("s3://bucket/home")
    with pytest.raises(UsageError, match="a SQLite file on one machine"):
        home.resolve("s3://bucket/home", "/data/catalog.sqlite")
    resolved = home.resolve("s3://bucket/home/", "postgresql:dbname=x")
    assert resolved == home.Home(url="s3://bucket/home", catalog="postgres:dbname=x")


def test_a_catalog_of_another_kind_is_refused() -> None:
    with pytest.raises(UsageError, match="neither a SQLite path nor"):
        home.resolve("here", "mysql://user:secret@host/db")


def test_no_password_is_in_a_repr_or_an_error() -> None:
    shown = repr(home.resolve("here", "postgres:dbname=x password=secret"))
    assert "secret" not in shown
    assert "postgres:..." in shown
    with pytest.raises(UsageError) as caught:
        home.resolve("here", "mysql://user:secret@host/db")
    assert "secret" not in str(caught.value)


def test_folders_are_below_home() -> None:
    where = home.Home(url="s3://bucket/home", catalog="postgres:dbname=x")
    assert where.datasets("toy", "v1") == "s3://bucket/home/datasets/toy/v1"
    assert where.work("job") == "s3://bucket/home/work/job"
    assert where.lake_data == "s3://bucket/home/lake"
