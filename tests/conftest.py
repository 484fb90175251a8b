"""What all tests share: one Ray for the whole session, fixed random examples, and no way out to a model hub."""

from __future__ import annotations

import os
import secrets
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from infra import storage
from infra.home import Home
from infra.session import Workers, open_workers

# Before any test imports the library that reads it: tests run without a network.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Ray lowers the priority of its workers, which starves them where something else keeps the machine busy.
os.environ.setdefault("RAY_worker_niceness", "0")

# The same examples on every run and machine; a slow machine is no failure.
settings.register_profile("goodviews", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("goodviews")


@pytest.fixture(scope="session")
def ray_workers() -> Iterator[Workers]:
    """The one Ray of the test session, with two slots; it takes 6 s to start, so ask for it only where Ray matters."""
    with open_workers(address="local", num_cpus=2) as workers:
        yield workers


@pytest.fixture(scope="session")
def s3_endpoint() -> Iterator[str]:
    """moto's S3 server over HTTP, one a session: the clients that fsspec keeps go on talking to the first they met."""
    server_module = pytest.importorskip("moto.server", reason="moto is not installed (`pip install 'moto[server]'`)")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        server = server_module.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        server.start()
        host, port = server.get_host_and_port()
        yield f"http://{host}:{port}"
        server.stop()


@pytest.fixture
def s3_home(s3_endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    """A HOME in a bucket of its own, with a SQLite catalog on disk; settings come from the environment."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key-id")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hush-hush")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_endpoint)
    bucket = f"bucket-{secrets.token_hex(4)}"
    storage.filesystem(f"s3://{bucket}/x")[0].mkdir(bucket)
    return Home(url=f"s3://{bucket}/a home", catalog=str(tmp_path / "catalog.sqlite"))
