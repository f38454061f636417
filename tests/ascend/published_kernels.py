"""Runs vllm-ascend's Triton kernels for rejection sampling under Triton's interpreter and compares with sam.verify.

A process of its own: TRITON_INTERPRET must be set before Triton is imported. Prints a JSON line with the counts.
"""

import importlib.util
import json
import os
import sys
import types
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"
os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"

import torch
import triton
import triton.language as tl

from sam import verify
from sam.verify import rejection

CORES = 4


@triton.jit
def get_element(vector, index):
    """CANN's, which upstream Triton does not have."""
    return tl.sum(tl.where(tl.arange(0, vector.shape[0]) == index[0], vector, 0))


def load_kernels() -> types.ModuleType:
    """The module alone: what it imports from vLLM and vllm-ascend asks for a device."""
    for name in ("vllm", "vllm_ascend", "vllm_ascend.ops", "vllm_ascend.ops.triton"):
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__path__ = []
    languages = types.ModuleType("vllm.triton_utils")
    languages.tl, languages.triton, languages.HAS_TRITON = tl, triton, True
    sys.modules[languages.__name__] = languages
    helpers = types.ModuleType("vllm_ascend.ops.triton.triton_utils")
    helpers.get_element, helpers.get_vectorcore_num = get_element, lambda: CORES
    sys.modules[helpers.__name__] = helpers
    origin = next(Path(folder) / "vllm_ascend" for folder in sys.path if (Path(folder) / "vllm_ascend").is_dir())
    path = origin / "ops" / "triton" / "reject_sample.py"
    specification = importlib.util.spec_from_file_location("reject_sample", path)
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def check(kernels, seed: int) -> tuple[int, int]:
    """One random batch through every kernel; accepted and rejected drafts."""
    torch.manual_seed(seed)
    batch, longest, vocabulary = 5, 3, 50
    counts = torch.randint(longest + 1, (batch,)).tolist()
    counts[0] = longest
    ends = torch.tensor(counts).cumsum(0).to(torch.int32)
    total = sum(counts)
    probabilities = (3 * torch.randn(total, vocabulary)).softmax(-1)
    drafts = torch.multinomial(probabilities, 1).squeeze(1).to(torch.int32)
    bonus = torch.randint(vocabulary, (batch, 1), dtype=torch.int32)
    grid, block = kernels.cal_grid_and_block_size(batch)
    greedy = torch.rand(batch) < 0.3

    def output():
        return torch.full((batch, longest + 1), verify.PLACEHOLDER, dtype=torch.int32)

    best = torch.where(torch.rand(total) < 0.7, drafts.long(), probabilities.argmax(-1))
    theirs, ours = output(), output()
    kernels.rejection_greedy_sample_with_triton(theirs, counts, ends, drafts, best, bonus, greedy, longest, grid, block)
    layout = rejection._layout(ends, total)
    rejection._write(ours, best, drafts == best, bonus, layout, greedy)
    assert torch.equal(theirs, ours), ("greedy", seed)

    x, expanded = torch.rand(batch), torch.empty(total)
    x[1] = 0.0
    kernels.expand_triton(batch, expanded, x, ends, 0, 1, max_num_tokens=32)
    assert torch.equal(expanded, verify.expand_batch_to_tokens(x, ends, total, 0, 1)), ("expand", seed)

    noise = torch.empty(batch, vocabulary).exponential_()
    recovered = torch.empty(total, dtype=torch.int32)
    kernels.sample_recovered_tokens_kernel[(batch, longest)](
        recovered, ends, drafts, None, probabilities, None, noise, vocabulary, vocabulary,
        NO_DRAFT_PROBS=True, ENABLE_REDUCE_SAMPLING=False, VOCAB_BLOCK_SIZE=512, SUB_BLOCK=4096,
    )  # fmt: skip
    row = torch.arange(batch).repeat_interleave(torch.tensor(counts))
    one_hot = torch.nn.functional.one_hot(drafts.long(), vocabulary)
    assert torch.equal(recovered.long(), (probabilities * (1 - one_hot) / noise[row]).argmax(-1)), ("recovered", seed)

    draws = torch.rand(total)
    theirs, ours = output(), output()
    kernels.rejection_random_sample_kernel[(grid,)](
        theirs, ends, drafts, None, probabilities, None, bonus, recovered, draws, greedy, longest, vocabulary,
        vocabulary, batch, None, NO_ORI_TARGET_PROBS=True, NO_DRAFT_PROBS=True, ENABLE_REDUCE_SAMPLING=False,
        ENTROPY_VERIFY=False, BLOCK_SIZE=block,
    )  # fmt: skip
    one_hot_drafts = rejection._Drafts.clamped(drafts, vocabulary)
    accepted = rejection._accept(one_hot_drafts, None, probabilities, draws.double())
    rejection._write(ours, torch.where(accepted, drafts, recovered), accepted, bonus, layout, ~greedy)
    assert torch.equal(theirs, ours), ("random", seed, theirs, ours)
    kept = (ours[~greedy] != verify.PLACEHOLDER).sum(1) - 1
    return int(kept.sum()), int((kept < torch.tensor(counts)[~greedy]).sum())


if __name__ == "__main__":
    module = load_kernels()
    found = [check(module, seed) for seed in range(40)]
    accepted, rejected = map(sum, zip(*found, strict=True))
    print(json.dumps({"cases": len(found), "accepted": accepted, "rejected": rejected}))
