"""Draft models under vLLM's asynchronous scheduling: the synchronous engine's tokens, and no wait but sam's own."""

from collections import Counter

import pytest
import torch

from sam.config import SpeculationConfig
from sam.vllm.plugin import check_installed
from tests.sam.engine.async_cpu import Event
from tests.sam.engine.draft_model_runs import (
    PROMPTS,
    SETTINGS,
    SMALL,
    K,
    again,
    broken,
    drafter_of,
    prefer_model,
    recorded,
    runner_of,
    save_draft_model,
)
from tests.sam.engine.eagle_head import save_head
from tests.sam.engine.tiny_engine import generate, save_model

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("asynchronous")]

ASYNC = {"async_scheduling": True, "distributed_executor_backend": "uni", **SMALL}
METHODS = ("draft_model", "hybrid", "eagle3")
STEPS = (3, 4, 9)  # of every ten, in which drafts are asked for


class Found:
    """What one engine gave, by how it was asked."""


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"), sharpness=12.0)


@pytest.fixture(scope="module")
def folders(target, tmp_path_factory):
    draft = save_draft_model(target, tmp_path_factory.mktemp("draft")).path
    head = tmp_path_factory.mktemp("head")
    save_head(target, head)
    return {"draft_model": draft, "hybrid": draft, "eagle3": str(head)}


@pytest.fixture(scope="module")
def off(target):
    return generate(target, PROMPTS, SETTINGS, speculation={"method": "off"}, **SMALL).tokens


def ask(target, folder, method, asynchronous, then):
    settings = {"method": method, "draft_model": folder, "policy": "always", "cross_prompt": False}
    config = SpeculationConfig(num_speculative_tokens=K, **settings)
    asked = config.vllm_arguments(asynchronous)["speculative_config"]
    engine = ASYNC if asynchronous else SMALL
    made = generate(target, PROMPTS, SETTINGS, asked, speculation=settings, then=then, **engine)
    check_installed(config, made.installed)
    return made


def counting(function, during: list, calls: list):
    """`function`, each of whose calls adds an entry to `calls` while `during` has one."""

    def call(*arguments, **keywords):
        calls.extend(during)
        return function(*arguments, **keywords)

    return call


def waits_of(llm, pattern):
    """As `recorded`, with the waits for the device in each step and, of those, in its sampling and drafting; and how
    often the host read a tensor of the device after it had ordered passes.

    Before it prepares a step's inputs vLLM waits for those of the step before, speculation or not.
    """
    runner, steps, reads = runner_of(llm), [], []
    trained, in_passes = runner.drafter.trained, []

    def counted(name):
        function = getattr(runner, name)

        def call(*arguments, **keywords):
            before = Event.waits
            result = function(*arguments, **keywords)
            if name == "execute_model":
                steps.append(Counter())
            steps[-1][name] += Event.waits - before
            return result

        return call

    run = trained._draft

    def marked(*arguments):
        in_passes.append(True)
        try:
            return run(*arguments)
        finally:
            in_passes.pop()

    with pytest.MonkeyPatch.context() as patch:
        for name in ("execute_model", "sample_tokens"):
            patch.setattr(runner, name, counted(name))
        patch.setattr(trained, "_draft", marked)
        for name in ("cpu", "item", "tolist"):
            patch.setattr(torch.Tensor, name, counting(getattr(torch.Tensor, name), in_passes, reads))
        found = recorded(llm, pattern)
    found.reads = len(reads)
    found.waits = sum(step["sample_tokens"] for step in steps)
    found.most_waits = max(step.total() for step in steps)
    return found


@pytest.fixture(scope="module")
def results(target, folders):
    def run(method):
        found = Found()

        def then(llm):
            if method == "hybrid":
                prefer_model(drafter_of(llm))
            found.paused, found.always, found.never = (waits_of(llm, steps) for steps in (STEPS, range(10), ()))
            found.broken = broken(llm, "raises")
            found.after = again(llm)

        found.first = ask(target, folders[method], method, True, then)
        return found

    return {method: run(method) for method in METHODS}


@pytest.mark.parametrize("method", METHODS)
def test_identical_tokens_greedy_and_drawn(results, off, method):
    found = results[method]
    assert found.first.installed["drafter"].startswith("Async") and found.first.installed["asynchronous"]
    assert found.first.preemptions > 0 and found.first.drafted > 0
    assert found.first.tokens == found.after == found.broken.tokens == off
    for one in (found.always, found.paused, found.never):
        assert one.tokens == off
        assert one.counters["draft_errors"] == one.counters["draft_model_errors"] == 0
        assert one.counters["draft_model_invalid_drafts"] == 0
    assert found.broken.counters["draft_model_errors"] > 0 and found.broken.counters["draft_errors"] == 0


def test_drafts_are_accepted(results):
    assert results["draft_model"].first.accepted > 100
    assert results["draft_model"].always.counters["draft_model_accepted_tokens"] > 50


@pytest.mark.parametrize("method", METHODS)
def test_no_pass_and_no_wait_in_the_off_phase(results, method):
    never = results[method].never
    assert never.counters["draft_model_passes"] == 0
    assert never.waits == never.counters["waited_steps"] <= 1, "drafts were asked for before the first step"


@pytest.mark.parametrize("method", METHODS)
def test_the_host_waits_for_each_steps_tokens_once(results, method):
    """No other wait: a head's hidden states have come when their step's tokens have."""
    for one in (results[method].always, results[method].paused):
        assert 0 < one.waits == one.counters["waited_steps"]
        assert one.most_waits <= 2
        assert one.reads == 0, "the next step is prepared while passes run"
    assert results[method].always.counters["draft_model_passes"] > 0


@pytest.mark.parametrize("method", ["draft_model", "eagle3"])
def test_drafts_are_those_of_the_synchronous_engine(target, folders, results, method):
    """For the same text, whatever the steps were in which they were made."""
    found = Found()
    ask(target, folders[method], method, False, lambda llm: setattr(found, "always", recorded(llm, range(10))))
    for how in ("always", "paused"):
        own = getattr(results[method], how).drafts
        common = own.keys() & found.always.drafts.keys()
        assert len(common) > 50 and all(own[text] == found.always.drafts[text] for text in common)


def test_states_that_do_not_come_fail_nothing(target, folders, off, monkeypatch):
    from sam.vllm.trained.passes import EaglePasses

    def fail(*_unused):
        raise RuntimeError("broken on purpose")

    monkeypatch.setattr(EaglePasses, "keep_states", fail)
    counters = {}
    made = ask(target, folders["eagle3"], "eagle3", True, lambda llm: counters.update(drafter_of(llm).counters))
    assert made.tokens == off and counters["draft_model_errors"] > 0 and counters["draft_errors"] == 0
