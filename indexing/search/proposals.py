"""Candidates for nearest neighbours: FAISS's flat inner product over tiles, on CPU or GPU.

Invariant: no row of the base outside the candidates of a query has a float32 product with it above `bound_M`. So
`indexing.search.knn` can decide with exact scores whether the neighbours are among the candidates.

M: queries. C: candidates a query. D: dimensions. B: rows of a tile.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

import numpy as np

from indexing.search.rows import Rows
from infra.errors import UsageError
from infra.vectors import Ids, Singles

Device = Literal["auto", "cpu", "gpu"]
GPU_MAX_K: Final = 2048
"Most neighbours that FAISS's GPU kernels select in one call."

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Tiles:
    """Rows of two tables that are in memory at once, and the device of their product. No field changes the result."""

    base_rows: int
    query_rows: int
    on_gpu: bool = False
    gpu_bytes: int = 1 << 30
    max_k: int | None = None
    "Most candidates that one call can select; None: any number."


@dataclass(frozen=True, kw_only=True)
class Proposals:
    """Candidates of some queries (-1: none), their float32 products (descending, -inf where none), and the bound."""

    ids_MC: Ids
    products_MC: Singles
    bound_M: Singles


def propose(queries: Rows, base: Rows, rows_M: Ids, c: int, tiles: Tiles, threads: Executor | None = None) -> Proposals:
    """The c rows of the base with the largest float32 products, for the adjacent queries `rows_M`."""
    search = _gpu_search(tiles.gpu_bytes) if tiles.on_gpu else _cpu_search
    unit_MD = queries.unit(int(rows_M[0]), int(rows_M[-1]) + 1, threads)
    best = Proposals(
        ids_MC=np.empty((len(rows_M), 0), np.int64),
        products_MC=np.empty((len(rows_M), 0), np.float32),
        bound_M=np.full(len(rows_M), -np.inf, np.float32),
    )
    for ids_B, unit_BD in unit_tiles(base, tiles.base_rows, threads):
        per_tile = min(c, len(ids_B), tiles.max_k or c)
        products_MC, places_MC = search(unit_MD, unit_BD, per_tile)
        # Rows of the tile that were not selected are at most the last selected one.
        bound_M = products_MC[:, -1] if per_tile < len(ids_B) else np.float32(-np.inf)
        best = _merge(best, ids_B[places_MC], products_MC, np.maximum(best.bound_M, bound_M), c)
    return best


def unit_tiles(base: Rows, tile_rows: int, threads: Executor | None = None) -> Iterator[tuple[Ids, Singles]]:
    """Row numbers and unit rows of each tile that holds a defined row, in ascending order."""
    for start in range(0, len(base), tile_rows):
        stop = min(start + tile_rows, len(base))
        defined_B = np.flatnonzero(base.norms_N[start:stop])
        if len(defined_B):
            unit_BD = base.unit(start, stop, threads)
            yield defined_B + start, unit_BD if len(defined_B) == stop - start else unit_BD[defined_B]


def _merge(best: Proposals, ids_MC: Ids, products_MC: Singles, bound_M: Singles, c: int) -> Proposals:
    if best.ids_MC.shape[1]:
        ids_MC = np.concatenate([best.ids_MC, ids_MC], axis=1)
        products_MC = np.concatenate([best.products_MC, products_MC], axis=1)
        order_MC = np.argsort(-products_MC, axis=1, kind="stable")
        ids_MC = np.take_along_axis(ids_MC, order_MC, axis=1)
        products_MC = np.take_along_axis(products_MC, order_MC, axis=1)
        if products_MC.shape[1] > c:
            # The first candidate that is cut off bounds all that are cut off.
            bound_M = np.maximum(bound_M, products_MC[:, c])
            ids_MC, products_MC = ids_MC[:, :c].copy(), products_MC[:, :c].copy()
    return Proposals(ids_MC=ids_MC, products_MC=products_MC, bound_M=bound_M)


def fit_to_gpu(tiles: Tiles, n: int, c: int, max_k: int = GPU_MAX_K) -> Tiles:
    """Tiles for a device that selects at most `max_k` rows a call; for larger c each tile has to give half of that.

    Where more of the neighbours stand in one tile all the same, `bound_M` shows it and the query is scanned.
    """
    if c <= max_k:
        return replace(tiles, max_k=max_k)
    n_tiles = -(-2 * c // max_k)
    return replace(tiles, max_k=max_k, base_rows=max(1, min(tiles.base_rows, -(-n // n_tiles))))


def _cpu_search(unit_MD: Singles, unit_BD: Singles, k: int) -> tuple[Any, Any]:
    import faiss

    found: tuple[Any, Any] = faiss.knn(unit_MD, unit_BD, k, metric=faiss.METRIC_INNER_PRODUCT)
    return found


def _gpu_search(gpu_bytes: int) -> Any:
    import faiss

    resources = faiss.StandardGpuResources()
    resources.setTempMemory(gpu_bytes // 2)
    # Half for FAISS's temporary memory, a quarter for the tiles of each side.
    limits: dict[str, Any] = {"vectorsMemoryLimit": gpu_bytes // 4, "queriesMemoryLimit": gpu_bytes // 4}

    def search(unit_MD: Singles, unit_BD: Singles, k: int) -> tuple[Any, Any]:
        return faiss.knn_gpu(resources, unit_MD, unit_BD, k, metric=faiss.METRIC_INNER_PRODUCT, **limits)

    return search


def is_on_gpu(device: Device) -> bool:
    """Whether products are computed on the GPU: `gpu` demands one, `auto` takes one where FAISS can use it.

    Raises UsageError when a GPU is demanded and FAISS can use none. With `auto`, a GPU that FAISS cannot use is logged.
    """
    if device == "cpu":
        return False
    reason = missing_gpu()
    if reason is None:
        return True
    if device == "gpu":
        raise UsageError(f"No GPU for neighbours: {reason} Or leave out `--device gpu`: the answer is the same.")
    if _machine_has_gpu():
        _log.warning("Neighbours are computed on the CPU: %s", reason)
    return False


def missing_gpu() -> str | None:
    """Why FAISS can use no GPU, and what to do; None when it can."""
    import faiss

    if not hasattr(faiss, "StandardGpuResources") or not hasattr(faiss, "knn_gpu"):
        return (
            "the installed FAISS was built without GPU support (faiss-cpu, or faiss-cpu and faiss-gpu together, where "
            "one hides the other). Run `pip uninstall faiss-cpu faiss-gpu`, then `pip install faiss-gpu`."
        )
    if faiss.get_num_gpus() == 0:
        return "FAISS sees no GPU here. Check `nvidia-smi` and CUDA_VISIBLE_DEVICES."
    return None


def _machine_has_gpu() -> bool:
    from pathlib import Path

    return Path("/proc/driver/nvidia/version").exists() or Path("/dev/nvidia0").exists()
