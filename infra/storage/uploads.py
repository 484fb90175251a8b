"""Multipart uploads that were begun and never completed: listed, measured and aborted.

Invariant: an object is never touched here, only what no listing of objects shows.

S3 keeps the parts of such an upload, and bills them, until somebody aborts it; a killed process leaves one. Google and
Azure drop theirs after a week, and their clients list none, so there is nothing to find there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from infra import storage
from infra.errors import StorageError


@dataclass(frozen=True, kw_only=True)
class Upload:
    """An upload to `url` under way or left over; `began_s` is in seconds since the epoch, by the store's clock."""

    url: str
    upload_id: str
    began_s: float


def unfinished(folder: str) -> list[Upload]:
    """Uploads below the folder (a URL) that are not completed, by url; none but on S3. Raises StorageError."""
    if not folder.startswith(("s3://", "s3a://")):
        return []
    fs, path = storage.filesystem(folder)
    bucket, _, prefix = path.partition("/")
    where = {"Bucket": bucket, "Prefix": f"{prefix.rstrip('/')}/" if prefix else ""}
    root = f"{folder.partition('://')[0]}://{bucket}"
    try:
        pages = list(_pages(fs, "list_multipart_uploads", where, markers=("KeyMarker", "UploadIdMarker")))
    except FileNotFoundError as error:
        raise StorageError(f"The bucket {root} is not there. Check its name, and the endpoint of the store.") from error
    found = []
    for page in pages:
        for entry in page.get("Uploads", []):
            began: datetime = entry["Initiated"]
            url = storage.join(root, entry["Key"])
            found.append(Upload(url=url, upload_id=entry["UploadId"], began_s=began.timestamp()))
    return sorted(found, key=lambda upload: (upload.url, upload.upload_id))


def uploaded_bytes(upload: Upload) -> int:
    """Bytes of the parts that the store keeps; 0 when the upload is gone."""
    fs, path = storage.filesystem(upload.url)
    bucket, _, key = path.partition("/")
    where = {"Bucket": bucket, "Key": key, "UploadId": upload.upload_id}
    try:
        pages = list(_pages(fs, "list_parts", where, markers=("PartNumberMarker",)))
    except FileNotFoundError:
        return 0
    return sum(int(part["Size"]) for page in pages for part in page.get("Parts", []))


def abort(url: str, *, upload_id: str) -> None:
    """Drop the parts of one upload; nothing happens when it is completed or gone. Raises StorageError."""
    fs, path = storage.filesystem(url)
    bucket, _, key = path.partition("/")
    with contextlib.suppress(FileNotFoundError):
        _call(fs, "abort_multipart_upload", Bucket=bucket, Key=key, UploadId=upload_id)


def _pages(fs: Any, method: str, where: dict[str, str], *, markers: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    """The pages of a listing of S3, each begun where the one before says."""
    place: dict[str, Any] = {}
    while True:
        page = _call(fs, method, **where, **place)
        yield page
        if not page.get("IsTruncated"):
            return
        place = {marker: page[f"Next{marker}"] for marker in markers}


def _call(fs: Any, method: str, **arguments: Any) -> dict[str, Any]:
    try:
        answer: dict[str, Any] = fs.call_s3(method, **arguments)
    except FileNotFoundError:
        raise
    except Exception as error:
        # Whatever the client raises: it has tried several times, and not every store offers these calls.
        message = (
            f"The store did not answer {method} for {arguments['Bucket']}: {str(error).rstrip('.')}. Check the rights"
            " on unfinished uploads and rerun."
        )
        raise StorageError(message) from error
    return answer
