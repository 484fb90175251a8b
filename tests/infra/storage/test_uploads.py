"""Connections to an S3 store (moto's server) that break in an upload: no half object, and nothing kept in secret."""

from __future__ import annotations

import gc
import secrets
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import fsspec
import pytest

from catalog.versions import collect
from infra import storage
from infra.doctor import store
from infra.doctor.findings import Circumstances
from infra.errors import StorageError
from infra.home import Home
from infra.storage import uploads
from tests.infra.broken_connections import Proxy, Rule, proxied

PART = 5 << 20
"The least that S3 takes as a part but the last."

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def proxy(s3_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """Between this test's client and the store."""
    with proxied(s3_endpoint) as between:
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key-id")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hush-hush")
        monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
        options = {"endpoint_url": between.url, "default_block_size": PART}
        monkeypatch.setitem(fsspec.config.conf, "s3", options)
        yield between


@pytest.fixture
def folder(proxy: Proxy) -> str:
    """A folder in a bucket of its own, over the proxy."""
    bucket = f"bucket-{secrets.token_hex(4)}"
    fs: Any = storage.filesystem(f"s3://{bucket}/x")[0]
    fs.retries = 1  # s3fs itself would try five times, with pauses
    fs.mkdir(bucket)
    return f"s3://{bucket}/a home"


def parts(count: int) -> Iterator[bytes]:
    for i in range(count):
        yield bytes([i]) * PART


def only(*words: str) -> Rule:
    """Cut each request whose first line holds all the words, in its body."""
    return lambda line: 100_000 if all(word in line for word in words) else None


def gone_since(*words: str) -> Rule:
    """From the first such request on, the store answers nothing any more."""
    seen: list[str] = []

    def rule(line: str) -> int | None:
        if all(word in line for word in words):
            seen.append(line)
        return 0 if seen else None

    return rule


def refusal(url: str, content: list[bytes]) -> str:
    """The sentence that publishing ends in; nothing of the exception lives on, so that its open file is collected."""
    try:
        storage.publish(url, content)
    except StorageError as error:
        return str(error)
    raise AssertionError("it was published")


@pytest.mark.parametrize(
    ("rule", "count", "is_left"),
    [
        pytest.param(lambda: only("PUT /"), 0, False, id="an upload of one request"),
        pytest.param(lambda: gone_since("PUT /"), 0, False, id="an upload of one request, and the store is gone"),
        pytest.param(lambda: only("partNumber=2&"), 4, False, id="the second part"),
        pytest.param(lambda: gone_since("partNumber=2&"), 4, True, id="the second part, and the store is gone"),
        pytest.param(lambda: only("partNumber=3&"), 3, False, id="the last part"),
        pytest.param(lambda: gone_since("POST ", "uploadId="), 3, True, id="the completion"),
    ],
)
def test_b16_c17_a_connection_that_breaks_in_an_upload_publishes_nothing(
    proxy: Proxy, folder: str, rule: Callable[[], Rule], count: int, is_left: bool
) -> None:
    url = storage.join(folder, "file.bin")
    content = [*parts(count), b"the end" * 100_000]
    proxy.rule = rule()
    sentence = refusal(url, content)
    assert url in sentence and "Nothing was published under that name" in sentence and "hush-hush" not in sentence
    assert proxy.cuts
    proxy.rule = lambda line: None
    # An open file of fsspec completes its upload when Python collects it.
    gc.collect()
    assert not storage.exists(url)
    assert storage.list_files(folder) == []
    left = uploads.unfinished(folder)
    assert [upload.url for upload in left] == [url] * is_left
    record = storage.publish(url, content)
    assert storage.digest(url) == record and record.bytes == count * PART + 700_000


def test_a_writer_that_raises_while_the_store_is_gone_publishes_nothing(proxy: Proxy, folder: str) -> None:
    url = storage.join(folder, "file.bin")

    def broken() -> Iterator[bytes]:
        yield from parts(2)
        proxy.rule = lambda line: 0
        raise RuntimeError("the writer broke")

    with pytest.raises(RuntimeError, match="the writer broke"):
        storage.publish(url, broken())
    proxy.rule = lambda line: None
    gc.collect()
    assert not storage.exists(url)
    assert [upload.url for upload in uploads.unfinished(folder)] == [url]


