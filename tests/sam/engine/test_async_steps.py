"""What a step costs under asynchronous scheduling, counted: waits for the device and copies; and what faults cost."""

from collections import Counter

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from sam.sharing.client import Client
from sam.switch.policy import Plan
from sam.vllm.async_proposer import AsyncSamProposer, SampledStep
from sam.vllm.step_recorder import StepRecorder
from tests.sam.engine.async_cpu import ASYNC_SAM, Event
from tests.sam.engine.faults import FAULTS
from tests.sam.engine.tiny_engine import generate, save_model

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("asynchronous")]

PROMPTS = [[5, 6, 7, 8, 5, 6, 7], [9, 10, 11]] * 4
SETTINGS = [{"max_tokens": 60 + 4 * row, "seed": row} for row in range(len(PROMPTS))]
ASYNC = {"async_scheduling": True, "distributed_executor_backend": "uni", "logprobs": 0}
COPIES = ("aten::_to_copy", "aten::copy_", "aten::_local_scalar_dense", "aten::clone")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"))


class Copies(TorchDispatchMode):
    """Counts the operators that copy or that bring a number to the host."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function.name().split(".")[0] in COPIES
        return function(*args, **kwargs or {})


def counted(steps, function):
    """`function`, whose waits and copies are added to the last of `steps`."""

    def call(*arguments, **keywords):
        waits = Event.waits
        with Copies() as copies:
            result = function(*arguments, **keywords)
        steps[-1].update(waits=Event.waits - waits, copies=copies.count)
        return result

    return call


def begins(steps, function):
    def call(*arguments, **keywords):
        steps.append(Counter())
        return function(*arguments, **keywords)

    return call


def steps_of(model, speculative_config, policy, then=None, **speculation):
    """Waits and copies of the whole model runner in each step, and what came out; `then` is called with the runner."""
    steps = []

    def observe(runner):
        if then:
            then(runner, steps)
        runner.execute_model = begins(steps, counted(steps, runner.execute_model))
        runner.sample_tokens = counted(steps, runner.sample_tokens)

    result = generate(
        model, PROMPTS, SETTINGS, speculative_config, policy=policy, observe=observe, speculation=speculation, **ASYNC
    )
    return result, [(step["waits"], step["copies"]) for step in steps]


@pytest.fixture(scope="module")
def counted_off(model):
    return steps_of(model, None, "always")


@pytest.fixture(scope="module")
def off(counted_off):
    return counted_off[0]


def test_without_drafts_no_step_waits_or_copies_more_than_without_speculation(model, counted_off):
    off, expected = counted_off
    on, found = steps_of(model, ASYNC_SAM, "never")
    assert on.tokens == off.tokens and on.drafted < 3 * len(PROMPTS) * 2, "room for drafts before the first plan only"
    assert found == expected and len(found) > 80
    assert max(copies for _, copies in found) > 5, "the control: they are counted"


def test_without_drafts_text_is_shared_from_vllms_own_copy(model, counted_off, monkeypatch):
    """In every step, with an interval that is over by then; and nothing is waited for or copied for it."""
    off, expected = counted_off
    clients, sent_at, sent = [], [], Counter()
    monkeypatch.setattr(Client, "start", lambda self: clients.append(self))
    monkeypatch.setattr("sam.vllm.tracked_requests.INTERVAL_SECONDS", 0.0)

    def share(runner, steps):
        runner.drafter.share("no address")
        (client,) = clients

        def put(event, *arguments):
            if event == "append":
                sent_at.append(len(steps))
                sent.update(tokens=len(arguments[2]))

        client.put = put

    on, found = steps_of(model, ASYNC_SAM, "never", share, sharing="replicas")
    assert on.tokens == off.tokens and found == expected
    # The last step's tokens arrive when there is no further one.
    assert sum(map(len, off.tokens)) - 3 * len(PROMPTS) <= sent["tokens"] <= sum(map(len, off.tokens))
    gaps = [later - earlier for earlier, later in zip(sent_at, sent_at[1:], strict=False)]
    assert max(gaps) <= 2 and len(set(sent_at)) > len(found) - 10


def test_with_drafts_a_step_waits_once_and_copies_twice(model, off, monkeypatch):
    """Of the proposer: its own operators, and the input tokens that it has vLLM bring to the device."""
    steps, seen, recorders = [Counter()], [], []
    for name in ("before_step", "after_step", "propose", "update_token_ids_ngram"):
        function = getattr(AsyncSamProposer, name)
        monkeypatch.setattr(AsyncSamProposer, name, lambda *a, _f=function: counted(steps, _f)(*a))

    def observe(runner):
        seen.append(runner.drafter)
        to_device = runner.input_ids.copy_to_gpu

        def copy_to_gpu(*arguments):
            steps[-1].update(copies=1)
            return to_device(*arguments)

        def sample_tokens(*arguments, _original=runner.sample_tokens):
            steps[-1].update(drafts=len(runner.drafter.verifying))
            return _original(*arguments)

        runner.input_ids.copy_to_gpu = copy_to_gpu
        runner.execute_model = begins(steps, runner.execute_model)
        runner.sample_tokens = sample_tokens
        recorders.append(StepRecorder.attach(runner))

    on = generate(model, PROMPTS, SETTINGS, ASYNC_SAM, policy="always", observe=observe, **ASYNC)
    assert on.tokens == off.tokens
    assert on.accepted > 50 and seen[0].counters["draft_errors"] == 0
    found = Counter((step["waits"], step["copies"]) for step in steps if step["drafts"])
    assert sum(found.values()) > 20
    assert all(waits <= 1 and copies <= 2 for waits, copies in found), found
    check_record(recorders[0].take(), on)


def check_record(record, on):
    """The recorder counts what was verified, not the scheduler's placeholders."""
    kept = sum(map(len, on.tokens))
    assert kept <= record.emitted.sum() <= kept + 4 * len(on.tokens)
    assert on.accepted <= record.accepted.sum() <= on.accepted + 3 * len(on.tokens)
    assert record.accepted.sum() < record.drafted.sum() <= on.drafted
    assert record.accepted_at.sum() == record.accepted.sum()


