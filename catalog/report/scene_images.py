"""Read captions and small pictures of single scenes from the published shards.

Invariants: a picture is shown only under the key of its own scene; bytes that Pillow cannot read completely never reach
the page.
"""

from __future__ import annotations

import base64
import io
import json
import tarfile
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from catalog import schema
from catalog.lake.lake import Lake
from catalog.manifest import Manifest, ShardFile
from infra import storage
from infra.errors import IntegrityError, StorageError
from infra.home import Home

BLOCK: Final = 512
"Of a tar, in bytes; `ShardFile.blocks` counts them."
LARGEST_PX: Final = 320
MOST_PIXELS: Final = 64_000_000
"Larger ones are not opened: a small file can claim any size."


@dataclass(frozen=True, kw_only=True)
class Scene:
    """What a page shows of a scene. captions: by index; picture: a data URI, or None."""

    key: str
    captions: Mapping[int, str]
    picture: str | None

    @property
    def first_caption(self) -> str:
        """The one of lowest index; empty when there is none."""
        return next(iter(self.captions.values()), "")


def read_scenes(home: Home, reader: Lake, dataset: str, version: str, keys: Iterable[str]) -> dict[str, Scene]:
    """The scenes of these keys that the catalog knows, with their first picture where a tar has one.

    Raises IntegrityError when a tar holds another scene at the place that its manifest names.
    """
    wanted = sorted(set(keys))
    # A join and not a list to look into: its few keys are pushed down into the scan.
    query = """SELECT s.scene_key, s.split, s.captions, s.filename, s.file_row_number FROM versions.scenes AS s
        SEMI JOIN (SELECT unnest(?::VARCHAR[]) AS scene_key) AS w ON (s.scene_key = w.scene_key)
        WHERE s.dataset = ? AND s.version = ? ORDER BY s.scene_key"""
    rows = reader.rows(query, [wanted, dataset, version])
    places: dict[tuple[str, int], dict[str, int]] = defaultdict(dict)
    for key, split, _, file, row in rows:
        shard = int(str(file).rsplit("/", 1)[-1].removesuffix(".parquet"))
        places[split, shard][key] = row
    pictures: dict[str, str] = {}
    for (split, shard), members in places.items():
        pictures |= _pictures(home.datasets(dataset, version), split, shard, members)
    return {
        key: Scene(key=key, captions={c["index"]: c["text"] for c in captions}, picture=pictures.get(key))
        for key, _, captions, _, _ in rows
    }


def _pictures(folder: str, split: str, shard: int, rows: Mapping[str, int]) -> dict[str, str]:
    """Data URIs by key of the scenes at these rows of a shard; without a tar, none."""
    url = storage.join(folder, schema.manifest_path(split, shard))
    if not storage.exists(url):
        return {}
    manifest = Manifest.from_json(storage.read_bytes(url), url=url)
    tar = next((file for file in manifest.files if file.kind == "good"), None)
    if tar is None or tar.blocks is None or not storage.exists(storage.join(folder, tar.path)):
        return {}
    found = {}
    for key, row in rows.items():
        data = _sample_picture(storage.join(folder, tar.path), tar, key, row)
        uri = None if data is None else data_uri(data)
        if uri is not None:
            found[key] = uri
    return found


def _sample_picture(url: str, tar: ShardFile, key: str, row: int) -> bytes | None:
    """The first picture of the sample at `row`, in the order of its frames."""
    blocks: Sequence[int] = tar.blocks or []
    if row >= len(blocks):
        raise _misplaced(url, key)
    start = sum(blocks[:row]) * BLOCK
    try:
        sample = storage.read_range(url, start, start + blocks[row] * BLOCK)
        with tarfile.open(fileobj=io.BytesIO(sample), mode="r:") as members:
            files = {member.name: member for member in members if member.isfile()}
            about = members.extractfile(files[f"{key}.json"])
            if about is None or json.loads(about.read())["scene_key"] != key:
                raise _misplaced(url, key)
            names = sorted(name for name in files if name.endswith(".jpg"))
            picture = members.extractfile(files[names[0]]) if names else None
            return None if picture is None else picture.read()
    except (tarfile.TarError, KeyError, ValueError) as error:
        raise _misplaced(url, key) from error
    except StorageError:
        return None


def _misplaced(url: str, key: str) -> IntegrityError:
    return IntegrityError(
        f"{url} does not hold scene {key!r} where its manifest says, so another picture would be shown as that "
        "scene. Run `goodviews catalog verify`."
    )


def data_uri(data: bytes) -> str | None:
    """A picture as a data URI, reduced to LARGEST_PX and without its metadata; None when it cannot be read whole."""
    from PIL import Image

    try:
        with Image.open(io.BytesIO(data)) as opened:
            if opened.width * opened.height > MOST_PIXELS:
                return None
            image = opened.convert("RGB")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        return None
    image.thumbnail((LARGEST_PX, LARGEST_PX))
    out = io.BytesIO()
    image.save(out, "JPEG", quality=88, subsampling=0)
    return "data:image/jpeg;base64," + base64.b64encode(out.getvalue()).decode()
