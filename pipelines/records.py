"""What a source yields (records and their texts), and the interface of a source.

A source turns files (or nothing, for `toyworld`) into records. A record is what one row of the input says of one scene.
The source decides ids, splits, roles and addresses; it never cleans, groups, hashes keys or writes.

A batch is two Arrow tables: `RECORDS` has one row for each record, `TEXTS` one row for each (record, text field), which
is the unit of accounting. Broken texts are included; they become rejects later.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol, TypeVar

import pyarrow as pa

from infra.errors import InputError

RECORDS: Final = pa.schema(
    [
        pa.field("source_id", pa.large_string()),  # null: the record names no scene
        pa.field("split", pa.dictionary(pa.int32(), pa.string()), nullable=False),
        pa.field("source_uri", pa.dictionary(pa.int32(), pa.string()), nullable=False),
        pa.field("source_row", pa.int64(), nullable=False),  # 0-based row, line or list place in source_uri
        pa.field("image_uri", pa.large_string()),
        pa.field("image_sha256", pa.large_string()),
        pa.field("width", pa.int32()),
        pa.field("height", pa.int32()),
        pa.field("frame", pa.int32()),
        pa.field("image", pa.large_binary()),  # encoded JPEG, when the source carries pictures
        # Column or member that held a picture; null where the source carries none, or draws its own.
        pa.field("image_field", pa.dictionary(pa.int32(), pa.string())),
        pa.field("image_fault", pa.large_string()),  # null, or "reason: detail" when the picture is rejected
        pa.field("state", pa.large_string()),  # JSON of the true state, when the source knows it
    ]
)
TEXTS: Final = pa.schema(
    [
        pa.field("record", pa.int64(), nullable=False),  # row of RECORDS in the same batch, ascending
        pa.field("field", pa.dictionary(pa.int32(), pa.string()), nullable=False),  # column or member it came from
        pa.field("role", pa.dictionary(pa.int32(), pa.string()), nullable=False),
        pa.field("text", pa.large_binary()),  # as read; null when absent
        pa.field("broken", pa.large_string()),  # null, or "reason: detail" when the reader itself rejects it
    ]
)


@dataclass(frozen=True)
class Batch:
    """Records and their texts. A record without texts is legal: it may still carry an image."""

    records: pa.Table
    texts: pa.Table


@dataclass(frozen=True, kw_only=True)
class Input:
    """One input file: `uri` relative to the input root (goes into the data), `url` where it is (never does)."""

    uri: str
    url: str

    @property
    def files(self) -> tuple[Input, ...]:
        """The files that are read when this one is: itself, unless a source says otherwise."""
        return (self,)


InputT = TypeVar("InputT", bound=Input)


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A part of the input that one task reads: rows [start, stop) of `input`, in the source's own row unit.

    scenes_by_split is an upper bound of the scenes that begin in it; it decides the number of shards.
    """

    input: Input | None
    start: int
    stop: int
    scenes_by_split: Mapping[str, int]

    def input_as(self, kind: type[InputT]) -> InputT:
        """`input`, checked to be of the kind that the source's `survey` made. Raises InputError."""
        if not isinstance(self.input, kind):
            raise InputError(f"A piece needs an input of the kind {kind.__name__}, as `survey` makes it.")
        return self.input


@dataclass(frozen=True, kw_only=True)
class Survey:
    """What a source found when it looked at its inputs without reading them whole."""

    format: str
    "What was recognised, in words, for `--dry-run`."
    pieces: Sequence[Piece]
    "In canonical order: inputs by uri, rows ascending."
    columns: Mapping[str, str] = field(default_factory=dict)
    "Column or member of the input -> what it becomes (`text:alt`, `scene id`, `split`, `image uri`, ...)."
    notes: Sequence[str] = ()
    cuttable: bool = True
    "Whether `read` can begin at any row without reading what stands before it (parquet yes, CSV and JSONL no)."


class Source(Protocol):
    """What each module in this package offers. Instances are cheap, picklable, and hold only their options."""

    name: str
    bad_passes: int = 5
    "Number of passes (P) of the bad view tars."
    needs_input: bool = True
    repairs_byte_escapes: bool = False

    @property
    def grouped(self) -> bool:
        """Whether records of one scene may be anywhere in the input and are brought together by id.

        False: one record is one scene, and a piece can be cut at any row.
        """
        return True

    @property
    def writers(self) -> Mapping[str, str]:
        """Versions of the libraries other than pyarrow that decide bytes (Pillow for encoded pictures)."""
        return {}

    def reads(self, name: str) -> bool:
        """Whether a file of this base name may be an input; the other files of a folder are left out."""
        return True

    def survey(self, inputs: Sequence[Input], limit: int | None) -> Survey:
        """Check the inputs and cut them. `limit`: at most so many rows (images, scenes) in canonical order.

        Raises InputError for a missing column, a truncated file, a mixture of generations.
        """
        ...

    def read(self, piece: Piece) -> Iterator[Batch]:
        """The records of one piece, in row order, in batches of bounded size."""
        ...
