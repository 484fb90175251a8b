"""Tars as people write them, from invented content: the fixtures of the sources webdataset and img2dataset."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

Members = Iterable[tuple[str, bytes]]


def picture(shade: int, encoding: str = "JPEG", px: int = 8) -> bytes:
    """A small picture of one shade."""
    sink = io.BytesIO()
    Image.new("RGB", (px, px + 1), (shade, 255 - shade, 40)).save(sink, encoding)
    return sink.getvalue()


def tar_of(members: Members, form: int = tarfile.USTAR_FORMAT) -> bytes:
    """The members in the given order, with the end mark."""
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w", format=form) as tar:
        for name, data in members:
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))
    return sink.getvalue()


def write_tar(path: Path, members: Members, form: int = tarfile.USTAR_FORMAT) -> Path:
    """A tar at `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(tar_of(members, form))
    return path


def write_webdataset(folder: Path) -> Path:
    """Tars of train and val: pictures with `txt`, with several dotted texts, with a json of captions. Returns the folder."""
    train: list[tuple[str, bytes]] = []
    for number in range(6):
        key = f"park/{number:04d}"
        train.append((f"{key}.jpg", picture(number)))
        if number % 2:
            train.append((f"{key}.json", json.dumps({"captions": [f"a red kite number {number}", "a kite"]}).encode()))
        else:
            train += [(f"{key}.0.txt", f"a dog number {number}".encode()), (f"{key}.1.txt", b"a dog runs")]
    write_tar(folder / "train-0000.tar", train)
    write_tar(folder / "val-0000.tar", [("0001.png", picture(9, "PNG")), ("0001.txt", b"a boat on a lake")])
    return folder


Fetched = Sequence[Mapping[str, Any]]

FETCHED: Fetched = [
    {"caption": "red boots, size 38", "shade": 3},
    {"caption": "Boots", "shade": 3},
    {"caption": "a hill in fog", "shade": 90},
    {"caption": "gone for good", "error": "HTTP Error 404: Not Found"},
    {"caption": None, "shade": 200},
    {"caption": "too slow", "error": "timed out"},
]
"""Rows of one shard by key: two of one picture, one without caption, two that were not fetched."""


def metadata(rows: Fetched, shard: int = 0) -> list[dict[str, Any]]:
    """The rows of the metadata of a shard, in the order of their keys."""
    found = []
    for number, row in enumerate(rows):
        shade = row.get("shade")
        sha256 = None if shade is None else hashlib.sha256(b"original of %d" % shade).hexdigest()
        found.append(
            {
                "caption": row["caption"],
                "url": row.get("url", f"https://pictures.example/{shard}/{number}.jpg"),
                "key": f"{shard:05d}{number:04d}",
                "status": "success" if shade is not None else "failed_to_download",
                "error_message": row.get("error"),
                "width": None if shade is None else 8,
                "height": None if shade is None else 9,
                "sha256": sha256,
            }
        )
    return found


METADATA = pa.schema(
    [
        *((name, pa.string()) for name in ("caption", "url", "key", "status", "error_message")),
        ("width", pa.int32()),
        ("height", pa.int32()),
        ("sha256", pa.string()),
    ]
)


def write_shard(folder: Path, rows: Fetched = FETCHED, shard: int = 0, *, order: Sequence[int] | None = None) -> Path:
    """`NNNNN.tar`, `NNNNN.parquet` and `NNNNN_stats.json`, in the order in which the pictures came. Returns the tar."""
    every = metadata(rows, shard)
    came = order if order is not None else [*range(1, len(rows), 2), *range(0, len(rows), 2)]
    members: list[tuple[str, bytes]] = []
    for number in came:
        row = every[number]
        if row["status"] == "success":
            members.append((f"{row['key']}.jpg", picture(rows[number]["shade"])))
            members.append((f"{row['key']}.json", json.dumps(row, indent=4).encode()))
            members.append((f"{row['key']}.txt", (row["caption"] or "").encode()))
    path = write_tar(folder / f"{shard:05d}.tar", members)
    table = pa.Table.from_pylist([every[number] for number in came], schema=METADATA)
    pq.write_table(table, path.with_suffix(".parquet"), row_group_size=2)
    write_stats(folder / f"{shard:05d}_stats.json", every)
    return path


def files(tar: Path) -> tuple[Path, Path, Path]:
    """All files of the shard of a tar."""
    return tar, tar.with_suffix(".parquet"), tar.with_name(f"{tar.stem}_stats.json")


def write_stats(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    """The statistics of a shard."""
    successes = sum(row["status"] == "success" for row in rows)
    stats = {"count": len(rows), "successes": successes, "failed_to_download": len(rows) - successes}
    path.write_text(json.dumps(stats | {"failed_to_resize": 0, "duration": 1.5}))
    return path


def write_img2dataset(folder: Path) -> Path:
    """Two shards with a hole in their numbers. Returns the folder."""
    write_shard(folder)
    write_shard(folder, [{"caption": f"a chair, model {n}", "shade": 20 * n + 1} for n in range(12)], shard=2)
    return folder


def read_bytes() -> int:
    """Bytes that this process read so far."""
    try:
        return int(Path("/proc/self/io").read_text().split()[1])
    except OSError:
        pytest.skip("this system does not count what a process reads")
