"""Every command reads the same version of a dataset, also after a kill between the commit and the writing of the pointer."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from catalog.overlap.comparison import compare
from catalog.versions import audit, current
from infra import cli, storage
from infra.home import Home
from infra.session import open_workers
from pipelines.embed.plan import EmbedConfig, plan_embedding
from pipelines.ingest import exclusion
from pipelines.ingest.commands import build_request
from pipelines.ingest.exclusion import ExcludeConfig
from pipelines.ingest.job import IngestOutcome, ingest
from tests.infra import tiny_models


class Killed(BaseException):
    """Stands for SIGKILL: nothing catches it."""


def ingest_toys(home: Home, dataset: str, seed: int) -> IngestOutcome:
    sets = [f"source.seed={seed}", "source.scenes=40", "images=false", "scenes_per_shard=20"]
    with open_workers(address=None, num_cpus=0) as workers:
        return ingest(build_request("toyworld", [], dataset, None, sets, 0.5), home, workers)


def die_before_the_pointer(publish: Callable[..., Any]) -> Callable[..., Any]:
    def publish_or_die(url: str, *rest: Any, **options: Any) -> Any:
        if url.endswith("/current.json"):
            raise Killed
        return publish(url, *rest, **options)

    return publish_or_die


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    """A HOME whose second version of `toy` was committed by a job that was killed before it wrote the pointer."""
    made = Home(url=str(tmp_path / "home"), catalog=str(tmp_path / "home" / "catalog.sqlite"))
    ingest_toys(made, "other", 3)
    ingest_toys(made, "toy", 1)
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(storage, "publish", die_before_the_pointer(storage.publish))
        ingest_toys(made, "toy", 2)
    return made


def answers(home: Home, model: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    """The version of `toy` by the command that names it."""

    def output(*words: str) -> Any:
        capsys.readouterr()
        assert cli.run([*words, "--home", home.url]) == 0
        return json.loads(capsys.readouterr().out)

    sets = ["--set", "data.dataset=toy", "--set", "plan.batch_global=16", "--set", "plan.lanes=4"]
    plan = output("train", "--recipe", "tiny-cpu", *sets, "--plan", "--json")
    (row,) = output("catalog", "sql", "SELECT version FROM datasets WHERE dataset = 'toy' AND is_current", "--json")
    config = EmbedConfig(model=str(model), dataset="toy", split="train", observation="captions")
    (excluded,) = exclusion.resolve(home, "other", ExcludeConfig(sets=("toy:train",), by="caption_set"))
    return {
        "train": plan["facts"]["version"],
        "sql": row["version"],
        "embed": plan_embedding(config, home).record.version,
        "exclude": excluded.version,
        "overlap": compare(home, "toy", "other").left.version,
    }


def test_all_commands_name_the_version_that_the_catalog_shows(
    home: Home, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tiny_models.save_bert(tmp_path / "model")
    versions = set(storage.list_names(home.datasets("toy"))) - {"current.json"}
    (behind,) = versions & {str(current.read_pointer(home, "toy"))}
    (newest,) = versions - {behind}
    found = answers(home, model, capsys)
    assert found == dict.fromkeys(found, newest) and len(found) == 5
    assert any("says " + behind in str(problem) for problem in audit.verify(home).problems)

    assert ingest_toys(home, "toy", 2).version == newest
    assert current.read_pointer(home, "toy") == newest and audit.verify(home).problems == []
