"""Sources outside the group: one that is added, beside the memory of other prompts."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np

from sam.drafting.drafter import Drafter
from sam.drafting.registry import SOURCES

ROOT = Path(__file__).parents[3]
EXAMPLE = '''
from typing import NamedTuple

import numpy as np

from sam.automaton.store import NONE
from sam.drafting.origins import OTHER_PROMPT
from sam.drafting.sequences import token_at
from sam.drafting.sources import nothing, one_token
from sam.jit import kernel


class LastFollower(NamedTuple):
    """following: int32 [size], the token that followed each token last; tokens of one remainder share a place."""

    following: np.ndarray

    ORIGIN = OTHER_PROMPT  # what its draft tokens are counted as

    @classmethod
    def make(cls, budget_bytes):
        return cls(np.full(budget_bytes // 4, NONE, np.int32))

    def start_version(self, policy_version):
        pass  # new weights change nothing

    @staticmethod
    @kernel
    def recall(source, sequences, slot, num_ahead):
        end, size = sequences.texts[slot].num_tokens + num_ahead, source.following.size
        if end == 0 or size == 0:
            return nothing()
        token = source.following[token_at(sequences, slot, end - 1) % size]
        return one_token(token) if token != NONE else nothing()

    @staticmethod
    @kernel
    def remember(source, sequences, slot, token):
        end, size = sequences.texts[slot].num_tokens, source.following.size
        if end != 0 and size != 0:
            source.following[token_at(sequences, slot, end - 1) % size] = token
'''
# Another prompt said 22 23 24 after 21; the text here goes from 7 to 22, of which only a context of one token is known.
PLAY = """
def play(drafter):
    def step(request, *text):
        offsets, tokens = np.array([0, len(text)]), np.array(text, np.int32)
        return drafter.step([request], tokens, offsets, np.array([3])).token_ids.tolist()

    drafter.start("a", np.array([1], np.int32))
    step("a", 21, 22, 23, 24)
    drafter.start("b", np.array([2], np.int32))
    drafts = [step("b", 7, 22), step("b", 23, 24, 9)]
    return drafts, drafter.learned.by_source.tolist(), int((drafter.learned.mixing["num_updates"] > 0).sum())
"""
SCRIPT = """
import json
from sam.drafting.drafter import Drafter
from sam.drafting.registry import SOURCES
drafter = Drafter(max_draft_tokens=3, memory_budget_bytes=4 << 20, count_every=1, sources=(*SOURCES, LastFollower))
print(json.dumps([len(drafter.learned.mixing), *play(drafter)]))
"""


def test_a_source_is_one_class(tmp_path):
    """In a process and with a cache of its own: compiled code is kept by types, and no other process knows this one."""
    script = tmp_path / "example.py"
    script.write_text(EXAMPLE + PLAY + SCRIPT)
    run = subprocess.run(
        [sys.executable, script],
        env={**os.environ, "NUMBA_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    weights, drafts, by_source, learned = json.loads(run.stdout)

    alone = Drafter(max_draft_tokens=3, memory_budget_bytes=4 << 20, count_every=1)
    namespace = {"np": np}
    exec(PLAY, namespace)
    without, by_source_without, learned_without = namespace["play"](alone)
    assert len(SOURCES) == 1 and without[0] == [], "the control: nobody else knows what follows"
    assert drafts[0][:2] == [23, 24]
    assert by_source[4][1] >= 2 and by_source_without[4][1] == 0, "draft tokens that came true, by ORIGIN"
    of_a_source = weights - len(alone.learned.mixing)
    assert of_a_source > 0 and learned > learned_without, "it has weights of its own, and they are learnt"
