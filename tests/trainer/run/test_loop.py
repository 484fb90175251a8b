"""`trainer.run.loop` without Ray: a resumed run is the uninterrupted one, and any number of ranks sees one sequence."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from infra.errors import ConflictError, GoodviewsError
from infra.home import Home
from tests.trainer import training
from trainer.run import checkpoint, records
from trainer.run.loop import Place, train_rank
from trainer.run.records import Job

STEPS_PER_EPOCH = 6
"97 training scenes of the toy world in batches of 16."


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Home:
    return training.make_home(tmp_path_factory.mktemp("home"))


@pytest.fixture(scope="module")
def uninterrupted(home: Home) -> Job:
    """Two epochs of good views on one rank."""
    job = training.make_job(home, training.small_recipe(), "uninterrupted")
    training.train(job)
    return job


def test_a_run_leaves_ledger_metrics_checkpoints_and_encoders(uninterrupted: Job) -> None:
    ledger = training.ledger_of(uninterrupted)
    assert ledger["step"] == list(range(2 * STEPS_PER_EPOCH))
    assert ledger["epoch"] == [0] * STEPS_PER_EPOCH + [1] * STEPS_PER_EPOCH
    assert ledger["samples"] == [16 * (step + 1) for step in range(2 * STEPS_PER_EPOCH)]
    assert len(set(ledger["scenes_hash"])) == 2 * STEPS_PER_EPOCH
    assert records.encoder_names(uninterrupted.url) == ["encoder", "encoder-epoch-001", "encoder-untrained"]
    assert checkpoint.published_steps(records.checkpoints_url(uninterrupted.url, uninterrupted.record)) == [6, 12]
    metrics = records.latest_metrics(uninterrupted.url)
    assert {"loss", "inv", "sigreg", "lr", "grad_norm", "samples_per_s", "effective_rank", "spread"} <= set(metrics)
    status = records.read_status(uninterrupted.url)
    assert status is not None and (status.steps, status.samples) == (12, 192)


def test_training_moves_the_weights_and_the_exports_differ(uninterrupted: Job) -> None:
    names = ["encoder-untrained", "encoder-epoch-001", "encoder"]
    weights = [load_file(f"{uninterrupted.url}/{name}/model.safetensors") for name in names]
    for before, after in itertools.pairwise(weights):
        assert any(not torch.equal(before[key], after[key]) for key in before)
    about = json.loads(Path(f"{uninterrupted.url}/encoder-epoch-001/goodviews.json").read_text())
    assert (about["record"]["steps"], about["record"]["samples"]) == (6, 96)


def test_the_same_recipe_trains_the_same_weights_twice(home: Home, uninterrupted: Job) -> None:
    again = training.renamed(uninterrupted, home, "again")
    training.train(again)
    verdict = records.verify(home, "uninterrupted", "again")
    assert (verdict.differs_at, verdict.same_views, verdict.same_losses) == (None, True, True)
    one, two = (load_file(f"{job.url}/encoder/model.safetensors") for job in (uninterrupted, again))
    assert all(torch.equal(one[key], two[key]) for key in one)


def test_e9_e24_killed_in_the_middle_of_an_epoch_it_goes_on_bit_for_bit(
    home: Home, uninterrupted: Job, tmp_path: Path
) -> None:
    job = training.renamed(uninterrupted, home, "killed")
    processes = training.start_ranks(job, 1, tmp_path)
    training.wait_for_step(job, 6, processes)
    training.kill(processes)
    assert checkpoint.published_steps(records.checkpoints_url(job.url, job.record)) == [6]
    training.train(job)
    verdict = records.verify(home, "uninterrupted", "killed")
    assert verdict.differs_at is None and verdict.same_views and verdict.same_losses


def test_e11_a_run_that_stopped_at_an_epoch_end_begins_the_next_epoch(home: Home, uninterrupted: Job) -> None:
    """Only the checkpoint of the last step of epoch 0 is left: mosaicml/streaming#700 raised or repeated here."""
    job = training.renamed(uninterrupted, home, "epoch-end")
    training.train(job)
    folder = records.checkpoints_url(job.url, job.record)
    Path(folder, "step-000000012", "state.json").unlink()
    before = training.ledger_of(job)
    training.train(job)
    assert training.ledger_of(job) == before
    assert before["epoch"][6] == 1


def test_resuming_a_run_that_has_all_steps_only_exports_again(home: Home, uninterrupted: Job) -> None:
    before = training.ledger_of(uninterrupted)
    training.train(uninterrupted)
    assert training.ledger_of(uninterrupted) == before


@pytest.mark.parametrize("world", [2, 4])
def test_e15_e16_any_number_of_ranks_sees_one_sequence_and_one_loss(
    home: Home, uninterrupted: Job, tmp_path: Path, world: int
) -> None:
    recipe_ = training.small_recipe("encoder.dropout=0.0", "optimizer.lr=0.0001")
    alone = training.make_job(home, recipe_, f"alone-{world}")
    together = training.renamed(alone, home, f"ranks-{world}")
    training.train(alone)
    training.train_ranks(together, world, tmp_path)
    verdict = records.verify(home, alone.run_id, together.run_id)
    assert verdict.differs_at is None and verdict.same_views
    one, many = (np.array(training.ledger_of(job)["loss"]) for job in (alone, together))
    np.testing.assert_allclose(one, many, rtol=1e-3)
    np.testing.assert_allclose(one[:2], many[:2], rtol=2e-6)


def test_e15_a_run_begun_by_four_ranks_goes_on_with_one(home: Home, uninterrupted: Job, tmp_path: Path) -> None:
    job = training.renamed(uninterrupted, home, "restriped")
    processes = training.start_ranks(job, 4, tmp_path)
    training.wait_for_step(job, 6, processes)
    training.kill(processes)
    training.train(job)
    verdict = records.verify(home, "uninterrupted", "restriped")
    assert verdict.differs_at is None and verdict.same_views


