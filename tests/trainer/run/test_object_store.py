"""A whole run in an object store: same sequence and losses as on a local disk, resumed from its checkpoints there."""

from __future__ import annotations

from pathlib import Path

import pytest

from infra import storage
from infra.home import Home
from tests.trainer import training
from trainer.run import checkpoint, job, records
from trainer.run.launch import Cluster


@pytest.mark.filterwarnings("ignore")
def test_a_run_in_s3_is_the_run_on_a_local_disk(s3_home: Home, tmp_path: Path) -> None:
    local = training.make_home(tmp_path / "home")
    training.fill(s3_home)
    for home in (local, s3_home):
        job.start(training.small_recipe("plan.epochs=1"), home, Cluster(), run_id="short")
    remote_url, local_url = (records.runs_url(home, "short") for home in (s3_home, local))
    assert records.read_ledger(remote_url).equals(records.read_ledger(local_url))
    assert records.read_ledger(remote_url).num_rows == 6
    for name in ("encoder/model.safetensors", "encoder-untrained/model.safetensors", "encoder/tokenizer.json"):
        assert storage.digest(storage.join(remote_url, name)) == storage.digest(storage.join(local_url, name))
    assert checkpoint.published_steps(records.checkpoints_url(remote_url, records.read_record(s3_home, "short"))) == [6]
