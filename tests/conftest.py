"""What all tests share: one Ray for the whole session, fixed random examples, and no way out to a model hub."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hypothesis import settings

from infra.session import Workers, open_workers

# Before any test imports the library that reads it: tests run without a network.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

# The same examples on every run and machine; a slow machine is no failure.
settings.register_profile("goodviews", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("goodviews")


@pytest.fixture(scope="session")
def ray_workers() -> Iterator[Workers]:
    """The one Ray of the test session, with two slots; it takes 6 s to start, so ask for it only where Ray matters."""
    with open_workers(address="local", num_cpus=2) as workers:
        yield workers
