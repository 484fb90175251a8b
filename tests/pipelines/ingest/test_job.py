"""The whole job on small inputs: plans, budgets, refusals, and the quirks of Recap-DataComp from end to end."""

import contextlib
import sqlite3
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

from infra.errors import (
    ConfigError,
    ConflictError,
    GoodviewsError,
    InputError,
    IntegrityError,
    RejectBudgetError,
    StorageError,
    UsageError,
)
from infra.home import resolve
from infra.session import open_workers
from infra.storage import files
from pipelines.ingest.commands import build_request
from pipelines.ingest.job import IngestOutcome, ingest
from pipelines.ingest.plan import plan_shards
from pipelines.ingest.preview import examine


def run(
    source: str, paths: list[Path], home: Path, sets: list[str] | None = None, budget: float = 0.2
) -> IngestOutcome:
    request = build_request(source, [str(p) for p in paths], "made", None, sets or [], budget)
    with open_workers(address=None, num_cpus=0) as workers:
        return ingest(request, resolve(str(home)), workers)


def rows(outcome: IngestOutcome, kind: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = ds.dataset(Path(outcome.url) / kind, format="parquet").to_table().to_pylist()
    return found


def captions(path: Path, texts: list[Any], **columns: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"caption": texts, **columns}), path)
    return path


def published(home: Path) -> list[str]:
    return sorted(str(p.relative_to(home)) for p in home.rglob("*") if p.is_file())


def test_every_quirk_of_recap_datacomp_ends_as_it_should(recap_files: list[Path], tmp_path: Path) -> None:
    outcome = run("recap-datacomp", recap_files, tmp_path / "home", budget=0.9)
    scenes = {s["source_id"]: s for s in rows(outcome, "scenes")}
    texts = {k: [(c["role"], c["text"], c["repaired"]) for c in s["captions"]] for k, s in scenes.items()}
    by_url = {s["images"][0]["uri"]: s for s in scenes.values()}
    # 13 rows of three texts and two rows of two.
    assert outcome.texts_read == 13 * 3 + 2 * 2 == outcome.texts_kept + sum(outcome.rejects.values())
    # A1: repaired and marked.
    clr = by_url["https://a.example/clr.jpg"]["captions"]
    assert [(c["text"], c["repaired"]) for c in clr] == [("CLR\u00ae Mold Remover", True), ("A bottle.", False)]
    # One picture, two URLs, rows in two files: one scene with all its captions and both images.
    dog = by_url["https://a.example/dog.jpg"]
    assert [c["text"] for c in dog["captions"]] == [
        "My dog",
        "A brown dog.",
        "A dog on grass.",
        "My dog again",
        "A dog sits.",
    ]
    assert [i["uri"] for i in dog["images"]] == ["https://a.example/dog.jpg", "https://f.example/dog.jpg"]
    assert {r for r, _, _ in texts[dog["source_id"]]} == {"alt", "recap", "recap_conditioned"}
    # A2: the placeholder is no scene, its twelve texts are rejects.
    rejects = rows(outcome, "rejects")
    assert Counter(r["reason"] for r in rejects)["placeholder_group"] == 12
    assert not any("c.example" in i["uri"] for s in scenes.values() for i in s["images"])
    # No hash: the normalised URL names one scene for two spellings.
    bay = by_url["HTTP://User@D.Example:80/A%7e.jpg?Size=2#top"]
    assert bay["scene_key"].startswith("h-")
    assert [c["text"] for c in bay["captions"]] == ["A bay", "Sea.", "Bay."]
    # A10: the Windows-1252 byte is a reject with its exact bytes; nobody's texts are rejects too.
    assert [(r["raw"], r["detail"]) for r in rejects if r["reason"] == "invalid_utf8"] == [
        (b"Caf\x92 menu", "byte 0x92 at offset 3")
    ]
    assert [r["text"] for r in rejects if r["reason"] == "missing_id"] == ["Nobody's", "Nothing.", "None"]


def test_a3_the_key_of_a_download_never_names_a_scene(recap_files: list[Path], tmp_path: Path) -> None:
    scenes = rows(run("recap-datacomp", recap_files, tmp_path / "home", budget=0.9), "scenes")
    assert len(scenes) > 3
    assert not any(s["scene_key"].isdigit() for s in scenes)


def test_mixed_uploads_are_refused_and_nothing_is_written(
    recap_files: list[Path], recap_old_upload: Path, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match="mix 2 uploads"):
        run("recap-datacomp", [*recap_files, recap_old_upload], tmp_path / "home")
    assert published(tmp_path / "home") == []


