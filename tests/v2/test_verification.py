"""Exact verification with vLLM's own sampler, without an engine: steps with drafts give the tokens of steps without.

A `model` here is a table: the logits after a token depend on it and on the position. Requests are decoded twice through
vLLM's Sampler: one token a step, and with drafts, some of them right.
"""

import numpy as np
import pytest
import torch
from scipy import stats

pytest.importorskip("vllm.v1.worker.gpu.sample.sampler")
from tests.v2.table_decoding import PROMPT_LENGTH, Decoder

K = 3
LENGTH = 8
ROWS = 3
CASES = {
    "greedy": {"temperature": 0.0},
    "drawn": {"temperature": 1.0},
    "top_k_top_p_min_p": {"temperature": 0.6, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
    "top_k": {"temperature": 0.6, "top_k": 5},
    "top_p": {"temperature": 0.6, "top_p": 0.8},
    "min_p": {"temperature": 0.6, "min_p": 0.1},
    "repetition_penalty": {"repetition_penalty": 1.5},
    "presence_and_frequency": {"presence_penalty": 0.5, "frequency_penalty": 0.7},
    "logit_bias": {"logit_bias": {5: 4.0, 9: -100.0}},
    "allowed_tokens": {"allowed_token_ids": list(range(0, 64, 2))},
    "min_tokens": {"min_tokens": 5, "stop_token_ids": list(range(0, 64, 2))},
    "logprobs": {"logprobs": 3},
    "logprobs_of_the_drawn": {"logprobs": 0, "temperature": 0.6, "top_k": 7},
    "everything": {"temperature": 0.7, "top_k": 30, "top_p": 0.95, "repetition_penalty": 1.2, "logprobs": 2},
}


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
@pytest.mark.parametrize("case", CASES)
def test_tokens_and_logprobs_are_those_without_drafts(case, mode):
    settings = [CASES[case] | {"seed": row} for row in range(ROWS)]
    plain, drafted = (Decoder(settings, K, logprobs_mode=mode) for _ in range(2))
    expected = plain.decode(LENGTH)
    found = drafted.decode(LENGTH, drafts=expected, right=0.6)
    assert drafted.accepted >= LENGTH / 2
    assert found == expected
    assert len(plain.logprobs) == len(drafted.logprobs) == (ROWS if "logprobs" in CASES[case] else 0)
    for row, entries in plain.logprobs.items():
        for here, there in zip(entries, drafted.logprobs[row], strict=True):
            assert np.array_equal(here[0], there[0]) and np.allclose(here[1], there[1], atol=1e-5)


def test_requests_of_all_kinds_in_one_batch():
    settings = [one | {"seed": row} for row, one in enumerate(CASES.values())]
    expected = Decoder(settings, K).decode(LENGTH)
    assert Decoder(settings, K).decode(LENGTH, drafts=expected, right=0.8) == expected


def test_drafts_of_any_number_and_none_at_all():
    settings = [{"seed": row} for row in range(ROWS)]
    expected = Decoder(settings, K).decode(LENGTH)
    assert Decoder(settings, K).decode(LENGTH, drafts=expected, right=0.8, ragged=True) == expected


def test_a_draft_that_is_no_token_ends_verification():
    from sam.vllm.v2.verification import accept_equal

    drawn, inputs = torch.tensor([7, 8, 9, 1, 2]), torch.tensor([3, 7, -1, 5, 1])
    begins, places = torch.tensor([0, 3, 5], dtype=torch.int32), torch.arange(K + 1)
    tokens, kept = accept_equal(drawn, inputs, begins, places)
    assert kept.tolist() == [2, 2] and tokens[0, :2].tolist() == [7, 8] and tokens[1, :2].tolist() == [1, 2]


@pytest.mark.statistical
def test_tokens_follow_the_distribution_behind_drafts_and_before_them():
    """The token after the prompt, and the ones after drafts that were accepted, over many seeds."""
    requests = 200
    decoder = Decoder([{"seed": seed} for seed in range(requests)], K, vocabulary=8, same_prompt=True)
    likeliest, distributions = [decoder.prompt[-1]], []
    for place in range(K):
        distributions.append(decoder.distribution(likeliest[-1], PROMPT_LENGTH - 1 + place))
        likeliest.append(int(distributions[-1].argmax()))
    tokens = np.array(decoder.decode(K + 1, drafts=[likeliest[1:] + [0]] * requests, right=1.0))
    for place, expected in enumerate(distributions):
        rows = (tokens[:, :place] == likeliest[1 : 1 + place]).all(1)
        assert rows.sum() > 50
        kinds = np.where(expected < 0.05, 8, np.arange(8))  # the unlikely ones together
        counts = np.bincount(kinds[tokens[rows, place]], minlength=9)
        chances = np.bincount(kinds, expected, minlength=9)
        assert stats.chisquare(counts[chances > 0], (chances * rows.sum())[chances > 0]).pvalue > 1e-4
