"""The tokens of stock vLLM, for every way to sample, with drafts that are accepted."""

import numpy as np
import pytest

from tests.v2.engines import answers, engine, prompts

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
}
ROWS = 2


def requests():
    from vllm.sampling_params import StructuredOutputsParams

    structured = {"structured_outputs": StructuredOutputsParams(regex="(w1[0-9]?[0-9]?)+")}
    drawn = prompts(ROWS)
    return [
        (f"{case}_{row}", prompt, settings if "logprobs" in case or row == 0 else settings | {"logprobs": 1})
        for case, settings in (CASES | {"structured_outputs": structured}).items()
        for row, prompt in enumerate(drawn if case != "near_max_model_len" else prompts(ROWS, 236))
    ]


@pytest.fixture(scope="module")
def runs(model):
    found = {}
    for name, method in (("stock", None), ("sam", "sam")):
        with engine(model, method) as llm:
            found[name] = answers(llm, requests())
    return found


@pytest.mark.parametrize("case", [*CASES, "structured_outputs"])
def test_tokens_are_those_of_stock_vllm(runs, case):
    names = [name for name in runs["stock"].tokens if name.rsplit("_", 1)[0] == case]
    assert len(names) == ROWS
    for name in names:
        stock, sam = runs["stock"], runs["sam"]
        assert any(stock.tokens[name])
        for expected, found in zip(stock.tokens[name], sam.tokens[name], strict=True):
            # After a stop string vLLM returns the tokens that the same step brought, of which one with drafts has more.
            length = len(expected) if case.startswith("stop_string") else None
            assert found[:length] == expected, name
        assert sam.text[name] == stock.text[name]
        for expected, found in zip(stock.logprobs[name], sam.logprobs[name], strict=True):
            for here, there in zip(expected, found[: len(expected)], strict=True):
                assert list(here) == list(there)
                assert np.allclose(list(here.values()), list(there.values()), atol=1e-4)


def test_drafts_are_accepted_and_nothing_fails(runs):
    sam = runs["sam"]
    assert sam.accepted > 50
    assert sam.counters["draft_errors"] == 0 and sam.counters["untracked_requests"] == 0
    assert sam.counters["tracked_requests"] == sum(map(len, sam.tokens.values()))
