"""On a GPU the automaton gives the drafts that it gives on the host, and garbage in it costs drafts at most."""

import contextlib
import re
import subprocess
import threading
from unittest import mock

import numpy as np
import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime import interpreter

from sam.automaton.store import NONE
from sam.drafting.drafter import Drafter
from sam.record.responses import Recording
from sam.vllm.v2 import device_walk
from tests.sam.stepping import append, tokens
from tests.sam.vllm.walks import VOCABULARY, K, compare, interpreted, requests_of

PROMPTS, SAMPLES = 5, 3


def recording() -> Recording:
    """Prompts whose samples repeat each other with other words here and there, and have boilerplate in common."""
    rng = np.random.default_rng(0)
    opening, closing = rng.integers(0, 40, (2, 30))
    prompts, responses = [], []
    for prompt in range(PROMPTS):
        body = rng.integers(40 * prompt, 40 * prompt + 40, 50)
        prompts.append(tokens(*body[:20], prompt))
        parts = [[_noisy(part, rng) for part in (opening, body, closing, body, closing)] for _ in range(SAMPLES)]
        responses.append([np.concatenate(sample).astype(np.int32) for sample in parts])
    return Recording(prompts, responses)


def _noisy(text, rng):
    return np.where(rng.random(len(text)) < 0.1, rng.integers(0, 300, len(text)), text)


SMALL = 96 << 10  # bytes: groups are dropped, and their blocks are taken again


@pytest.mark.parametrize(("late", "memory_bytes"), [(0, 1 << 20), (2, 1 << 20), ("0 to 3", 1 << 20), ("0 to 3", SMALL)])
def test_the_device_drafts_what_the_host_would(late, memory_bytes):
    rng = np.random.default_rng(1)
    late_of = (lambda: int(rng.integers(4))) if late == "0 to 3" else lambda: late
    counts = compare(recording(), late_of, share=0.02, memory_bytes=memory_bytes)
    assert counts["different"] == 0
    assert counts["drafts"] > 15 and counts["recovery"] > 2
    assert counts["by_other_prompts"] > 0 or memory_bytes == SMALL
    assert (counts["walked"] > 0) == (late != 0)
    assert (counts["evicted_groups"] > 0) == (memory_bytes == SMALL)


def drafter_of(**texts) -> Drafter:
    drafter = Drafter(max_draft_tokens=K, memory_budget_bytes=1 << 20)
    for name, text in texts.items():
        drafter.start(name, tokens(*text[:2]))
        append(drafter, {name: text[2:]})
    return drafter


def test_who_gets_no_draft():
    """A request that the drafter does not follow, that has no row or no group, whose text on the device is shorter than
    what was appended, as after a preemption, or longer by more than is walked."""
    texts = [[90 + i, *range(10), *range(5)] for i in range(6)]
    drafter = drafter_of(**dict(zip("abcdef", texts, strict=True)))
    texts[3] = texts[3][:-1]
    texts[4] = texts[4] + 65 * [5]
    given = requests_of(drafter, texts, "abcdef", np.random.default_rng(0))
    given.slots[1] = given.rows[2] = -1
    drafter.sequences.texts["group"][drafter.slots_of("f")] = NONE
    with interpreted() as kernel:
        drafts, probabilities, lengths = kernel.draft(kernel.automaton_of(drafter), given, K, VOCABULARY)
    assert lengths.tolist() == [K, 0, 0, 0, 0, 0]
    assert drafts[0].tolist() == [5, 6, 7, 8] and not probabilities[1:].any()
    with interpreted() as kernel:  # of tokens outside the vocabulary a draft ends
        drafts, _, lengths = kernel.draft(kernel.automaton_of(drafter), given, K, vocabulary=7)
    assert lengths[0] == 2 and drafts[0].tolist() == [5, 6, 4, 4] and (drafts < 7).all()


