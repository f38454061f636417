"""Sources outside the group: the example of docs/development.md, beside the memory of other prompts."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np

from sam.drafting.drafter import Drafter
from sam.drafting.registry import SOURCES

ROOT = Path(__file__).parents[3]
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


def example() -> str:
    page = (ROOT / "docs" / "development.md").read_text()
    (block,) = [part.split("```")[0] for part in page.split("```python")[1:] if "class LastFollower" in part]
    return block


def test_a_source_is_one_class(tmp_path):
    """In a process and with a cache of its own: compiled code is kept by types, and no other process knows this one."""
    script = tmp_path / "example.py"
    script.write_text(example() + PLAY + SCRIPT)
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
