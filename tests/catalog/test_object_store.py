"""A HOME in an S3 store (moto's server), with the settings that fsspec takes from the environment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from catalog import audit, collect, lake
from catalog.commit import commit_version
from infra import storage
from infra.errors import IntegrityError
from infra.home import Home

SECRET = "hush-hush"
"Of the fixture `s3_home`."


@pytest.fixture
def home(s3_home: Home) -> Home:
    """`publish` publishes into this one."""
    return s3_home


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
