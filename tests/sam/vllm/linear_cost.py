"""`python -m tests.sam.vllm.linear_cost`: linear layers of SmolLM2-135M, stock vLLM's time over that of the kernel of
this project, by rows. Weights are not in the cache; both take turns; medians."""

import itertools
import time
from statistics import median

import torch
from vllm import _custom_ops as ops

from sam.vllm.cpu_fixes import describe
from sam.vllm.cpu_linear import linear

SHAPES = ((960, 576), (576, 576), (3072, 576), (576, 1536), (49152, 576))
ROWS = (1, 4, 16, 64, 96, 2000)
BYTES = 60_000_000  # of weights that follow each other
SECONDS = 0.5  # for each number


def stocks(weight: torch.Tensor):
    """As vLLM's dispatch_cpu_unquantized_gemm chooses."""
    try:
        pack = ops.create_onednn_mm(weight.t(), 32)
        ops.onednn_mm(pack, torch.ones(1, weight.shape[1], dtype=weight.dtype), None)
    except RuntimeError:
        return lambda x: torch.nn.functional.linear(x, weight)
    return lambda x: ops.onednn_mm(pack, x, None)


def ratio(weights: list[torch.Tensor], products: list, rows: int) -> float:
    x, seconds = torch.randn(rows, weights[0].shape[1]).to(weights[0].dtype), ([], [])
    products[0](x), linear(x, weights[0])  # compiled
    stop = time.perf_counter() + SECONDS
    for turn in itertools.count():
        if turn > 4 and time.perf_counter() > stop:
            return median(seconds[0]) / median(seconds[1])
        place = turn % len(weights)
        start = time.perf_counter()
        products[place](x)
        middle = time.perf_counter()
        linear(x, weights[place])
        seconds[0].append(middle - start)
        seconds[1].append(time.perf_counter() - middle)


def main() -> None:
    print(describe())
    for dtype, shape in itertools.product((torch.float32, torch.bfloat16), SHAPES):
        weights = [(0.05 * torch.randn(shape)).to(dtype) for _ in range(1 + BYTES // (4 * shape[0] * shape[1]))]
        products = [stocks(weight) for weight in weights]
        of_rows = [f"{ratio(weights, products, rows):.2f}" for rows in ROWS if rows * shape[0] < 2e7]
        print(dtype, "x".join(map(str, shape)), *of_rows, sep=" | ", flush=True)


if __name__ == "__main__":
    main()
