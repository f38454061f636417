"""Drafts that the device makes: stock vLLM's tokens, no wait, about as many accepted as of the host's.

Most tests draft by the host's kernels on the arrays that a launch is given: tests/sam/vllm/test_device_walk.py shows
that these are the kernel's drafts.
"""

import contextlib
import functools
import itertools
from types import SimpleNamespace

import pytest
import torch

from sam.config import SpeculationConfig
from sam.switch.policies import Plan
from sam.vllm.plugin import check_installed, installed
from sam.vllm.step_recorder import StepRecorder
from sam.vllm.v2 import device_speculator, device_walk
from tests.sam.engine import matrix
from tests.sam.engine.async_cpu import Event
from tests.sam.engine.tiny_engine import PROMPTS
from tests.sam.vllm.walks import draft_by_host, fast_interpreter
from tests.v2.engines import ROWS, SQUEEZED, engine, watch
from tests.v2.zero import Operators

pytestmark = pytest.mark.engine

# A small memory: Triton's interpreter copies it in each launch.
ON_DEVICE = {"draft_on": "auto", "memory_budget_mib": 1}


@contextlib.contextmanager
def drafting(model, is_interpreted=False, **arguments):
    """An engine whose device, a CPU, drafts. A step's copy to the host ends when one waits for it or a later one."""
    with pytest.MonkeyPatch.context() as patch, fast_interpreter():
        patch.setattr(device_speculator, "DEVICES", ["cpu"])
        patch.setattr(torch.cuda, "Event", Event)
        if not is_interpreted:
            patch.setattr(device_walk, "draft", draft_by_host)
        with engine(model, "sam", asynchronous=True, speculation=ON_DEVICE, **arguments) as own:
            assert own.runner.speculator.on == "the device"
            check_installed(SpeculationConfig(), installed(own.runner))
            yield own


@pytest.fixture(scope="module")
def stock(model):
    """Answers of vLLM's own engine, and its steps."""
    with pytest.MonkeyPatch.context() as patch, engine(model, asynchronous=True, **SQUEEZED) as own:
        steps = watch(patch, own)
        return matrix.run(own, ROWS), steps


@pytest.fixture(scope="module")
def squeezed(model, stock):  # after stock's engine, which takes the process's ranks with it
    with drafting(model, **SQUEEZED) as own:
        yield own


def test_tokens_are_stock_vllms_before_and_after_a_weight_sync(squeezed, stock):
    for _ in range(2):
        matrix.assert_same(matrix.run(squeezed, ROWS), stock[0], ROWS, by=1e-4)
        counted = squeezed.count()
        assert counted["preemptions"] > 3 and counted["accepted"] > 5
        squeezed.runner.drafter.weights_updated()
    counters = squeezed.counters()
    assert counters["draft_errors"] == counters["untracked_requests"] == counters["waited_steps"] == 0
    assert counters["policy_version"] == 2 and counters["tracked_requests"] >= 2 * len(ROWS)


@pytest.mark.long
def test_tokens_are_stock_vllms_over_the_whole_matrix(model):
    with engine(model, asynchronous=True, **matrix.SQUEEZED, logprobs_mode="processed_logprobs") as own:
        stock = matrix.run(own)
    with drafting(model, **matrix.SQUEEZED, logprobs_mode="processed_logprobs") as own:
        matrix.assert_same(matrix.run(own), stock, by=1e-4)
        counted = own.count()
    assert counted["accepted"] > 100 and counted["preemptions"] > 3


PLANS = {
    "min_acceptance": [Plan(3), Plan(3, min_acceptance=0.1), Plan(2, min_acceptance=0.4)],
    "on and off": [Plan(budget) for budget in (0, 0, 3, 3, 2, 0, 3)],
}


@pytest.mark.parametrize("plans", PLANS)
def test_tokens_are_stock_vllms_whatever_the_switch_says(squeezed, stock, plans, monkeypatch):
    following = itertools.cycle(PLANS[plans])
    monkeypatch.setattr(squeezed.runner.drafter.policy, "plan", lambda state: next(following))
    recorder = StepRecorder.attach(squeezed.runner)
    recorder.take()
    matrix.assert_same(matrix.run(squeezed, ROWS), stock[0], ROWS, by=1e-4)
    steps = recorder.take()
    assert steps.drafted_at[0] > steps.drafted_at[-1] > 0 and steps.accepted.sum() > 2


