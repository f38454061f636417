"""A real vLLM engine on CPU: the same tokens and log-probs with and without speculation, at any batch size."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.engine

GENERATE = Path(__file__).with_name("generate.py")
SAMPLES, DRAFT_LENGTH = 8, 3  # as generate.py has them
UNSEEDED = 6  # the sample without a seed: its key comes from vLLM's request id, which is random


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=300, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=512, tie_word_embeddings=True,
        initializer_range=0.1, eos_token_id=0, pad_token_id=0, bos_token_id=None,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("model")
    Qwen3ForCausalLM(config).float().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def results(model):
    return {
        name: generate(model, method, batch)
        for name, (method, batch) in {"off": ("off", 40), "sam": ("sam", 40), "ngram": ("ngram", 12)}.items()
    }


def generate(model, method, batch):
    command = [sys.executable, str(GENERATE), str(model), method, str(batch)]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=300)
    lines = [line for line in finished.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, finished.stdout[-2000:] + finished.stderr[-4000:]
    return json.loads(lines[0].removeprefix("RESULT "))


@pytest.mark.parametrize("name", ["sam", "ngram"])
def test_same_tokens_and_log_probs(results, name):
    off, on = results["off"], results[name]
    seeded = [index for index in range(len(off["tokens"])) if index % SAMPLES != UNSEEDED]
    identical = sum(off["tokens"][index] == on["tokens"][index] for index in seeded)
    print(f"{name}: {identical} of {len(seeded)} responses identical, {on['accepted']} drafts accepted")
    assert on["accepted"] > 100
    assert identical == len(seeded) == 35
    for index in seeded:
        assert on["logprobs"][index] == off["logprobs"][index]


@pytest.mark.parametrize("name, drafter", [("off", None), ("sam", "SamProposer"), ("ngram", "NgramProposer")])
def test_what_is_installed_says_so(results, name, drafter):
    status = results[name]["status"]
    assert (status["drafter"], status["verification"]) == (drafter, "exact")


def test_every_token_is_counted_once(results):
    for result in results.values():
        kept = sum(map(len, result["tokens"]))
        # Accepted drafts beyond a response's last token are sampled and then cut off by the scheduler.
        assert kept <= result["emitted"] <= kept + DRAFT_LENGTH * len(result["tokens"])
    assert results["off"]["emitted"] == sum(map(len, results["off"]["tokens"]))


def test_switch_and_lifecycle(results):
    sam = results["sam"]
    assert sam["drafting_above_threshold"] == 0
    assert sam["counters"]["skipped_steps"] > 0
    assert sam["counters"]["draft_errors"] == 0
    assert sam["counters"]["tracked_requests"] == len(sam["tokens"])
    assert sam["followed"] == 1  # only the request after all of these


def test_samples_of_a_prompt_differ(results):
    tokens = results["off"]["tokens"]
    assert len({tuple(response[:150]) for response in tokens[1:6]}) == 5
