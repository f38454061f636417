"""What happens to requests in an engine: preemption, aborts, prompts in pieces, faults, a switch; waits and copies."""

import time
from collections import Counter

import numpy as np
import pytest
from scipy import stats

from sam.config import SpeculationConfig
from sam.vllm.plugin import check_installed, installed
from sam.vllm.step_recorder import StepRecorder
from tests.sam.engine import matrix
from tests.sam.engine.faults import FAULTS, mend
from tests.sam.engine.tiny_engine import PROMPTS
from tests.sam.sharing.channel import Channel
from tests.v2 import zero
from tests.v2.engines import ROWS, SQUEEZED, engine, watch

pytestmark = pytest.mark.engine

THRESHOLD = 4
ALLOWED = list(range(10, 90, 10))


@pytest.fixture(scope="module")
def stock(model):
    """Answers of vLLM's own engine, and its steps."""
    with pytest.MonkeyPatch.context() as patch, engine(model, **SQUEEZED) as own:
        steps = watch(patch, own)
        return matrix.run(own, ROWS), steps


def test_verification_by_vllms_own_rejection_sampler(model, stock):
    with engine(model, "sam", {"verification": "rejection"}, **SQUEEZED) as own:
        assert type(own.runner.rejection_sampler).__name__ == "RejectionSampler"
        assert installed(own.runner)["verification"] == "rejection"
        found = matrix.run(own, ROWS)
        assert own.count()["accepted"] > 5 and own.counters()["draft_errors"] == 0
    greedy = [row for row in ROWS if matrix.settings(row)["temperature"] == 0]
    assert len(greedy) == 3
    assert [found[row].text or found[row].tokens for row in greedy] == [
        stock[0][row].text or stock[0][row].tokens for row in greedy
    ]


def test_text_of_other_engines_is_drafted_from(model, stock, tmp_path, monkeypatch):
    """Of a replica that shares it, and of a history on disk."""
    channel = Channel()
    monkeypatch.setattr("sam.sharing.drafter.Link", lambda address: channel)
    speculation = {"sharing": "replicas", "scope": "history", "history_path": str(tmp_path)}
    writes = ("sharing_sent_tokens", "history_written_responses")
    reads = ("sharing_received_tokens", "history_found_prompts")
    for counters in (writes, reads):
        with engine(model, "sam", speculation) as own:
            own.runner.drafter.share("address")
            deadline = time.monotonic() + 60
            while not all(own.counters()[name] for name in counters):
                assert time.monotonic() < deadline, own.counters()
                own.generate(PROMPTS[1:2], [{"temperature": 0.0, "max_tokens": 12}])
                own.runner.drafter.weights_updated()


@pytest.mark.parametrize(
    ("line", "method", "arguments"),
    [
        ("speculation.paths=2", "sam", {"speculation": {"paths": 2}}),
        ("data_parallel_size=2", "sam", {"data_parallel_size": 2}),
    ],
)
def test_what_is_not_there_yet_is_refused_in_one_line(model, line, method, arguments):
    with pytest.raises(ValueError, match=line) as refused:
        engine(model, method, **arguments)
    assert "\n" not in str(refused.value)


@pytest.fixture(scope="module", params=[False, True], ids=["synchronous", "asynchronous"])
def squeezed(request, model, stock):
    """An engine with drafts, and what it answered; it goes on to run, which is what the other tests use it for."""
    speculation = {"policy": "threshold", "batch_size_threshold": THRESHOLD}
    with engine(model, "sam", speculation, asynchronous=request.param, **SQUEEZED) as own:
        with pytest.MonkeyPatch.context() as patch:
            own.steps, recorder = watch(patch, own), StepRecorder.attach(own.runner)
            own.answers = matrix.run(own, ROWS)
        own.recorded, own.counted, own.first = recorder.take(), own.count(), own.counters()
        yield own


@pytest.fixture
def drafting(squeezed, monkeypatch):
    """The engine, which drafts however many requests there are."""
    monkeypatch.setattr(squeezed.runner.drafter.policy, "batch_size_threshold", 1000)
    return squeezed


def test_tokens_are_stock_vllms_through_preemption_aborts_and_pieces_of_prompts(squeezed, stock):
    matrix.assert_same(squeezed.answers, stock[0], ROWS, by=1e-4)
    assert squeezed.counted["preemptions"] > 3 and squeezed.counted["accepted"] > 5
    metrics = {one.name: getattr(one, "value", None) for one in squeezed.llm.get_metrics()}
    assert metrics["vllm:prefix_cache_hits"] > 0
    assert squeezed.first["draft_errors"] == squeezed.first["untracked_requests"] == 0
    status, config = installed(squeezed.runner), squeezed.runner.vllm_config
    asynchronous = config.scheduler_config.async_scheduling
    assert status == {"drafter": "SamSpeculator", "verification": "exact", "asynchronous": asynchronous}
    check_installed(SpeculationConfig.from_vllm(config), status)


