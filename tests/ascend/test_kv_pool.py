"""AscendStoreConnector of the real vllm-ascend: engines on the simulated NPU, with a folder in place of Mooncake's
store; and by its own code what its keys are made of and what its reset does.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sam.vllm.runner_hooks import GENERATED
from tests.kv_pool import replica
from tests.sam.engine.tiny_engine import SAM

SCRIPT = Path(__file__).with_name("pool_keys.py")


@pytest.fixture(scope="module")
def found():
    paths = os.pathsep.join([str(SCRIPT.parent), str(SCRIPT.parents[2])])
    command = [sys.executable, str(SCRIPT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env={**os.environ, "PYTHONPATH": paths})
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_its_keys_bear_the_salt(found):
    old, new = found["keys"]["run/1"], found["keys"]["run/2"]
    assert len(old) == 4 and old == found["again"] and not set(old) & set(new)
    assert found["asked"]["run/1"] == old and found["asked"]["run/2"] == new


def test_its_reset_is_vllms_base_class_which_clears_nothing(found):
    assert not found["resets"]


def test_draft_tokens_that_it_counts_get_no_key(found):
    """It counts the draft tokens of a step as tokens; keys are of blocks whose tokens are all in the response."""
    assert len(found["drafted"]) == 5 and found["drafted"][:4] == found["known"]


def test_a_part_of_a_block_gets_the_whole_blocks_key(found):
    """With discard_partial_chunks=false, which preflight refuses: 6 tokens of a prompt that goes on are computed."""
    assert [tokens for _, tokens in found["partial"]] == [4, 2]
    assert found["partial"][1][0] == found["keys"]["run/1"][1]


CHUNK, LENGTH = 32, 96
PROMPTS = [[(7 * row + token * token) % 500 for token in range(40)] for row in range(4)]


def asked(tokens=None, number=0, salt=None):
    """Whole responses, or the chunk of that number of responses whose whole is `tokens`."""
    given = number * CHUNK
    extra = {"extra_args": {GENERATED: given}, "max_tokens": CHUNK} if tokens else {"max_tokens": LENGTH}
    prompts = [prompt + tokens[row][:given] if tokens else prompt for row, prompt in enumerate(PROMPTS)]
    return {"prompts": prompts, "parameters": [{"seed": row, **extra} for row in range(len(PROMPTS))], "salt": salt}


@pytest.mark.engine
def test_a_chunk_that_moves_loads_and_new_weights_read_nothing_old(models, tmp_path):
    from transformers import Qwen3ForCausalLM

    network = Qwen3ForCausalLM.from_pretrained(models / "dense")
    network.model.embed_tokens.weight.data *= 1.5
    newer = tmp_path / "dense"  # the pool's keys bear the folder's name
    network.save_pretrained(newer)
    pool, old, drafts = tmp_path / "pool", str(models / "dense"), {"speculative_config": SAM, "simulated": True}
    (whole,) = replica.run(old, [asked()], simulated=True)
    tokens = whole["tokens"]
    first = replica.run(old, [asked(tokens, 0, "run/1"), asked(tokens, 1, "run/1")], pool, **drafts)
    (moved,) = replica.run(old, [asked(tokens, 2, "run/1")], pool, **drafts)
    for number, call in enumerate((*first, moved)):
        assert call["tokens"] == [response[number * CHUNK : (number + 1) * CHUNK] for response in tokens]
    assert moved["loaded"] == len(PROMPTS) * ((len(PROMPTS[0]) + CHUNK) // replica.BLOCK * replica.BLOCK)
    salted, stale = replica.run(str(newer), [asked(salt="run/2"), asked(salt="run/1")], pool, **drafts)
    assert salted["loaded"] == 0 and salted["tokens"] == replica.run(str(newer), [asked()], simulated=True)[0]["tokens"]
    assert stale["loaded"] > 0 and stale["logprobs"] != salted["logprobs"], "the control"
