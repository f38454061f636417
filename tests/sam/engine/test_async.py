"""Under vLLM's asynchronous scheduling sam gives the tokens of the synchronous engine, whatever happens to requests."""

import numpy as np
import pytest

from sam.switch.policy import Plan
from tests.sam.engine.async_cpu import ASYNC_SAM
from tests.sam.engine.tiny_engine import SAM, VOCABULARY, generate, save_model

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("asynchronous")]

REQUESTS, BATCH = 48, 16
ASYNC = {"async_scheduling": True, "distributed_executor_backend": "uni"}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"), sharpness=12.0)


def prompts():
    generator = np.random.default_rng(0)
    each = [generator.integers(0, VOCABULARY, 5 + row % 7).tolist() * 2 for row in range(REQUESTS // 4)]
    return [each[row // 4] for row in range(REQUESTS)]


def settings(row):
    """Greedy and drawn, ends by length and by stop token, plain and penalised."""
    chosen = {"seed": row, "temperature": 0.0 if row % 3 == 0 else 1.0, "max_tokens": 20 + 7 * row % 61}
    if row % 5 == 0:
        chosen["stop_token_ids"] = list(range(0, VOCABULARY, 20))
    if row % 8 == 1:
        chosen["repetition_penalty"] = 1.1
    return chosen


def run(model, speculative_config=None, **engine):
    engine = {
        "async_scheduling": False,
        "logprobs": 0,
        "logprobs_mode": "processed_logprobs",
        "policy": "always",
        "batch": BATCH,
        **engine,
    }
    return generate(model, prompts(), [settings(row) for row in range(REQUESTS)], speculative_config, **engine)


@pytest.fixture(scope="module")
def off(model):
    return run(model)


def assert_same(one, other):
    assert one.tokens == other.tokens
    assert one.logprobs == other.logprobs


def test_the_requests_end_in_every_way(off):
    lengths = [len(tokens) for tokens in off.tokens]
    stopped = sum(length < settings(row)["max_tokens"] for row, length in enumerate(lengths))
    assert stopped > 3 and len(set(lengths)) > 10


def test_synchronous_with_sam(model, off):
    on = run(model, SAM)
    assert on.accepted > 50 and on.installed["drafter"] == "SamProposer"
    assert_same(on, off)


def test_asynchronous_without_speculation(model, off):
    assert_same(run(model, **ASYNC), off)


def test_asynchronous_with_sam(model, off):
    seen = []
    on = run(model, ASYNC_SAM, **ASYNC, observe=seen.append)
    assert_same(on, off)
    assert on.installed["drafter"] == "AsyncSamProposer"
    assert seen[0].use_async_scheduling
    assert seen[0].drafter.counters["draft_errors"] == 0
    assert on.accepted > 50


def test_rejection_sampling_gives_the_same_greedy_tokens(model, off):
    on = run(model, ASYNC_SAM, verification="rejection", **ASYNC)
    greedy = [row for row in range(REQUESTS) if row % 3 == 0]
    assert on.accepted > 50
    assert [on.tokens[row] for row in greedy] == [off.tokens[row] for row in greedy]


def test_the_switch_turns_at_any_step(model, off):
    def observe(runner):
        generator, policy = np.random.default_rng(0), runner.drafter.policy
        policy.plan = lambda state: Plan(budget=3 if generator.random() < 0.6 else 0)
        proposers.append(runner.drafter)

    proposers = []
    on = run(model, ASYNC_SAM, **ASYNC, observe=observe)
    assert_same(on, off)
    assert on.accepted > 20 and proposers[0].counters["draft_errors"] == 0


def test_preemptions_and_prompts_in_pieces(model, off):
    """So little KV cache that requests are preempted, and steps so small that prompts come beside drafts."""
    squeezed = {"block_size": 32, "num_gpu_blocks_override": 16, "max_num_batched_tokens": 64}
    seen = []
    on = run(model, ASYNC_SAM, **squeezed, **ASYNC, observe=seen.append)
    assert_same(on, off)
    assert on.preemptions > 0 and on.accepted > 20
    assert seen[0].drafter.counters["draft_errors"] == 0


def test_aborts_and_forced_preemptions_between_draft_and_verification(model, off):
    aborted = {3: [0, 5], 7: [9, 11, 2], 15: [20]}
    tokens = {}

    def then(llm):
        from vllm import SamplingParams

        engine, common = llm.llm_engine, {"logprobs": 0, "ignore_eos": True, "detokenize": False}
        for row, prompt in enumerate(prompts()):
            engine.add_request(str(row), {"prompt_token_ids": prompt}, SamplingParams(**common | settings(row)))
        step = 0
        while engine.has_unfinished_requests():
            step += 1
            for output in engine.step():
                tokens[int(output.request_id)] = list(output.outputs[0].token_ids)
            engine.abort_request([str(row) for row in aborted.get(step, [])])
            if step in (10, 11, 18):
                assert engine.reset_prefix_cache(reset_running_requests=True)

    seen = []
    generate(
        model, [[1, 2]], [{"max_tokens": 2}], ASYNC_SAM, BATCH, observe=seen.append, then=then, policy="always",
        logprobs_mode="processed_logprobs", **ASYNC,
    )  # fmt: skip
    gone = {row for rows in aborted.values() for row in rows}
    for row in range(REQUESTS):
        expected = list(off.tokens[row])
        if row in gone:
            assert tokens.get(row, []) == expected[: len(tokens.get(row, []))]
        else:
            assert tokens[row] == expected
    assert any(len(tokens.get(row, [])) < len(off.tokens[row]) for row in gone)
    proposer = seen[0].drafter
    assert proposer.counters["draft_errors"] == 0 and len(proposer.tracked.states) <= 1
