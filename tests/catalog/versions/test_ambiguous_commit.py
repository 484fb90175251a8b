"""A commit whose answer is lost on the way from Postgres: nobody knows whether it landed, and a rerun finds out."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from catalog.lake import lake
from catalog.versions import audit
from catalog.versions.commit import commit_version
from infra.errors import GoodviewsError
from infra.home import Home
from tests.infra.broken_connections import Relay


class Forwarder(Relay):
    """Passes connections to Postgres on, and cuts the one that sends the `place`-th COMMIT: before it arrives, or after."""

    def __init__(self, port: int) -> None:
        self.place, self.moment, self.seen = 0, "after", 0
        super().__init__("127.0.0.1", port)

    @property
    def has_cut(self) -> bool:
        return self.seen >= self.place > 0

    def serve(self, client: socket.socket, server: socket.socket) -> None:
        is_mute, is_answered = threading.Event(), threading.Event()
        threading.Thread(target=_answers, args=(server, client, is_mute, is_answered), daemon=True).start()
        while data := client.recv(1 << 16):
            self.seen += b"COMMIT" in data
            if b"COMMIT" in data and self.seen == self.place:
                if self.moment == "after":
                    is_mute.set()
                    server.sendall(data)
                    assert is_answered.wait(20)
                return
            server.sendall(data)


def _answers(
    server: socket.socket, client: socket.socket, is_mute: threading.Event, is_answered: threading.Event
) -> None:
    with contextlib.suppress(OSError):
        while data := server.recv(1 << 16):
            if is_mute.is_set():
                is_answered.set()
                return
            client.sendall(data)


@pytest.fixture
def between(postgres_catalog: str, tmp_path: Path) -> Iterator[tuple[Home, Home, Forwarder]]:
    """HOME as it is, HOME over a forwarder, and the forwarder."""
    from psycopg.conninfo import conninfo_to_dict, make_conninfo

    direct = conninfo_to_dict(postgres_catalog.removeprefix("postgres:"))
    forwarder = Forwarder(int(str(direct["port"])))
    over = make_conninfo("", **{**direct, "port": forwarder.port})
    url = str(tmp_path / "home")
    yield Home(url=url, catalog=postgres_catalog), Home(url=url, catalog=f"postgres:{over}"), forwarder
    forwarder.close()


def test_d7_a_commit_whose_answer_is_lost_lands_once(between: tuple[Home, Home, Forwarder], publisher: Any) -> None:
    """The connection is cut at COMMITs of one commit in turn: of its reads, and of the rows, before and after they landed."""
    direct, over, forwarder = between
    publish = publisher(direct)
    for name in ("first", "counted"):
        made = publish(name, shards=1)
        forwarder.seen = 0
        commit_version(over, made.dataset, made.version)
    count = forwarder.seen
    assert count > 6
    cuts = [
        (1, "before"),
        (count // 2, "after"),
        *((count - i, moment) for i in (2, 1, 0) for moment in ("before", "after")),
    ]
    landed = []
    for place, moment in cuts:
        made = publish(f"cut-{place}-{moment}", shards=1)
        forwarder.place, forwarder.moment, forwarder.seen = place, moment, 0
        try:
            commit_version(over, made.dataset, made.version)
        except GoodviewsError as error:
            assert "rerun" in str(error).lower() and "s3 cret" not in str(error)
        assert forwarder.has_cut
        landed.append(commit_version(direct, made.dataset, made.version).was_there)
    assert landed[:2] == [False, False] and landed[3] and landed[-1]
    with lake.reading(direct) as reader:
        query = "SELECT dataset, count(*) FROM versions.{} GROUP BY ALL ORDER BY ALL"
        names = sorted(published.dataset for published in publish.made)
        assert len(names) == len(cuts) + 2
        assert reader.rows(query.format("scenes")) == [(name, 4) for name in names]
        assert reader.rows(query.format("shards")) == [(name, 1) for name in names]
        assert reader.rows(query.format("jobs").replace("versions", "main")) == [(name, 1) for name in names]
    assert audit.verify(direct).problems == []