def test_steps_are_recorded(squeezed):
    """Tokens behind the end of a response are emitted, too; so are those of requests that were aborted."""
    steps, answered = squeezed.recorded, sum(len(squeezed.answers[row].tokens) for row in ROWS)
    assert answered <= steps.emitted.sum() <= 1.2 * answered
    assert steps.accepted.sum() == steps.accepted_at.sum() >= squeezed.counted["accepted"]
    if squeezed.runner.scheduler_config.async_scheduling:  # vLLM counts all that it left room for
        assert steps.accepted.sum() < steps.drafted.sum() < squeezed.counted["drafted"]
    else:
        assert steps.drafted.sum() >= squeezed.counted["drafted"]
    assert steps.drafting.sum() > 5 and (~steps.drafting).sum() > 5 and (steps.step_ms > 0).all()
    assert steps.running.max() > THRESHOLD and steps.preemptions == squeezed.counted["preemptions"]
    assert steps.turn_emitted.sum() - steps.turn_steps.sum() == steps.accepted.sum()
    assert steps.counters["tracked_requests"] == len(ROWS)


def test_steps_without_drafts_wait_for_nothing_and_copy_nothing(squeezed, stock):
    """The host waits as stock vLLM does: once for the copy of a step's tokens, with drafts a little earlier; under
    asynchronous scheduling the first step with drafts waits for its own tokens and the last step's."""
    kinds = Counter(squeezed.steps)
    drafting = {step: number for step, number in kinds.items() if step[1]}
    idle = {step: number for step, number in kinds.items() if not step[1]}
    assert sum(drafting.values()) > 5 and sum(idle.values()) > 5
    assert sum(waits for waits, _ in squeezed.steps) <= len(squeezed.steps)
    assert max(waits for waits, _ in idle) <= max(waits for waits, _ in stock[1]) == 1
    assert all(copies == 1 for _, copies in drafting)
    assert squeezed.first["skipped_steps"] > 5


def test_a_fault_in_drafting_costs_drafts_and_nothing_else(drafting, stock, caplog):
    before, rows = drafting.counters()["draft_errors"], ROWS[2:8]
    FAULTS["drafting_raises"](drafting.runner.speculator)
    matrix.assert_same(matrix.run(drafting, rows), stock[0], rows, by=1e-4)
    mend(drafting.runner.speculator)
    assert drafting.counters()["draft_errors"] > before + 3
    assert caplog.text.count("drafting failed") == 1


def test_a_fault_in_a_steps_record_costs_drafts_and_nothing_else(drafting, stock, monkeypatch):
    """The scheduler is told nothing of such a step, and goes on as before."""
    before, rows = drafting.counters()["draft_errors"], ROWS[2:8]
    monkeypatch.setattr(drafting.runner.speculator, "_step_of", None)
    matrix.assert_same(matrix.run(drafting, rows), stock[0], rows, by=1e-4)
    assert drafting.counters()["draft_errors"] > before + 3


@pytest.mark.parametrize("squeezed", [True], ids=["asynchronous"], indirect=True)
def test_tokens_follow_the_models_distribution(drafting):
    """By the place of each token in its own distribution, as the engine tells that: uniform, behind drafts too."""
    settings = {"temperature": 2.0, "allowed_token_ids": ALLOWED, "max_tokens": 3}
    asked = [settings | {"seed": seed} for seed in range(150)]
    found = drafting.generate([PROMPTS[1][:6]] * len(asked), asked, logprobs=len(ALLOWED))
    generator, places = np.random.default_rng(0), []
    for tokens, entries in zip(found.tokens, found.logprobs, strict=True):
        for token, entry in zip(tokens, entries, strict=True):
            chances = {one: np.exp(value) for one, value in entry.items() if np.isfinite(value)}
            below = sum(chance for one, chance in chances.items() if one < token)
            places.append(below + generator.random() * chances[token])
    assert len(places) == 450 and found.accepted > 30
    assert stats.chisquare(np.bincount((np.array(places) * 10).astype(int).clip(0, 9), minlength=10)).pvalue > 1e-4


@pytest.mark.parametrize("is_asynchronous", [False, True], ids=["synchronous", "asynchronous"])
def test_the_switchs_zero_schedules_and_computes_what_stock_does(model, is_asynchronous):
    stock, own = zero.works(model, is_asynchronous)
    assert stock == own and len(stock) >= 16
