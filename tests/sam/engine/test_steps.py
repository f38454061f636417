"""Steps around the drafter in a real engine: none is drafted for in vain, none goes without because of another."""

import pytest

from sam.vllm.step_recorder import StepRecorder
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


@pytest.mark.parametrize("has_graphs", [True, False])
def test_steps_that_replay_a_graph_are_counted_where_vllm_dispatches_them(has_graphs, tmp_path):
    """A CPU has no graphs: vLLM's dispatcher says so, and is made to name one in two steps of three."""
    from vllm.config import CUDAGraphMode
    from vllm.forward_context import BatchDescriptor

    model = save_model(tmp_path / "model")
    settings = [{"max_tokens": 60 + seed, "seed": seed} for seed in range(len(PROMPTS))]
    dispatched, recorders, steps = [], [], []

    def dispatch(num_tokens, **_):
        mode = CUDAGraphMode.PIECEWISE if len(dispatched) % 3 else CUDAGraphMode.NONE
        dispatched.append(mode != CUDAGraphMode.NONE)
        return mode, BatchDescriptor(num_tokens)

    def observe(runner):
        execute = runner.execute_model
        runner.execute_model = lambda scheduled, *rest: steps.append(scheduled) or execute(scheduled, *rest)
        if has_graphs:
            runner.vllm_config.model_config.enforce_eager = False
            runner.compilation_config.cudagraph_mode = CUDAGraphMode.PIECEWISE
            runner.cudagraph_dispatcher.dispatch = dispatch
        recorders.append(StepRecorder.attach(runner))

    # Few at once, so that requests begin in several steps: nothing is drafted for their prompts.
    on = generate(model, PROMPTS, settings, SAM, batch=2, policy="always", observe=observe)
    replays = recorders[0].take().replays()
    if not has_graphs:
        assert replays is None
        return
    with_drafts = [bool(one.scheduled_spec_decode_tokens) for one in steps if one.total_num_scheduled_tokens]
    counted = [[graph for graph, its in zip(dispatched, with_drafts, strict=True) if its == phase] for phase in (1, 0)]
    assert on.drafted and [*replays.values()] == [(sum(graphs), len(graphs)) for graphs in counted]
    assert all(0 < sum(graphs) < len(graphs) for graphs in counted), counted
