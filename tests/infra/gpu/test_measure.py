"""`infra.gpu.measure` rehearsed on a CPU: every number comes from a command that ran, and a failure is a line of its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from infra.gpu import measure

pytestmark = pytest.mark.timeout(600)


def test_the_rehearsal_measures_agreement_and_speed(tmp_path: Path) -> None:
    steps = ["machine", "agreement", "neighbours", "speed"]
    words = ["--rehearse", "--home", str(tmp_path / "home"), "--out", str(tmp_path), "--only", *steps]
    assert measure.main(words) == 0
    found = json.loads((tmp_path / "measurements.json").read_text())
    assert list(found) == steps
    assert found["agreement"]["broken"] == [] and len(found["agreement"]["found"]) == 7
    assert found["neighbours"]["equality"]["equal"] and found["neighbours"]["speed"]["rows"] == 5000
    assert found["speed"]["steps"] == 6 and found["speed"]["tokens_per_s"] > 0
    assert 0 <= found["speed"]["data_stall"] <= 1


def test_what_fails_is_told_and_the_rest_goes_on(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = ["--rehearse", "--home", str(tmp_path / "home"), "--out", str(tmp_path), "--dataset", "absent"]
    assert measure.main([*words, "--only", "speed", "machine"]) == 1
    found = json.loads((tmp_path / "measurements.json").read_text())
    assert "holds no dataset absent" in found["speed"]["failed"]
    assert "torch" in found["machine"]
    assert "Failed: speed." in capfd.readouterr().out
