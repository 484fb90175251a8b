"""A TCP proxy before a store that cuts the connections of chosen requests after some of their bytes."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from urllib.parse import urlsplit

Rule = Callable[[str], int | None]
"""From the first line of a request to how many of its bytes may pass, None for all. Cut it before its first byte or in its body:
Python's HTTP server takes a half header for a whole one."""


class Relay:
    """Takes connections on a port of its own and serves each in a thread; a subclass passes them on to `target` as it likes."""

    def __init__(self, host: str, port: int) -> None:
        self.target = (host, port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Take no more connections."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client, contextlib.suppress(OSError), socket.create_connection(self.target) as server:
            self.serve(client, server)
            for end in (server, client):
                end.shutdown(socket.SHUT_RDWR)

    def serve(self, client: socket.socket, server: socket.socket) -> None:
        """Pass one connection on; both ends are shut when this returns."""
        raise NotImplementedError


class Proxy(Relay):
    """Passes HTTP/1.1 on to `target`, but for what `rule` cuts; `cuts` holds the first lines of what was cut."""

    def __init__(self, target: str) -> None:
        self.rule: Rule = lambda line: None
        self.cuts: list[str] = []
        place = urlsplit(target)
        super().__init__(place.hostname or "", place.port or 80)
        self.url = f"http://127.0.0.1:{self.port}"

    def serve(self, client: socket.socket, server: socket.socket) -> None:
        threading.Thread(target=_copy, args=(server, client), daemon=True).start()
        left: int | None = None
        while data := client.recv(1 << 16):
            # No client sends a request before the answer to the one before, so one begins at the start of a read.
            line = data.split(b"\r\n", 1)[0].decode("latin-1")
            if line.endswith("HTTP/1.1"):
                left = self.rule(line)
                if left is not None:
                    self.cuts.append(line)
            server.sendall(data[:left])
            if left is not None and (left := left - len(data)) <= 0:
                break


def _copy(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            sink.sendall(data)


@contextlib.contextmanager
def proxied(target: str) -> Iterator[Proxy]:
    """A proxy for the time of the block."""
    proxy = Proxy(target)
    try:
        yield proxy
    finally:
        proxy.close()
