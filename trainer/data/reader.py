"""View tars into columns of captions: 512-byte blocks by the manifest's offsets, then one columnar JSON parse.

Invariant: what is yielded agrees with the manifest in number, keys and dataset, and with the tar's own headers; with
`verify` no last piece is yielded from a file whose size or sha256 is not the manifest's.

Why not a tar library: with the offsets known, all headers of a piece are one NumPy array and all payloads one buffer of
JSON lines; webdataset decodes 11,000 samples/s where this reaches 200,000 (tests/bench/bench_stream.py).
Shapes: S samples of a piece, C captions of all of them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.json
from numpy.typing import NDArray

from catalog import schema
from catalog.manifest import Manifest, ShardFile
from infra import storage
from infra.errors import IntegrityError

I64: TypeAlias = NDArray[np.int64]

BLOCK: Final = 512
PIECE_BYTES: Final = 16 << 20
"Read at a time; one more piece is read ahead from remote stores, so a reader holds about three of these."
ADVICE: Final = "Delete its manifest and rerun `goodviews ingest`."

# Arrow's JSON reader knows no large_list; a piece is far below the 2 GiB that 32-bit offsets hold.
_CAPTION: Final = pa.struct([("index", pa.int64()), ("role", pa.string()), ("text", pa.string())])
_SAMPLE: Final = pa.schema([("dataset", pa.string()), ("scene_key", pa.string()), ("captions", pa.list_(_CAPTION))])


@dataclass(frozen=True, eq=False)
class SceneTexts:
    """S scenes of a tar with their captions, in the order of the tar."""

    keys: list[str]
    "(S,)"
    scene_offsets: I64
    "(S + 1,) into captions"
    caption_index: I64
    "(C,)"
    roles: NDArray[np.int8]
    "(C,) place in `catalog.schema.ROLES`"
    texts: pa.StringArray
    "(C,)"


@dataclass(frozen=True, kw_only=True)
class ViewTar:
    """One good or bad tar of a shard, as its manifest describes it."""

    url: str
    dataset: str
    name: str
    "`train-00042 of flickr30k@9f3c`, for messages."
    file: ShardFile


def view_tar(folder: str, manifest: Manifest, *, bad_pass: int | None = None) -> ViewTar:
    """The good tar of a shard, or one pass of its bad tars. Raises IntegrityError when the manifest names none."""
    kind = "good" if bad_pass is None else "bad"
    name = f"{schema.shard_name(manifest.split, manifest.shard)} of {manifest.dataset}@{manifest.version}"
    for file in manifest.files:
        if file.kind == kind and file.bad_pass == bad_pass:
            return ViewTar(url=storage.join(folder, file.path), dataset=manifest.dataset, name=name, file=file)
    which = "good tar" if bad_pass is None else f"bad tar of pass {bad_pass}"
    raise IntegrityError(f"Shard {name} has no {which}. Ingest with `--set views={kind}`, or train on the other kind.")


def read_tar(tar: ViewTar, *, piece_bytes: int = PIECE_BYTES, verify: bool = True) -> Iterator[SceneTexts]:
    """The samples of a tar in pieces of about `piece_bytes`.

    verify: hash all bytes on the way (1.5 GB/s) and compare with the manifest. Raises IntegrityError for anything else
    than what the manifest says, InputError when the file is not there.
    """
    file = tar.file
    if file.blocks is None or len(file.blocks) != file.rows:
        raise IntegrityError(
            f"The manifest of shard {tar.name} does not give the length of each sample of {file.path}. {ADVICE}"
        )
    size = storage.size(tar.url)
    if size != file.bytes:
        raise IntegrityError(
            f"{tar.url} has {size:,} bytes, the manifest of shard {tar.name} says {file.bytes:,}. It was cut off or"
            f" changed. {ADVICE}"
        )
    edges = np.concatenate([[0], np.cumsum(np.asarray(file.blocks, np.int64))]) * BLOCK
    if int(edges[-1]) > file.bytes:
        raise IntegrityError(
            f"The samples of {tar.url} end at byte {int(edges[-1]):,}, but it has {file.bytes:,}. {ADVICE}"
        )
    sha = hashlib.sha256()
    rows = 0
    for first, last, data in _pieces(tar, edges, piece_bytes):
        if verify:
            sha.update(data)
        is_last = last == file.rows
        if is_last and verify:
            sha.update(storage.read_range(tar.url, int(edges[-1]), file.bytes))
            _check_digest(tar, sha.hexdigest())
        texts = _parse(tar, data, edges[first : last + 1] - edges[first])
        rows += len(texts.keys)
        yield texts
    if rows != file.rows:
        raise IntegrityError(
            f"{tar.url} gave {rows:,} samples, the manifest of shard {tar.name} says {file.rows:,}. {ADVICE}"
        )


def _check_digest(tar: ViewTar, digest: str) -> None:
    if digest != tar.file.sha256:
        raise IntegrityError(
            f"{tar.url} has sha256 {digest[:12]}, the manifest of shard {tar.name} says {tar.file.sha256[:12]}. It was"
            f" changed after publication. {ADVICE}"
        )


def _pieces(tar: ViewTar, edges: I64, piece_bytes: int) -> Iterator[tuple[int, int, bytes]]:
    """(first sample, last sample + 1, bytes), with one piece read ahead when the tar is remote."""
    cuts = [0]
    while cuts[-1] < len(edges) - 1:
        last = int(np.searchsorted(edges, edges[cuts[-1]] + piece_bytes, side="right")) - 1
        cuts.append(max(last, cuts[-1] + 1))
    spans = list(pairwise(cuts))

    def fetch(span: tuple[int, int]) -> bytes:
        start, stop = int(edges[span[0]]), int(edges[span[1]])
        data = storage.read_range(tar.url, start, stop)
        if len(data) != stop - start:
            raise IntegrityError(
                f"{tar.url} ends at byte {start + len(data):,}, the manifest of shard {tar.name} says"
                f" {tar.file.bytes:,}. It was cut off. {ADVICE}"
            )
        return data

    if not storage.is_remote(tar.url):
        yield from ((*span, fetch(span)) for span in spans)
        return
    with ThreadPoolExecutor(1, thread_name_prefix="read-ahead") as thread:
        ahead: Future[bytes] | None = None
        for i, span in enumerate(spans):
            data = ahead.result() if ahead is not None else fetch(span)
            ahead = thread.submit(fetch, spans[i + 1]) if i + 1 < len(spans) else None
            yield (*span, data)


# --- headers ------------------------------------------------------------------------------------------------------


def _parse(tar: ViewTar, data: bytes, edges: I64) -> SceneTexts:
    """The samples that begin at edges[:-1] and end at edges[1:] of `data`."""
    names, starts, sizes = _json_members(tar, np.frombuffer(data, np.uint8), edges)
    table = _columns(tar, _lines(tar, data, starts, sizes), len(names))
    texts = _scene_texts(tar, table)
    _check_names(tar, names, texts)
    return texts


def _json_members(tar: ViewTar, data: NDArray[np.uint8], edges: I64) -> tuple[list[bytes], I64, I64]:
    """Member name, payload start and payload size of the JSON of each sample: its last member, after the pictures."""
    blocks = data.reshape(-1, BLOCK)
    at = edges[:-1].copy()
    names = np.zeros(len(at), "S100")
    sizes = np.zeros(len(at), np.int64)
    open_rows = np.arange(len(at))
    while len(open_rows):
        header, size = _headers(tar, blocks[at[open_rows] // BLOCK])
        ends = at[open_rows] + BLOCK + -(-size // BLOCK) * BLOCK
        found = np.strings.endswith(header, b".json")
        sizes[open_rows], names[open_rows] = size, header
        wrong = np.where(found, ends != edges[1:][open_rows], ends >= edges[1:][open_rows])
        if wrong.any():
            row = int(open_rows[wrong][0])
            raise IntegrityError(
                f"{tar.url}: the sample that begins with member {names[row].decode('ascii', 'replace')!r} does not end"
                f" with its JSON where the manifest of shard {tar.name} says. {ADVICE}"
            )
        at[open_rows[~found]] = ends[~found]
        open_rows = open_rows[~found]
    return names.tolist(), at + BLOCK, sizes


def _headers(tar: ViewTar, header: NDArray[np.uint8]) -> tuple[NDArray[np.bytes_], I64]:
    """Names and payload sizes of ustar headers (S, 512), after magic, type and checksum were checked (POSIX.1-1988)."""
    digits = header[:, 124:135].astype(np.int64) - ord("0")
    stored = header[:, 148:154].astype(np.int64) - ord("0")
    numbers = ((digits >= 0) & (digits < 8)).all(1) & ((stored >= 0) & (stored < 8)).all(1)
    # The checksum field counts itself as eight spaces.
    total = header.sum(1, dtype=np.uint32).astype(np.int64) - header[:, 148:156].sum(1, dtype=np.int64) + 8 * ord(" ")
    magic = (header[:, 257:262] == np.frombuffer(b"ustar", np.uint8)).all(1) & (header[:, 156] == ord("0"))
    right = numbers & magic & (stored @ (8 ** np.arange(5, -1, -1)) == total)
    if not right.all():
        raise IntegrityError(
            f"{tar.url} does not hold a tar header where the manifest of shard {tar.name} says (sample"
            f" {int(np.flatnonzero(~right)[0])} of a piece). The file was changed, or is no tar. {ADVICE}"
        )
    names = np.ascontiguousarray(header[:, :100]).view("S100").ravel()
    return names, digits @ (8 ** np.arange(10, -1, -1))


# --- JSON ---------------------------------------------------------------------------------------------------------


def _lines(tar: ViewTar, data: bytes, starts: I64, sizes: I64) -> pa.Buffer:
    """The payloads at `starts` as one buffer of JSON lines.

    An array of Arrow string views points into `data` without copying, payload and line end in turn; its cast to an
    ordinary array is the one copy. Layout of a view: length, first 4 bytes, buffer, offset, 32 bits each; a string of
    up to 12 bytes stands in the view itself. Three times as fast as slicing and joining bytes.
    """
    if len(sizes) == 0 or int(sizes.min()) <= 12 or len(data) >= 2**31:
        raise IntegrityError(
            f"{tar.url} holds a sample with {int(sizes.min()) if len(sizes) else 0:,} bytes of JSON in a piece of"
            f" {len(data):,}; the JSON of a scene has more than 12 bytes, a sample less than 2 GiB. {ADVICE}"
        )
    views = np.zeros((len(sizes), 2, 4), np.int32)
    views[:, 0, 0] = sizes
    views[:, 0, 1] = np.frombuffer(data, np.uint8)[starts[:, None] + np.arange(4)].copy().view(np.int32).ravel()
    views[:, 0, 3] = starts
    views[:, 1, :2] = 1, ord("\n")
    buffers = [None, pa.py_buffer(views), pa.py_buffer(data)]
    lines = pa.Array.from_buffers(pa.binary_view(), 2 * len(sizes), buffers).cast(pa.large_binary())
    return lines.buffers()[2]


def _columns(tar: ViewTar, lines: pa.Buffer, samples: int) -> pa.Table:
    # One block: an object larger than the default of 1 MiB would be refused. Types are given, never inferred (B14).
    options = pa.json.ReadOptions(use_threads=False, block_size=len(lines) + 1)
    parsing = pa.json.ParseOptions(explicit_schema=_SAMPLE, unexpected_field_behavior="ignore")
    try:
        table = pa.json.read_json(pa.BufferReader(lines), read_options=options, parse_options=parsing)
    except pa.ArrowInvalid as error:
        raise IntegrityError(f"{tar.url} holds a sample that is not the JSON of a scene: {error}. {ADVICE}") from error
    if table.num_rows != samples:
        raise IntegrityError(f"{tar.url} holds {table.num_rows:,} JSON texts in {samples:,} members. {ADVICE}")
    return table.combine_chunks()


def _scene_texts(tar: ViewTar, table: pa.Table) -> SceneTexts:
    keys, captions = table["scene_key"].chunk(0), table["captions"].chunk(0)
    values = captions.values
    columns = [values.field(i) for i in range(values.type.num_fields)]
    if any(a.null_count for a in (keys, captions, values, *columns)):
        raise IntegrityError(f"{tar.url} holds a sample without scene key, captions, index, role or text. {ADVICE}")
    datasets = set(table["dataset"].unique().to_pylist())
    if datasets != {tar.dataset}:
        raise IntegrityError(
            f"{tar.url} holds samples of the dataset {sorted(map(str, datasets))}, shard {tar.name} is of"
            f" {tar.dataset!r}. {ADVICE}"
        )
    index, role, text = columns
    offsets = captions.offsets.to_numpy().astype(np.int64)
    if bool(np.any(np.diff(offsets) == 0)):
        empty = keys[int(np.flatnonzero(np.diff(offsets) == 0)[0])].as_py()
        raise IntegrityError(f"{tar.url}: scene {empty!r} has no caption. {ADVICE}")
    return SceneTexts(
        keys=keys.to_pylist(),
        scene_offsets=offsets,
        caption_index=index.to_numpy().astype(np.int64),
        roles=_role_codes(tar, role),
        texts=text,
    )


def _role_codes(tar: ViewTar, role: pa.StringArray) -> NDArray[np.int8]:
    encoded = role.dictionary_encode()
    names = encoded.dictionary.to_pylist()
    unknown = sorted(set(names) - set(schema.ROLES))
    if unknown:
        raise IntegrityError(
            f"{tar.url} holds captions of role {unknown[0]!r}; this release knows {', '.join(schema.ROLES)}. Use the"
            " release that wrote it."
        )
    codes = np.array([schema.ROLES.index(name) for name in names], np.int8)
    found: NDArray[np.int8] = codes[encoded.indices.to_numpy()]
    return found


def _check_names(tar: ViewTar, names: list[bytes], texts: SceneTexts) -> None:
    """Each member is named for the scene in it: `KEY.json`, or `KEY-cNNN.json` with one caption of index NNN."""
    stems = texts.keys
    if tar.file.kind == "bad":
        if len(texts.caption_index) != len(stems):
            raise IntegrityError(
                f"{tar.url} holds {len(texts.caption_index):,} captions in {len(stems):,} bad samples; each has one."
                f" {ADVICE}"
            )
        stems = [f"{key}-c{number:03d}" for key, number in zip(stems, texts.caption_index.tolist(), strict=True)]
    # One comparison of long strings: member by member takes as long as parsing the headers.
    found = b"\n".join(names).decode("ascii", "replace")
    if found != ".json\n".join([*stems, ""]).removesuffix("\n"):
        pairs = zip(found.split("\n"), stems, strict=True)
        name, stem = next((name, stem) for name, stem in pairs if name != f"{stem}.json")
        raise IntegrityError(f"{tar.url}: the member {name!r} holds the scene of {stem + '.json'!r}. {ADVICE}")
