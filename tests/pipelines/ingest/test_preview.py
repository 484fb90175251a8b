"""`pipelines.ingest.preview`: what a dry run says of files before anything is written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from infra.errors import InputError, UsageError
from pipelines.ingest.commands import app, build_request
from pipelines.ingest.preview import SAMPLE_RECORDS, examine, recognise


def token(folder: Path, scenes: int) -> Path:
    path = folder / "flickr8k" / "captions.token.txt"
    path.parent.mkdir(parents=True)
    path.write_text("".join(f"{n}.jpg#{i}\ta dog {i % 2}\n" for n in range(scenes) for i in range(4)))
    return path


def test_a_sample_is_extrapolated_to_the_whole(tmp_path: Path) -> None:
    path = token(tmp_path, 2 * SAMPLE_RECORDS // 4)
    facts = examine(build_request("flickr8k", [str(path)], None, None, [], 0.2))
    assert (facts["rows"], facts["sample_records"]) == (2 * SAMPLE_RECORDS, SAMPLE_RECORDS)
    assert facts["sample_rejects"] == {"exact_repeat": SAMPLE_RECORDS // 2}
    assert facts["expected_rejects"] == {"exact_repeat": SAMPLE_RECORDS}
    assert facts["expected_texts"] == 2 * SAMPLE_RECORDS


def test_a_sample_is_taken_from_all_over_the_input(tmp_path: Path) -> None:
    for number in range(20):
        path = tmp_path / f"{number:02d}.jsonl"
        path.write_text("".join(json.dumps({"caption": f"{number} {i}"}) + "\n" for i in range(1_000)))
    facts = examine(build_request("table", [str(tmp_path)], "x", None, ["source.text=caption"], 0.2))
    assert facts["sample_records"] == SAMPLE_RECORDS and facts["rows"] == 20_000
    # Eight pieces, of which the last is not the first file.
    request = build_request("table", [str(tmp_path / "1*.jsonl")], "x", None, ["source.text=caption"], 0.2)
    assert examine(request)["sample_records"] == SAMPLE_RECORDS


def test_sources_that_read_some_files_are_recognised(tmp_path: Path) -> None:
    path = token(tmp_path, 3)
    found = recognise([str(path)], None)
    assert list(found) == ["flickr8k", "flickr30k"] and "token form" in found["flickr8k"]
    (tmp_path / "odd.xyz").write_text("?")
    with pytest.raises(InputError, match=r"No source reads these files\. coco: .*table: "):
        recognise([str(tmp_path / "odd.xyz")], None)


def test_a_dry_run_needs_no_source_and_an_ingestion_does(tmp_path: Path) -> None:
    path = token(tmp_path, 3)
    done = CliRunner().invoke(app, ["--dry-run", "--input", str(path), "--json"])
    facts = json.loads(done.stdout)
    assert facts["source"] == "flickr8k" and list(facts["recognised"]) == ["flickr8k", "flickr30k"]
    assert [scene["scene_key"] for scene in facts["first_scenes"]] == ["0", "1", "2"]
    shown = CliRunner().invoke(app, ["--dry-run", "--input", str(path)]).stdout
    assert "flickr8k, token form" in shown and "exact_repeat 6" in shown and "Nothing was written." in shown
    done = CliRunner().invoke(app, ["--input", str(path)])
    assert isinstance(done.exception, UsageError) and "No source was named" in str(done.exception)
