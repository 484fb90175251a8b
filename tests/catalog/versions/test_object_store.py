"""A HOME in an S3 store (moto's server), with the settings that fsspec takes from the environment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from catalog.lake import lake
from catalog.versions import audit, collect
from catalog.versions.commit import commit_version
from infra import storage
from infra.errors import IntegrityError
from infra.home import Home
from infra.storage import uploads

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


@pytest.mark.filterwarnings("ignore")
def test_gc_names_uploads_that_were_never_completed_and_aborts_them(home: Home, publish: Any) -> None:
    made = publish()
    commit_version(home, made.dataset, made.version)
    fs: Any = storage.filesystem(home.url)[0]
    bucket = home.url.removeprefix("s3://").partition("/")[0]
    named = storage.join(made.folder, "scenes/train/00000.parquet")
    for url in (named, storage.join(home.url, "runs/r1/encoder.safetensors"), storage.join(home.url, "theirs/x.bin")):
        key = url.removeprefix(f"s3://{bucket}/")
        begun = fs.call_s3("create_multipart_upload", Bucket=bucket, Key=key)
        fs.call_s3("upload_part", Bucket=bucket, Key=key, UploadId=begun["UploadId"], PartNumber=1, Body=b"x" * 70)
    # moto says that every upload began in 2010.
    assert collect.collect(home, older_than_hours=200 * 365 * 24, delete=True).strays == []
    found = collect.collect(home, older_than_hours=24).strays
    assert [(stray.url, stray.bytes, stray.why) for stray in found] == [
        (named, 70, "upload that was never completed"),
        (storage.join(home.url, "runs/r1/encoder.safetensors"), 70, "upload that was never completed"),
    ]
    assert collect.collect(home, older_than_hours=24, delete=True).strays == found
    assert [u.url for u in uploads.unfinished(home.url)] == [storage.join(home.url, "theirs/x.bin")]
    # An upload to the name of a published file is not that file.
    assert audit.verify(home).problems == []
