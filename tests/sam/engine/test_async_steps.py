"""What a step costs under asynchronous scheduling, counted: waits for the device and copies; and what faults cost."""

from collections import Counter

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from sam.sharing.client import Client
from sam.switch.policies import make_policy
from sam.switch.policy import Plan
from sam.vllm.async_proposer import SampledStep
from sam.vllm.proposer import StepResult
from sam.vllm.step_recorder import StepRecorder
from tests.sam.engine.async_cpu import Event
from tests.sam.engine.faults import FAULTS, mend
from tests.sam.engine.tiny_engine import PROMPTS, Engine, assert_same

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("asynchronous")]

COPIES = ("aten::_to_copy", "aten::copy_", "aten::_local_scalar_dense", "aten::clone")


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


def steps_of(engine, steps):
    """What came out, and waits and copies of the whole model runner in each step, once others have been before."""
    engine.generate()
    runner = engine.runner
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "execute_model", begins(steps, counted(steps, runner.execute_model)))
        patch.setattr(runner, "sample_tokens", counted(steps, runner.sample_tokens))
        result = engine.generate()
    return result, [(step["waits"], step["copies"]) for step in steps]


@pytest.fixture(scope="module")
def counted_off(model, off):
    """Without speculation."""
    with Engine(model, asynchronous=True) as engine:
        result, steps = steps_of(engine, [])
    assert_same(result, off)
    return steps


@pytest.fixture(scope="module")
def running(model, counted_off):
    """One engine for all tests, whose interval of sharing is over in every step: started when the other has ended."""
    clients = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Client, "start", lambda self: clients.append(self))
        patch.setattr("sam.vllm.tracked_requests.INTERVAL_SECONDS", 0.0)
        with Engine(model, "sam", asynchronous=True, speculation={"sharing": "replicas"}) as engine:
            engine.runner.drafter.share("no address")
            (engine.client,) = clients
            engine.client.put = lambda *_: None
            yield engine


@pytest.fixture
def engine(running):
    """As no test has used it."""
    proposer = running.runner.drafter
    proposer.last, proposer.policy = StepResult(), make_policy("always", 3, 0)
    proposer.counters.update(dict.fromkeys(("draft_errors", "late_steps", "waited_steps"), 0))
    return running


def test_without_drafts_no_step_waits_or_copies_more_and_text_is_shared_from_vllms_own_copy(
    engine, off, counted_off, monkeypatch
):
    """In every step; and nothing is waited for or copied for it."""
    steps, sent_at, sent = [], [], []

    def put(event, *arguments):
        if event == "append":
            sent_at.append(len(steps))
            sent.append(len(arguments[2]))

    monkeypatch.setattr(engine.client, "put", put)
    engine.runner.drafter.policy = make_policy("never", 3, 0)
    on, found = steps_of(engine, steps)
    assert_same(on, off)
    assert found == counted_off and len(found) > 80
    assert max(copies for _, copies in found) > 5, "the control: they are counted"
    # Of two rollouts. The last step's tokens arrive when there is no further one.
    tokens = sum(map(len, off.tokens))
    assert 2 * tokens - 6 * len(PROMPTS) <= sum(sent) <= 2 * tokens
    gaps = [later - earlier for earlier, later in zip(sent_at, sent_at[1:], strict=False)]
    assert max(gaps) <= 2 and len(set(sent_at)) > len(found) - 10


def test_with_drafts_a_step_waits_once_and_copies_twice(engine, off, monkeypatch):
    """Of the proposer: its own operators, and the input tokens that it has vLLM bring to the device."""
    steps, runner, proposer = [Counter()], engine.runner, engine.runner.drafter
    for name in ("before_step", "after_step", "propose", "update_token_ids_ngram"):
        monkeypatch.setattr(proposer, name, counted(steps, getattr(proposer, name)))
    to_device, sample = runner.input_ids.copy_to_gpu, runner.sample_tokens

    def copy_to_gpu(*arguments):
        steps[-1].update(copies=1)
        return to_device(*arguments)

    def sample_tokens(*arguments):
        steps[-1].update(drafts=len(proposer.verifying))
        return sample(*arguments)

    monkeypatch.setattr(runner.input_ids, "copy_to_gpu", copy_to_gpu)
    monkeypatch.setattr(runner, "execute_model", begins(steps, runner.execute_model))
    monkeypatch.setattr(runner, "sample_tokens", sample_tokens)
    on = engine.generate()
    assert_same(on, off)
    assert on.accepted > 50 and proposer.counters["draft_errors"] == 0
    found = Counter((step["waits"], step["copies"]) for step in steps if step["drafts"])
    assert sum(found.values()) > 20
    assert all(waits <= 1 and copies <= 2 for waits, copies in found), found


