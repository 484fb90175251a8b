"""Build webdataset tars in memory with Arrow and NumPy, without a Python loop over samples.

Invariant: the same samples give the same bytes; stock `tarfile` and webdataset read them; members of a sample are
adjacent, in sorted order of their suffixes; fixed mode 0444, owner 0, time 0.

Headers, payloads and paddings are three Arrow binary arrays; their element-wise concatenation is one contiguous buffer,
which is the tar. Layout: POSIX.1-1988 ustar (header of 512 bytes, payload padded to 512, end padded to 10,240).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from infra.errors import IntegrityError
from pipelines.arrays import Ints, contiguous, offsets_of, run_starts

LAYOUT_VERSION = "1"
"Part of every dataset version."
BLOCK = 512
RECORD = 10_240
NAME_BYTES = 100
MEMBER_BYTES_MAX = 8**11 - 1  # eleven octal digits: 8 GiB


def _template() -> NDArray[np.uint8]:
    header = bytearray(BLOCK)
    header[100:108] = b"0000444\0"
    header[108:116] = b"0000000\0"
    header[116:124] = b"0000000\0"
    header[136:148] = b"00000000000\0"
    header[148:156] = b"        "  # the checksum counts itself as spaces
    header[156:157] = b"0"
    header[257:265] = b"ustar\x0000"
    return np.frombuffer(bytes(header), np.uint8)


_TEMPLATE = _template()
_TEMPLATE_SUM = int(_TEMPLATE.sum(dtype=np.int64))


@dataclass(frozen=True)
class Tar:
    """The parts of a tar, to be written one after another, and the length of each sample in 512-byte blocks."""

    parts: list[pa.Buffer | bytes]
    blocks: Ints


def tar(names: pa.LargeStringArray, payloads: pa.LargeBinaryArray, samples: Ints | None = None) -> Tar:
    """Members in the given order.

    names: ASCII, at most 100 bytes. payloads: no nulls. samples (len(names),): ascending number of the sample of each
    member; None: every member is a sample of its own.
    Raises IntegrityError for a name or a payload that ustar cannot hold; nothing is truncated.
    """
    n = len(names)
    if n == 0:
        return Tar([bytes(RECORD)], np.zeros(0, np.int64))
    payloads, names = contiguous(payloads), contiguous(names)
    sizes = np.diff(offsets_of(payloads))
    padding = -sizes % BLOCK
    body = pc.binary_join_element_wise(
        _headers(names, sizes), payloads, _zeros(padding), pa.scalar(b"", pa.large_binary())
    )
    lengths = BLOCK + sizes + padding
    total = int(lengths.sum())
    end = bytes(2 * BLOCK + (-(total + 2 * BLOCK)) % RECORD)
    blocks = lengths // BLOCK
    if samples is not None:
        blocks = np.add.reduceat(blocks, run_starts(samples))
    return Tar([contiguous(body).buffers()[2].slice(int(offsets_of(body)[0]), total), end], blocks)


def _headers(names: pa.LargeStringArray, sizes: Ints) -> pa.LargeBinaryArray:
    n = len(names)
    name_offsets = offsets_of(names)
    name_lengths = np.diff(name_offsets)
    if int(name_lengths.max()) > NAME_BYTES:
        worst = names[int(name_lengths.argmax())].as_py()
        raise IntegrityError(
            f"The member name {worst!r} has more than {NAME_BYTES} bytes, which a ustar header cannot hold. Use a "
            "shorter scene key."
        )
    if int(sizes.max()) > MEMBER_BYTES_MAX:
        worst = names[int(sizes.argmax())].as_py()
        raise IntegrityError(
            f"The member {worst!r} has {int(sizes.max())} bytes; a ustar member holds less than 8 GiB. Use smaller "
            "images."
        )
    header = np.empty((n, BLOCK), np.uint8)
    header[:] = _TEMPLATE
    padded = pc.ascii_rpad(names.cast(pa.large_binary()).cast(pa.large_string()), NAME_BYTES, padding="\0")
    start = int(offsets_of(padded)[0])
    name_bytes = np.frombuffer(padded.buffers()[2], np.uint8)[start : start + n * NAME_BYTES].reshape(n, NAME_BYTES)
    header[:, :NAME_BYTES] = name_bytes
    digits = _octal(sizes, 11)
    header[:, 124:135] = digits
    # The bytes of a header sum to those of the template, which has zeros for name and size, plus both.
    checksum = _TEMPLATE_SUM + name_bytes.sum(1, dtype=np.int64) + digits.sum(1, dtype=np.int64)
    header[:, 148:154] = _octal(checksum, 6)
    header[:, 154] = 0  # "%06o\0 ": the eighth byte is the space of the template
    offsets = np.arange(n + 1, dtype=np.int64) * BLOCK
    return pa.Array.from_buffers(pa.large_binary(), n, [None, pa.py_buffer(offsets), pa.py_buffer(header)])


def _octal(values: Ints, digits: int) -> NDArray[np.uint8]:
    """ASCII octal digits (N, digits), the most significant first: three bits a digit."""
    return ((values[:, None] >> (3 * np.arange(digits - 1, -1, -1))) & 7).astype(np.uint8) + ord("0")


def _zeros(lengths: Ints) -> pa.LargeBinaryArray:
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return pa.Array.from_buffers(
        pa.large_binary(), len(lengths), [None, pa.py_buffer(offsets), pa.py_buffer(bytes(int(offsets[-1])))]
    )


# --- JSON of samples ----------------------------------------------------------------------------------------------


def caption_json(index: Ints, role: pa.LargeStringArray, text: pa.LargeStringArray) -> pa.LargeStringArray:
    """`{"index":0,"role":"human","text":"..."}` for each caption."""
    # Cleaned texts hold no control characters, so JSON (RFC 8259) escapes only quotation marks and backslashes.
    escaped = pc.replace_substring(pc.replace_substring(text, "\\", "\\\\"), '"', '\\"')
    number = pa.array(index).cast(pa.large_string())
    return joined('{"index":', number, ',"role":"', role, '","text":"', escaped, '"}')


def sample_json(dataset: str, scene_key: pa.LargeStringArray, captions: pa.LargeStringArray) -> pa.LargeBinaryArray:
    """`{"dataset":...,"scene_key":...,"captions":[...]}` from captions already joined by commas."""
    head = f'{{"dataset":"{dataset}","scene_key":"'
    return joined(head, scene_key, '","captions":[', captions, "]}").cast(pa.large_binary())


def joined_by_scene(fragments: pa.LargeStringArray, offsets: Ints) -> pa.LargeStringArray:
    """The fragments of each scene joined by commas; scene i owns fragments offsets[i] to offsets[i + 1]."""
    lists = pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), fragments)
    return contiguous(pc.binary_join(lists, pa.scalar(",", pa.large_string())))


def joined(*pieces: str | pa.Array) -> pa.LargeStringArray:
    """Strings and arrays of strings, concatenated row by row."""
    scalars = [pa.scalar(p, pa.large_string()) if isinstance(p, str) else p for p in pieces]
    return contiguous(pc.binary_join_element_wise(*scalars, pa.scalar("", pa.large_string())))


def with_images(
    names: pa.LargeStringArray,
    payloads: pa.LargeBinaryArray,
    keys: pa.LargeStringArray,
    sample: Ints,
    suffix: pa.LargeStringArray,
    image: pa.LargeBinaryArray,
) -> tuple[pa.LargeStringArray, pa.LargeBinaryArray, Ints]:
    """Members of good samples with images: `KEY.jpg` or `KEY.f003.jpg` before `KEY.json`, sample after sample.

    names, payloads (S,): the JSON members. sample (I,), suffix (I,), image (I,): sample number, suffix and bytes of
    each image, ascending by sample and frame. Returns names, payloads and sample numbers of all members.
    """
    image_names = joined(keys.take(pa.array(sample)), suffix)
    owner = np.concatenate([sample, np.arange(len(names))])
    order = np.argsort(owner, kind="stable")  # images first, as `.f...` and `.jpg` sort before `.json`
    taken = pa.array(order)
    all_names = pa.concat_arrays([image_names, names]).take(taken)
    return all_names, pa.concat_arrays([image, payloads]).take(taken), owner[order]
