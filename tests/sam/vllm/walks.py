"""The device's drafts beside the host's on recordings, its kernel in Triton's interpreter.

`python -m tests.sam.vllm.walks RECORDING... [--tokens 20000]` says how many drafts were compared and how many differ.
"""

import argparse
import contextlib
import dataclasses
import importlib.util
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from triton.runtime import interpreter

from sam.automaton import store
from sam.automaton.store import NONE
from sam.drafting.context_mixing import MIXING, make_learned
from sam.drafting.drafter import Drafter
from sam.drafting.late import LateDrafter, draft_behind
from sam.drafting.prompt_memory import ENTRY, make_memory
from sam.drafting.texts import SEQUENCE, make_sequences
from sam.record.responses import Recording, read_recording
from sam.tools.replay import replay
from sam.vllm.v2 import device_walk

K = 4
VOCABULARY = 1 << 20


@contextlib.contextmanager
def fast_interpreter():
    """Triton is patched once a launch of the kernel, not in each call of a helper, and sums are not looked at for
    overflows: both take longer than what they are there for. Hashes overflow."""
    patch = interpreter._patch_lang
    options = dataclasses.replace(interpreter.interpreter_builder.options, sanitize_overflow=False)

    def patch_for(function):
        is_helper = function.__module__.endswith("device_walk") and function.__name__ != "draft_kernel"
        return None if is_helper else patch(function)

    with (
        mock.patch.object(interpreter, "_patch_lang", patch_for),
        mock.patch.object(interpreter.interpreter_builder, "options", options),
    ):
        yield


@contextlib.contextmanager
def interpreted():
    """The module device_walk with its kernels in Triton's interpreter."""
    spec = importlib.util.spec_from_file_location("interpreted_device_walk", device_walk.__file__)
    module = importlib.util.module_from_spec(spec)
    with mock.patch.dict(os.environ, TRITON_INTERPRET="1"):
        spec.loader.exec_module(module)
    with fast_interpreter():
        yield module


def draft_by_host(automaton, requests, k, vocabulary):
    """As device_walk.draft, by the host's kernels on the same arrays: a thousand times as fast as the interpreter."""

    def array(words, dtype):
        return words.numpy().view(dtype)

    unused = np.zeros(1, store.GROUP), np.zeros(1, np.int64)
    nodes = array(automaton.nodes, store.NODE)
    own = store.Store(nodes, automaton.buckets.numpy(), *unused, array(automaton.counters, store.COUNTERS))
    memory = make_memory(0)._replace(entries=array(automaton.rows, ENTRY).reshape(automaton.num_rows, -1))
    learned = make_learned()._replace(mixing=array(automaton.weights, MIXING))
    texts = array(automaton.texts, SEQUENCE)
    recent = automaton.recent.numpy().reshape(len(texts), -1)
    sequences = make_sequences(len(texts), k)._replace(texts=texts, recent_tokens=recent)
    branch = make_sequences(1, k)
    drafts = np.zeros((len(requests.slots), k), np.int64)
    lengths = np.zeros(len(drafts), np.int32)
    for i, (slot, row) in enumerate(zip(requests.slots.tolist(), requests.rows.tolist(), strict=True)):
        if slot < 0 or row < 0 or texts[slot]["group"] == NONE:
            continue
        text = requests.tokens[row, : requests.lengths[row]].numpy()
        if (known := texts[slot]["num_tokens"]) > len(text):
            continue
        draft_behind(own, memory, learned, sequences, slot, text[known:], branch, np.int64(k))
        lengths[i] = branch.texts[0]["num_drafted"]
        drafts[i] = np.where(np.arange(k) < lengths[i], branch.draft_tokens[0], text[-1])
    return torch.from_numpy(drafts), None, torch.from_numpy(lengths)


class Enough(Exception):
    """So many tokens are replayed."""


