"""docs/sources.md: each command runs on files of the form that it names, and each option and reject of a section exists."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from catalog.schema import REJECT_REASONS
from pipelines.ingest.commands import app
from pipelines.sources import SOURCES, source_class
from tests.pipelines.page_files import write_page_files

PAGE = Path(__file__).parents[3] / "docs" / "sources.md"
PARTS = ("Expects", "Repairs", "Rejects", "Licence")


def sections() -> dict[str, str]:
    parts = re.split(r"^## (.+)$", PAGE.read_text(), flags=re.MULTILINE)
    return {name: body for name, body in zip(parts[1::2], parts[2::2], strict=True) if name in SOURCES}


def commands() -> Iterator[tuple[str, str]]:
    for name, body in sections().items():
        for block in re.findall(r"```sh\n(.*?)```", body, flags=re.DOTALL):
            yield from ((name, line) for line in block.splitlines())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with small files at every path that the page names."""
    root = tmp_path_factory.mktemp("page")
    write_page_files(root / "data")
    return root


def test_every_source_has_its_section_with_all_its_parts() -> None:
    found = sections()
    assert set(found) == set(SOURCES)
    for name, body in found.items():
        for part in PARTS:
            assert f"* **{part}**" in body, f"{name} says nothing of {part}"
    # Without a command in a section nothing below would run, and nobody would see it.
    assert {name for name, _ in commands()} == set(SOURCES)


@pytest.mark.parametrize("name", sorted(SOURCES))
def test_a_section_names_every_option_of_its_source_and_no_other(name: str) -> None:
    body = sections()[name]
    named = set(re.findall(r"source\.(\w+)", body))
    own = {field.name for field in dataclasses.fields(source_class(name))}
    assert named - own == set()
    assert own - named <= {"seed"}


def test_reasons_that_the_page_names_exist() -> None:
    page = PAGE.read_text()
    named = set(re.findall(r"`((?:\w+_)+\w+)`", page))
    reasons = named & {word for word in named if word.split("_")[-1] in {r.split("_")[-1] for r in REJECT_REASONS}}
    others = {"re_caption", "org_caption", "text_unreadable"}
    assert {"missing_image", "malformed_record"} <= reasons
    assert reasons - set(REJECT_REASONS) - others == set()


@pytest.mark.parametrize(("source", "line"), list(commands()))
def test_a_command_of_the_page_runs(
    source: str, line: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    program, verb, *words = shlex.split(line)
    assert (program, verb, words[0]) == ("goodviews", "ingest", source)
    done = CliRunner().invoke(app, [*words, "--num-cpus", "0", "--home", str(tmp_path / "home"), "--json"])
    assert done.exception is None, f"{line}: {done.exception}"
    outcome = json.loads(done.stdout)
    assert outcome["scenes"] > 0
    assert outcome["texts_read"] == outcome["texts_kept"] + sum(outcome["rejects"].values())


def test_forms_of_one_set_give_the_same_scenes(folder: Path, tmp_path: Path) -> None:
    """Kaggle's CSV and the token file of Flickr8k, and the four forms of Flickr30k, caption by caption."""

    def scenes(source: str, *paths: str) -> dict[str, list[str]]:
        words = [word for path in paths for word in ("--input", str(folder / "data" / path))]
        home = tmp_path / "-".join(paths).replace("/", "-")
        done = CliRunner().invoke(app, [source, *words, "--num-cpus", "0", "--home", str(home), "--json"])
        assert done.exception is None, done.exception
        rows = pa.concat_tables(
            pq.read_table(file, columns=["scene_key", "captions"])
            for file in Path(json.loads(done.stdout)["url"], "scenes").rglob("*.parquet")
        )
        return {row["scene_key"]: [c["text"] for c in row["captions"]] for row in rows.to_pylist()}

    token = scenes("flickr8k", "flickr8k")
    assert token == scenes("flickr8k", "kaggle") == scenes("flickr8k", "karpathy/dataset_flickr8k.json")
    forms = [
        scenes("flickr30k", path) for path in ("flickr30k", "flickr30k-token", "karpathy/dataset_flickr30k.json", "hub")
    ]
    assert forms[0] and all(form == forms[0] for form in forms)


def test_archives_are_as_they_are_published(folder: Path) -> None:
    with zipfile.ZipFile(folder / "data" / "msrvtt" / "train_val_annotation.zip") as file:
        assert "readme.txt" in file.namelist()
