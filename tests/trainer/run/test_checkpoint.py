"""`trainer.run.checkpoint`: what is read back is what was saved, and half a checkpoint does not exist."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest
import torch

from infra.errors import ConfigError, IntegrityError, StorageError
from trainer.run import checkpoint
from trainer.run.checkpoint import State

STATE = State(
    step=3,
    plan_digest="p",
    config_digest="c",
    ranks=1,
    samples=12,
    tokens=99,
    scenes_hash="0" * 16,
    views_hash="1" * 16,
)


def model_of(seed: int, width: int = 4) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(3, width), torch.nn.BatchNorm1d(width), torch.nn.Linear(width, 2))


def optimizer_of(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.1)


def take_steps(model: torch.nn.Module, optimizer: torch.optim.Optimizer, start: int, stop: int) -> list[float]:
    losses = []
    for step in range(start, stop):
        x = torch.randn(8, 3, generator=torch.Generator().manual_seed(step))
        loss = model(x).square().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_training_that_goes_on_from_a_checkpoint_is_bit_identical(tmp_path: Path) -> None:
    model = model_of(0)
    optimizer = optimizer_of(model)
    take_steps(model, optimizer, 0, 3)
    checkpoint.save(str(tmp_path), STATE, model, optimizer)
    uninterrupted = take_steps(model, optimizer, 3, 6)

    other = model_of(1)
    other_optimizer = optimizer_of(other)
    found = checkpoint.newest(str(tmp_path))
    assert found is not None and dataclasses.replace(found, files={}) == STATE
    checkpoint.load(str(tmp_path), found, other, other_optimizer)
    assert take_steps(other, other_optimizer, 3, 6) == uninterrupted


def test_a_checkpoint_without_its_state_does_not_exist(tmp_path: Path) -> None:
    model = model_of(0)
    checkpoint.save(str(tmp_path), STATE, model, optimizer_of(model))
    checkpoint.save(str(tmp_path), dataclasses.replace(STATE, step=6), model, optimizer_of(model))
    os.unlink(tmp_path / "step-000000006" / "state.json")
    found = checkpoint.newest(str(tmp_path))
    assert found is not None and found.step == 3


def test_a_changed_tensor_file_is_refused(tmp_path: Path) -> None:
    model = model_of(0)
    state = checkpoint.save(str(tmp_path), STATE, model, optimizer_of(model))
    path = tmp_path / "step-000000003" / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(IntegrityError, match="changed or cut off"):
        checkpoint.load(str(tmp_path), state, model, None)


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    model = model_of(0)
    state = checkpoint.save(str(tmp_path), STATE, model, optimizer_of(model))
    with pytest.raises(ConfigError, match="another model"):
        checkpoint.load(str(tmp_path), state, model_of(0, width=5), None)


def test_retention_keeps_the_newest_and_clears_halves(tmp_path: Path) -> None:
    model = model_of(0)
    for step in (1, 2, 3, 4):
        checkpoint.save(str(tmp_path), dataclasses.replace(STATE, step=step), model, optimizer_of(model))
    os.unlink(tmp_path / "step-000000003" / "state.json")
    checkpoint.prune(str(tmp_path), keep=2)
    assert checkpoint.published_steps(str(tmp_path)) == [2, 4]
    assert sorted(os.listdir(tmp_path)) == ["step-000000002", "step-000000004"]


def test_saving_a_published_step_again_changes_nothing(tmp_path: Path) -> None:
    first, second = model_of(0), model_of(1)
    checkpoint.save(str(tmp_path), STATE, first, optimizer_of(first))
    before = (tmp_path / "step-000000003" / "model.safetensors").read_bytes()
    checkpoint.save(str(tmp_path), STATE, second, optimizer_of(second))
    assert (tmp_path / "step-000000003" / "model.safetensors").read_bytes() == before


def test_a_failed_write_leaves_the_older_checkpoint(tmp_path: Path) -> None:
    model = model_of(0)
    checkpoint.save(str(tmp_path), STATE, model, optimizer_of(model))
    (tmp_path / "step-000000009").write_text("a file where the folder should be")
    with pytest.raises((StorageError, OSError)):
        checkpoint.save(str(tmp_path), dataclasses.replace(STATE, step=9), model, optimizer_of(model))
    found = checkpoint.newest(str(tmp_path))
    assert found is not None and found.step == 3


def test_a_checkpoint_travels_through_an_object_store() -> None:
    url = "memory://bucket/run/checkpoints"
    model = model_of(0)
    optimizer = optimizer_of(model)
    take_steps(model, optimizer, 0, 2)
    checkpoint.save(url, STATE, model, optimizer)
    other = model_of(1)
    found = checkpoint.newest(url)
    assert found is not None
    checkpoint.load(url, found, other, optimizer_of(other))
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), other.state_dict().values(), strict=True))
