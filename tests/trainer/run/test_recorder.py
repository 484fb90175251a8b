"""`trainer.run.recorder`: totals and hashes by hand, whatever the flushes; ranks are covered by `test_loop`."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer.run import records
from trainer.run.checkpoint import State
from trainer.run.recorder import Recorder, Totals, digests_of

CPU = torch.device("cpu")


def add_all(recorder: Recorder, batches: list[list[int]]) -> None:
    for step, batch in enumerate(batches):
        scenes = np.array(batch, np.uint64)
        digests = digests_of(scenes, np.repeat(scenes, 2), 0, len(batch))
        recorder.add(step // 2, digests, 10 * len(batch), len(batch), torch.tensor(float(step)))


@given(st.lists(st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=5), min_size=1, max_size=8), st.data())
def test_flushing_at_any_step_gives_the_same_rows(batches: list[list[int]], data: st.DataObject) -> None:
    whole = Recorder(Totals(), CPU)
    add_all(whole, batches)
    at = data.draw(st.integers(0, len(batches)))
    parts = Recorder(Totals(), CPU)
    add_all(parts, batches[:at])
    first = parts.flush()
    for step, batch in enumerate(batches[at:], at):
        scenes = np.array(batch, np.uint64)
        digests = digests_of(scenes, np.repeat(scenes, 2), 0, len(batch))
        parts.add(step // 2, digests, 10 * len(batch), len(batch), torch.tensor(float(step)))
    rows = [*first.to_pylist(), *parts.flush().to_pylist()]
    assert rows == whole.flush().to_pylist()
    assert parts.totals == whole.totals and whole.totals.samples == sum(map(len, batches))


def test_a_recorder_goes_on_from_a_checkpoint() -> None:
    batches = [[1, 2], [3, 4], [5, 6]]
    whole = Recorder(Totals(), CPU)
    add_all(whole, batches)
    expected = whole.flush().to_pylist()
    before = Recorder(Totals(), CPU)
    add_all(before, batches[:2])
    before.gather()
    totals = before.totals
    state = State(
        step=totals.step,
        plan_digest="p",
        config_digest="c",
        ranks=1,
        samples=totals.samples,
        tokens=totals.tokens,
        scenes_hash=f"{totals.scenes_hash:016x}",
        views_hash=f"{totals.views_hash:016x}",
    )
    after = Recorder(Totals.of(state), CPU)
    scenes = np.array(batches[2], np.uint64)
    after.add(1, digests_of(scenes, np.repeat(scenes, 2), 0, 2), 20, 2, torch.tensor(2.0))
    assert after.flush().to_pylist() == expected[2:]


def test_gathering_brings_totals_up_to_date_and_keeps_the_rows() -> None:
    recorder = Recorder(Totals(), CPU)
    add_all(recorder, [[1, 2], [3]])
    recorder.gather()
    assert (recorder.totals.step, recorder.totals.samples, recorder.totals.tokens) == (2, 3, 30)
    assert recorder.flush().num_rows == 2 and recorder.flush().num_rows == 0


def test_the_digests_of_the_ranks_add_up_to_the_global_ones() -> None:
    scenes = np.arange(8, dtype=np.uint64) + np.uint64(2**63)
    rows = np.arange(24, dtype=np.uint64)  # 3 views of 8 samples, view by view
    whole = digests_of(scenes, rows, 0, 8)
    halves = [digests_of(scenes[a : a + 4], rows.reshape(3, 8)[:, a : a + 4].ravel(), a, 8) for a in (0, 4)]
    assert tuple(sum(values) & records.MASK for values in zip(*halves, strict=True)) == whole
