"""Steps around the drafter in a real engine: none is drafted for in vain, none goes without because of another."""

import pytest

from tests.sam.engine.tiny_engine import SAM, generate, save_model

pytestmark = pytest.mark.engine

LONGEST = 256  # of tiny_engine's engines
PROMPTS = [[5, 6, 7, 8, 5, 6, 7], [9, 10, 11]] * 2


def test_requests_are_drafted_for_while_another_is_near_the_longest_length(tmp_path):
    model = save_model(tmp_path / "model")
    settings = [{"max_tokens": 249, "seed": 0}, *({"max_tokens": 240, "seed": seed} for seed in (1, 2, 3))]
    drafted_for = []

    def observe(runner):
        propose = runner.drafter.propose

        def recorded(sampled, lengths, tokens, *rest, **keywords):
            drafts = propose(sampled, lengths, tokens, *rest, **keywords)
            drafted_for.append((int(lengths[: len(sampled)].max()), sum(map(bool, drafts))))
            return drafts

        runner.drafter.propose = recorded

    off = generate(model, PROMPTS, settings)
    on = generate(model, PROMPTS, settings, SAM, policy="always", observe=observe)
    assert on.tokens == off.tokens and on.logprobs == off.logprobs
    # So near that a whole draft does not fit, while the others go on.
    last = [rows for longest, rows in drafted_for if longest + SAM["num_speculative_tokens"] > LONGEST]
    assert last and max(last) >= 1


def test_steps_without_drafts_tell_the_scheduler_nothing(tmp_path):
    model = save_model(tmp_path / "model")
    settings = [{"max_tokens": 20, "seed": seed} for seed in range(len(PROMPTS))]
    told = []

    def observe(runner):
        take = runner.take_draft_token_ids

        def recorded():
            told.append(take())
            return told[-1]

        runner.take_draft_token_ids = recorded

    generate(model, PROMPTS, settings, SAM, policy="never", observe=observe)
    assert told and not any(told)
    told.clear()
    on = generate(model, PROMPTS, settings, SAM, policy="always", observe=observe)
    assert on.drafted > 0 and any(told)
    for drafts in filter(None, told):
        assert any(drafts.draft_token_ids)
