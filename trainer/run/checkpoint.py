"""Checkpoints to resume from: weights, optimizer state and one global cursor, published whole or not at all.

Invariant: a checkpoint exists when its `state.json` does. That file is published last and holds size and sha256 of the
others. Tensors are safetensors files, so nothing is unpickled. All ranks hold equal state (DDP), so rank 0 writes it,
and the cursor is one number for all ranks: a checkpoint can be resumed on any number of them.

Why not the checkpoints of Ray Train: a crash right after `report` can lose one (we saw it lose a reported step), and
each report waits for Ray's controller. The loop writes these itself, to any fsspec URL. For exported encoders see
`infra.models.checkpoints`.
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
    """How far a run is. Counts are over all ranks."""

    format: str = FORMAT
    step: int
    "Steps done; the next one has this number."
    plan_digest: str
    config_digest: str
    ranks: int
    "That wrote it, for information: no state belongs to one rank."
    samples: int
    tokens: int
    scenes_hash: str
    views_hash: str
    "Hashes of the ledger after `step` steps, 16 hex digits."
    best_loss: float | None = None
    "Lowest validation loss so far; None without validation."
    files: Mapping[str, FileRecord] = field(default_factory=dict)


def folder_of(url: str, step: int) -> str:
    """URL of the checkpoint after `step` steps; url: folder of all checkpoints of a run."""
    return storage.join(url, f"step-{step:09d}")


def save(url: str, state: State, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> State:
    """Publish a checkpoint in the folder `url`; returns its state with the files. Called on rank 0 only.

    Raises StorageError when the disk is full or the store refuses; older checkpoints stay as they are.
    """
    folder = folder_of(url, state.step)
    # A complete checkpoint of this step is kept: a kill while its files are replaced would leave a broken one.
    if storage.exists(storage.join(folder, STATE_NAME)):
        return read_state(folder)
    payloads = {MODEL_NAME: _model_tensors(model), OPTIMIZER_NAME: _optimizer_tensors(model, optimizer)}
    files = {name: storage.publish(storage.join(folder, name), save_tensors(t)) for name, t in payloads.items()}
    complete = dataclasses.replace(state, files=files)
    options = orjson.OPT_SORT_KEYS | orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE
    storage.publish(storage.join(folder, STATE_NAME), orjson.dumps(complete, option=options))
    return complete


def newest(url: str) -> State | None:
    """State of the published checkpoint with the most steps; None when there is none."""
    steps = published_steps(url)
    return read_state(folder_of(url, steps[-1])) if steps else None


def published_steps(url: str) -> list[int]:
    """Steps of all published checkpoints, ascending."""
    return [s for s in _steps(url) if storage.exists(storage.join(folder_of(url, s), STATE_NAME))]


def _steps(url: str) -> list[int]:
    """Steps of all folders of checkpoints, complete or not, ascending."""
    return sorted(int(found[1]) for found in map(_FOLDER.fullmatch, storage.list_names(url)) if found)


def read_state(folder: str) -> State:
    """Raises IntegrityError when this release cannot read the state."""
    url = storage.join(folder, STATE_NAME)
    try:
        record = orjson.loads(storage.read_bytes(url))
        found = record["format"]
        if found != FORMAT:
            raise IntegrityError(f"{url} has format {found!r}, not {FORMAT!r}. Resume with the release that wrote it.")
        record["files"] = {name: FileRecord(**value) for name, value in record["files"].items()}
        return State(**record)
    except (ValueError, KeyError, TypeError) as error:
        message = f"{url} is not the state of a checkpoint ({error}). Delete its folder to resume from the one before."
        raise IntegrityError(message) from error


def load(url: str, state: State, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    """Load the checkpoint of `state` into the model and, unless it is None, the optimizer.

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
    """Remove all but the `keep` newest checkpoints, and incomplete ones before the newest."""
    steps = published_steps(url)
    if not steps:
        return
    for step in _steps(url):
        if step not in steps[-keep:] and step < steps[-1]:
            folder = folder_of(url, step)
            # The state first, so that a kill leaves no folder that counts as complete.
            storage.remove(storage.join(folder, STATE_NAME))
            storage.remove_folder(folder)


def _verified(folder: str, name: str, state: State) -> bytes:
    url = storage.join(folder, name)
    expected = state.files.get(name)
    if expected is None or storage.digest(url) != expected:
        message = (
            f"{url} is not the file that {STATE_NAME} describes: it was changed or cut off. Delete the folder to "
            "resume from the checkpoint before."
        )
        raise IntegrityError(message)
    return storage.read_bytes(url)


def _model_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().cpu().contiguous() for name, value in model.state_dict().items()}


def _optimizer_tensors(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """State of each parameter by `key/parameter name`. Rates and decays are not kept: config and step decide them."""
    tensors = {}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            tensors[f"{key}/{name}"] = value.detach().cpu().contiguous()
    return tensors


def _optimizer_state(
    tensors: Mapping[str, torch.Tensor], model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> dict[str, object]:
    """The state dictionary that torch's optimizers load: state by the parameter's index over all groups."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    places = {names[id(p)]: i for i, p in enumerate(p for g in optimizer.param_groups for p in g["params"])}
    state: dict[int, dict[str, torch.Tensor]] = {}
    for label, tensor in tensors.items():
        key, _, name = label.partition("/")
        if name not in places:
            message = (
                f"The checkpoint has optimizer state of {name!r}, unknown to this model. Use the config of its run."
            )
            raise ConfigError(message)
        state.setdefault(places[name], {})[key] = tensor
    return {"state": state, "param_groups": optimizer.state_dict()["param_groups"]}