def test_e18_ranks_killed_and_started_again_on_the_same_number_are_bit_identical(home: Home, tmp_path: Path) -> None:
    """SIGKILL of all ranks mid-epoch; nothing of the dead processes stands in the way of the next ones."""
    whole = training.make_job(home, training.small_recipe("run.loader_workers=1"), "two-whole")
    training.train_ranks(whole, 2, tmp_path)
    job = training.renamed(whole, home, "two-killed")
    processes = training.start_ranks(job, 2, tmp_path)
    training.wait_for_step(job, 6, processes)
    training.kill(processes)
    training.train_ranks(job, 2, tmp_path)
    verdict = records.verify(home, "two-whole", "two-killed")
    assert verdict.differs_at is None and verdict.same_views and verdict.same_losses


def test_e23_a_rank_without_its_process_group_does_not_train(home: Home, uninterrupted: Job) -> None:
    job = training.renamed(uninterrupted, home, "ungrouped")
    with pytest.raises(GoodviewsError, match=r"rank 1 of 2, but its process group says rank 0 of 1"):
        train_rank(job, Place(rank=1, world=2, device=torch.device("cpu")))
    assert not Path(job.url, "ledger").exists()


def test_another_arm_reads_the_same_scenes_but_other_views(home: Home, uninterrupted: Job) -> None:
    job = training.make_job(home, training.small_recipe(arm="bad"), "bad")
    training.train(job)
    verdict = records.verify(home, "uninterrupted", "bad")
    assert verdict.differs_at is None and not verdict.same_views


def test_another_seed_is_found_out_at_step_zero(home: Home, uninterrupted: Job) -> None:
    job = training.make_job(home, training.small_recipe("plan.seed=1"), "seed-1")
    training.train(job)
    assert records.verify(home, "uninterrupted", "seed-1").differs_at == 0


def test_next_token_training_validates_and_keeps_its_best_encoder(home: Home, tmp_path: Path) -> None:
    recipe_ = training.small_recipe("optimizer.lr=0.01", arm="next-token")
    job = training.make_job(home, recipe_, "next-token")
    training.train_ranks(job, 2, tmp_path)
    rows = records.read_metrics(job.url).to_pylist()
    losses = {row["step"]: row["value"] for row in rows if row["name"] == "validation_loss"}
    assert sorted(losses) == [6, 12] and losses[12] < losses[6]
    state = checkpoint.newest(records.checkpoints_url(job.url, job.record))
    assert state is not None and state.best_loss == losses[12]
    config = json.loads(Path(job.url, "encoder-best", "config.json").read_text())
    assert config["is_decoder"] is True


def test_validation_loss_does_not_depend_on_the_ranks(home: Home, tmp_path: Path) -> None:
    recipe_ = training.small_recipe("encoder.dropout=0.0", "optimizer.lr=1e-9", "plan.epochs=1", arm="next-token")
    found = []
    for world in (1, 2):
        job = training.make_job(home, recipe_, f"validation-{world}")
        training.train_ranks(job, world, tmp_path)
        found.append(records.latest_metrics(job.url)["validation_loss"])
    assert found[0] == pytest.approx(found[1], rel=1e-6)


def test_caption_pairs_train(home: Home) -> None:
    job = training.make_job(home, training.small_recipe("plan.epochs=1", arm="caption-pair"), "pairs")
    training.train(job)
    assert len(training.ledger_of(job)["step"]) == STEPS_PER_EPOCH


def test_a_loss_that_is_not_finite_ends_the_run_before_any_checkpoint(home: Home) -> None:
    recipe_ = training.small_recipe("optimizer.lr=1e30", 'optimizer.clip_norm="off"', "optimizer.warmup_share=0.0")
    job = training.make_job(home, recipe_, "diverged")
    with pytest.raises(GoodviewsError, match="gave loss"):
        training.train(job)
    assert checkpoint.published_steps(records.checkpoints_url(job.url, job.record)) == []


def test_a_collapse_ends_the_run_when_it_is_asked_to(home: Home) -> None:
    job = training.make_job(
        home, training.small_recipe("alarms.stop_on_collapse=true", "alarms.min_spread=0.99"), "flat"
    )
    with pytest.raises(GoodviewsError, match="collapsed"):
        training.train(job)


def test_a_record_that_no_longer_fits_is_refused(home: Home, uninterrupted: Job) -> None:
    job = training.renamed(uninterrupted, home, "changed")
    other = "0" * 16
    for record in (
        dataclasses.replace(job.record, plan_digest=other),
        dataclasses.replace(job.record, tokenizer_digest=other),
    ):
        with pytest.raises(ConflictError, match="was started with"):
            training.train(dataclasses.replace(job, record=record))


def test_a_checkpoint_of_another_config_is_refused(home: Home, uninterrupted: Job) -> None:
    job = training.renamed(uninterrupted, home, "other-config")
    training.train(job)
    config = {**job.record.config, "optimizer": {**job.record.config["optimizer"], "lr": 0.5}}
    with pytest.raises(ConflictError, match="under config"):
        training.train(dataclasses.replace(job, record=dataclasses.replace(job.record, config=config)))


def test_checkpoints_may_lie_elsewhere(home: Home, tmp_path: Path) -> None:
    job = training.make_job(home, training.small_recipe(f"run.checkpoints={tmp_path}", "plan.epochs=1"), "elsewhere")
    training.train(job)
    assert checkpoint.published_steps(str(tmp_path / "elsewhere")) == [6]
    assert not Path(job.url, "checkpoints").exists()
