"""Whether a GPU computes what a CPU computes: losses and gradients of one batch, LeJEPA and next tokens.

Usage: gpu_agreement.py [--device cuda|cpu] [--width W] [--layers L]. Prints one JSON object; exit code 1 when a bound is
broken. The same weights and the same batch go through both devices without dropout: in float64, where only the order of
sums differs, in float32 with TF32 off, and under bf16 autocast against float32. `--device cpu` compares the CPU with
itself, which rehearses the script where there is no GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from trainer.data.ragged import Ragged
from trainer.model.encoder import EncoderConfig, ProjectorConfig, TextEncoder
from trainer.model.objectives import LejepaConfig, LejepaModel, NextTokenModel, directions

VOCAB = 1000
BATCH = 32
VIEWS = 8
BOUNDS = {"float64": 1e-9, "float32": 1e-4, "bf16": 3e-2}
"Largest relative difference of the loss; of the gradients' norm of difference, ten times that."


def main() -> int:
    """Compare, print, and tell by the exit code whether all bounds hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    args = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    found = {
        f"{objective} {kind}": _compare(objective, kind, args) for objective in ("lejepa", "ntp") for kind in BOUNDS
    }
    found["directions"] = {"equal": _directions_agree(args.device)}
    broken = [name for name, values in found.items() if not _holds(name, values)]
    print(json.dumps({"device": args.device, "torch": torch.__version__, "found": found, "broken": broken}, indent=2))
    return 1 if broken else 0


def _holds(name: str, values: dict[str, Any]) -> bool:
    if name == "directions":
        return bool(values["equal"])
    bound = BOUNDS[name.split()[1]]
    return bool(values["loss"] <= bound and values["gradient"] <= 10 * bound)


def _compare(objective: str, kind: str, args: Any) -> dict[str, float]:
    """Relative differences between the CPU and the device."""
    exact = torch.float64 if kind == "float64" else torch.float32
    cpu_loss, cpu_gradient = _loss_and_gradient(objective, "cpu", exact, args, is_bf16=False)
    loss, gradient = _loss_and_gradient(objective, args.device, exact, args, is_bf16=kind == "bf16")
    return {
        "loss": abs(loss / cpu_loss - 1),
        "gradient": float((gradient - cpu_gradient).norm() / cpu_gradient.norm()),
    }


def _loss_and_gradient(
    objective: str, device: str, dtype: torch.dtype, args: Any, *, is_bf16: bool
) -> tuple[float, torch.Tensor]:
    model = _model(objective, args).to(device, dtype)
    batch = model.encoder.batch(_views(1 if objective == "ntp" else VIEWS))
    with torch.autocast(torch.device(device).type, dtype=torch.bfloat16, enabled=is_bf16):
        loss = model(batch, 0).loss if isinstance(model, LejepaModel) else model(batch)
    torch.autograd.backward(loss)
    parts = [p.grad.detach().to("cpu", torch.float64).flatten() for p in model.parameters() if p.grad is not None]
    return float(loss.detach().to("cpu", torch.float64)), torch.cat(parts)


def _model(objective: str, args: Any) -> LejepaModel | NextTokenModel:
    torch.manual_seed(0)
    is_ntp = objective == "ntp"
    config = EncoderConfig(
        layers=args.layers,
        width=args.width,
        heads=4,
        ffn=4 * args.width,
        max_tokens=64,
        dropout=0.0,
        vocab_size=VOCAB,
        pad_token_id=0,
        causal=is_ntp,
        projector=None if is_ntp else ProjectorConfig(entry=64, hidden=128, output=64),
    )
    encoder = TextEncoder(config)
    if is_ntp:
        return NextTokenModel(encoder)
    return LejepaModel(encoder, LejepaConfig(weight=20.48, n_directions=256), n_views=VIEWS, n_global=2)


def _views(views: int) -> Ragged:
    rng = np.random.default_rng(0)
    lengths = rng.integers(6, 30, views * BATCH)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    return Ragged(tokens=rng.integers(5, VOCAB, int(offsets[-1])).astype(np.int32), offsets=offsets)


def _directions_agree(device: str) -> bool:
    config = LejepaConfig(weight=1.0)
    cpu = directions(7, 64, config, like=torch.zeros(1))
    there = directions(7, 64, config, like=torch.zeros(1, device=device))
    return bool(torch.allclose(cpu, there.cpu(), rtol=0, atol=1e-6))


if __name__ == "__main__":
    sys.exit(main())
