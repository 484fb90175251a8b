"""Each option of each source, in each format: the same scenes with and without the exchange, with 0 and with 2 CPUs.

The cases are generated. An option that a source gains must be named here, else the first test fails.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

from catalog.versions.commit import Committed
from infra.errors import GoodviewsError, IntegrityError
from infra.home import resolve
from infra.session import Workers, open_workers
from pipelines.ingest import job
from pipelines.ingest.commands import build_request
from pipelines.ingest.plan import Plan, plan_shards
from pipelines.sources import SOURCES, source_class
from tests.pipelines.sources import tar_files, test_mutated_files

Facts = Any
"The scenes and rejects of a version; or the kind and the words of the error."

ROWS: Final[list[dict[str, Any]]] = [
    {
        "key": f"scene-{number % 5}",
        "name": f"row-{number}",
        "alt": f"an alt text, number {number}",
        "caption": f"a person sees thing {number}",
        "path": f"pictures/{number % 5}.jpg",
        "digest": f"{number % 5:064x}",
        "w": 40 + number % 5,
        "h": 30 + number % 5,
        "part": "val" if number % 5 == 3 else "train",
    }
    for number in range(12)
]

TABLE_OPTIONS: Final[dict[str, list[str]]] = {
    "text": ["alt", "caption:human", "alt:alt,caption:human"],
    "id": ["", "key", "name"],
    "unique": ["false", "true"],
    "image": ["", "path"],
    "image_sha256": ["", "digest"],
    "width": ["", "w"],
    "height": ["", "h"],
    "split": ["train", "dev", "column:part"],
    "delimiter": ["", ";"],
}


def delimited(delimiter: str) -> bytes:
    sink = io.StringIO()
    writer = csv.DictWriter(sink, list(ROWS[0]), delimiter=delimiter, lineterminator="\n")
    writer.writeheader()
    writer.writerows(ROWS)
    return sink.getvalue().encode()


def parquet() -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(ROWS), sink, row_group_size=4)
    return sink.getvalue()


FORMATS: Final[dict[str, Callable[[str], bytes]]] = {
    "parquet": lambda _: parquet(),
    "csv": lambda delimiter: delimited(delimiter or ","),
    "tsv": lambda delimiter: delimited(delimiter or "\t"),
    "jsonl": lambda _: "".join(json.dumps(row) + "\n" for row in ROWS).encode(),
}


def table_settings() -> Iterator[dict[str, str]]:
    """Every value of every option beside every split, and beside the ids in turn; `unique` beside all of them."""
    keys = itertools.cycle(TABLE_OPTIONS["id"])
    for name, values in TABLE_OPTIONS.items():
        for value, split in itertools.product(values, TABLE_OPTIONS["split"]):
            for key in TABLE_OPTIONS["id"][1:] if name == "unique" else [next(keys)]:
                # The size of a picture that has no name and no digest is no fact of a scene.
                picture = {"image": "path"} if name in ("width", "height") else {}
                yield {"text": "alt", "split": split, "id": key} | picture | {name: value}


def expected(options: Mapping[str, str]) -> Facts:
    """What a table gives, stated row by row: an oracle without Arrow, batches, shards or an exchange."""
    is_unique = options.get("unique") == "true"
    names = [row[options["id"]] if options["id"] else number for number, row in enumerate(ROWS)]
    if is_unique and len(set(names)) < len(names):
        return "IntegrityError"
    columns = [part.partition(":") for part in options["text"].split(",")]
    scenes: dict[tuple[str, Any], list[tuple[str, str]]] = {}
    for name, row in zip(names, ROWS, strict=True):
        kind, _, column = options["split"].partition(":")
        split = row[column] if column else kind
        texts = [(role or "human", row[column]) for column, _, role in columns]
        scenes.setdefault((split, name), []).extend(texts)
    return sorted((split, tuple(sorted(texts))) for (split, _), texts in scenes.items())


def facts_of(outcome: job.IngestOutcome) -> tuple[Facts, Facts]:
    """Scenes with split, texts and facts of the picture; and rejects. Which shard holds them is no fact."""
    scenes = ds.dataset(f"{outcome.url}/scenes", partitioning=None).to_table().to_pylist()
    found = sorted(
        (s["split"], s["scene_key"], tuple(sorted((c["role"], c["text"]) for c in s["captions"])), *pictures(s))
        for s in scenes
    )
    rejects: list[Any] = []
    if list(Path(outcome.url).glob("rejects/*.parquet")):
        rows = ds.dataset(f"{outcome.url}/rejects", partitioning=None).to_table().to_pylist()
        rejects = sorted((r["reason"], str(r["text"]), r["source_uri"], r["source_row"]) for r in rows)
    return found, rejects


def pictures(scene: Mapping[str, Any]) -> tuple[Any, ...]:
    """uri, sha256, width and height of the pictures of a scene, each as one text."""
    names = ("uri", "sha256", "width", "height")
    return tuple(",".join(str(image[name]) for image in scene["images"]) for name in names)


def run(
    source: str, inputs: Path | None, options: Sequence[str], home: Path, workers: Workers, *, limit: bool
) -> Facts:
    sets = [*(f"source.{option}" for option in options), "scenes_per_shard=3", *(["limit=7"] if limit else [])]
    request = build_request(source, [str(inputs)] if inputs else [], "made", None, sets, 1.0)
    try:
        return facts_of(job.ingest(request, resolve(str(home)), workers))
    except (GoodviewsError, ValueError) as error:
        assert isinstance(error, GoodviewsError)
        return type(error).__name__


def on_all_paths(
    source: str,
    inputs: Path | None,
    options: Sequence[str],
    folder: Path,
    ray_workers: Workers | None,
    *,
    limit: bool = False,
) -> Facts:
    """The facts of one job, after a check that they are the same with and without exchange, with 0 and 2 CPUs.

    ray_workers: None leaves the two CPUs out. A job that was planned with an exchange runs once for both ways.
    """

    found: dict[str, Facts] = {}
    with open_workers(address=None, num_cpus=0) as none, pytest.MonkeyPatch.context() as patch:
        # The commit sees shards and not options, and takes half of the time of so small a job.
        patch.setattr(job, "commit_version", lambda *_, **__: Committed(snapshot_id=1, was_there=False))
        for exchange in ("planned", "forced"):
            plans: list[Plan] = []

            def plan(*arguments: Any, exchange: str = exchange, plans: list[Plan] = plans) -> Plan:
                plans.append(plan_shards(*arguments))
                return dataclasses.replace(plans[0], direct=()) if exchange == "forced" else plans[0]

            patch.setattr(job, "plan_shards", plan)
            for cpus, workers in {"0 CPUs": none, "2 CPUs": ray_workers}.items():
                if workers is not None:
                    home = folder / f"{exchange}-{cpus[0]}"
                    found[f"{exchange}, {cpus}"] = run(source, inputs, options, home, workers, limit=limit)
            if not plans or not plans[0].direct:
                break
    first = next(iter(found.values()))
    for name, facts in found.items():
        assert facts == first, (name, options, limit)
    return first


def test_every_option_of_every_source_is_in_the_matrix() -> None:
    for name in SOURCES:
        options = {field.name for field in dataclasses.fields(source_class(name))}
        named = set(TABLE_OPTIONS) if name == "table" else {o.partition("=")[0] for o in OTHERS[name]}
        assert named == options, name


@pytest.mark.parametrize("kind", FORMATS)
def test_the_options_of_a_table(kind: str, tmp_path: Path, ray_workers: Workers) -> None:
    count = 0
    for number, options in enumerate(table_settings()):
        if kind == "tsv" and "delimiter" not in options and number % 6:
            continue  # The same reader as CSV with another delimiter: every delimiter, and a sixth of the rest.
        inputs = tmp_path / f"{number}" / f"rows.{kind}"
        inputs.parent.mkdir()
        inputs.write_bytes(FORMATS[kind](options.get("delimiter", "")))
        words = [f"{name}={value}" for name, value in options.items() if value]
        # Two CPUs take half a second a job; they take every fifth setting, each at another place in every format.
        both = (number + len(kind)) % 5 == 0
        facts = on_all_paths("table", inputs, words, inputs.parent, ray_workers if both else None)
        wanted = expected(options)
        if isinstance(facts, str):
            assert facts == wanted, words
            continue
        assert sorted((split, texts) for split, _, texts, *_ in facts[0]) == wanted, words
        of_pictures = [options.get(name, "") for name in ("image", "image_sha256", "width", "height")]
        for scene in facts[0]:
            assert [fact.strip("None,") != "" for fact in scene[3:]] == [bool(column) for column in of_pictures], words
        count += 1
    assert count > (10 if kind == "tsv" else 40)


OTHERS: Final[dict[str, list[str]]] = {
    "coco": ["split=dev", "restval=keep"],
    "datacomp": [],
    "flickr30k": ["split=dev", "pictures=true"],
    "flickr8k": ["split=dev"],
    "img2dataset": ["text=caption:alt", "id=url", "split=dev", "failed=skip"],
    "msrvtt": ["splits=official", "test_captions=all", "scene=video"],
    "multi30k": [],
    "recap-datacomp": [],
    "toyworld": [
        *("scenes=11", "captions=3", "images=false", "image_px=32"),
        *("seed=4", "val=0.3", "test=0.4", "defects=0.4"),
    ],
    "webdataset": ["text=txt", "id=__key__", "split=dev"],
    "wit": ["contexts=true", "pictures=false"],
}
"An unusual value of each option of the other sources."
OF_SOME_FILES: Final = {"pictures=true", "pictures=false", "contexts=true", "scene=video"}
"Options that only some forms of their files take."


def write_inputs(source: str, folder: Path) -> Iterator[tuple[Path | None, tuple[str, ...]]]:
    """Small inputs of a source, with the options that they need: those of the tests of mutated files, and tars."""
    if source == "toyworld":
        yield None, ("scenes=11",)
    elif source == "webdataset":
        yield tar_files.write_webdataset(folder / "tars"), ()
    elif source == "img2dataset":
        yield tar_files.write_img2dataset(folder / "shards"), ()
    for number, case in enumerate(case for case in test_mutated_files.CASES.values() if case.source == source):
        place = folder / f"case-{number}"
        place.mkdir(parents=True)
        for name, data in case.files.items():
            (place / name).write_bytes(data)
        yield place, case.sets


@pytest.mark.parametrize("source", OTHERS)
def test_the_options_of_the_other_sources(source: str, tmp_path: Path, ray_workers: Workers) -> None:
    jobs = 0
    for (place, needed), option in itertools.product(write_inputs(source, tmp_path), [None, *OTHERS[source]]):
        for limit in (False, True) if option is None else (False,):
            words = [*needed, *([option] if option else [])]
            folder = tmp_path / f"homes-{jobs}"
            both = option is None and not limit
            facts = on_all_paths(source, place, words, folder, ray_workers if both else None, limit=limit)
            assert not isinstance(facts, str) or option in OF_SOME_FILES, (place, words, facts)
            jobs += 1


def test_two_rows_of_one_id_are_never_one_scene_when_ids_are_said_to_be_unique(tmp_path: Path) -> None:
    """The fault: only parquet of one split was checked."""
    for kind, split in itertools.product(FORMATS, TABLE_OPTIONS["split"]):
        inputs = tmp_path / f"{kind}-{split.partition(':')[0]}" / f"rows.{kind}"
        inputs.parent.mkdir()
        inputs.write_bytes(FORMATS[kind](""))
        sets = ["source.text=alt", "source.id=key", "source.unique=true", f"source.split={split}"]
        request = build_request("table", [str(inputs)], "made", None, sets, 1.0)
        with (
            open_workers(address=None, num_cpus=0) as none,
            pytest.raises(IntegrityError, match=r"The id 'scene-\d' of made stands in several rows"),
        ):
            job.ingest(request, resolve(str(inputs.parent / "home")), none)