def test_b10_rejects_over_budget_fail_the_job_and_a_larger_budget_finishes_it(tmp_path: Path) -> None:
    path = captions(tmp_path / "in" / "t.parquet", ["a", "b b", None, "nan", "c c c"])
    with pytest.raises(RejectBudgetError, match=r"2 of 5 texts .*40.0%.*missing_text 2") as failed:
        run("table", [path], tmp_path / "home", ["source.text=caption"])
    assert failed.value.exit_code == 3
    assert not any(name.endswith("job.json") for name in published(tmp_path / "home"))
    outcome = run("table", [path], tmp_path / "home", ["source.text=caption"], budget=0.5)
    assert (outcome.texts_kept, outcome.shards_reused) == (3, 1)


def test_b10_a_source_without_any_good_text_is_never_committed(tmp_path: Path) -> None:
    path = captions(tmp_path / "in" / "t.parquet", [None, "", "nan"])
    with pytest.raises(InputError, match="No text"):
        run("table", [path], tmp_path / "home", ["source.text=caption"], budget=1.0)


def test_c4_an_input_without_rows_is_one_sentence(tmp_path: Path) -> None:
    path = captions(tmp_path / "in" / "t.parquet", pa.array([], pa.string()))
    with pytest.raises(InputError, match="holds no row"):
        run("table", [path], tmp_path / "home", ["source.text=caption"])


def test_d2_a_glob_that_matches_nothing_says_what_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"matches no file"):
        run("table", [tmp_path / "*.parquet"], tmp_path / "home")


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda p: p.write_bytes(b""), "t.parquet"),
        (lambda p: p.write_bytes(captions(p, ["a", "b"]).read_bytes()[:-20]), "t.parquet"),
        (lambda p: captions(p, ["a"]), "no_such"),
    ],
    ids=["empty", "truncated", "wrong column"],
)
def test_b18_a_broken_input_is_one_sentence_and_nothing_is_half_written(make: Any, match: str, tmp_path: Path) -> None:
    path = tmp_path / "in" / "t.parquet"
    path.parent.mkdir()
    make(path)
    column = "caption" if match == "t.parquet" else match
    with pytest.raises(GoodviewsError, match=match):
        run("table", [path], tmp_path / "home", [f"source.text={column}"])
    assert published(tmp_path / "home") == []


def test_one_scene_in_two_splits_fails_the_job(tmp_path: Path) -> None:
    path = captions(tmp_path / "t.parquet", ["a a", "b b", "c c"], image=["x", "y", "x"], part=["train", "val", "val"])
    sets = ["source.text=caption", "source.id=image", "source.split=column:part"]
    with pytest.raises(IntegrityError, match="x"):
        run("table", [path], tmp_path / "home", sets)


def test_ids_that_were_promised_unique_and_are_not_fail_the_job(tmp_path: Path) -> None:
    path = captions(tmp_path / "t.parquet", ["a a", "b b", "c c"], image=["x", "y", "x"])
    sets = ["source.text=caption", "source.id=image", "source.unique=true", "scenes_per_shard=2"]
    with pytest.raises(GoodviewsError, match="x"):
        run("table", [path], tmp_path / "home", sets)


def test_streamed_shards_are_cut_at_exactly_the_size_asked_for(tmp_path: Path) -> None:
    paths = [captions(tmp_path / f"{i}.parquet", [f"file {i} text {j}" for j in range(7)]) for i in range(3)]
    request = build_request(
        "table", [str(p) for p in paths], "made", None, ["source.text=caption", "scenes_per_shard=5"], 0.2
    )
    plan = plan_shards(request, request.source.survey(request.inputs, None))
    assert [sum(p.stop - p.start for p in shard) for shard in plan.direct] == [5, 5, 5, 5, 1]
    outcome = run("table", paths, tmp_path / "home", ["source.text=caption", "scenes_per_shard=5"])
    assert (outcome.scenes, outcome.shards) == (21, 5)


def test_the_limit_is_content(tmp_path: Path) -> None:
    path = captions(tmp_path / "t.parquet", [f"text {j}" for j in range(9)])
    whole = run("table", [path], tmp_path / "home", ["source.text=caption"])
    part = run("table", [path], tmp_path / "home", ["source.text=caption", "limit=4"])
    assert (whole.scenes, part.scenes) == (9, 4)
    assert whole.version != part.version


