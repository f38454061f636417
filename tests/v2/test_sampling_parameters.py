"""The tokens of stock vLLM, for every way to sample, with drafts that are accepted."""

import numpy as np
import pytest

from tests.sam.engine.tiny_engine import PROMPTS
from tests.v2.engines import engine

pytestmark = pytest.mark.engine

CASES = {
    "greedy": {"temperature": 0.0},
    "drawn": {"temperature": 1.0},
    "without_a_seed": {"temperature": 0.0, "seed": None},
    "top_k_top_p_min_p": {"temperature": 0.6, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
    "penalties": {"repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.2},
    "logit_bias": {"logit_bias": {5: 4.0, 9: -100.0}},
    "bad_words_and_allowed": {"allowed_token_ids": list(range(0, 300, 2))},
    "min_tokens": {"min_tokens": 12, "stop_token_ids": list(range(0, 300, 12))},
    "stop_tokens": {"stop_token_ids": list(range(0, 300, 12))},
    "logprobs": {"logprobs": 3},
    "greedy_logprobs": {"temperature": 0.0, "logprobs": 0},
    "named_logprobs": {"logprob_token_ids": [3, 40, 200]},
    "prompt_logprobs": {"prompt_logprobs": 1},
    "stop_string": {"stop": ["7 w1"], "detokenize": True},
    "stop_string_kept": {"stop": ["3 w2"], "detokenize": True, "include_stop_str_in_output": True},
    "n_4": {"n": 4, "temperature": 0.8},
    "near_max_model_len": {"max_tokens": 300},
    "structured_outputs": {"structured_outputs": "(w1[0-9]?[0-9]?)+"},
}
ROWS = (1, 5)  # of PROMPTS


def answers(own) -> dict[str, list]:
    """By case: what vLLM gives for each prompt."""
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    prompts, parameters = [], []
    common = {"temperature": 1.0, "ignore_eos": True, "detokenize": False, "max_tokens": 16}
    for case, settings in CASES.items():
        if regex := settings.get("structured_outputs"):
            settings = {"structured_outputs": StructuredOutputsParams(regex=regex)}
        for row in ROWS:
            logprobs = {} if "logprobs" in case or row == ROWS[0] else {"logprobs": 1}
            prompts.append((PROMPTS[row] * 14)[: 236 if case == "near_max_model_len" else 6])
            parameters.append(SamplingParams(**common | {"seed": len(prompts)} | logprobs | settings))
    asked = [{"prompt_token_ids": prompt} for prompt in prompts]
    outputs = iter(own.llm.generate(asked, parameters, use_tqdm=False))
    return {case: [next(outputs).outputs for _ in ROWS] for case in CASES}


@pytest.fixture(scope="module")
def stock(model):
    with engine(model) as own:
        return answers(own)


@pytest.fixture(scope="module")
def sam(model, stock):
    with engine(model, "sam") as own:
        found = answers(own)
        counters = own.counters()
        assert own.count()["accepted"] > 50
    assert counters["draft_errors"] == counters["untracked_requests"] == 0
    assert counters["tracked_requests"] == sum(len(outputs) for case in found.values() for outputs in case)
    return found


@pytest.mark.parametrize("case", CASES)
def test_tokens_are_those_of_stock_vllm(stock, sam, case):
    for expected, found in zip(sum(stock[case], []), sum(sam[case], []), strict=True):
        # After a stop string vLLM returns the tokens that the same step brought, of which one with drafts has more.
        length = len(expected.token_ids) if case.startswith("stop_string") else None
        assert found.token_ids[:length] == expected.token_ids and found.text == expected.text
        assert expected.token_ids and (expected.logprobs is None) == (found.logprobs is None)
        for here, there in zip(expected.logprobs or [], (found.logprobs or [])[:length], strict=True):
            assert list(here) == list(there)
            np.testing.assert_allclose(*([one.logprob for one in step.values()] for step in (here, there)), atol=1e-4)