@contextlib.contextmanager
def checked_reads(tensors):
    """Each read of the interpreter is in one of the tensors; yields how many there were."""
    ranges = [(one.data_ptr(), one.data_ptr() + one.nbytes) for one in tensors]
    load, count = interpreter.InterpreterBuilder.create_masked_load, [0]

    def checked(builder, pointers, *rest):
        for address in pointers.data.ravel().tolist():
            assert any(first <= address < end for first, end in ranges), "outside of every array"
            count[0] += 1
        return load(builder, pointers, *rest)

    with mock.patch.object(interpreter.InterpreterBuilder, "create_masked_load", checked):
        yield count


def tear(arrays: list[np.ndarray], earlier: list[np.ndarray], stop: threading.Event) -> None:
    """Write into arrays what stood there earlier, words of elsewhere, and noise, until told to stop."""
    rng = np.random.default_rng(2)
    while not stop.is_set():
        which = int(rng.integers(len(arrays)))
        array, before = arrays[which], earlier[which]
        at = rng.integers(0, len(array), max(1, len(array) // 20))
        noise = rng.integers(-(2**31), 2**31, len(at)).astype(array.dtype)
        array[at] = (before[at], before[rng.permutation(at)], noise, -noise % 4096)[int(rng.integers(4))]
        stop.wait(1e-4)


@pytest.mark.parametrize("launches", [30, pytest.param(10_000, marks=pytest.mark.long)])
def test_a_store_torn_while_it_is_read_costs_drafts_and_nothing_else(launches):
    text = [*np.random.default_rng(3).integers(0, 50, 40).tolist()] * 3
    drafter = drafter_of(a=text, b=[*text[:60], *text[7:]])
    given = requests_of(drafter, [[*text, 1, 2], [*text[:60], *text[7:], 3]], "ab", np.random.default_rng(0))
    with interpreted() as kernel:
        own = kernel.automaton_of(drafter)
        copied = [one.clone() if isinstance(one, torch.Tensor) else one for one in own]
        torn = kernel.Automaton(*copied)
        arrays = [one.numpy() for one in copied if isinstance(one, torch.Tensor)]
        used = [array[: 4 * 96 * int(drafter.store.counters[0]["num_touched_blocks"])] for array in arrays]
        stop = threading.Event()
        writer = threading.Thread(target=tear, args=(used, [array.copy() for array in used], stop))
        writer.start()
        try:
            tensors = [one for one in (*copied, *given) if isinstance(one, torch.Tensor)]
            with checked_reads(tensors) as reads, np.errstate(all="ignore"):
                for _ in range(launches):
                    drafts, _, lengths = kernel.draft(torn, given, K, 1000)
                    assert ((drafts >= 0) & (drafts < 1000)).all() and ((lengths >= 0) & (lengths <= K)).all()
        finally:
            stop.set()
            writer.join()
    assert reads[0] > 100 * launches


POINTERS = device_walk.Automaton("*i64", "*i32", "*i64", "i32", "*i32", "i32", "*i64", "*fp64", "*i64", "i32")
SIGNATURE = {
    "drafts": "*i64", "probabilities": "*fp32", "num_drafted": "*i32", "slots": "*i32", "rows": "*i32",
    "tokens": "*i32", "stride": "i32", "lengths": "*i32", "automaton": POINTERS, "vocabulary": "i32", "k": "i32",
}  # fmt: skip


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_it_compiles_without_spills_and_does_not_grow(capability, tmp_path):
    """To machine code, by the assembler in Triton's wheel: no GPU is needed."""
    source = ASTSource(fn=device_walk.draft_kernel, signature=SIGNATURE, constexprs={})
    options = {"num_warps": 1, "enable_fp_fusion": False}
    found = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    (binary := tmp_path / "kernel.cubin").write_bytes(found.asm["cubin"])
    command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", binary]
    usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    said = {name: int(value) for name, value in re.findall(r"\b(REG|STACK|LOCAL|SHARED):(\d+)", usage)}
    assert (said["STACK"], said["LOCAL"], said["SHARED"]) == (0, 0, 0) and said["REG"] <= 128
    instructions = re.findall(r"^\s+(?:@\S+ )?([a-z]\S*) .*;$", found.asm["ptx"], flags=re.M)
    assert len(instructions) <= 1900
    assert sum(name.startswith("ld.global") for name in instructions) <= 144