def test_a_dry_run_shows_the_plan_and_writes_nothing(recap_files: list[Path], tmp_path: Path) -> None:
    facts = examine(build_request("recap-datacomp", [str(p) for p in recap_files], None, None, [], 0.2))
    assert (facts["files"], facts["rows"], facts["shards"]) == (2, 15, 1)
    assert facts["columns"]["org_caption"] == "text:alt"
    assert len(facts["first_scenes"]) == 3
    assert facts["sample_rejects"]["invalid_utf8"] == 1
    assert {p.name for p in tmp_path.iterdir()} == {"recap"}


@pytest.mark.parametrize(
    ("words", "error", "match"),
    [
        (("tyoworld", [], None, []), UsageError, "Did you mean 'toyworld'"),
        (("coco", [], None, []), UsageError, "--input"),
        (("toyworld", ["x"], None, []), UsageError, "reads no files"),
        (("table", ["x"], None, []), UsageError, "--dataset"),
        (("toyworld", [], "Bad Name", []), UsageError, "Bad Name"),
        (("toyworld", [], None, ["source.scene=3"]), ConfigError, "source.scenes"),
        (("toyworld", [], None, ["clean.max_group_records=0"]), ConfigError, "max_group_records"),
        (("toyworld", [], None, ["views=god"]), ConfigError, "'god'"),
        (("toyworld", [], None, ["scenes_per_shard=0"]), ConfigError, "scenes_per_shard"),
    ],
)
def test_a_wrong_word_on_the_command_line_is_one_sentence(words: Any, error: type[Exception], match: str) -> None:
    source, paths, dataset, sets = words
    with pytest.raises(error, match=match):
        build_request(source, paths, dataset, None, sets, 0.2)


def test_a_damaged_shard_of_a_grouped_source_is_mended_by_a_rerun(recap_files: list[Path], tmp_path: Path) -> None:
    home = tmp_path / "home"
    outcome = run("recap-datacomp", recap_files, home, budget=0.9)
    before = {p: p.read_bytes() for p in Path(outcome.url).rglob("*") if p.is_file()}
    lost = next(p for p in before if p.suffix == ".tar")
    lost.unlink()
    again = run("recap-datacomp", recap_files, home, budget=0.9)
    assert (again.version, again.shards_reused) == (outcome.version, 0)
    assert {p: p.read_bytes() for p in Path(outcome.url).rglob("*") if p.is_file()} == before


def test_a_file_changed_after_a_kill_is_made_again(recap_files: list[Path], tmp_path: Path) -> None:
    """Same size, other bytes, no job record yet: sizes alone would let it pass."""
    outcome = run("recap-datacomp", recap_files, tmp_path / "home", budget=0.9)
    (Path(outcome.url) / "job.json").unlink()
    path = next(p for p in Path(outcome.url).rglob("*.tar"))
    data = path.read_bytes()
    path.write_bytes(data.replace(b"dog", b"cat"))
    run("recap-datacomp", recap_files, tmp_path / "home", budget=0.9)
    assert path.read_bytes() == data


