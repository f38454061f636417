"""Steps around the drafter in a real engine: none is drafted for in vain, none goes without because of another."""

import pytest

from sam.switch.policies import make_policy
from sam.vllm.step_recorder import StepRecorder
from tests.sam.engine.tiny_engine import SAM, Engine, generate, save_model

pytestmark = pytest.mark.engine

LONGEST = 256  # of tiny_engine's engines
PROMPTS = [[5, 6, 7, 8, 5, 6, 7], [9, 10, 11]] * 2


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"))


def test_requests_are_drafted_for_while_another_is_near_the_longest_length_and_plain_steps_tell_nothing(model):
    settings = [{"max_tokens": 249, "seed": 0}, *({"max_tokens": 240, "seed": seed} for seed in (1, 2, 3))]
    off = generate(model, PROMPTS, settings)
    drafted_for, told = [], []
    with Engine(model, SAM, policy="never") as engine:
        runner, proposer = engine.runner, engine.runner.drafter
        propose, take = proposer.propose, runner.take_draft_token_ids

        def recorded(sampled, lengths, tokens, *rest, **keywords):
            drafts = propose(sampled, lengths, tokens, *rest, **keywords)
            drafted_for.append((int(lengths[: len(sampled)].max()), sum(map(bool, drafts))))
            return drafts

        proposer.propose, runner.take_draft_token_ids = recorded, lambda: told.append(take()) or told[-1]
        engine.generate(PROMPTS, [{"max_tokens": 20, "seed": seed} for seed in range(len(PROMPTS))])
        assert told and not any(told), "the scheduler hears nothing of steps without drafts"
        told.clear()
        proposer.policy = make_policy("always", 3, 0)
        on = engine.generate(PROMPTS, settings)
    assert on.tokens == off.tokens and on.logprobs == off.logprobs
    # So near that a whole draft does not fit, while the others go on.
    last = [rows for longest, rows in drafted_for if longest + SAM["num_speculative_tokens"] > LONGEST]
    assert last and max(last) >= 1
    assert on.drafted > 0 and any(told) and all(any(drafts.draft_token_ids) for drafts in filter(None, told))


def test_steps_that_replay_a_graph_are_counted_where_vllm_dispatches_them(model):
    """A CPU has no graphs: vLLM's dispatcher says so, and is made to name one in two steps of three."""
    from vllm.config import CUDAGraphMode
    from vllm.forward_context import BatchDescriptor

    settings = [{"max_tokens": 60 + seed, "seed": seed} for seed in range(len(PROMPTS))]
    dispatched, recorders, steps = [], [], []

    def dispatch(num_tokens, **_):
        mode = CUDAGraphMode.PIECEWISE if len(dispatched) % 3 else CUDAGraphMode.NONE
        dispatched.append(mode != CUDAGraphMode.NONE)
        return mode, BatchDescriptor(num_tokens)

    def observe(runner):
        execute = runner.execute_model
        runner.execute_model = lambda scheduled, *rest: steps.append(scheduled) or execute(scheduled, *rest)
        runner.vllm_config.model_config.enforce_eager = False
        runner.compilation_config.cudagraph_mode = CUDAGraphMode.PIECEWISE
        runner.cudagraph_dispatcher.dispatch = dispatch
        recorders.append(StepRecorder.attach(runner))

    # Few at once, so that requests begin in several steps: nothing is drafted for their prompts.
    on = generate(model, PROMPTS, settings, SAM, batch=2, policy="always", observe=observe)
    replays = recorders[0].take().replays()
    with_drafts = [bool(one.scheduled_spec_decode_tokens) for one in steps if one.total_num_scheduled_tokens]
    counted = [[graph for graph, its in zip(dispatched, with_drafts, strict=True) if its == phase] for phase in (1, 0)]
    assert on.drafted and [*replays.values()] == [(sum(graphs), len(graphs)) for graphs in counted]
    assert all(0 < sum(graphs) < len(graphs) for graphs in counted), counted
