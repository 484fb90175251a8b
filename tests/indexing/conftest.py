"""Where the real features are, for the tests that need them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

REAL = Path(os.environ.get("GOODVIEWS_REAL_DATA", Path(__file__).parents[3] / "shared" / "data"))


@pytest.fixture(scope="session")
def real_features() -> Path:
    """Given features of 1,000 photos: `files`, `effnet_lite0`, `minilm_int8` of five captions each."""
    path = REAL / "features" / "flickr8k_1000_features.npz"
    if not path.exists():
        pytest.skip(f"the real data is not at {REAL} (set GOODVIEWS_REAL_DATA)")
    return path
