"""What all tests share: one Ray, one S3 endpoint and one Postgres for the whole session, fixed random examples, and no way
out to a model hub."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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

POSTGRES_PASSWORD = "s3 cret'x\\y"


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


def postgres_binary(name: str) -> str | None:
    """A program of the newest Postgres here; Debian keeps the server's off the path."""
    versions = sorted(map(str, Path("/usr/lib/postgresql").glob(f"*/bin/{name}")), reverse=True)
    return next((path for path in (shutil.which(name), *versions) if path), None)


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[str]:
    """A Postgres of our own, one a session: a conninfo without the name of a database."""
    initdb, pg_ctl = postgres_binary("initdb"), postgres_binary("pg_ctl")
    if initdb is None or pg_ctl is None:
        pytest.skip("Postgres is not installed (`apt-get install postgresql`)")
    # Not below pytest's own folder, which is shut to the user that Postgres must run as.
    folder = Path(tempfile.mkdtemp(prefix="goodviews-postgres-"))
    run: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    if os.geteuid() == 0:
        import pwd

        try:
            owner = pwd.getpwnam("postgres")
        except KeyError:
            pytest.skip("Postgres does not run as root, and there is no user `postgres`")
        run |= {"user": owner.pw_uid, "group": owner.pw_gid, "extra_groups": []}
        os.chown(folder, owner.pw_uid, owner.pw_gid)
    (folder / "password").write_text(POSTGRES_PASSWORD)
    os.chmod(folder / "password", 0o644)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    data = str(folder / "data")
    made = [initdb, "-D", data, "-A", "scram-sha-256", "-U", "gv", f"--pwfile={folder / 'password'}"]
    subprocess.run(made, check=True, cwd=folder, **run)
    options = f"-p {port} -k {folder} -c listen_addresses=127.0.0.1 -c fsync=off"
    started = [pg_ctl, "-D", data, "-o", options, "-l", str(folder / "log"), "-w", "start"]
    subprocess.run(started, check=True, cwd=folder, **run)
    yield f"host=127.0.0.1 port={port} user=gv"
    subprocess.run([pg_ctl, "-D", data, "-m", "immediate", "stop"], check=True, cwd=folder, **run)
    shutil.rmtree(folder)


@pytest.fixture
def postgres_catalog(postgres_server: str) -> str:
    """`--catalog` of an empty database of its own."""
    import psycopg
    from psycopg.conninfo import make_conninfo

    name = f"lake_{secrets.token_hex(6)}"
    server = make_conninfo(postgres_server, dbname="postgres", password=POSTGRES_PASSWORD)
    with psycopg.connect(server, autocommit=True) as connection:
        connection.execute(f'CREATE DATABASE "{name}"')
    return "postgres:" + make_conninfo(postgres_server, dbname=name, password=POSTGRES_PASSWORD)
