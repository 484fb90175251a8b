"""Whether a GPU gives the neighbours that a CPU gives, and how fast it gives them.

Usage: gpu_knn.py [--device cuda|cpu] [--rows N] [--timed-rows N] [--dims D] [--product-seconds S]. Prints one JSON
object; exit code 1 when ids, scores, ties or undefined rows differ by a single bit. 200,000 x 768 are compared, with
duplicates and zero rows among them; 1,000,000 x 768 are timed, beside the bare float32 matrix product on the same device.
`--device cpu` compares the CPU with itself, which rehearses the script where there is no GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from indexing.search.knn import KnnOptions, Neighbours, exact_knn

K = 10
PRODUCT_ROWS = 8192


def main() -> int:
    """Compare, time, print; tell by the exit code whether the answers are equal."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--timed-rows", type=int, default=1_000_000)
    parser.add_argument("--dims", type=int, default=768)
    parser.add_argument("--product-seconds", type=float, default=2.0, help="how long the bare product is timed")
    parser.add_argument("--gpu-memory-gb", type=float, default=4.0)
    args = parser.parse_args()
    options = KnnOptions(
        device="gpu" if args.device == "cuda" else "cpu",
        memory_bytes=8 << 30,
        gpu_memory_bytes=int(args.gpu_memory_gb * 1e9),
    )
    equality = agreement(args.rows, args.dims, options)
    found = {
        "device": args.device,
        "equality": equality,
        "speed": speed(args.timed_rows, args.dims, args.device, options, args.product_seconds),
    }
    print(json.dumps(found, indent=2))
    return 0 if equality["equal"] else 1


def agreement(rows: int, dims: int, options: KnnOptions) -> dict[str, Any]:
    """Whether both devices give the same bytes, for few and for more neighbours than a GPU selects at once."""
    x = _table(rows, dims)
    on_device, seconds = _timed(x, K, options)
    on_cpu, cpu_seconds = _timed(x, K, KnnOptions(device="cpu"))
    many: dict[str, Any] = {"k": 3000, "queries_MD": x[:64], "exclude_self": False}
    few_k = _is_equal(on_device, on_cpu)
    many_k = _is_equal(exact_knn(x, options=options, **many), exact_knn(x, options=KnnOptions(device="cpu"), **many))
    return {
        "rows": rows,
        "dims": dims,
        "equal": few_k and many_k,
        "equal_k_10": few_k,
        "equal_k_3000": many_k,
        "tie_rate": on_cpu.tie_rate,
        "undefined": on_cpu.n_undefined,
        "seconds": seconds,
        "seconds_cpu": cpu_seconds,
    }


def speed(rows: int, dims: int, device: str, options: KnnOptions, product_s: float) -> dict[str, Any]:
    """Seconds of all neighbours, and the share of the device's own float32 matrix product that they reach."""
    _, seconds = _timed(_table(rows, dims), K, options)
    limit = product_flops(dims, device, product_s)
    reached = 2.0 * rows * rows * dims / seconds
    return {
        "rows": rows,
        "dims": dims,
        "seconds": seconds,
        "tflops": reached / 1e12,
        "product_tflops": limit / 1e12,
        "share_of_product": reached / limit,
    }


def product_flops(dims: int, device: str, seconds: float) -> float:
    """Floating point operations a second of the float32 product (8192, dims) x (dims, 8192), TF32 off."""
    import torch

    torch.backends.cuda.matmul.allow_tf32 = False
    a = torch.randn(PRODUCT_ROWS, dims, device=device)

    def wait() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    _ = a @ a.T
    wait()
    start, count = time.perf_counter(), 0
    while time.perf_counter() - start < seconds:
        _ = a @ a.T
        wait()
        count += 1
    return 2.0 * PRODUCT_ROWS**2 * dims * count / (time.perf_counter() - start)


def _table(rows: int, dims: int) -> np.ndarray:
    """Noise in float16 with some equal and some zero rows."""
    x = np.empty((rows, dims), np.float16)
    generator = np.random.default_rng(0)
    for start in range(0, rows, 10_000):
        stop = min(start + 10_000, rows)
        x[start:stop] = generator.standard_normal((stop - start, dims), dtype=np.float32)
    x[rows // 2 : rows // 2 + min(200, rows // 10)] = x[0]
    x[rows // 3] = 0
    return x


def _timed(x: np.ndarray, k: int, options: KnnOptions) -> tuple[Neighbours, float]:
    start = time.perf_counter()
    found = exact_knn(x, k=k, options=options)
    return found, time.perf_counter() - start


def _is_equal(a: Neighbours, b: Neighbours) -> bool:
    same_bytes = a.ids_MK.tobytes() == b.ids_MK.tobytes() and a.scores_MK.tobytes() == b.scores_MK.tobytes()
    return same_bytes and (a.tie_rate, a.n_undefined) == (b.tie_rate, b.n_undefined)


if __name__ == "__main__":
    sys.exit(main())
