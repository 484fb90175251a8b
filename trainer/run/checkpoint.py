"""Checkpoints of a run: weights, optimizer state and one global cursor, published whole or not at all.

Owns: files of a checkpoint, which one is the newest, retention. Does not own: when one is written, what the cursor means.
Invariant: a checkpoint exists when its `state.json` does; that file is published last and holds size and sha256 of the
others. Tensors are safetensors files, so nothing is unpickled. All ranks hold equal state (DDP), so rank 0 writes it, and
the cursor is one number for all: the same checkpoint goes on with any number of ranks.

Ray Train keeps checkpoints of its own that a crash right after `report` can lose (tried: one reported step was gone), and
each report waits for its controller; these are written by the loop itself, to any fsspec URL.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import orjson
import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors

from infra import storage
from infra.errors import ConfigError, IntegrityError
from infra.storage import FileRecord

FORMAT: Final = "goodviews-checkpoint-1"
STATE_NAME: Final = "state.json"
MODEL_NAME: Final = "model.safetensors"
OPTIMIZER_NAME: Final = "optimizer.safetensors"
_FOLDER: Final = re.compile(r"step-(\d{9})")


@dataclass(frozen=True, kw_only=True)
class State:
    """Where a run stands. Every count is over all ranks."""

    format: str = FORMAT
    step: int
    "Steps done; the next one has this number."
    plan_digest: str
    config_digest: str
    ranks: int
    "That wrote it. Not needed to go on: nothing here is kept by rank."
    samples: int
    tokens: int
    scenes_hash: str
    views_hash: str
    "Rolling hashes of the ledger after `step` steps, 16 hex digits."
    best_loss: float | None = None
    "Lowest validation loss so far; None without validation."
    files: Mapping[str, FileRecord] = field(default_factory=dict)


def folder_of(url: str, step: int) -> str:
    """URL of the checkpoint after `step` steps, below the folder of all checkpoints of a run."""
    return storage.join(url, f"step-{step:09d}")


def save(url: str, state: State, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> State:
    """Publish a checkpoint below the folder `url`; returns its state with the files. Called on rank 0 only.

    One of the same step that is there already is left alone: overwriting it file by file could be killed half-way.
    Raises StorageError when the disk is full or the store refuses; then the older checkpoints are as before.
    """
    folder = folder_of(url, state.step)
    if storage.exists(storage.join(folder, STATE_NAME)):
        return read_state(folder)
    payloads = {MODEL_NAME: _model_tensors(model), OPTIMIZER_NAME: _optimizer_tensors(model, optimizer)}
    files = {name: storage.publish(storage.join(folder, name), save_tensors(t)) for name, t in payloads.items()}
    complete = dataclasses.replace(state, files=files)
    options = orjson.OPT_SORT_KEYS | orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE
    storage.publish(storage.join(folder, STATE_NAME), orjson.dumps(complete, option=options))
    return complete


def newest(url: str) -> State | None:
    """State of the published checkpoint with the most steps below `url`; None when there is none."""
    steps = published_steps(url)
    return read_state(folder_of(url, steps[-1])) if steps else None


def published_steps(url: str) -> list[int]:
    """Steps of all published checkpoints below `url`, ascending."""
    folders = [int(found[1]) for name in storage.list_names(url) if (found := _FOLDER.fullmatch(name))]
    return [s for s in sorted(folders) if storage.exists(storage.join(folder_of(url, s), STATE_NAME))]


def read_state(folder: str) -> State:
    """Raises IntegrityError when the state is not one that this release reads."""
    url = storage.join(folder, STATE_NAME)
    try:
        record = orjson.loads(storage.read_bytes(url))
        found = record["format"]
        if found != FORMAT:
            message = (
                f"{url} has format {found!r}, this release reads {FORMAT!r}. Resume with the release that wrote it."
            )
            raise IntegrityError(message)
        record["files"] = {name: FileRecord(**value) for name, value in record["files"].items()}
        return State(**record)
    except (ValueError, KeyError, TypeError) as error:
        message = f"{url} is not the state of a checkpoint ({error}). Delete its folder to go on from the one before."
        raise IntegrityError(message) from error


def load(url: str, state: State, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    """Bring model and optimizer (None: the model alone) to the published checkpoint of `state`, in place.

    Raises IntegrityError when a file is not what the state says, ConfigError when it is of another model.
    """
    folder = folder_of(url, state.step)
    weights = load_tensors(_verified(folder, MODEL_NAME, state))
    try:
        model.load_state_dict(weights, strict=True)
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"Checkpoint {folder} is of another model: {reason}. Use the config of its run.") from error
    if optimizer is not None:
        moments = load_tensors(_verified(folder, OPTIMIZER_NAME, state))
        optimizer.load_state_dict(_optimizer_state(moments, model, optimizer))


def prune(url: str, *, keep: int) -> None:
    """Remove all published checkpoints but the `keep` newest, and the halves that a kill left before the newest one."""
    steps = published_steps(url)
    if not steps:
        return
    kept = set(steps[-keep:])
    for name in storage.list_names(url):
        found = _FOLDER.fullmatch(name)
        if found and int(found[1]) not in kept and int(found[1]) < steps[-1]:
            folder = storage.join(url, name)
            # The state first, so that a kill leaves no checkpoint that says it is whole.
            storage.remove(storage.join(folder, STATE_NAME))
            storage.remove_folder(folder)


def _verified(folder: str, name: str, state: State) -> bytes:
    url = storage.join(folder, name)
    expected = state.files.get(name)
    if expected is None or storage.digest(url) != expected:
        message = f"{url} is not the file that {STATE_NAME} beside it describes: it was changed or cut off. Delete the folder to go on from the checkpoint before."
        raise IntegrityError(message)
    return storage.read_bytes(url)


def _model_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().cpu().contiguous() for name, value in model.state_dict().items()}


def _optimizer_tensors(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Per-parameter state by `key/parameter name`. Learning rates and decays are functions of config and step."""
    tensors = {}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            tensors[f"{key}/{name}"] = value.detach().cpu().contiguous()
    return tensors


def _optimizer_state(
    tensors: Mapping[str, torch.Tensor], model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> dict[str, object]:
    """The state dictionary that torch's optimizers load: state by place of the parameter in the groups."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    places = {names[id(p)]: i for i, p in enumerate(p for g in optimizer.param_groups for p in g["params"])}
    state: dict[int, dict[str, torch.Tensor]] = {}
    for label, tensor in tensors.items():
        key, _, name = label.partition("/")
        if name not in places:
            message = f"The checkpoint holds optimizer state of {name!r}, which this model does not train. Use the config of its run."
            raise ConfigError(message)
        state.setdefault(places[name], {})[key] = tensor
    return {"state": state, "param_groups": optimizer.state_dict()["param_groups"]}