class Beside(LateDrafter):
    """Drafts as LateDrafter, whose lateness `late_of` gives anew in each step, and compares a share of the steps with
    the kernel's drafts, until `first` tokens are appended.

    Attributes:
        counts: tokens appended, drafts, tokens of drafts, tokens walked; drafts with a recovery context, that the
            memory of other prompts changed, and that differ.
    """

    def __init__(self, drafter: Drafter, kernel, late_of: Callable[[], int], share: float, first: int):
        super().__init__(drafter, 0)
        self.kernel, self.late_of, self.share, self.first = kernel, late_of, share, first
        self.counts = Counter()
        self.texts: dict[str, list[int]] = {}
        self.rng = np.random.default_rng(0)

    def start(self, request_id, prompt_token_ids):
        super().start(request_id, prompt_token_ids)
        self.texts[request_id] = prompt_token_ids.tolist()

    def append(self, request_ids, token_ids, offsets):
        for row, name in enumerate(request_ids):
            self.texts[name] += token_ids[offsets[row] : offsets[row + 1]].tolist()
        self.counts["appended"] += len(token_ids)
        self.late = self.late_of()
        super().append(request_ids, token_ids, offsets)

    def draft(self, request_ids, budgets):
        if self.counts["appended"] >= self.first:
            raise Enough
        drafts = super().draft(request_ids, budgets)
        if self.rng.random() < self.share:
            self.compare(request_ids, drafts)
        return drafts

    def compare(self, names, drafts):
        given = requests_of(self.drafter, [self.texts[name] for name in names], names, self.rng)
        automaton = self.kernel.automaton_of(self.drafter)
        tokens, probabilities, lengths = map(torch.Tensor.numpy, self.kernel.draft(automaton, given, K, VOCABULARY))
        by_host = draft_by_host(automaton, given, K, VOCABULARY)
        forgetful = automaton._replace(rows=torch.zeros_like(automaton.rows))
        own_only = draft_by_host(forgetful, given, K, VOCABULARY)
        for row, name in enumerate(names):
            expected = slice(drafts.offsets[row], drafts.offsets[row + 1])
            mine = drafts.token_ids[expected], drafts.acceptance[expected]
            length = len(mine[0])
            its = tokens[row, :length], probabilities[row, :length]
            is_same = length == lengths[row] and all(map(np.array_equal, mine, its))
            is_filled = (tokens[row, length:] == self.texts[name][-1]).all() and not probabilities[row, length:].any()
            slot = self.drafter.slots_of([name])[0]
            self.counts["different"] += not (is_same and is_filled)
            self.counts["different"] += by_host[2][row] != length or (by_host[0][row].numpy() != tokens[row]).any()
            self.counts["by_other_prompts"] += not torch.equal(own_only[0][row], by_host[0][row])
            self.counts["drafts"] += 1
            self.counts["tokens"] += length
            self.counts["walked"] += len(self.pending[name])
            self.counts["recovery"] += self.drafter.sequences.texts[slot]["recovery_state"] != NONE


def requests_of(drafter, texts, names, rng) -> device_walk.Requests:
    """Whole texts in rows of their own order, as the runner has them."""
    rows = rng.permutation(len(texts)).astype(np.int32)
    tokens = np.full((len(texts), max(map(len, texts)) + 1), -7, np.int32)
    lengths = np.zeros(len(texts), np.int32)
    for row, text in zip(rows, texts, strict=True):
        tokens[row, : len(text)] = text
        lengths[row] = len(text)
    slots = drafter.slots_of(names).astype(np.int32)
    return device_walk.Requests(*map(torch.from_numpy, (slots, rows, tokens, lengths)))


def compare(
    recording: Recording,
    late_of: Callable[[], int],
    share: float,
    first=1 << 30,
    memory_bytes=8 << 20,
    kernel=interpreted,
):
    """Compare on a recording; a small memory, since the interpreter copies every array. Returns Beside's counts, and
    those of the drafter."""
    drafter = Drafter(max_draft_tokens=K, memory_budget_bytes=memory_bytes)
    with kernel() as own:
        beside = Beside(drafter, own, late_of, share, first)
        with contextlib.suppress(Enough):
            replay(recording, lambda: beside, K, in_step=True)
    return beside.counts + Counter(drafter.counters)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("recordings", nargs="+", type=Path)
    parser.add_argument("--share", type=float, default=0.05, help="of the steps that are compared")
    parser.add_argument("--tokens", type=int, default=20_000, help="of a recording, in each lateness")
    options = parser.parse_args()
    for path in options.recordings:
        for late in range(4):
            found = compare(read_recording(path), lambda: late, options.share, options.tokens)  # noqa: B023
            print(path.name, "late", late, dict(found), flush=True)


if __name__ == "__main__":
    main()
