"""The cluster files: they parse, they name the pinned Ray, and the token stays on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from infra import deploy

FOLDER = Path(deploy.__file__).parent
CONSTRAINTS = FOLDER.parents[1] / "constraints.txt"


def read(name: str) -> Any:
    """One file as plain values."""
    return yaml.safe_load((FOLDER / name).read_text())


@pytest.fixture
def pinned_ray() -> str:
    """The version of Ray in constraints.txt."""
    (line,) = [x for x in CONSTRAINTS.read_text().splitlines() if x.startswith("ray==")]
    return line.removeprefix("ray==")


def test_the_kubernetes_cluster_has_the_token_and_the_pinned_ray(pinned_ray: str) -> None:
    spec = read("kuberay.yaml")["spec"]
    assert spec["authOptions"] == {"mode": "token"}
    assert spec["rayVersion"] == pinned_ray
    assert f"rayproject/ray:{pinned_ray}-py311" in (FOLDER / "Containerfile").read_text()
    groups = [spec["headGroupSpec"], *spec["workerGroupSpecs"]]
    assert len(groups) == 2
    images = {c["image"] for g in groups for c in g["template"]["spec"]["containers"]}
    assert len(images) == 1, "driver and workers must run the same code"


def test_the_launched_cluster_starts_every_ray_with_the_token() -> None:
    config = read("ray-up.yaml")
    starts = [c for k in ("head", "worker") for c in config[f"{k}_start_ray_commands"] if "ray start" in c]
    assert len(starts) == 2
    assert all(command.startswith("RAY_AUTH_MODE=token ") for command in starts)
    assert "~/.ray/auth_token" in config["file_mounts"]
