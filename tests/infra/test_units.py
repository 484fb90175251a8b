"""One format of durations and one of sizes."""

from __future__ import annotations

import pytest

from infra.units import duration, size


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.04, "0.0 s"),
        (9.4, "9.4 s"),
        (59.2, "59.2 s"),
        (61, "1 min 01 s"),
        (65, "1 min 05 s"),
        (3599.6, "1 h 00 min"),
        (7260, "2 h 01 min"),
        (13_800, "3 h 50 min"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(("count", "text"), [(0, "0 MiB"), (600 << 20, "600 MiB"), (1.25 * 2**30, "1.25 GiB")])
def test_sizes(count: float, text: str) -> None:
    assert size(count) == text
