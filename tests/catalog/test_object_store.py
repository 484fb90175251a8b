"""A HOME in an S3 store (moto's server), with the settings that fsspec takes from the environment."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from catalog import audit, collect, lake
from catalog.commit import commit_version
from infra import storage
from infra.errors import IntegrityError
from infra.home import Home

SECRET = "hush-hush"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Home]:
    server_module = pytest.importorskip("moto.server", reason="moto is not installed (`pip install 'moto[server]'`)")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        server = server_module.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        server.start()
        host, port = server.get_host_and_port()
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key-id")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
        monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        bucket = f"bucket-{port}"
        storage.filesystem(f"s3://{bucket}/x")[0].mkdir(bucket)
        yield Home(url=f"s3://{bucket}/a home", catalog=str(tmp_path / "catalog.sqlite"))
        server.stop()


@pytest.mark.filterwarnings("ignore")
def test_a_home_in_s3_is_committed_read_verified_and_collected(home: Home, publish: Any) -> None:
    made = publish()
    assert not commit_version(home, made.dataset, made.version).was_there
    assert commit_version(home, made.dataset, made.version).was_there
    with lake.reading(home) as reader:
        assert reader.rows("SELECT count(*) FROM captions") == [(made.captions,)]
        assert reader.rows("SELECT count(*) FROM shards") == [(2,)]
        secrets = str(reader.rows("FROM duckdb_secrets()"))
    assert "key-id" in secrets and SECRET not in secrets
    for text in (Path(home.catalog).read_bytes(), *map(str.encode, lake.connect_lines(home))):
        assert SECRET.encode() not in text and b"key-id" not in text
    assert audit.verify(home).problems == []
    assert collect.collect(home, older_than_hours=0, delete=True).strays == []
    storage.publish(storage.join(made.folder, "scenes/train/00077.parquet"), b"stray")
    assert [stray.bytes for stray in collect.collect(home, older_than_hours=0, delete=True).strays] == [5]
    storage.publish(storage.join(made.folder, "scenes/train/00000.parquet"), b"x")
    with pytest.raises(IntegrityError, match="has 1 bytes"):
        commit_version(home, made.dataset, made.version)
