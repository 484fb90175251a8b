"""The verbs: the options of the commands, dataclasses for results, the project's errors, and not a word printed."""

from __future__ import annotations

import dataclasses
import inspect
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import goodviews as gv
from catalog.report import commands as report_commands
from indexing.align import commands as align_commands
from indexing.probe import commands as probe_commands
from indexing.rotate import commands as rotate_commands
from indexing.search import search_commands
from infra import cli
from pipelines.embed import commands as embed_commands
from pipelines.ingest import commands as ingest_commands
from trainer.run import train_commands

SET = "run:first/toyworld/train/scenes"

COMMANDS: dict[str, Callable[..., Any]] = {
    "ingest": ingest_commands.ingest,
    "train": train_commands.train,
    "embed": embed_commands.embed,
    "align": align_commands.align,
    "rotate": rotate_commands.rotate,
    "probe": probe_commands.probe,
    "search": search_commands.search,
    "report": report_commands.report,
}
NOT_OFFERED = {
    "json": "a verb returns objects",
    "home": "of the workspace",
    "catalog": "of the workspace",
    "ctx": "of Typer",
    "dry_run": "it prints a preview",
    "plan": "it prints a forecast; `Views.plan` has its numbers",
}
PYTHON_NAMES = {"set_": "settings"}
OWN_DEFAULTS = {
    ("align", "metric"): "the command repeats the option, and documents this default",
    ("embed", "dataset"): "required; the command checks it by hand",
    ("embed", "of"): "required; the command checks it by hand",
    ("embed", "split"): "required; the command checks it by hand",
    ("embed", "model"): "required; the command checks it by hand, and takes several",
    ("ingest", "source"): "required; only a dry run does without",
    ("train", "views"): "a number or a word",
}


@pytest.mark.parametrize("verb", COMMANDS)
def test_a_verb_has_the_options_of_its_command(verb: str) -> None:
    command = dict(inspect.signature(COMMANDS[verb]).parameters)
    if verb == "probe":
        command = {"set_": command["set_"].replace(name="set"), **{n: p for n, p in command.items() if n != "set_"}}
    method = dict(inspect.signature(getattr(gv.Workspace, verb)).parameters)
    names = PYTHON_NAMES if verb != "probe" else {}
    wanted = {names.get(name, name) for name in command if name not in NOT_OFFERED}
    assert set(method) - {"self", "progress"} == wanted
    assert method["progress"].default is False
    for name, option in command.items():
        own = method.get(names.get(name, name))
        if own is None or (verb, name) in OWN_DEFAULTS:
            continue
        # An option that is repeated is none or several: () here, None there.
        assert own.default == option.default or (own.default == () and option.default is None), name


def test_a_verb_does_what_its_command_does(trained_home: str, capsys: pytest.CaptureFixture[str]) -> None:
    options: dict[str, Any] = {"k": 5, "permutations": 20, "bootstrap": 100}
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    capsys.readouterr()
    assert cli.run(["align", SET, SET, *words, "--metric", "cka", "--json", "--home", trained_home]) == 0
    (printed,) = json.loads(capsys.readouterr().out)
    (score,) = gv.open(trained_home).align(SET, SET, metric="cka", **options)
    own = {field.name for field in dataclasses.fields(score)} - {"details"}
    shown = {name: getattr(score, name) for name in own if name in printed} | dict(score.details)
    assert shown.keys() == printed.keys()
    assert {name for name in printed if shown[name] != printed[name]} <= {"created_at"}
    assert len(printed) > 20


def test_a_paired_difference_is_a_score_too(trained_home: str) -> None:
    found = gv.open(trained_home).align(SET, SET, against=SET, k=5, permutations=0, bootstrap=100)
    assert [score.difference for score in found] == [None, [SET, SET]]
    assert found[1].value == 0.0
    assert found[1].left is None


PROGRAM = """
import dataclasses, sys
import goodviews as gv

workspace = gv.open(sys.argv[1])
world = {"source.scenes": 40, "source.image_px": 16, "source.defects": 0.2}
ingested = workspace.ingest("toyworld", settings=world, exclude=[], limit=30, num_cpus=0)
assert ingested.scenes == 30 and ingested.texts_kept < ingested.texts_read
trained = workspace.train("tiny-cpu", dataset="toyworld", roles=["human"], views="bad", settings=eval(sys.argv[2]))
run = f"run:{trained.run_id}"
embedded = workspace.embed(run, dataset="toyworld", split="train", of="scenes", num_cpus=0)
first = workspace.embed(f"{run}@untrained", dataset="toyworld", split="train", of="scenes", num_cpus=0)
name, other = embedded.name, first.name
results = [ingested, trained, embedded, first]
results += workspace.align(name, other, k=3, metric="all", permutations=20, bootstrap=100)
results += workspace.rotate(name, other, fit_pairs=8, splits=2, curve=[5], bootstrap=100)
results += workspace.probe(name, ["states:sky"], kind="knn", folds=2, k=3, bootstrap=100)
results += [workspace.search("a boat", name, k=2), workspace.report(title="Quiet")]
assert all(map(dataclasses.is_dataclass, results))
assert len(workspace.leaderboard) > 10
assert workspace.runs["status"].to_pylist() == ["finished"]
assert workspace.embeddings["name"].to_pylist() == [name, other]
"""


def test_a_program_that_calls_every_verb_prints_nothing(tmp_path: Path, tiny: dict[str, Any]) -> None:
    # A process of its own: pytest's own handlers would swallow what logging prints.
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "home"), repr(tiny)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_progress_is_shown_where_it_is_asked_for(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    workspace = gv.open(str(tmp_path / "home"))
    workspace.ingest("toyworld", settings={"source.scenes": 12}, num_cpus=0, progress=True)
    shown = capfd.readouterr()
    assert shown.out == ""
    assert "12 scenes" in shown.err


def test_the_verbs_raise_the_errors_of_the_project(trained_home: str) -> None:
    workspace = gv.open(trained_home)
    with pytest.raises(gv.UsageError, match="no source 'toyword'"):
        workspace.ingest("toyword")
    with pytest.raises(gv.ConfigError, match="Did you mean 'source.scenes'"):
        workspace.ingest("toyworld", settings={"source.scene": 3}, num_cpus=0)
    with pytest.raises(gv.UsageError, match="Name a recipe"):
        workspace.train()
    with pytest.raises(gv.UsageError, match="Name a recipe"):
        workspace.train(resume="first", run_id="second")
    with pytest.raises(gv.ConflictError, match="is finished"):
        workspace.train(resume="first")
    with pytest.raises(gv.ConfigError, match="plan.good_fraction"):
        workspace.train("tiny-cpu", views="goood")
    with pytest.raises(gv.InputError, match="nobody"):
        workspace.align(SET, "nobody")
    with pytest.raises(gv.UsageError, match="fits nothing"):
        workspace.rotate(SET, SET, apply="0" * 16, curve=[5])
    with pytest.raises(gv.UsageError, match="is a control"):
        workspace.rotate(SET, SET, map="random", fit_pairs=5)
    with pytest.raises(gv.UsageError, match="can be embedded"):
        workspace.embed("run:first", dataset="toyworld", split="train", of="words")
