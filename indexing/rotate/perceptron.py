"""A map with one hidden layer, trained with torch on the CPU.

Invariant: the same pairs, seed and number of threads give the same weights. The kept epoch is the best one on the
held-out fit pairs, which take no part in the gradient. `indexing.rotate.rotation` applies the weights in plain NumPy.
N pairs, D dims in, E out, H hidden.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np

from infra.vectors import Floats, Mask

HIDDEN: Final = 1_024
RATE: Final = 1e-3
DECAY: Final = 1e-2
BATCH: Final = 256
EPOCHS: Final = 300
PATIENCE: Final = 20
"The training stops after so many epochs without a better mean cosine on the held-out pairs."


def fit_perceptron(
    x_ND: Floats, y_NE: Floats, held_N: Mask, *, seed: int
) -> tuple[Mapping[str, Floats], Mapping[str, float]]:
    """Weights in (D, H), in_bias, out (H, E), out_bias for rows x as given, and the facts of the fit.

    AdamW on 1 - cosine to the partner. Rows are scaled to a root mean square of 1; the weights take the scale back.
    """
    import torch
    from torch import nn

    scale = 1 / max(float(np.sqrt(np.square(x_ND[~held_N]).mean())), 1e-12)
    x, y = (torch.from_numpy(np.ascontiguousarray(t)).float() for t in (x_ND * scale, y_NE))
    held = torch.from_numpy(held_N)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = nn.Sequential(nn.Linear(x.shape[1], HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, y.shape[1]))
        optimizer = torch.optim.AdamW(network.parameters(), lr=RATE, weight_decay=DECAY)
        fit_x, fit_y = x[~held], y[~held]
        best, best_epoch = -float("inf"), 0
        kept = {name: w.clone() for name, w in network.state_dict().items()}
        for epoch in range(1, EPOCHS + 1):
            for batch in torch.split(torch.randperm(len(fit_x)), BATCH):
                cosine = nn.functional.cosine_similarity(network(fit_x[batch]), fit_y[batch])
                optimizer.zero_grad()
                torch.autograd.backward((1 - cosine).mean())
                optimizer.step()
            with torch.no_grad():
                found = float(nn.functional.cosine_similarity(network(x[held]), y[held]).mean())
            if found > best:
                best, best_epoch = found, epoch
                kept = {name: w.clone() for name, w in network.state_dict().items()}
            elif epoch - best_epoch >= PATIENCE:
                break
    plain = {name: w.double().numpy() for name, w in kept.items()}
    weights = {
        "in": plain["0.weight"].T * scale,
        "in_bias": plain["0.bias"],
        "out": plain["2.weight"].T.copy(),
        "out_bias": plain["2.bias"],
    }
    return weights, {"epochs": float(best_epoch), "held_out_cosine": best}
