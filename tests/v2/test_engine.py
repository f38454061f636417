"""What happens to requests in an engine: preemption, aborts, prompts in pieces, faults, a switch; waits and copies."""

from collections import Counter

import numpy as np
import pytest
import torch
from scipy import stats

from sam.vllm.plugin import check_installed, installed
from sam.vllm.step_recorder import StepRecorder
from tests.sam.engine.async_cpu import Event
from tests.v2.engines import answers, config_of, engine, prompts, runner_of, scheduler_of

pytestmark = pytest.mark.engine

# So few blocks that requests are preempted, so small steps that prompts come in pieces beside drafts.
SQUEEZED = {
    "block_size": 32,
    "num_gpu_blocks_override": 14,
    "max_num_batched_tokens": 48,
    "logprobs_mode": "processed_logprobs",
}
THRESHOLD = 4
ABORTED = {5: ["row_2"], 9: ["row_5"]}
GONE = {name for names in ABORTED.values() for name in names}
FORCED_PREEMPTION = 14  # after this step
ALLOWED = list(range(10, 90, 10))


def requests():
    """Twelve, of three prompts; the longest are alone in the end."""
    each = prompts(3, 56)
    kinds = ({"temperature": 0.0}, {}, {"temperature": 0.7, "top_k": 30}, {"repetition_penalty": 1.1, "logprobs": 1})
    return [(f"row_{row}", each[row // 4], kinds[row % 4] | {"max_tokens": 4 + 2 * row}) for row in range(12)]


class Watch:
    """Counts, by step, whether drafts were asked for, waits of the host, and copies of drafts to the device."""

    def __init__(self, monkeypatch):
        from sam.vllm.v2 import speculator

        self.steps, self.copies = [], 0
        copy = speculator.async_tensor_h2d

        def counted(*arguments, **keywords):
            self.copies += 1
            return copy(*arguments, **keywords)

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(speculator, "async_tensor_h2d", counted)
        self._before = self._counts(0)

    def _counts(self, drafting: int) -> np.ndarray:
        return np.array([Event.waits, self.copies, drafting])

    def after_step(self, llm, step: int) -> None:
        if step in ABORTED:
            llm.llm_engine.abort_request(ABORTED[step])
        if step == FORCED_PREEMPTION:
            assert llm.llm_engine.reset_prefix_cache(reset_running_requests=True)
        counts = self._counts(getattr(runner_of(llm).speculator, "counters", {}).get("waited_steps", 0))
        self.steps.append(tuple((counts - self._before).tolist()))
        self._before = counts


@pytest.fixture(scope="module")
def stock(model):
    with pytest.MonkeyPatch.context() as patched, engine(model, None, **SQUEEZED) as llm:
        watch = Watch(patched)
        run = answers(llm, requests(), watch.after_step)
    run.steps = watch.steps
    return run


@pytest.fixture(scope="module", params=[False, True], ids=["synchronous", "asynchronous"])
def squeezed(request, model, stock):
    """An engine with drafts, and what it answered; it goes on to run, which is what the other tests use it for."""
    speculation = {"policy": "threshold", "batch_size_threshold": THRESHOLD}
    with (
        pytest.MonkeyPatch.context() as patched,
        engine(model, "sam", speculation, asynchronous=request.param, **SQUEEZED) as llm,
    ):
        with pytest.MonkeyPatch.context() as watched:
            watch, recorder = Watch(watched), StepRecorder.attach(runner_of(llm))
            run = answers(llm, requests(), watch.after_step)
        run.steps, run.recorded = watch.steps, recorder.take()
        yield llm, run, patched


def test_tokens_are_stock_vllms_through_preemption_aborts_and_pieces_of_prompts(squeezed, stock):
    _, run, _ = squeezed
    assert run.tokens.keys() - GONE == stock.tokens.keys() - GONE and len(run.tokens.keys() - GONE) == 10
    for name in stock.tokens.keys() - GONE:
        assert run.tokens[name] == stock.tokens[name], name
        for expected, found in zip(stock.logprobs[name], run.logprobs[name], strict=True):
            for here, there in zip(expected, found, strict=True):
                assert list(here) == list(there) and np.allclose(list(here.values()), list(there.values()), atol=1e-4)
    assert run.metrics["vllm:num_preemptions"] > 3
    assert run.metrics["vllm:prefix_cache_hits"] > 0
    assert run.accepted > 5 and run.counters["draft_errors"] == 0
    assert run.counters["tracked_requests"] == len(requests()) and run.counters["untracked_requests"] == 0


def test_steps_are_recorded(squeezed):
    """Tokens behind the end of a response are emitted, too; so are those of requests that were aborted."""
    _, run, _ = squeezed
    steps, answered = run.recorded, sum(len(tokens) for (tokens,) in run.tokens.values())
    assert answered <= steps.emitted.sum() <= 1.2 * answered
    assert steps.accepted.sum() == steps.accepted_at.sum() >= run.accepted
    assert steps.drafted.sum() >= run.drafted and steps.drafting.sum() > 5 and (~steps.drafting).sum() > 5
    assert steps.running.max() > THRESHOLD and steps.preemptions == run.metrics["vllm:num_preemptions"]
    assert steps.turn_emitted.sum() - steps.turn_steps.sum() == steps.accepted.sum()
    assert (steps.step_ms > 0).all() and steps.counters["tracked_requests"] == len(requests())


def test_an_engine_says_what_it_uses(squeezed):
    llm, _, _ = squeezed
    runner = runner_of(llm)
    status = installed(runner)
    assert status == {
        "drafter": "SamSpeculator",
        "verification": "exact",
        "asynchronous": runner.scheduler_config.async_scheduling,
    }
    check_installed(config_of(llm), status)


def test_steps_without_drafts_wait_for_nothing_and_copy_nothing(squeezed, stock):
    """The host waits as stock vLLM does: once for the copy of a step's tokens, with drafts a little earlier; under
    asynchronous scheduling the first step with drafts waits for its own tokens and the last step's."""
    _, run, _ = squeezed
    kinds = Counter(run.steps)
    drafting = {step: number for step, number in kinds.items() if step[2]}
    idle = {step: number for step, number in kinds.items() if not step[2]}
    assert sum(drafting.values()) > 5 and sum(idle.values()) > 5
    assert sum(waits for waits, _, _ in run.steps) <= len(run.steps)
    assert max(waits for waits, _, _ in idle) <= max(waits for waits, _, _ in stock.steps) == 1
    assert all(copies == 0 for _, copies, _ in idle) and all(copies == 1 for _, copies, _ in drafting)
    assert run.counters["waited_steps"] == sum(drafting.values()) and run.counters["skipped_steps"] > 5


def test_a_fault_in_drafting_costs_drafts_and_nothing_else(squeezed, stock, caplog):
    llm, _, patched = squeezed
    speculator = runner_of(llm).speculator
    with pytest.MonkeyPatch.context() as broken:
        broken.setattr(speculator.drafter, "draft", lambda *_: 1 / 0)
        broken.setattr(scheduler_of(llm)._switch.policy, "batch_size_threshold", 1000)
        before = speculator.counters["draft_errors"]
        run = answers(llm, requests()[:6])
    assert all(run.tokens[name] == stock.tokens[name] for name in run.tokens if name not in GONE)
    assert run.counters["draft_errors"] > before + 3
    assert caplog.text.count("drafting failed") == 1


@pytest.mark.parametrize("squeezed", [True], ids=["asynchronous"], indirect=True)
def test_tokens_follow_the_models_distribution(squeezed):
    """By the place of each token in its own distribution, as the engine tells that: uniform, behind drafts too."""
    llm, before, patched = squeezed
    settings = {"temperature": 2.0, "allowed_token_ids": ALLOWED, "logprobs": len(ALLOWED), "max_tokens": 3}
    with pytest.MonkeyPatch.context() as changed:
        changed.setattr(scheduler_of(llm)._switch.policy, "batch_size_threshold", 1000)
        run = answers(llm, [(f"drawn_{row}", prompts(1)[0], settings | {"seed": row}) for row in range(150)])
    generator, places = np.random.default_rng(0), []
    for name, (entries,) in run.logprobs.items():
        for token, entry in zip(run.tokens[name][0], entries, strict=True):
            chances = {one: np.exp(value) for one, value in entry.items() if np.isfinite(value)}
            assert sum(chances.values()) == pytest.approx(1.0, abs=1e-4)
            below = sum(chance for one, chance in chances.items() if one < token)
            places.append(below + generator.random() * chances[token])
    assert len(places) == 450 and run.accepted - before.accepted > 30
    assert stats.chisquare(np.bincount((np.array(places) * 10).astype(int).clip(0, 9), minlength=10)).pvalue > 1e-4


def test_verification_by_vllms_own_rejection_sampler(model, stock):
    with engine(model, "sam", {"verification": "rejection"}, **SQUEEZED) as llm:
        runner = runner_of(llm)
        assert type(runner.rejection_sampler).__name__ == "RejectionSampler"
        assert installed(runner)["verification"] == "rejection"
        check_installed(config_of(llm), installed(runner))
        run = answers(llm, requests())
    assert run.accepted > 5 and run.counters["draft_errors"] == 0
    greedy = [name for name, _, settings in requests() if settings.get("temperature") == 0]
    assert len(greedy) == 3
    for name in greedy:
        assert run.tokens[name] == stock.tokens[name]