def test_a_job_that_is_overtaken_by_another_of_its_version_ends_with_that_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other finishes, and removes the work folder, between the making of that folder and the first file in it."""
    home = tmp_path / "home"
    kept_out = captions(tmp_path / "eval.parquet", ["text 3"])
    with open_workers(address=None, num_cpus=0) as workers:
        request = build_request("table", [str(kept_out)], "eval", None, ["source.text=caption"], 0.2)
        ingest(request, resolve(str(home)), workers)
    path = captions(tmp_path / "t.parquet", [f"text {i}" for i in range(9)])
    sets = ["source.text=caption", 'exclude.sets=["eval"]', "exclude.by=captions", "scenes_per_shard=3"]
    make_folder, once = files._make_folder, threading.Lock()
    others: list[IngestOutcome] = []

    def overtaken(folder: str) -> None:
        make_folder(folder)
        if "/work/" in folder and once.acquire(blocking=False):
            others.append(run("table", [path], home, sets))

    monkeypatch.setattr(files, "_make_folder", overtaken)
    outcome = run("table", [path], home, sets)
    (other,) = others
    assert (outcome.version, outcome.scenes, outcome.was_there) == (other.version, other.scenes, True)
    assert (outcome.scenes, outcome.shards, other.shards_reused) == (8, 3, 0)
    assert not (home / "work").exists()


def test_a_readme_beside_the_data_changes_nothing(tmp_path: Path) -> None:
    captions(tmp_path / "in" / "data" / "t.parquet", ["one text", "two texts"])
    plain = run("table", [tmp_path / "in"], tmp_path / "a", ["source.text=caption"])
    (tmp_path / "in" / "README.md").write_text("# About\n")
    assert run("table", [tmp_path / "in"], tmp_path / "b", ["source.text=caption"]).version == plain.version


def test_a_named_file_that_the_source_does_not_read_is_refused(tmp_path: Path) -> None:
    path = captions(tmp_path / "t.parquet", ["one text"])
    (tmp_path / "notes.md").write_text("x")
    with pytest.raises(InputError, match=r"notes.md is no file that this source reads"):
        run("table", [path, tmp_path / "notes.md"], tmp_path / "home", ["source.text=caption"])


def test_notes_of_the_survey_are_said_on_a_real_run(
    recap_files: list[Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    outcome = run("recap-datacomp", recap_files, tmp_path / "home", budget=0.9)
    assert any("2 of 2,719 parts" in note for note in outcome.notes)
    assert "2 of 2,719 parts" in caplog.text


def test_one_file_under_two_names_is_read_once(tmp_path: Path) -> None:
    path = captions(tmp_path / "in" / "t.parquet", ["one text", "two texts"])
    (tmp_path / "in" / "u.parquet").symlink_to(path)
    assert run("table", [tmp_path / "in"], tmp_path / "home", ["source.text=caption"]).texts_read == 2


def test_a_promise_of_unique_ids_is_checked_whatever_the_shard_size(tmp_path: Path) -> None:
    path = captions(tmp_path / "t.parquet", ["a a", "b b", "c c"], image=["x", "x", "y"])
    sets = ["source.text=caption", "source.id=image", "source.unique=true"]
    with pytest.raises(IntegrityError, match="'x' of made stands in several rows"):
        run("table", [path], tmp_path / "home", sets)


def test_a_url_that_no_parser_takes_fails_no_job(tmp_path: Path) -> None:
    urls = ["http://c]d/1", "http://exa\u2100mple.com/x", "no url"]
    path = captions(tmp_path / "t.parquet", ["red shoe", "red shoes", "a red shoe"], id=["x"] * 3, url=urls)
    sets = ["source.text=caption:alt", "source.id=id", "source.image=url"]
    assert run("table", [path], tmp_path / "home", sets).scenes == 1


def test_two_pictures_of_one_file_name_are_no_scene(tmp_path: Path) -> None:
    path = tmp_path / "coco_karpathy_val.json"
    path.write_text('[{"image": "a/1.jpg", "caption": "a red car"}, {"image": "b/1.jpg", "caption": "two kittens"}]')
    with pytest.raises(InputError, match="two files of one name"):
        run("coco", [path], tmp_path / "home")


def test_ids_that_json_readers_round_are_rejected(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    ids = [12345678901234567890123, 12345678901234567890124, 7]
    path.write_text("".join(f'{{"id": {i}, "caption": "text {i}"}}\n' for i in ids))
    outcome = run("table", [path], tmp_path / "home", ["source.text=caption", "source.id=id"], budget=0.9)
    assert (outcome.scenes, dict(outcome.rejects)) == (1, {"malformed_record": 2})


def test_a_blank_line_of_a_one_column_csv_is_a_row(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("caption\na dog runs\n\na cat sleeps\n")
    outcome = run("table", [path], tmp_path / "home", ["source.text=caption"], budget=0.9)
    assert (outcome.texts_read, dict(outcome.rejects)) == (3, {"missing_text": 1})
    assert sorted(s["source_row"] for s in rows(outcome, "scenes")) == [0, 2]


@pytest.mark.parametrize("catalog", ["postgres:host=127.0.0.1 port=1 dbname=goodviews", "foreign"])
def test_h6_a_catalog_that_cannot_take_the_version_is_found_before_the_first_shard(
    tmp_path: Path, catalog: str
) -> None:
    path = captions(tmp_path / "t.parquet", ["one text", "two texts"])
    if catalog == "foreign":
        catalog = str(tmp_path / "other.sqlite")
        with contextlib.closing(sqlite3.connect(catalog)) as connection:
            connection.execute("CREATE TABLE accounts (name TEXT)")
            connection.commit()
    request = build_request("table", [str(path)], "made", None, ["source.text=caption"], 0.2)
    with open_workers(address=None, num_cpus=0) as workers, pytest.raises((StorageError, ConflictError)):
        ingest(request, resolve(str(tmp_path / "home"), catalog), workers)
    assert not (tmp_path / "home").exists()
