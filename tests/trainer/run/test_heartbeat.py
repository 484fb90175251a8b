"""`trainer.run.heartbeat` and `trackers`: what is shown, and that no missing package is needed to show it."""

from __future__ import annotations

import importlib
import io
import time
from pathlib import Path
from typing import Any

import pytest

from infra.errors import ConfigError
from trainer.run.heartbeat import Heartbeat, HeartbeatWriter, LiveLine, line, read_heartbeat
from trainer.run.trackers import open_trackers

HEARTBEAT = Heartbeat(
    step=20,
    steps=400,
    epoch=1,
    losses={"loss": 1.234567, "inv": 0.5},
    samples_per_s=1234.5,
    tokens_per_s=9e4,
    eta_s=245.0,
)


def test_the_line_says_what_a_watcher_asks() -> None:
    assert line(HEARTBEAT) == (
        "step 20/400 | epoch 1 | loss 1.235 | inv 0.5 | 1,234 samples/s | 90,000 tokens/s | ETA 4 min 05 s"
    )


def test_a_heartbeat_travels_by_file_but_not_at_every_step(tmp_path: Path) -> None:
    writer = HeartbeatWriter(str(tmp_path))
    writer.write(HEARTBEAT)
    writer.write(Heartbeat(step=21, steps=400, epoch=1))
    found = read_heartbeat(str(tmp_path))
    assert found == HEARTBEAT
    writer.write(Heartbeat(step=400, steps=400, epoch=9))
    last = read_heartbeat(str(tmp_path))
    assert last is not None and last.step == 400


def test_a_heartbeat_that_cannot_be_written_or_read_fails_nobody(tmp_path: Path) -> None:
    (tmp_path / "pulse.json").write_text("half a pul")
    assert read_heartbeat(str(tmp_path)) is None
    (tmp_path / "file").write_text("")
    HeartbeatWriter(str(tmp_path / "file")).write(HEARTBEAT)


def test_the_live_line_shows_the_last_heartbeat_and_its_alarm_but_no_older_one(tmp_path: Path) -> None:
    stream = io.StringIO()
    HeartbeatWriter(str(tmp_path)).write(Heartbeat(step=1, steps=400, epoch=0, written_at=time.time() - 60))
    with LiveLine(str(tmp_path), label="run", stream=stream, interval_s=60):
        pass
    assert stream.getvalue() == ""
    with LiveLine(str(tmp_path), label="run", stream=stream, interval_s=60):
        HeartbeatWriter(str(tmp_path)).write(
            Heartbeat(step=2, steps=400, epoch=0, alarm="It is on fire.", written_at=time.time())
        )
    assert stream.getvalue().startswith("ALARM run: It is on fire.\nrun: step 2/400")


def test_tensorboard_gets_the_metrics(tmp_path: Path) -> None:
    accumulator: Any = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    trackers = open_trackers(str(tmp_path), "r", {}, step=0, exclude=["wandb", "mlflow"])
    assert len(trackers) == 1
    trackers[0].log(5, {"loss": 2.5})
    trackers[0].close()
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(5, 2.5)]


def test_an_unknown_tracker_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'comet'"):
        open_trackers(str(tmp_path), "r", {}, step=0, exclude=["comet"])
