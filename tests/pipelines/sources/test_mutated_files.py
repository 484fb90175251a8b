"""Mutated files through every reader: either a sentence, or every text is kept or a reject.

The files are small ones of each form, and heads of the public ones where those are there.
"""

from __future__ import annotations

import gzip
import io
import itertools
import json
import os
import re
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from infra.config import load
from infra.errors import GoodviewsError
from pipelines.arrays import is_none
from pipelines.ingest.clean import CleanConfig
from pipelines.ingest.exchange import bucket_of
from pipelines.ingest.group import group, merge
from pipelines.ingest.plan import plan_shards
from pipelines.ingest.request import IngestConfig, Request
from pipelines.ingest.tables import keep
from pipelines.sources import source_class
from pipelines.sources.formats.discovery import find_inputs

REAL = Path(os.environ.get("GOODVIEWS_REAL_DATA", Path(__file__).parents[4] / "shared" / "data"))
CAPTIONS = ["A dog runs .", 'He says " hi "', "Two guys | one, hat", "na\u00efve caf\u00e9", "nan", "A &amp; B"]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A source with its options and files; the first file is the one that is mutated."""

    source: str
    files: Mapping[str, bytes]
    sets: tuple[str, ...] = ()
    texts: Callable[[bytes], int] | None = None
    "How many texts the first file must give if it is read at all, counted another way."


def parquet(columns: dict[str, Any]) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.table(columns), sink, row_group_size=4, compression="none")
    return sink.getvalue()


def lines_with(rows: Iterator[str], header: str = "") -> bytes:
    return (header + "".join(f"{row}\n" for row in rows)).encode()


def lines_of(data: bytes) -> int:
    """Lines that are not blank, without the header if there is one: a header is no line of a token file."""
    lines = [line for line in data.removeprefix(b"\xef\xbb\xbf").split(b"\n") if line.strip()]
    return len(lines) - (0 if not lines or re.fullmatch(rb"\S+#\d+\t.*", lines[0].rstrip(b"\r\n")) else 1)


def numbered() -> Iterator[tuple[int, int, str]]:
    return ((scene, n, text) for scene in range(4) for n, text in enumerate(CAPTIONS[: 3 + scene % 3]))


def msrvtt() -> bytes:
    clip = {"category": 1, "url": "https://v/1", "start time": 1.0, "end time": 2.0}
    videos = [{**clip, "video_id": f"video{n}", "id": n, "split": "train"} for n in range(4)]
    sentences = [{"caption": t, "video_id": f"video{s}", "sen_id": 9 * s + n} for s, n, t in numbered()]
    return json.dumps({"info": {}, "videos": videos, "sentences": sentences}).encode()


def zipped(name: str, data: bytes) -> bytes:
    sink = io.BytesIO()
    with zipfile.ZipFile(sink, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr(name, data)
    return sink.getvalue()


TOKEN = lines_with(f"{100 + s}_ab.jpg#{n}\t{t}" for s, n, t in numbered())
PIPED = lines_with((f"{s}.jpg| {n}| {t}" for s, n, t in numbered()), "image_name| comment_number| comment\n")
QUOTED = {t: t.replace('"', '""') for t in CAPTIONS}
COMMA = lines_with((f'{s}.jpg,"{QUOTED[t]}"' for s, n, t in numbered()), "image,caption\n")
KARPATHY = json.dumps(
    {
        "images": [
            {"filename": f"{s}.jpg", "split": "train", "sentences": [{"raw": t, "sentid": n} for _, n, t in rows]}
            for s, rows in itertools.groupby(numbered(), key=lambda row: row[0])
        ]
    }
).encode()
COCO = json.dumps(
    {
        "images": [{"id": s, "file_name": f"{s}.jpg", "width": 4, "height": 3} for s in range(4)],
        "annotations": [{"id": 9 * s + n, "image_id": s, "caption": t} for s, n, t in numbered()],
    }
).encode()
JSON_LINES = lines_with(json.dumps({"id": s, "caption": t, "split": "val"}) for s, n, t in numbered())
MULTI30K = {"train_images.txt": lines_with(f"{s}.jpg" for s in range(6))} | {
    f"train.{n}.en": lines_with(CAPTIONS[(s + n) % 5] for s in range(6)) for n in range(1, 6)
}
WEB = {
    # A picture a row: several pages with unrelated texts of one picture would all be quarantined.
    "sha256": [f"{10 * s + n:064x}" for s, n, _ in numbered()],
    "uid": [f"{s:032x}" for s, _, _ in numbered()],
    "url": [f"http://x/{s}/{n}.jpg" for s, n, _ in numbered()],
    "text": [t for _, _, t in numbered()],
    "org_caption": [t for _, _, t in numbered()],
}

CASES = {
    "token": Case(source="flickr8k", files={"f.token.txt": TOKEN}, texts=lines_of),
    "token in gzip": Case(source="flickr30k", files={"f.token.gz": gzip.compress(TOKEN, mtime=0)}),
    "piped": Case(source="flickr30k", files={"results.csv": PIPED}, texts=lines_of),
    "comma": Case(source="flickr8k", files={"captions.txt": COMMA}),
    "split list": Case(
        source="flickr8k", files={"Flickr_8k.trainImages.txt": b"1.jpg\n2.jpg\n", "captions.txt": COMMA}
    ),
    "Karpathy": Case(source="flickr30k", files={"dataset_flickr30k.json": KARPATHY}),
    "Flickr30k parquet": Case(
        source="flickr30k",
        files={"test.parquet": parquet({"caption": [CAPTIONS] * 4, "filename": [f"{n}.jpg" for n in range(4)]})},
    ),
    "COCO": Case(source="coco", files={"captions_val2017.json": COCO}),
    "MSR-VTT": Case(source="msrvtt", files={"a.json": msrvtt()}),
    "MSR-VTT in zip": Case(source="msrvtt", files={"a.zip": zipped("a.json", msrvtt())}),
    "1k-A": Case(
        source="msrvtt",
        files={"list.csv": b"key;vid_key;video_id;sentence\nret0;m;video1;a person\n", "a.json": msrvtt()},
    ),
    "Multi30k images": Case(source="multi30k", files=MULTI30K),
    "Multi30k captions": Case(
        source="multi30k", files={"train.3.en": MULTI30K["train.3.en"], **MULTI30K}, texts=lambda data: 30
    ),
    "DataComp": Case(source="datacomp", files={"a.parquet": parquet(WEB)}),
    "Recap": Case(source="recap-datacomp", files={"train-00000-of-00001.parquet": parquet(WEB)}),
    "table of JSON lines": Case(
        source="table",
        files={"a.jsonl": JSON_LINES},
        sets=("text=caption", "id=id", "split=column:split"),
        texts=lambda data: sum(1 for line in data.split(b"\n") if line.rstrip(b"\r").strip()),
    ),
    "table of CSV": Case(source="table", files={"a.csv": COMMA}, sets=("text=caption", "id=image")),
    "table of parquet": Case(source="table", files={"a.parquet": parquet(WEB)}, sets=("text=text:alt", "id=uid")),
    "WIT metadata": Case(
        source="wit",
        files={"metadata.jsonl": lines_with(json.dumps({"file_name": f"{n}.jpg", "text": CAPTIONS}) for n in range(4))},
        sets=("pictures=false", "contexts=true"),
    ),
    "WIT parquet": Case(
        source="wit",
        files={
            "train.parquet": parquet(
                {"image": [{"bytes": b"\xff\xd8", "path": f"{n}.jpg"} for n in range(4)], "text": [CAPTIONS] * 4}
            )
        },
    ),
}


def real_cases() -> dict[str, Case]:
    """Heads of the public files; none where they are absent."""

    def head(name: str, lines: int) -> bytes:
        data = (REAL / name).read_bytes()
        data = gzip.decompress(data) if name.endswith(".gz") else data
        return b"".join(data.splitlines(keepends=True)[:lines])

    def clips() -> bytes:
        with zipfile.ZipFile(REAL / "msrvtt" / "train_val_annotation.zip") as file:
            document = json.loads(file.read("train_val_videodatainfo.json"))
        videos = document["videos"][:5]
        known = {video["video_id"] for video in videos}
        sentences = [sentence for sentence in document["sentences"] if sentence["video_id"] in known]
        return json.dumps({"info": document["info"], "videos": videos, "sentences": sentences}).encode()

    def rows() -> bytes:
        sink = io.BytesIO()
        pq.write_table(pq.read_table(REAL / "imgtext" / "img2dataset_test_1000.parquet").slice(0, 60), sink)
        return sink.getvalue()

    def pictures() -> bytes:
        document = json.loads(gzip.decompress((REAL / "coco" / "captions_val2017.json.gz").read_bytes()))
        images = document["images"][:10]
        known = {image["id"] for image in images}
        annotations = [a for a in document["annotations"] if a["image_id"] in known]
        return json.dumps({**document, "images": images, "annotations": annotations}).encode()

    if not REAL.exists():
        return {}
    return {
        "token": Case(source="flickr8k", files={"f.token.txt": head("flickr8k/Flickr8k.token.txt.gz", 60)}),
        "Kaggle": Case(source="flickr8k", files={"captions.txt": head("flickr8k/captions_kaggle.txt.gz", 60)}),
        "MSR-VTT": Case(source="msrvtt", files={"a.json": clips()}),
        "COCO": Case(source="coco", files={"captions_val2017.json": pictures()}),
        "Multi30k": Case(
            source="multi30k",
            files={f"val.{n}.en": head(f"multi30k/val.{n}.en.gz", 30) for n in range(1, 6)}
            | {"val_images.txt": head("multi30k/val_images.txt", 30)},
        ),
        "LAION": Case(source="table", files={"a.parquet": rows()}, sets=("text=TEXT:alt", "id=URL")),
    }


PIECES_OF_TROUBLE = [
    b"\x92", b'"', b"\n", b"\r\n", b"\r", b"\0", b"\xff\xfe", b",", b"|", b"\t", b"#", b"{", b"]", b"}", b"nan", b"null",
    b"\\ud800", b"\xed\xa0\x80", b"1e999", b"\xef\xbb\xbf", b"PAR1", b"-1", b"9" * 25, b".jpg.1#0\t", b'""', b"[[[[",
]  # fmt: skip

Draw = Callable[..., Any]


@st.composite
def mutations(draw: Draw) -> Callable[[bytes], bytes]:
    """One to three changes: a byte, a cut, an insertion, a repeated or removed part."""
    kinds = st.sampled_from(["flip", "cut", "insert", "remove", "repeat"])
    steps = draw(
        st.lists(
            st.tuples(kinds, st.floats(0, 1), st.integers(1, 40), st.sampled_from(PIECES_OF_TROUBLE)),
            min_size=1,
            max_size=3,
        )
    )

    def mutate(data: bytes) -> bytes:
        for kind, where, length, piece in steps:
            at = int(where * len(data))
            if kind == "flip" and data:
                at = min(at, len(data) - 1)
                data = data[:at] + bytes([data[at] ^ (1 << (length % 8))]) + data[at + 1 :]
            elif kind == "cut":
                data = data[:at]
            elif kind == "insert":
                data = data[:at] + piece + data[at:]
            elif kind == "remove":
                data = data[:at] + data[at + length :]
            elif kind == "repeat":
                data = data[: at + length] + data[at:]
        return data

    return mutate


def read_all(case: Case, mutate: Callable[[bytes], bytes]) -> int | None:
    """Survey, read and group the files as a job does; returns the texts that were kept, None when the files were refused.

    Raises AssertionError for a text that is lost or counted twice, and for a refusal that is no sentence.
    """
    with tempfile.TemporaryDirectory() as folder:
        for place, (name, data) in enumerate(case.files.items()):
            Path(folder, name).write_bytes(mutate(data) if place == 0 else data)
        source = load(source_class(case.source), sets=case.sets)
        try:
            inputs = find_inputs([folder], source.reads)[1]
            survey = source.survey(inputs, None)
            batch = merge(itertools.chain.from_iterable(source.read(piece) for piece in survey.pieces))
            request = Request(dataset="x", source=source, config=IngestConfig(), inputs=inputs)
            plan = plan_shards(request, survey)
            bucket_of(batch.records, plan.buckets)
            scenes = group(batch, config=CleanConfig(), repair=True)
        except GoodviewsError as error:
            assert str(error).endswith((".", "?")) and "\n" not in str(error)
            return None
        read, kept = batch.texts.num_rows, len(keep(scenes).texts)
        assert scenes.texts.num_rows == read == kept + int(np.count_nonzero(~is_none(scenes.reason)))
        if case.texts is not None:
            assert read == case.texts(mutate(next(iter(case.files.values()))))
        return kept


def untouched(data: bytes) -> bytes:
    return data


@pytest.mark.parametrize("name", sorted(CASES))
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(mutate=mutations())
def test_a_mutated_file_is_a_sentence_or_accounted_for(name: str, mutate: Callable[[bytes], bytes]) -> None:
    read_all(CASES[name], mutate)


@pytest.mark.parametrize("name", ["token", "Kaggle", "MSR-VTT", "COCO", "Multi30k", "LAION"])
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(mutate=mutations())
def test_a_mutated_public_file_is_a_sentence_or_accounted_for(name: str, mutate: Callable[[bytes], bytes]) -> None:
    cases = real_cases_once()
    if not cases:
        pytest.skip(f"the real data is not at {REAL} (set GOODVIEWS_REAL_DATA)")
    read_all(cases[name], mutate)


@pytest.mark.parametrize("name", sorted(CASES))
def test_the_file_before_mutation_is_read(name: str) -> None:
    """Else every mutation would be a refusal, and nothing be accounted for."""
    kept = read_all(CASES[name], untouched)
    assert kept is not None and kept > 0


def test_the_public_files_before_mutation_are_read() -> None:
    for name, case in real_cases_once().items():
        assert read_all(case, untouched), name


def test_some_mutations_are_read_and_some_are_refused() -> None:
    def flipped(place: int) -> Callable[[bytes], bytes]:
        return lambda data: data[:place] + b"\x92" + data[place + 1 :]

    def cut(place: int) -> Callable[[bytes], bytes]:
        return lambda data: data[:place]

    assert all(read_all(CASES["token"], flipped(place)) for place in range(30, 200, 7))
    assert not any(read_all(CASES["MSR-VTT"], cut(place)) for place in range(0, 200, 7))


_REAL: list[dict[str, Case]] = []


def real_cases_once() -> dict[str, Case]:
    if not _REAL:
        _REAL.append(real_cases())
    return _REAL[0]
