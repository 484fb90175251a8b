"""Scenes that an evaluation set also holds are left out, no others, and their rejects name the set."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from catalog.lake import lake
from catalog.overlap.identity import NO_BYTES
from infra.errors import ConfigError, InputError, RejectBudgetError, UsageError
from infra.home import Home, resolve
from infra.session import Workers, open_workers
from pipelines.ingest.commands import app, build_request
from pipelines.ingest.job import IngestOutcome, ingest
from tests.catalog.datasets import image, put_dataset

DOG, PLACEHOLDER = "d" * 64, "b" * 64
SAME = "https://a.example/same"

ROWS: list[tuple[str, str | None, str]] = [
    (SAME, None, "Words of its own"),
    ("same-bytes", DOG.upper(), "A dog, by other words"),
    ("same-set", None, "a DOG runs"),
    ("same-set", None, "Two dogs!"),
    ("one-caption", None, "A dog runs."),
    ("one-caption", None, "And more"),
    ("only-caption", None, "A dog runs."),
    ("signs", None, "..."),
    ("signs", None, "!!"),
    ("placeholder", PLACEHOLDER, "A house"),
    ("nothing", NO_BYTES, "A tree"),
    ("36979", None, "A number"),
    ("free", None, "Free of all"),
]
"""(id, sha256 of the image, caption) of a table; rows of one id are one scene."""


def put_eval(home: Home, *, version: str = "e" * 16, first: str = "A dog runs .") -> None:
    texts = {
        "a": ["x one"],
        "b": ["x two"],
        "c": ["Two dogs .", first],
        "signs": ["?", "..."],
        "n": ["x three"],
        **{f"p{i}": [f"y {i}"] for i in range(4)},
    }
    facts: dict[str, dict[str, Any]] = {
        "a": {"source_id": SAME},
        "b": image(DOG),
        "n": image(NO_BYTES),
        **{f"p{i}": image(PLACEHOLDER) for i in range(4)},
    }
    put_dataset(home, "eval", texts, split="test", version=version, facts=facts, source="table")


@pytest.fixture
def home(tmp_path: Path) -> Home:
    made = resolve(str(tmp_path / "home"))
    put_eval(made)
    put_dataset(made, "photos", {"x": ["z"]}, source="multi30k", split="test", facts={"x": {"source_id": "36979"}})
    return made


@pytest.fixture
def table(tmp_path: Path) -> list[str]:
    path = tmp_path / "in" / "in.parquet"
    path.parent.mkdir()
    ids, shas, texts = zip(*ROWS, strict=True)
    pq.write_table(pa.table({"id": ids, "sha": pa.array(shas, pa.string()), "caption": texts}), path)
    return [str(path.parent)]


SETS = ["source.id=id", "source.image_sha256=sha", "source.text=caption", "scenes_per_shard=4"]


def run(home: Home, table: list[str], *sets: str, budget: float = 0.0, workers: Workers | None = None) -> IngestOutcome:
    request = build_request("table", table, "web", None, [*SETS, *sets], budget)
    if workers is not None:
        return ingest(request, home, workers)
    with open_workers(address=None, num_cpus=0) as here:
        return ingest(request, home, here)


def rows(outcome: IngestOutcome, kind: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = ds.dataset(Path(outcome.url) / kind, format="parquet").to_table().to_pylist()
    return found


def kept(outcome: IngestOutcome) -> set[str]:
    return {row["source_id"] for row in rows(outcome, "scenes")}


EVERY = {row[0] for row in ROWS}
EVAL = f"eval@{'e' * 16}/test"


def test_scenes_of_one_id_of_the_same_bytes_or_of_the_same_captions_are_left_out_and_no_others(
    home: Home, table: list[str]
) -> None:
    # The budget is 0: what was asked to be left out is no fault of the input.
    outcome = run(home, table, 'exclude.sets=["eval:test","photos"]')
    assert EVERY - kept(outcome) == {SAME, "same-bytes", "same-set", "placeholder"}
    assert outcome.excluded == {f"{EVAL} by id": 1, f"{EVAL} by sha256": 2, f"{EVAL} by caption_set": 1}
    rejects = {(r["source_id"], r["text"]): (r["reason"], r["detail"]) for r in rows(outcome, "rejects")}
    assert rejects == {
        (SAME, "Words of its own"): ("excluded", f"{EVAL} by id"),
        ("same-bytes", "A dog, by other words"): ("excluded", f"{EVAL} by sha256"),
        ("same-set", "a DOG runs"): ("excluded", f"{EVAL} by caption_set"),
        ("same-set", "Two dogs!"): ("excluded", f"{EVAL} by caption_set"),
        # Under four scenes of the set: perhaps a placeholder, perhaps a set with a row for each caption.
        ("placeholder", "A house"): ("excluded", f"{EVAL} by sha256"),
    }
    assert outcome.texts_read == len(ROWS) == outcome.texts_kept + sum(outcome.rejects.values())


def test_by_captions_every_scene_that_shares_one_is_left_out(home: Home, table: list[str]) -> None:
    outcome = run(home, table, 'exclude.sets=["eval"]', "exclude.by=captions")
    # A text of signs is nobody's caption.
    assert EVERY - kept(outcome) == {"same-set", "one-caption", "only-caption"}
    assert outcome.excluded == {f"{EVAL.removesuffix('/test')} by captions": 3}
    assert outcome.rejects == {"excluded": 5}


def test_rows_that_stream_and_rows_that_are_brought_together_lose_the_same_scenes(
    home: Home, table: list[str], tmp_path: Path
) -> None:
    single = [row for row in ROWS if sum(other[0] == row[0] for other in ROWS) == 1]
    path = tmp_path / "single" / "in.parquet"
    path.parent.mkdir()
    ids, shas, texts = zip(*single, strict=True)
    pq.write_table(pa.table({"id": ids, "sha": pa.array(shas, pa.string()), "caption": texts}), path)
    found = [
        run(home, [str(path)], 'exclude.sets=["eval:test"]', "exclude.by=id,sha256,captions", f"source.unique={unique}")
        for unique in ("false", "true")
    ]
    assert found[0].version != found[1].version
    assert [{r[0] for r in single} - kept(outcome) for outcome in found] == [
        {SAME, "same-bytes", "only-caption", "placeholder"}
    ] * 2


def test_the_version_is_named_by_the_versions_that_were_left_out_and_how(home: Home, table: list[str]) -> None:
    plain = run(home, table)
    outcome = run(home, table, 'exclude.sets=["eval:test","photos"]')
    swapped = run(home, table, f'exclude.sets=["photos","eval@{"e" * 16}/test","eval:test"]')
    assert (swapped.version, swapped.was_there, swapped.excluded) == (outcome.version, True, outcome.excluded)
    by_id = run(home, table, 'exclude.sets=["eval:test","photos"]', "exclude.by=id")
    put_eval(home, version="f" * 16, first="Another dog .")
    newer = run(home, table, 'exclude.sets=["eval:test","photos"]')
    older = run(home, table, f'exclude.sets=["eval@{"e" * 16}:test","photos"]')
    assert older.version == outcome.version
    assert len({plain.version, outcome.version, by_id.version, newer.version}) == 4
    assert plain.version == run(home, table, "exclude.by=id").version
    assert "same-set" in kept(newer) and "same-set" not in kept(older)
    with lake.reading(home) as reader:
        query = "SELECT config->>'$.exclude.sets[0].version' FROM jobs WHERE version = ?"
        assert reader.rows(query, [newer.version]) == [("f" * 16,)]
        query = "SELECT count(*) FROM versions.rejects WHERE version = ? AND reason = 'excluded'"
        assert reader.rows(query, [outcome.version]) == [(5,)]


def test_the_same_bytes_after_a_lost_shard_and_on_two_workers(
    home: Home, table: list[str], tmp_path: Path, ray_workers: Workers
) -> None:
    sets = ('exclude.sets=["eval:test"]', "max_scenes_per_caption=1", "exclude.by=id")
    first = run(home, table, *sets, budget=0.5)
    files = {p: hashlib.sha256(p.read_bytes()).hexdigest() for p in Path(first.url).rglob("*") if p.is_file()}
    assert len(files) > 10 and first.rejects["excluded"] == 1 and first.rejects["common_caption"] == 2
    lost = sorted(Path(first.url, "manifests").iterdir())[1]
    lost.unlink()
    again = run(home, table, *sets, budget=0.5)
    assert (again.version, again.shards_reused) == (first.version, again.shards - 1)
    assert {p: hashlib.sha256(p.read_bytes()).hexdigest() for p in files} == files
    other = resolve(str(tmp_path / "other"))
    put_eval(other)
    on_ray = run(other, table, *sets, budget=0.5, workers=ray_workers)
    there = {
        Path(first.url) / p.relative_to(on_ray.url): hashlib.sha256(p.read_bytes()).hexdigest()
        for p in Path(on_ray.url).rglob("*")
        if p.is_file()
    }
    assert there == files
    assert not Path(home.url, "work").exists()


def test_an_object_store_gives_the_same_version_and_rejects(home: Home, s3_home: Home, table: list[str]) -> None:
    put_eval(s3_home)
    sets = ('exclude.sets=["eval:test"]', "max_scenes_per_caption=1")
    here, there = run(home, table, *sets, budget=0.5), run(s3_home, table, *sets, budget=0.5)
    assert (here.version, here.rejects, here.excluded) == (there.version, there.rejects, there.excluded)
    query = "SELECT rows_digest FROM versions.shards WHERE dataset = 'web' ORDER BY shard"
    digests = []
    for where in (home, s3_home):
        with lake.reading(where) as reader:
            digests.append(reader.rows(query))
    assert digests[0] == digests[1] and len(digests[0]) == here.shards


def test_what_was_left_out_hides_no_other_rejects(home: Home, tmp_path: Path) -> None:
    path = tmp_path / "many.parquet"
    texts = [(SAME, f"text {i}") for i in range(90)] + [("x", "one"), ("y", "two"), ("z", ""), ("u", "nan")]
    pq.write_table(pa.table({"id": [i for i, _ in texts], "sha": [None] * 94, "caption": [t for _, t in texts]}), path)
    sets = ('exclude.sets=["eval:test"]', "clean.max_group_records=100", "source.image_sha256=")
    assert run(home, [str(path)], *sets, budget=0.5).rejects == {"excluded": 90, "missing_text": 2}
    with pytest.raises(
        RejectBudgetError, match=r"^2 of 4 texts of web were rejected \(50.0%, budget 49.0%\): missing_text 2"
    ):
        run(home, [str(path)], *sets, "seed=1", budget=0.49)


def test_a_dataset_that_is_left_out_whole_is_no_dataset(home: Home, table: list[str], tmp_path: Path) -> None:
    path = tmp_path / "one.parquet"
    pq.write_table(pa.table({"id": [SAME], "sha": ["a" * 64], "caption": ["one"]}), path)
    with pytest.raises(InputError, match=r"No text of web was kept \(1 were left out as excluded\)"):
        run(home, [str(path)], 'exclude.sets=["eval:test"]')


@pytest.mark.parametrize(
    ("sets", "error", "sentence"),
    [
        (['exclude.sets=["eval:val"]'], InputError, "no split 'val'. It has test"),
        (['exclude.sets=["evil:test"]'], InputError, "no dataset 'evil'.* It holds eval, photos"),
        (['exclude.sets=["eval@0:test"]'], InputError, f"no version '0' of eval. It holds {'e' * 16}"),
        (['exclude.sets=["eval:a:b"]'], UsageError, "is not DATASET"),
        (['exclude.sets=["eval"]', "exclude.by=words"], ConfigError, "exclude.by names 'words'; known are id, sha256"),
        (['exclude.sets=["eval"]', "exclude.by="], ConfigError, "exclude.by is empty"),
        (["max_scenes_per_caption=0"], ConfigError, "use 1 or more"),
    ],
)
def test_what_cannot_be_left_out_ends_in_a_sentence(
    home: Home, table: list[str], sets: list[str], error: type[Exception], sentence: str
) -> None:
    with pytest.raises(error, match=sentence):
        run(home, table, *sets)


def test_a_set_of_which_nothing_can_be_recognised_is_refused(home: Home, table: list[str]) -> None:
    put_dataset(home, "mute", {"a": ["A dog runs."]}, source="table")
    with pytest.raises(InputError, match=r"Nothing of mute@0123456789abcdef can be recognised by id, sha256"):
        run(home, table, 'exclude.sets=["mute"]')
    outcome = run(home, table, 'exclude.sets=["mute"]', "exclude.by=captions")
    assert EVERY - kept(outcome) == {"one-caption", "only-caption", "same-set"}


def test_equal_ids_of_two_tables_are_two_things(home: Home, table: list[str]) -> None:
    put_dataset(home, "rows", {"a": ["x", "y"]}, source="table", facts={"a": {"source_id": "36979"}})
    assert "36979" in kept(run(home, table, 'exclude.sets=["rows"]'))


def test_common_captions_do_not_count_against_the_budget(home: Home, table: list[str]) -> None:
    assert run(home, table, "max_scenes_per_caption=1").rejects["common_caption"] == 2


def test_a_dataset_cannot_leave_out_itself(home: Home, table: list[str]) -> None:
    run(home, table)
    with pytest.raises(UsageError, match="is of the dataset that is ingested"):
        run(home, table, 'exclude.sets=["web:train"]')


def test_the_options_of_the_command_are_those_of_the_config(home: Home, table: list[str]) -> None:
    words = ["table", "--input", table[0], "--dataset", "web", "--home", home.url, "--num-cpus", "0"]
    words += [word for set_ in SETS for word in ("--set", set_)]
    words += ["--exclude", "eval:test", "--exclude", "photos", "--max-scenes-per-caption", "9"]
    done = CliRunner().invoke(app, [*words, "--max-reject-rate", "0", "--json"])
    assert done.exit_code == 0, done.output
    facts = json.loads(done.stdout)
    same = run(home, table, 'exclude.sets=["eval:test","photos"]', "max_scenes_per_caption=9")
    assert (facts["version"], facts["excluded"]) == (same.version, same.excluded) and same.was_there
    shown = CliRunner().invoke(app, [*words, "--max-reject-rate", "0"]).stdout
    assert f"1 scenes of {EVAL} by id" in " ".join(shown.split()) and "; 5 texts" in shown
