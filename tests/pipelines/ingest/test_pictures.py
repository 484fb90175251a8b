"""Each source that carries pictures, each kind of picture: it is published whole, or is a reject; none is lost."""

from __future__ import annotations

import dataclasses
import io
import json
import struct
import tarfile
import zlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from PIL import Image

from catalog.manifest import JobRecord, Manifest
from catalog.versions import published
from infra.errors import AccountingError
from infra.home import resolve
from infra.session import Workers, open_workers
from pipelines.ingest import job
from pipelines.ingest.commands import build_request
from pipelines.ingest.plan import plan_shards
from tests.pipelines.sources import tar_files


def encoded(picture: Image.Image, encoding: str, **options: Any) -> bytes:
    sink = io.BytesIO()
    picture.save(sink, encoding, **options)
    return sink.getvalue()


def bomb() -> bytes:
    """A PNG whose header says 20,000 x 20,000 grey pixels, in about a kilobyte."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", 20_000, 20_000, 1, 0, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(bytes(10**6)))
        + chunk(b"IEND", b"")
    )


@cache
def kinds() -> dict[str, tuple[bytes, str | None]]:
    """Kind -> bytes, and the reason of the reject; None where the picture is kept."""
    noise = Image.fromarray(np.random.default_rng(1).integers(0, 255, (64, 48, 3), np.uint8))
    jpeg, png = encoded(noise, "JPEG"), encoded(noise, "PNG")
    frames = [Image.new("P", (9, 7), shade) for shade in (1, 2, 3)]
    return {
        "good_jpeg": (jpeg, None),
        "progressive_jpeg": (encoded(noise, "JPEG", progressive=True), None),
        "good_png": (png, None),
        "gif": (encoded(frames[0], "GIF", save_all=True, append_images=frames[1:]), None),
        "cmyk_jpeg": (encoded(noise.convert("CMYK"), "JPEG"), None),
        "png_of_16_bits": (encoded(Image.new("I;16", (9, 7), 40_000), "PNG"), None),
        "cut_jpeg": (jpeg[: len(jpeg) // 2], "broken_image"),
        "cut_progressive_jpeg": (encoded(noise, "JPEG", progressive=True)[:-400], "broken_image"),
        "header_of_jpeg": (jpeg[:3], "broken_image"),
        "cut_png": (png[: len(png) // 2], "broken_image"),
        "html": (b"<html><body>404 Not Found</body></html>", "broken_image"),
        "empty": (b"", "broken_image"),
        "bomb": (bomb(), "oversized_image"),
    }


def caption(name: str) -> str:
    return f"a caption of the picture {name}"


def write_webdataset(folder: Path) -> None:
    members = [
        (f"{name}.{end}", data)
        for name, (raw, _) in sorted(kinds().items())
        for end, data in (("jpg", raw), ("txt", caption(name).encode()))
    ]
    tar_files.write_tar(folder / "train-0000.tar", members)


def write_img2dataset(folder: Path) -> None:
    rows = [
        {"key": f"{number:09d}", "status": "success", "error_message": None, "url": f"http://a/{name}.jpg",
         "caption": caption(name), "jpg": raw}
        for number, (name, (raw, _)) in enumerate(kinds().items())
    ]  # fmt: skip
    pq.write_table(pa.Table.from_pylist(rows), folder / "00000.parquet")


def write_wit_folder(folder: Path) -> None:
    for name, (raw, _) in kinds().items():
        (folder / f"{name}.jpg").write_bytes(raw)
    lines = [json.dumps({"file_name": f"{name}.jpg", "text": [caption(name)]}) for name in kinds()]
    (folder / "metadata.jsonl").write_text("\n".join(lines) + "\n")


def embedded(name: str, raw: bytes) -> dict[str, Any]:
    return {"bytes": raw, "path": f"{name}.jpg"}


def write_wit_parquet(folder: Path) -> None:
    rows = [{"image": embedded(name, raw), "text": [caption(name)]} for name, (raw, _) in kinds().items()]
    pq.write_table(pa.Table.from_pylist(rows), folder / "train.parquet", row_group_size=4)


def write_flickr(folder: Path) -> None:
    rows = [
        {"image": embedded(name, raw), "caption": [caption(name)], "filename": f"{1000 + number}.jpg"}
        for number, (name, (raw, _)) in enumerate(kinds().items())
    ]
    pq.write_table(pa.Table.from_pylist(rows), folder / "test-00000.parquet", row_group_size=4)


FORMS: Final[dict[str, tuple[str, Callable[[Path], None], list[str], str]]] = {
    "webdataset": ("webdataset", write_webdataset, [], "jpg"),
    "img2dataset": ("img2dataset", write_img2dataset, [], "jpg"),
    "wit_folder": ("wit", write_wit_folder, [], "file_name"),
    "wit_parquet": ("wit", write_wit_parquet, [], "image"),
    "flickr30k": ("flickr30k", write_flickr, ["source.pictures=true"], "image"),
}


def ingest(form: str, folder: Path, workers: Workers, home: str) -> job.IngestOutcome:
    source, write, options, _ = FORMS[form]
    inputs = folder / "inputs"
    if not inputs.exists():
        inputs.mkdir(parents=True)
        write(inputs)
    request = build_request(source, [str(inputs)], "made", None, [*options, "scenes_per_shard=5", "images=true"], 0.2)
    return job.ingest(request, resolve(str(folder / home)), workers)


def facts_of(outcome: job.IngestOutcome) -> tuple[Any, ...]:
    """(kind -> width and whether a tar has the picture), (kind -> row of rejects), the record of the job."""
    url = Path(outcome.url)
    scenes = ds.dataset(f"{url}/scenes", partitioning=None).to_table().to_pylist()
    names = {s["scene_key"]: s["captions"][0]["text"].rpartition(" ")[2] for s in scenes}
    rows = ds.dataset(f"{url}/rejects", partitioning=None).to_table().to_pylist()
    held: dict[str, bytes] = {}
    for path in sorted(url.glob("views/good/*.tar")):
        with tarfile.open(path) as tar:
            for member in tar:
                file = tar.extractfile(member)
                if member.name.endswith(".jpg") and file:
                    held[names[member.name.removesuffix(".jpg")]] = file.read()
    widths = {names[s["scene_key"]]: s["images"][0]["width"] for s in scenes}
    rejects = sorted((names[r["scene_key"]], r["reason"], r["detail"], r["field"], r["source_row"], r["text"], r["raw"])
                     for r in rows)  # fmt: skip
    record = JobRecord.from_json((url / "job.json").read_bytes(), url="job.json")
    return held, widths, rejects, record.pictures_read, record.pictures_kept, record.pictures_rejected, record.rejects


@pytest.mark.parametrize("form", FORMS)
def test_every_picture_is_kept_or_is_a_reject(
    form: str, tmp_path: Path, ray_workers: Workers, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with open_workers(address=None, num_cpus=0) as none:
        capfd.readouterr()
        found = facts_of(ingest(form, tmp_path, none, "home"))
        assert "Warning" not in capfd.readouterr().err
        monkeypatch.setattr(job, "plan_shards", lambda *a: dataclasses.replace(plan_shards(*a), direct=()))
        assert facts_of(ingest(form, tmp_path, none, "forced")) == found
    assert facts_of(ingest(form, tmp_path, ray_workers, "two")) == found
    held, widths, rejects, read, kept, rejected, texts_rejected = found
    bad = {name: reason for name, (_, reason) in kinds().items() if reason}
    assert {row[0]: row[1] for row in rejects} == bad and len(rejects) == len(bad) and not texts_rejected
    assert set(held) == set(kinds()) - set(bad)
    for name, reason, detail, field, row, text, raw in rejects:
        assert f"{len(kinds()[name][0]):,} bytes" in detail and "0x" not in detail, reason
        assert (field, text, raw, widths[name]) == (FORMS[form][3], None, None, None)
        assert row >= 0
    assert held["good_jpeg"] == kinds()["good_jpeg"][0] and held["cmyk_jpeg"] == kinds()["cmyk_jpeg"][0]
    for data in held.values():
        with Image.open(io.BytesIO(data)) as picture:
            picture.load()
            assert picture.format == "JPEG"
    assert (read, kept, rejected) == (len(kinds()), len(held), {"broken_image": len(bad) - 1, "oversized_image": 1})


def test_pictures_of_scenes_without_a_caption_or_an_id_are_rejects(tmp_path: Path) -> None:
    jpeg = kinds()["good_jpeg"][0]
    rows = [("a.jpg", jpeg), ("a.txt", b"a red kite"), ("b.jpg", jpeg), ("b.txt", b" ")]
    tar_files.write_tar(tmp_path / "in" / "train.tar", rows)
    request = build_request("webdataset", [str(tmp_path / "in")], "made", None, [], 1.0)
    with open_workers(address=None, num_cpus=0) as none:
        url = Path(job.ingest(request, resolve(str(tmp_path / "home")), none).url)
    record = JobRecord.from_json((url / "job.json").read_bytes(), url="")
    assert (record.pictures_read, record.pictures_kept) == (2, 1)
    assert record.pictures_rejected == {"image_without_caption": 1}
    assert record.rejects == {"missing_text": 1} and record.texts_read == 2


def test_a_version_whose_pictures_do_not_add_up_is_refused(tmp_path: Path) -> None:
    with open_workers(address=None, num_cpus=0) as none:
        outcome = ingest("wit_folder", tmp_path, none, "home")
    url = Path(outcome.url)
    record = JobRecord.from_json((url / "job.json").read_bytes(), url="")
    manifests = [Manifest.from_json((url / f"manifests/{s}.json").read_bytes(), url="") for s in record.shards]
    whole = published.Version(folder=str(url), job=record, manifests=manifests)
    assert not list(published.disagreements(whole))
    assert manifests[0].pictures_kept is not None
    fewer = dataclasses.replace(manifests[0], pictures_kept=manifests[0].pictures_kept - 1)
    with pytest.raises(AccountingError, match="pictures but kept"):
        published.check_accounts(dataclasses.replace(whole, manifests=[fewer, *manifests[1:]]))
    with pytest.raises(AccountingError, match="counts other pictures"):
        published.check_accounts(dataclasses.replace(whole, job=dataclasses.replace(record, pictures_read=1)))


def test_records_without_counts_of_pictures_have_no_such_keys(tmp_path: Path) -> None:
    request = build_request("toyworld", [], "toy", None, ["source.scenes=3"], 1.0)
    with open_workers(address=None, num_cpus=0) as none:
        url = Path(job.ingest(request, resolve(str(tmp_path)), none).url)
    for path in (url / "job.json", *url.glob("manifests/*.json")):
        assert not [key for key in json.loads(path.read_bytes()) if key.startswith("pictures")]
