"""Small files of invented content at every path that docs/sources.md names."""

from __future__ import annotations

import gzip
import io
import json
import zipfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from tests.pipelines.sources.tar_files import write_img2dataset, write_webdataset

CAPTIONS = {
    "1000_ab": ["A dog, running .", 'He says " hi " .', "The dog runs ."],
    "2000_cd": ["Two guys wear one hat .", "Men ."],
    "3000_ef": ["A bird ."],
}
WEB = ["untitled image", "CLR\\xc2\\xae Mold", "a dog", "a cat"]


def write_page_files(root: Path) -> None:
    """Everything below `root`."""
    _flickr(root)
    _coco(root)
    _msrvtt(root / "msrvtt")
    _web(root)
    _wit(root)
    for name, write in (("img2dataset", write_img2dataset), ("webdataset", write_webdataset)):
        (root / name).mkdir()
        write(root / name)
    _write(root / "shop.csv", 'sku,caption,part\n1,"red, warm hat",train\n1,hat of wool,train\n2,green hat,test\n')


def _write(path: Path, data: str | bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data.encode() if isinstance(data, str) else data)


def _table(path: Path, columns: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path)


def picture(encoding: str) -> bytes:
    """A small picture in that encoding."""
    sink = io.BytesIO()
    Image.new("RGB", (8, 6), (200, 30, 30)).save(sink, encoding)
    return sink.getvalue()


def _karpathy(dataset: str) -> str:
    images = [
        {
            "filename": f"{name}.jpg",
            "split": "train",
            "sentences": [{"raw": t, "sentid": n} for n, t in enumerate(texts)],
        }
        for name, texts in CAPTIONS.items()
    ]
    return json.dumps({"images": images, "dataset": dataset})


def _flickr(root: Path) -> None:
    each = [(name, n, text) for name, texts in CAPTIONS.items() for n, text in enumerate(texts)]
    token = "".join(f"{name}.jpg#{n}\t{text}\n" for name, n, text in each)
    _write(root / "flickr8k" / "Flickr8k.token.txt", "2258277193_586949ec62.jpg.1#0\tpeople waiting\n" + token)
    _write(root / "flickr8k" / "Flickr8k.lemma.token.txt", "1000_ab.jpg#0\ta dog run .\n")
    for split, name in (("train", "1000_ab"), ("dev", "2000_cd"), ("test", "3000_ef")):
        _write(root / "flickr8k" / f"Flickr_8k.{split}Images.txt", f"{name}.jpg\n")
    quoted = [(name, text.replace('"', '""')) for name, _, text in each]
    _write(root / "kaggle" / "captions.txt", "image,caption\n" + "".join(f'{n}.jpg,"{t}"\n' for n, t in quoted))
    header = "image_name| comment_number| comment\n"
    piped = "".join(f"{name}.jpg| {n}| {text}\n" for name, n, text in each)
    piped = piped.replace("3000_ef.jpg| 0| A bird .", "3000_ef.jpg| 0   A bird .")
    _write(root / "flickr30k" / "results.csv", header + piped)
    _write(root / "flickr30k-token" / "results_20130124.token", token)
    for dataset in ("flickr8k", "flickr30k", "coco"):
        _write(root / "karpathy" / f"dataset_{dataset}.json", _karpathy(dataset))
    struct = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    pictures = pa.array([{"bytes": picture("JPEG"), "path": None}] * 3, struct)
    names = [f"{name}.jpg" for name in CAPTIONS]
    columns = {"image": pictures, "caption": list(CAPTIONS.values()), "filename": names, "img_id": ["0", "1", "2"]}
    _table(root / "hub" / "test-00000-of-00001.parquet", columns)
    for split in ("train", "val", "test_2016"):
        _write(root / "multi30k" / f"{split}_images.txt", "".join(f"{split}{n}.jpg\n" for n in range(3)))
        for place in range(1, 6):
            lines = "".join(f"{split} picture {n} told by {place}\n" for n in range(3))
            _write(root / "multi30k" / f"{split}.{place}.en.gz", gzip.compress(lines.encode(), mtime=0))


def _coco(root: Path) -> None:
    images = [{"id": n, "file_name": f"{n:012d}.jpg", "width": 4, "height": 3} for n in range(3)]
    annotations = [{"id": 5 * n + i, "image_id": n, "caption": f"{i} of {n}"} for n in range(3) for i in range(5)]
    data = json.dumps({"images": images, "annotations": annotations}).encode()
    _write(root / "coco" / "captions_val2017.json.gz", gzip.compress(data, mtime=0))


def _msrvtt(root: Path) -> None:
    def document(numbers: range, split: str) -> bytes:
        clip = {"category": 1, "url": "https://v/1", "start time": 1.0, "end time": 2.0, "split": split}
        videos = [{**clip, "video_id": f"video{n}", "id": n} for n in numbers]
        texts = [
            {"caption": f"{i} of {n}", "video_id": f"video{n}", "sen_id": 20 * n + i}
            for n in numbers
            for i in range(20)
        ]
        return json.dumps({"info": {}, "videos": videos, "sentences": texts}).encode()

    root.mkdir(parents=True)
    with zipfile.ZipFile(root / "train_val_annotation.zip", "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("readme.txt", "MSR-VTT")
        file.writestr("train_val_videodatainfo.json", document(range(3), "train"))
    _write(root / "test_videodatainfo.json", document(range(7010, 7012), "test"))
    _write(root / "MSRVTT_JSFUSION_test.csv", "key;vid_key;video_id;sentence\nret0;msr7011;video7011;3 of 7011\n")


def _web(root: Path) -> None:
    sha256 = [f"{n:064x}" for n in range(4)]
    urls = [f"http://x/{n}.jpg" for n in range(4)]
    sizes = {"original_width": [4] * 4, "original_height": [3] * 4}
    columns = {"uid": [f"{n:032x}" for n in range(4)], "url": urls, "text": WEB, **sizes, "sha256": sha256}
    _table(root / "datacomp" / f"{0:032x}.parquet", columns)
    _write(root / "datacomp" / f"{0:032x}.npz", b"")
    recap = {"url": urls, "org_caption": WEB, "re_caption": [f"recap of {t}" for t in WEB], "sha256": sha256}
    _table(root / "recap" / "train-00000-of-00001.parquet", recap)


def _wit(root: Path) -> None:
    names, encodings = ["image_0.jpg", "image_1.png"], ["JPEG", "PNG"]
    texts = [["a church in Brno", "page of a church", None], ["a bridge at night", None, "section of a bridge"]]
    struct = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    pictures = [{"bytes": picture(e), "path": name} for name, e in zip(names, encodings, strict=True)]
    _table(root / "wit-parquet" / "train.parquet", {"image": pa.array(pictures, struct), "text": texts})
    lines = [json.dumps({"file_name": n, "text": t}) + "\n" for n, t in zip(names, texts, strict=True)]
    _write(root / "wit-folder" / "metadata.jsonl", "".join(lines))
    for name, encoding in zip(names, encodings, strict=True):
        _write(root / "wit-folder" / name, picture(encoding))