@pytest.mark.parametrize("lasts", [2, 10])
def test_turning_costs_one_step(model, off, lasts):
    """From the first step that asks for drafts to the first that verifies some lies one step without."""
    asked, verified = [], []

    def observe(runner):
        proposer, update = runner.drafter, runner.sample_tokens
        proposer.policy.plan = lambda state: Plan(budget=3 if len(asked) // lasts % 2 else 0)

        def sample_tokens(*arguments):
            verified.append(bool(proposer.verifying))
            output = update(*arguments)
            asked.append(proposer.wants_drafts)
            return output

        runner.sample_tokens = sample_tokens

    on = generate(model, PROMPTS, SETTINGS, ASYNC_SAM, observe=observe, **ASYNC)
    assert on.tokens == off.tokens
    for step, drafts in enumerate(verified):
        assert not drafts or (asked[step - 1] and asked[step - 2]), step
    if lasts == 10:
        begun = [step for step in range(12, len(asked)) if asked[step] and not asked[step - 1]]
        assert any(verified[step + 2] for step in begun if step + 2 < len(verified))


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_costs_drafts_and_changes_no_token(model, off, fault, monkeypatch):
    said, proposers = [], []
    monkeypatch.setattr("sam.vllm.proposer.logger.exception", lambda text, *_: said.append(text))

    def observe(runner):
        proposers.append(runner.drafter)
        FAULTS[fault](runner.drafter)

    on = generate(model, PROMPTS, SETTINGS, ASYNC_SAM, policy="always", observe=observe, **ASYNC)
    assert on.tokens == off.tokens and on.logprobs == off.logprobs
    assert proposers[0].counters["draft_errors"] > 20
    assert len(said) == 1 and "drafting failed" in said[0]


def test_drafts_that_would_come_late_are_left_out(model, off):
    """No copy is over when drafting is turned on: the step runs without drafts, and waits for nothing."""
    asked, late, proposers = [], [], []

    def observe(runner):
        proposer, sample = runner.drafter, runner.sample_tokens
        proposer.policy.plan = lambda state: Plan(budget=3 if len(asked) // 10 % 2 else 0)

        def sample_tokens(*arguments):
            waits, before = Event.waits, proposer.counters["late_steps"]
            output = sample(*arguments)
            if proposer.counters["late_steps"] > before:
                late.append((proposer.wants_drafts, Event.waits - waits, dict(proposer._drafts)))
            asked.append(proposer.wants_drafts)
            return output

        runner.sample_tokens = sample_tokens
        proposers.append(proposer)

    on = generate(model, PROMPTS, SETTINGS, ASYNC_SAM, observe=observe, **ASYNC)
    assert on.tokens == off.tokens and on.logprobs == off.logprobs and on.accepted > 10
    begun = [step for step in range(1, len(asked)) if asked[step] and not asked[step - 1]]
    assert late == [(True, 0, {})] * len(begun) and len(begun) > 2
    assert proposers[0].counters["draft_errors"] == 0


def test_tokens_that_never_arrive_leave_their_requests_without_drafts(model, off, monkeypatch):
    sampled, proposers, calls = SampledStep.sampled, [], []

    def broken(step, *other):
        calls.append(step)
        if len(calls) == 1:
            raise RuntimeError("the copy failed")
        return sampled(step, *other)

    monkeypatch.setattr(SampledStep, "sampled", broken)
    on = generate(
        model, PROMPTS, SETTINGS, ASYNC_SAM, policy="never", observe=lambda runner: proposers.append(runner.drafter),
        **ASYNC,
    )  # fmt: skip
    assert on.tokens == off.tokens
    assert len(calls) > 20 and proposers[0].counters["draft_errors"] == 1
    assert not proposers[0].tracked.states
