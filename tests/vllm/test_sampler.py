"""Exact verification in a real vLLM engine on CPU: the same tokens and log-probabilities, whatever is drafted."""

import os

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

import gc
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from sam.keys import sample_key, uniforms
from sam.vllm import plugin

VOCABULARY = 300
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
SAM = {"model": "sam.vllm.proposer.SamProposer", "num_speculative_tokens": 3}
REQUESTS = 48
LENGTH = 60


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A random Qwen3 with peaked outputs, so that its text repeats and drafts are accepted now and then."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    network = Qwen3ForCausalLM(config).float()
    with torch.no_grad():
        network.lm_head.weight.mul_(25)
    path = tmp_path_factory.mktemp("model")
    network.save_pretrained(path)
    return SimpleNamespace(path=str(path), network=network.eval())


def prompts() -> list[list[int]]:
    generator = np.random.default_rng(0)
    return [generator.integers(0, VOCABULARY, 5 + row % 7).tolist() * 2 for row in range(REQUESTS)]


def run(model, speculative_config=None, batch=64, additional=None, sampling=None, seeds=True, **engine):
    """Outputs of REQUESTS requests, and the engine's model runner."""
    from vllm import LLM, SamplingParams

    plugin.register()
    llm = LLM(
        model=model.path,
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=256,
        max_num_seqs=batch,
        enforce_eager=True,
        speculative_config=speculative_config,
        additional_config=additional or {"speculation": {"verification": "exact", "batch_size_threshold": 1000}},
        disable_log_stats=False,
        **engine,
    )
    try:
        settings = {"temperature": 1.0, "max_tokens": LENGTH, "logprobs": 2, "ignore_eos": True, "detokenize": False}
        parameters = [
            SamplingParams(**settings | (sampling(row) if sampling else {}), seed=row if seeds else None)
            for row in range(REQUESTS)
        ]
        outputs = llm.generate([{"prompt_token_ids": p} for p in prompts()], parameters, use_tqdm=False)
        runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
        counters = {metric.name: getattr(metric, "value", None) for metric in llm.get_metrics()}
        return SimpleNamespace(
            tokens=[o.outputs[0].token_ids for o in outputs],
            logprobs=[
                [step[t].logprob for step, t in zip(o.outputs[0].logprobs, o.outputs[0].token_ids, strict=True)]
                for o in outputs
            ],
            accepted=counters.get("vllm:spec_decode_num_accepted_tokens", 0),
            preemptions=counters.get("vllm:num_preemptions", 0),
            installed=plugin.installed(runner),
        )
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()


@pytest.fixture(scope="module")
def off(model):
    return run(model)


def assert_same(one, other):
    """The same tokens; log-probabilities as far as the forward passes agree.

    Attention over 1 + k queries adds up in another order than over one; with this model's logits, of which some exceed
    20, that is a few 1e-6. Given equal logits the sampler returns equal log-probabilities: test_sampler_rows.py.
    """
    assert one.tokens == other.tokens
    for a, b in zip(one.logprobs, other.logprobs, strict=True):
        assert np.abs(np.array(a) - np.array(b)).max() < 1e-5


def test_it_is_what_runs(off):
    assert off.installed["verification"] == "exact"
    assert off.installed["sampled_steps"] >= LENGTH
    assert off.installed["invalid_rows"] == 0


@pytest.mark.parametrize(("speculative_config", "batch"), [(NGRAM, 16), (SAM, 64)], ids=["ngram-16", "sam-64"])
def test_speculation_changes_no_token(model, off, speculative_config, batch):
    on = run(model, speculative_config, batch)
    assert on.accepted > 50
    assert on.installed["verification"] == "exact"
    assert_same(on, off)


def test_tokens_are_the_keyed_draws_from_the_teacher_forced_distribution(model, off):
    """The engine's tokens against transformers' logits and sam.keys; a rounding may move one draw in a thousand."""
    agree = total = 0
    for row, (prompt, tokens) in enumerate(zip(prompts(), off.tokens, strict=True)):
        with torch.no_grad():
            logits = model.network(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        probabilities = logits.double().softmax(-1).numpy()
        draws = uniforms(np.full(len(tokens), sample_key(row, 0, "")), np.arange(len(tokens)))
        cumulative = probabilities.cumsum(-1)
        expected = [np.searchsorted(c, u * c[-1], side="right") for c, u in zip(cumulative, draws, strict=True)]
        agree += int((np.array(tokens) == expected).sum())
        total += len(tokens)
    assert total == REQUESTS * LENGTH and agree >= 0.999 * total


def mixed(row: int) -> dict:
    """What vLLM allows with speculation, alone and together, greedy rows among them."""
    return [
        {"temperature": 0.0},
        {"top_k": 5, "temperature": 0.7},
        {"top_p": 0.8},
        {"repetition_penalty": 1.2, "presence_penalty": 0.5},
        {"allowed_token_ids": list(range(100)), "frequency_penalty": 0.3},
        {"min_tokens": 5, "stop_token_ids": [7], "ignore_eos": False},
        {"top_k": 20, "top_p": 0.9, "temperature": 1.3, "repetition_penalty": 1.1},
        {},
    ][row % 8]


def test_the_same_with_every_constraint_and_processed_log_probabilities(model):
    arguments = {"sampling": mixed, "logprobs_mode": "processed_logprobs"}
    without, on = run(model, **arguments), run(model, NGRAM, 16, **arguments)
    assert on.accepted > 50
    assert_same(on, without)


def test_the_same_with_preemption_and_prompts_in_pieces(model, off):
    """The cache holds a few requests only, so that some are preempted and computed again."""
    squeezed = run(
        model,
        block_size=32,
        num_gpu_blocks_override=10,
        max_num_batched_tokens=64,
    )
    assert squeezed.preemptions > 0
    assert_same(squeezed, off)


def test_keys_without_seeds_come_from_engine_and_request(model):
    one, other = run(model, seeds=False), run(model, seeds=False, seed=1)
    assert sum(a == b for a, b in zip(one.tokens, other.tokens, strict=True)) == 0
    assert len({tuple(tokens) for tokens in one.tokens}) == REQUESTS
