"""What a step costs under asynchronous scheduling, counted: waits for the device and copies; and tokens it misses."""

from collections import Counter

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from sam.engine.requests import Step
from sam.sharing.client import Client
from sam.switch.policies import make_policy
from tests.sam.engine.async_cpu import Event
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


def steps_of(engine, steps):
    """What came out, and waits and copies of the whole model runner in each step, once others have been before."""

    def counted(function, is_first):
        def call(*arguments, **keywords):
            if is_first:
                steps.append(Counter())
            waits = Event.waits
            with Copies() as copies:
                result = function(*arguments, **keywords)
            steps[-1].update(waits=Event.waits - waits, copies=copies.count)
            return result

        return call

    engine.generate()
    runner = engine.runner
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "execute_model", counted(runner.execute_model, True))
        patch.setattr(runner, "sample_tokens", counted(runner.sample_tokens, False))
        result = engine.generate()
    return result, [(step["waits"], step["copies"]) for step in steps]


@pytest.fixture(scope="module")
def counted_off(model, off):
    with Engine(model, asynchronous=True) as engine:
        result, steps = steps_of(engine, [])
    assert_same(result, off)
    return steps


@pytest.fixture(scope="module")
def engine(model, counted_off):
    """Its interval of sharing is over in every step."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Client, "start", lambda self: None)
        patch.setattr(Client, "put", lambda self, *_: None)
        patch.setattr("sam.engine.session.INTERVAL_SECONDS", 0.0)
        with Engine(model, "sam", asynchronous=True, speculation={"sharing": "replicas"}) as engine:
            engine.runner.drafter.share("no address")
            yield engine


def test_without_drafts_no_step_waits_or_copies_more_and_text_is_shared_from_vllms_own_copy(
    engine, off, counted_off, monkeypatch
):
    """In every step; and nothing is waited for or copied for it."""
    steps, sent = [], Counter()

    def put(_client, event, *arguments):
        if event == "append":
            sent[len(steps)] += len(arguments[2])

    monkeypatch.setattr(Client, "put", put)
    monkeypatch.setattr(engine.runner.drafter.session.switch, "policy", make_policy("never", 3, 0))
    on, found = steps_of(engine, steps)
    assert_same(on, off)
    assert found == counted_off and len(found) > 80
    assert max(copies for _, copies in found) > 5, "the control: they are counted"
    # Of two rollouts. The last step's tokens arrive when there is no further one.
    tokens = sum(map(len, off.tokens))
    assert 2 * tokens - 6 * len(PROMPTS) <= sum(sent.values()) <= 2 * tokens
    assert len(sent) > len(found) - 10


def test_with_drafts_a_step_waits_once_more(engine, off, counted_off):
    on, found = steps_of(engine, [])
    assert_same(on, off)
    assert on.accepted > 50 and max(waits for waits, _ in found) == 1 + max(waits for waits, _ in counted_off)


def test_tokens_that_cannot_be_read_cost_drafts_and_change_no_token(engine, off, monkeypatch):
    read, calls = Step.read, []

    def broken(step):
        calls.append(step)
        if len(calls) == 20:
            raise RuntimeError("broken on purpose")
        read(step)

    with monkeypatch.context() as patch:
        patch.setattr(engine.runner.drafter.session.switch, "policy", make_policy("never", 3, 0))
        patch.setattr(Step, "read", broken)
        found = engine.generate()
    assert_same(found, off)
    assert len(calls) > 20 and found.counters["draft_errors"] > 0
    assert engine.generate().accepted > 50, "until their requests have ended"