def test_a_step_with_drafts_waits_as_stocks_does_copies_nothing_and_has_one_launch_of_ours(
    squeezed, stock, monkeypatch
):
    """And vLLM writes the drafts where its next step looks for them."""
    speculator, launches, operators = squeezed.runner.speculator, [], Operators()
    nothing = torch.zeros((16, 3), dtype=torch.int64)

    def launch(_automaton, requests, *_):
        launches.append(len(requests.rows))
        return (nothing[: len(requests.rows)],)

    def counted(method, *arguments, **keywords):
        with operators:
            return method(*arguments, **keywords)

    monkeypatch.setattr(device_walk, "draft", launch)
    for name in ("_prepared", "_drafts_follow", "propose", "_end_step"):
        monkeypatch.setattr(speculator, name, functools.partial(counted, getattr(speculator, name)))
    steps = watch(monkeypatch, squeezed)
    matrix.assert_same(matrix.run(squeezed, ROWS), stock[0], ROWS, by=1e-4)
    assert max(waits for waits, _ in steps) <= max(waits for waits, _ in stock[1]) == 1
    assert not any(copies for _, copies in steps)
    assert len(steps) / 2 < len(launches) <= len(steps) and len(set(launches)) > 3
    called = {name.removeprefix("aten::").partition(".")[0] for name in operators.called}
    assert called <= {"slice", "alias", "detach", "view"}, "which launch nothing"


@pytest.mark.parametrize("place", ["draft", "slots_of", "choose", "_step_of"])
def test_a_fault_in_drafting_costs_drafts_and_nothing_else(squeezed, stock, place, monkeypatch, caplog):
    speculator, rows = squeezed.runner.speculator, ROWS[2:8]
    owners = {"draft": device_walk, "slots_of": speculator.drafter, "choose": speculator.policy}
    owner = owners.get(place, speculator)
    before = squeezed.counters()["draft_errors"]
    monkeypatch.setattr(owner, place, None)
    matrix.assert_same(matrix.run(squeezed, rows), stock[0], rows, by=1e-4)
    assert squeezed.counters()["draft_errors"] > before + 3
    assert caplog.text.count("drafting failed") == (before == 0)


def test_as_many_drafts_are_accepted_as_of_the_hosts(model):
    """Tokens of a request in a step, its own one included."""
    asked = [{"seed": row, "temperature": 0.5 * (row % 2), "max_tokens": 40} for row in range(12)]

    def acceptance_length(own) -> float:
        found = own.generate(PROMPTS, asked, logprobs=None)
        tokens = sum(map(len, found.tokens))
        return tokens / (tokens - found.accepted)

    with engine(model, "sam", asynchronous=True) as own:
        host = acceptance_length(own)
    with drafting(model) as own:
        device = acceptance_length(own)
    assert host > 1.3 and abs(device / host - 1) < 0.02


def test_the_kernel_drafts_in_an_engine(model, monkeypatch):
    draft, same = device_walk.draft, []

    def both(*arguments):
        found, expected = draft(*arguments), draft_by_host(*arguments)
        for row, length in enumerate(expected[2].tolist()):
            same.append(length == found[2][row] and (found[0][row, :length] == expected[0][row, :length]).all())
        return found

    monkeypatch.setattr(device_walk, "draft", both)
    rows = (91, 95, 100, 101, 110)
    with drafting(model, is_interpreted=True) as own:
        found = matrix.run(own, rows)
        assert own.count()["accepted"] > 2 and own.counters()["draft_errors"] == 0
    with engine(model) as own:
        matrix.assert_same(found, matrix.run(own, rows), rows, by=1e-4)
    assert all(same) and len(same) > 30


def test_where_it_cannot_be_the_host_drafts_and_says_why(monkeypatch):
    def engines(asynchronous=True):
        return SimpleNamespace(scheduler_config=SimpleNamespace(async_scheduling=asynchronous))

    def no_memory(*_):
        raise RuntimeError("CUDA error: out of memory\nCompile with ...")

    first = SimpleNamespace(is_first_rank=True, broadcast_object=lambda reason: reason)
    other = SimpleNamespace(is_first_rank=False, broadcast_object=lambda _: "of the first rank")
    monkeypatch.setattr(device_speculator, "SamSpeculator", lambda *_: SimpleNamespace(on="the host"))
    monkeypatch.setattr(device_speculator, "SamDeviceSpeculator", lambda *_: SimpleNamespace(on="the device"))
    monkeypatch.setattr(device_speculator, "get_tp_group", lambda: first)
    monkeypatch.setattr(device_speculator, "DEVICES", ["cuda"])
    of = functools.partial(device_speculator.make_speculator, device=torch.device("cpu"))
    on_device, on_host = SpeculationConfig(draft_on="auto"), SpeculationConfig()
    assert of(engines(), on_host).on == "the host"
    assert of(engines(), on_device).on == "the host (no CUDA device)"
    monkeypatch.setattr(device_speculator, "DEVICES", ["cpu"])
    assert of(engines(), on_device).on == "the device"
    assert of(engines(asynchronous=False), on_device).on == "the host (scheduled synchronously)"
    monkeypatch.setattr(device_speculator, "get_tp_group", lambda: other)
    assert of(engines(), on_device).on == "the host (of the first rank)"
    monkeypatch.setattr(device_speculator, "get_tp_group", lambda: first)
    monkeypatch.setattr(device_speculator, "SamDeviceSpeculator", no_memory)
    assert of(engines(), on_device).on == "the host (CUDA error: out of memory)"
