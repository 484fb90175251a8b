"""`trainer.run.records`: hashes that do not depend on ranks, ledgers without holes, comparisons that name the step."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.errors import InputError, IntegrityError, UsageError
from infra.home import Home, resolve
from trainer.run import records

RECORD = records.RunRecord(
    run_id="a",
    recipe="tiny",
    arm="good",
    objective="lejepa",
    config={"seed": 0},
    dataset="toyworld",
    version="v",
    split="train",
    plan_digest="p",
    tokenizer_digest="t",
    code_version="0.1.0",
    seed=0,
    steps=6,
    snapshot_id=None,
    started_at=1.0,
)


def ledger_of(batches: list[list[int]], *, start: int = 0, views: int = 0, loss: float = 1.0) -> pa.Table:
    rows, rolling, samples = [], 0, 0
    for step, batch in enumerate(batches):
        rolling = records.roll(rolling, records.batch_digest(np.array(batch, np.uint64), np.arange(len(batch))))
        samples += len(batch)
        row = {"step": step, "epoch": step // 3, "scenes_hash": rolling, "views_hash": views, "samples": samples}
        rows.append({**row, "tokens": 10 * samples, "loss": loss})
    return pa.Table.from_pylist(rows[start:], schema=records.LEDGER)


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return resolve(str(tmp_path))


def save(home: Home, run_id: str, *parts: pa.Table) -> str:
    url = records.runs_url(home, run_id)
    records.write_record(url, dataclasses.replace(RECORD, run_id=run_id))
    for part in parts:
        records.write_part(url, "ledger", part, first_step=part.column("step")[0].as_py())
    return url


BATCHES = [[5, 3, 9], [1, 2, 4], [8, 7, 6], [5, 3, 9], [2, 2, 2], [1, 0, 3]]


@given(st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=40), st.data())
def test_the_digest_of_a_batch_is_the_sum_over_any_split_into_ranks(hashes: list[int], data: st.DataObject) -> None:
    values, places = np.array(hashes, np.uint64), np.arange(len(hashes))
    rank_of = np.array(data.draw(st.lists(st.integers(0, 3), min_size=len(hashes), max_size=len(hashes))))
    parts = [records.batch_digest(values[rank_of == rank], places[rank_of == rank]) for rank in range(4)]
    assert sum(parts) % 2**64 == records.batch_digest(values, places)


def test_the_digest_sees_order_and_content() -> None:
    places = np.arange(3)
    digests = {records.batch_digest(np.array(batch, np.uint64), places) for batch in ([1, 2, 3], [2, 1, 3], [1, 2, 4])}
    assert len(digests) == 3


def test_row_hashes_see_tokens_their_order_and_where_a_row_ends() -> None:
    def of(*rows: list[int]) -> list[int]:
        offsets = np.cumsum([0, *map(len, rows)])
        return [int(h) for h in records.row_hashes(np.array([t for row in rows for t in row], np.int32), offsets)]

    assert of([1, 2], [3]) == [of([1, 2])[0], of([3])[0]]
    assert len({of([1, 2])[0], of([2, 1])[0], of([1])[0], of([1, 2, 0])[0]}) == 4


def test_a_ledger_in_parts_reads_as_one(home: Home) -> None:
    whole = ledger_of(BATCHES)
    url = save(home, "a", whole.slice(0, 2), whole.slice(2))
    assert records.read_ledger(url).equals(whole)


def test_a_ledger_with_a_hole_is_refused(home: Home) -> None:
    whole = ledger_of(BATCHES)
    url = save(home, "a", whole.slice(0, 2), whole.slice(3))
    with pytest.raises(IntegrityError, match="step 3 in the place of step 2"):
        records.read_ledger(url)


def test_parts_after_the_checkpoint_are_dropped_before_a_run_goes_on(home: Home) -> None:
    whole = ledger_of(BATCHES)
    url = save(home, "a", whole.slice(0, 2), whole.slice(2, 2), whole.slice(4))
    records.drop_parts(url, "ledger", from_step=4)
    assert records.read_ledger(url).num_rows == 4


def test_two_runs_of_one_sequence_are_found_equal(home: Home) -> None:
    save(home, "a", ledger_of(BATCHES))
    save(home, "b", ledger_of(BATCHES, loss=2.0))
    found = records.verify(home, "a", "b")
    assert (found.differs_at, found.same_views, found.same_losses) == (None, True, False)
    assert "same scenes in the same order at all 6 steps" in found.sentence


@pytest.mark.parametrize("planted", range(6))
def test_a_planted_difference_is_named_by_its_first_step(home: Home, planted: int) -> None:
    changed = [list(batch) for batch in BATCHES]
    changed[planted][0], changed[planted][2] = changed[planted][2] + 100, changed[planted][0]
    save(home, "a", ledger_of(BATCHES))
    save(home, "b", ledger_of(changed))
    found = records.verify(home, "a", "b")
    assert (found.differs_at, found.epoch) == (planted, planted // 3)


def test_two_samples_that_change_places_are_a_difference(home: Home) -> None:
    changed = [BATCHES[0], [2, 1, 4], *BATCHES[2:]]
    save(home, "a", ledger_of(BATCHES))
    save(home, "b", ledger_of(changed))
    assert records.verify(home, "a", "b").differs_at == 1


def test_other_views_of_the_same_scenes_are_told_apart(home: Home) -> None:
    save(home, "a", ledger_of(BATCHES))
    save(home, "b", ledger_of(BATCHES, views=1))
    found = records.verify(home, "a", "b")
    assert (found.differs_at, found.same_views) == (None, False)


def test_a_shorter_run_differs_where_it_ends(home: Home) -> None:
    save(home, "a", ledger_of(BATCHES))
    save(home, "b", ledger_of(BATCHES[:4]))
    found = records.verify(home, "a", "b")
    assert found.differs_at == 4 and "b ends before step 4" in found.sentence


def test_nothing_is_said_of_unknown_or_empty_runs(home: Home) -> None:
    save(home, "a", ledger_of(BATCHES))
    save(home, "empty")
    with pytest.raises(InputError, match="no run 'zzz'"):
        records.verify(home, "a", "zzz")
    with pytest.raises(UsageError, match="no step in its ledger"):
        records.verify(home, "a", "empty")


@pytest.mark.parametrize("name", ["../x", "A", "", "a/b", "."])
def test_a_run_id_cannot_leave_its_folder(home: Home, name: str) -> None:
    with pytest.raises(UsageError, match="run id"):
        records.read_record(home, name)


def test_record_and_status_come_back_as_written(home: Home) -> None:
    url = save(home, "a")
    status = records.RunStatus(status="running", ranks=2, steps=3, samples=9, tokens=90, updated_at=5.0)
    assert records.read_status(url) is None
    records.write_status(url, status)
    assert records.read_record(home, "a") == dataclasses.replace(RECORD, run_id="a")
    assert records.read_status(url) == status
    row = records.catalog_row(url, records.read_record(home, "a"), status)
    assert (row.dataset_versions, row.steps, row.status) == ({"toyworld": "v"}, 3, "running")