def test_the_recorder_counts_what_was_verified_not_the_schedulers_placeholders(engine, off, monkeypatch):
    runner = engine.runner
    for name in ("execute_model", "sample_tokens", "_sample", "propose_draft_token_ids"):  # which it wraps
        monkeypatch.setattr(runner, name, getattr(runner, name))
    monkeypatch.setattr(runner, "_sam_step_recorder", None, raising=False)
    recorder = StepRecorder.attach(runner)
    on = engine.generate()
    record, kept = recorder.take(), sum(map(len, off.tokens))
    assert kept <= record.emitted.sum() <= kept + 4 * len(PROMPTS)
    assert on.accepted <= record.accepted.sum() <= on.accepted + 3 * len(PROMPTS)
    assert record.accepted.sum() < record.drafted.sum() <= on.drafted + 3 * len(PROMPTS)
    assert record.accepted_at.sum() == record.accepted.sum()


@pytest.mark.parametrize("lasts", [2, 10])
def test_turning_costs_one_step(engine, off, lasts, monkeypatch):
    """From the first step that asks for drafts to the first that verifies some lies one step without. No copy is over
    when drafting is turned on: that step's drafts would come late, and are left out; it waits for nothing."""
    asked, verified, late = [], [], []
    runner, proposer, sample = engine.runner, engine.runner.drafter, engine.runner.sample_tokens
    monkeypatch.setattr(proposer.policy, "plan", lambda state: Plan(budget=3 if len(asked) // lasts % 2 else 0))

    def sample_tokens(*arguments):
        verified.append(bool(proposer.verifying))
        waits, before = Event.waits, proposer.counters["late_steps"]
        output = sample(*arguments)
        if proposer.counters["late_steps"] > before:
            late.append((proposer.wants_drafts, Event.waits - waits))
        asked.append(proposer.wants_drafts)
        return output

    monkeypatch.setattr(runner, "sample_tokens", sample_tokens)
    on = engine.generate()
    assert_same(on, off)
    for step, drafts in enumerate(verified):
        assert not drafts or (asked[step - 1] and asked[step - 2]), step
    begun = [step for step in range(1, len(asked)) if asked[step] and not asked[step - 1]]
    assert late == [(True, 0)] * len(begun) and len(begun) > 1
    assert proposer.counters["draft_errors"] == 0
    if lasts == 10:
        assert on.accepted > 10 and any(verified[step + 2] for step in begun if step + 2 < len(verified))


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_costs_drafts_and_changes_no_token(engine, off, fault, monkeypatch):
    said, proposer = [], engine.runner.drafter
    monkeypatch.setattr("sam.vllm.proposer.logger.exception", lambda text, *_: said.append(text))
    FAULTS[fault](proposer)
    on = engine.generate()
    mend(proposer)
    assert_same(on, off)
    assert proposer.counters["draft_errors"] > 20
    assert len(said) == 1 and "drafting failed" in said[0]


def test_tokens_that_the_drafter_misses_cost_drafts_and_change_no_token(engine, off, monkeypatch):
    read, proposer, calls = SampledStep.read, engine.runner.drafter, []

    def broken(step):
        calls.append(step)
        if len(calls) == 20:
            raise RuntimeError("broken on purpose")
        read(step)

    proposer.policy = make_policy("never", 3, 0)
    monkeypatch.setattr(SampledStep, "read", broken)
    assert_same(engine.generate(), off)
    assert len(calls) > 20 and proposer.counters["draft_errors"] > 0
    proposer.policy = make_policy("always", 3, 0)
    assert engine.generate().accepted > 50, "until their requests have ended"
