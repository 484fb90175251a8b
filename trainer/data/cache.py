"""The token cache: each shard of captions is tokenised once, and mapped into memory after that.

Invariants: a token file is whole or not there, and the same bytes whoever fills it, so two ranks may fill one shard at
once; it is only read under the key of everything that decides it (version, tokenizer, release of the tokenizers
package, tar).

    HOME/cache/tokens/<dataset>/<version>/<tokenizer>/good/train-00000.tokens
    HOME/cache/tokens/<dataset>/<version>/<tokenizer>/bad-03/train-00000.tokens     one pass of the bad tars

Local files are mapped: the ranks of a machine share the page cache. Remote ones are read whole, about 4 MB a shard.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import OrderedDict
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from catalog import schema
from infra import storage
from infra.errors import IntegrityError
from infra.home import Home
from infra.seeds import hash_keys
from trainer.data import arrayfile
from trainer.data.captions import Captions
from trainer.data.ragged import offsets_of
from trainer.data.reader import SceneTexts, read_tar, view_tar
from trainer.data.shardset import ShardSet
from trainer.data.tokenizer import TextTokenizer

FORMAT: Final = 1
OPEN_SHARDS: Final = 256
"Kept open at least: local ones are only mapped, remote ones take about 4 MB each."
STALE_S: Final = 3_600.0
"Temporary siblings older than this were left by a killed process."


@dataclass(frozen=True, eq=False)
class TokenShard:
    """One shard as cached. keys: scene keys in the order of the tar, UTF-8, cut by key_offsets (S + 1,)."""

    captions: Captions
    keys: NDArray[np.uint8]
    key_offsets: NDArray[np.int64]


class TokenCache:
    """Opens shards by their place in a `ShardSet`, filling what is not there. Safe to share between threads."""

    def __init__(self, shards: ShardSet, tokenizer: TextTokenizer, home: Home) -> None:
        self.shards = shards
        self.tokenizer = tokenizer
        self.url = storage.join(home.url, "cache", "tokens", shards.dataset, shards.version, tokenizer.cache_name)
        self._capacity = OPEN_SHARDS
        self._open: OrderedDict[tuple[int, int | None], Future[TokenShard]] = OrderedDict()
        self._lock = threading.Lock()
        self._swept: set[str] = set()

    def path(self, ordinal: int, bad_pass: int | None = None) -> str:
        """URL of the token file of a shard."""
        kind = "good" if bad_pass is None else f"bad-{bad_pass:02d}"
        return storage.join(
            self.url, kind, schema.shard_name(self.shards.split, int(self.shards.numbers[ordinal])) + ".tokens"
        )

    def open(self, ordinal: int, bad_pass: int | None = None) -> TokenShard:
        """The shard at place `ordinal`, from its good tar or one pass of its bad tars; tokenised first if needed.

        One thread fills, others that ask for the same shard wait. Raises IntegrityError when tar or cache is not what
        its record says.
        """
        key = (ordinal, bad_pass)
        with self._lock:
            future = self._open.get(key)
            is_mine = future is None
            if future is None:
                future = self._open[key] = Future()
            self._open.move_to_end(key)
            self._close_oldest()
        if is_mine:
            try:
                future.set_result(self._load(ordinal, bad_pass))
            except BaseException as error:  # noqa: BLE001 - handed on to this thread and to all that wait
                with self._lock:
                    self._open.pop(key, None)
                future.set_exception(error)
        return future.result()

    def reserve(self, shards: int) -> None:
        """Keep at least so many shards open, because one window needs them."""
        self._capacity = max(self._capacity, shards)

    def _close_oldest(self) -> None:
        # Only finished ones: a thread waits for each of the others. Arrays in use keep their memory map alive.
        for key in [k for k, f in self._open.items() if f.done()][: max(0, len(self._open) - self._capacity)]:
            del self._open[key]

    def _load(self, ordinal: int, bad_pass: int | None) -> TokenShard:
        url = self.path(ordinal, bad_pass)
        if not storage.exists(url):
            self._fill(ordinal, bad_pass, url)
        facts, arrays = arrayfile.unpack(_buffer(url), url=url)
        for name, expected in self._facts(ordinal, bad_pass).items():
            if facts.get(name) != expected:
                raise IntegrityError(
                    f"{url} is of {name} {facts.get(name)!r}, not of {expected!r}. It was copied from elsewhere."
                    f" {arrayfile.ADVICE}"
                )
        columns: dict[str, Any] = {name: arrays[name] for name in Captions.__dataclass_fields__}
        return TokenShard(captions=Captions(**columns), keys=arrays["keys"], key_offsets=arrays["key_offsets"])

    def _facts(self, ordinal: int, bad_pass: int | None) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "dataset": self.shards.dataset,
            "version": self.shards.version,
            "split": self.shards.split,
            "shard": int(self.shards.numbers[ordinal]),
            "scenes": int(self.shards.scenes[ordinal]),
            "bad_pass": bad_pass,
            "tokenizer": self.tokenizer.cache_name,
        }

    def _fill(self, ordinal: int, bad_pass: int | None, url: str) -> None:
        """Read the tar, tokenise it by pieces, publish the token file. Memory: a shard of tokens, a piece of text."""
        self._sweep(os.path.dirname(url))
        tar = view_tar(self.shards.folder, self.shards.manifest(ordinal), bad_pass=bad_pass)
        keys: list[str] = []
        parts = []
        for texts in read_tar(tar):
            keys += texts.keys
            parts.append(self._tokenise(texts))
        if len(set(keys)) != len(keys):
            raise IntegrityError(
                f"{tar.url} holds a scene twice among its {len(keys):,} samples. Delete its manifest and rerun"
                " `goodviews ingest`."
            )
        captions = Captions.concatenate(parts)
        encoded = [key.encode() for key in keys]
        arrays = {name: getattr(captions, name) for name in Captions.__dataclass_fields__}
        arrays["keys"] = np.frombuffer(b"".join(encoded), np.uint8)
        arrays["key_offsets"] = offsets_of(np.fromiter(map(len, encoded), np.int64, len(encoded)))
        size = len(schema.ROLES)
        facts = self._facts(ordinal, bad_pass) | {
            "tokens_by_role": np.bincount(captions.roles, captions.lengths, size).astype(np.int64).tolist(),
            "captions_by_role": np.bincount(captions.roles, minlength=size).tolist(),
        }
        storage.publish(url, arrayfile.pack(facts, arrays))

    def _tokenise(self, texts: SceneTexts) -> Captions:
        ids = self.tokenizer.encode(texts.texts)
        return Captions(
            tokens=ids.tokens.astype(np.uint16) if self.tokenizer.dtype is np.uint16 else ids.tokens,
            caption_offsets=ids.offsets,
            caption_index=texts.caption_index,
            roles=texts.roles,
            scene_offsets=texts.scene_offsets,
            scene_hashes=hash_keys(texts.keys),
        )

    def _sweep(self, folder: str) -> None:
        """Remove, once, what killed processes left in `folder`. Names are unique, so nothing waits for these files."""
        if storage.is_remote(folder) or folder in self._swept:
            return
        self._swept.add(folder)
        for name in storage.list_names(folder):
            if name.endswith(storage.TEMPORARY_SUFFIX):
                path = os.path.join(folder, name)
                with contextlib.suppress(FileNotFoundError):
                    if time.time() - os.stat(path).st_mtime > STALE_S:
                        os.unlink(path)

    def token_counts(
        self, ordinal: int, bad_pass: int | None = None
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]] | None:
        """(tokens, captions) of the shard by role, each (roles,), from its header; None when it is not filled yet."""
        url = self.path(ordinal, bad_pass)
        if not storage.exists(url):
            return None
        length = arrayfile.header_bytes(storage.read_range(url, 0, arrayfile.PREFIX), url=url)
        facts = arrayfile.facts_of(storage.read_range(url, 0, length), url=url)
        return np.array(facts["tokens_by_role"], np.int64), np.array(facts["captions_by_role"], np.int64)


def _buffer(url: str) -> bytes | pa.Buffer:
    if storage.is_remote(url):
        return storage.read_bytes(url)
    # Arrow's map outlives the file it was made from; Python's keeps a descriptor, and a rank of many lanes has
    # few left.
    with pa.memory_map(storage.absolute(url)) as file:
        return file.read_buffer()