def test_unfinished_uploads_are_listed_below_a_folder_and_aborted_one_by_one(folder: str) -> None:
    fs: Any = storage.filesystem(folder)[0]
    bucket = folder.removeprefix("s3://").partition("/")[0]
    keys = ["a home/one.tar", "a home/one.tar", "a home/deep/two.tar", "a homely place/three.tar"]
    ids = [fs.call_s3("create_multipart_upload", Bucket=bucket, Key=key)["UploadId"] for key in keys]
    for number in (1, 2):
        fs.call_s3("upload_part", Bucket=bucket, Key=keys[0], UploadId=ids[0], PartNumber=number, Body=b"x" * 50)
    storage.publish(storage.join(folder, "one.tar"), b"the object of that name")
    found = uploads.unfinished(folder)
    assert [u.url for u in found] == [f"{folder}/deep/two.tar", f"{folder}/one.tar", f"{folder}/one.tar"]
    assert {u.upload_id: uploads.uploaded_bytes(u) for u in found} == {ids[0]: 100, ids[1]: 0, ids[2]: 0}
    uploads.abort(f"{folder}/one.tar", upload_id=ids[0])
    uploads.abort(f"{folder}/one.tar", upload_id=ids[0])
    assert {u.upload_id for u in uploads.unfinished(folder)} == {ids[1], ids[2]}
    assert storage.read_bytes(storage.join(folder, "one.tar")) == b"the object of that name"


def test_every_page_of_a_listing_is_read(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """moto puts all on one page, so the pages are cut here; the markers are those of S3."""
    fs: Any = storage.filesystem(folder)[0]
    whole = [{"Key": f"a home/{i}", "UploadId": str(i), "Initiated": datetime(2026, 1, 1)} for i in range(5)]
    asked: list[dict[str, Any]] = []

    def call(method: str, **arguments: Any) -> dict[str, Any]:
        asked.append(arguments)
        start = int(arguments.get("UploadIdMarker", -1)) + 1
        some = whole[start : start + 2]
        return {
            "Uploads": some,
            "IsTruncated": start + 2 < len(whole),
            "NextKeyMarker": some[-1]["Key"],
            "NextUploadIdMarker": some[-1]["UploadId"],
        }

    monkeypatch.setattr(fs, "call_s3", call)
    assert [upload.upload_id for upload in uploads.unfinished(folder)] == list("01234")
    assert [arguments.get("KeyMarker") for arguments in asked] == [None, "a home/1", "a home/3"]


def test_a_store_that_does_not_answer_is_one_sentence(proxy: Proxy, folder: str) -> None:
    proxy.rule = lambda line: 0
    with pytest.raises(StorageError, match="The store did not answer list_multipart_uploads"):
        uploads.unfinished(folder)


def test_a_bucket_that_is_not_there_is_one_sentence(folder: str) -> None:
    absent = "s3://misspelt-bucket/a home"
    with pytest.raises(StorageError, match="misspelt-bucket is not there"):
        uploads.unfinished(absent)
    with pytest.raises(StorageError, match="its folder or bucket is not there"):
        storage.publish(storage.join(absent, "file.bin"), b"x")
    (found,) = store.store(Circumstances(home=Home(url=absent, catalog="x")))
    assert (found.check, found.state) == ("store", "broken") and "bucket is not there" in found.found
    left_alone: list[str] = []
    assert list(collect._uploads(Home(url=absent, catalog="x"), 0, left_alone)) == []
    (said,) = left_alone
    assert "misspelt-bucket is not there" in said


def test_other_stores_have_nothing_to_list(tmp_path: Path) -> None:
    assert uploads.unfinished(str(tmp_path)) == []
    assert uploads.unfinished("memory://x") == []
