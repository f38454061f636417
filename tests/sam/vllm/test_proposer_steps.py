"""What a step without drafts costs the proposer, and which steps it shows to the policy."""

from sam.drafting.calibration import ALL, GROUP_TABLE
from sam.switch.policies import make_policy
from sam.switch.policy import StepState
from sam.vllm.proposer import MAX_STEPS_BEHIND
from tests.sam.vllm.model_runner import make_proposer


def test_without_drafts_the_drafter_is_called_now_and_then_and_misses_nothing():
    proposer = make_proposer(policy="threshold", batch_size_threshold=1)
    runner, appended = proposer._runner, []
    append = proposer.drafter._append
    proposer.drafter._append = lambda *arguments: (appended.append(len(arguments[1])), append(*arguments))
    runner.add("a", [1, 2])
    runner.add("c", [1, 2])
    for token in range(MAX_STEPS_BEHIND + 5):
        new = [3 + token % 3]
        assert runner.step(proposer, ["a", "c"], {"a": new, "c": new}) == {"a": [], "c": []}
    assert appended == [2 * MAX_STEPS_BEHIND] and proposer.counters["skipped_steps"] == MAX_STEPS_BEHIND + 5
    finished = runner.texts["a"]
    runner.requests.clear()
    runner.add("b", [1, 2])
    assert runner.step(proposer, ["b"], {"b": [3]})["b"] == finished[3:6]
    assert appended[1:] == [5, 5, 1], "what the finished requests had written since, and the new one"
    assert set(proposer.tracked.states) == {"b"} and proposer.counters["draft_errors"] == 0


def test_drafts_that_nobody_verifies_are_compared_with_what_comes():
    proposer = make_proposer(policy="threshold", batch_size_threshold=0)
    runner, bins = proposer._runner, proposer.drafter.learned.acceptance[GROUP_TABLE, :ALL]
    runner.add("a", [1, 2])
    for token in range(MAX_STEPS_BEHIND + 5):
        assert runner.step(proposer, ["a"], {"a": [3 + token % 3]}) == {"a": []}
    assert not bins["expected"].any()
    runner.requests.clear()
    proposer.tracked.release_finished()
    settled = bins["accepted"].sum(), bins["expected"].sum()
    assert settled == (3, 3), "a whole draft, made after 32 steps, came true"


def test_a_policy_is_not_asked_while_its_answer_holds_but_at_once_when_the_batch_changes():
    proposer = make_proposer(policy="threshold", batch_size_threshold=1)
    runner, asked = proposer._runner, []
    plan = proposer.policy.plan
    proposer.policy.plan = lambda state: (asked.append(state.steps_since_plan), plan(state))[1]
    for name in "abc":
        runner.add(name, [1, 2])
    for _ in range(9):
        runner.step(proposer, ["a", "b", "c"], {"a": [3], "b": [3], "c": [3]})
    assert asked == [1]
    runner.step(proposer, ["a", "b"], {"a": [3], "b": [3]})
    assert asked == [1, 9]
    runner.step(proposer, ["a"], {"a": [3]})
    assert asked == [1, 9, 1] and runner.step(proposer, ["a"], {"a": [3]})["a"] and asked == [1, 9, 1, 1]
    assert proposer.counters["skipped_steps"] == 10


def test_goodput_holds_for_its_pause_and_counts_the_steps_in_which_nobody_asked():
    asked_in_each, held = make_policy("goodput", 3, 0), make_policy("goodput", 3, 0)
    for policy in (asked_in_each, held):
        policy.plan(StepState(4))
        policy._pause.steps = 20
    while asked_in_each.plan(StepState(4)).budget == 0:
        pass
    steps, asked = 1, 0
    while (answer := held.plan(StepState(4, steps_since_plan=steps))).budget == 0:
        steps, asked = 1 + answer.valid_for_steps, asked + 1
    assert held.counters == asked_in_each.counters == {"paused_steps": 20}
    assert asked == 2, "in the first step and after fifteen more"


def test_a_step_is_shown_to_the_policy_only_if_it_is_the_one_that_was_planned():
    proposer, seen = make_proposer(), []
    proposer.policy.observe = lambda state, drafted, accepted, ms: seen.append((state.running, drafted, accepted))
    runner = proposer._runner
    runner.add("a", [1, 2, 1, 2])
    runner.step(proposer, ["a"], {"a": [1]})  # its prompt's step
    drafted = len(runner.step(proposer, ["a"], {"a": [2, 1]})["a"])
    assert seen == [(1, 3, 1)]
    runner.add("b", [5])
    runner.step(proposer, ["a", "b"], {"a": [2], "b": [6]})  # another one has come
    runner.step(proposer, ["a", "b"], {"a": [1, 2], "b": []})
    assert seen == [(1, 3, 1)] and drafted == 3


def test_a_step_in_which_one_request_took_the_place_of_another_is_not_shown():
    proposer, seen = make_proposer(), []
    proposer.policy.observe = lambda *step: seen.append(step)
    runner = proposer._runner
    for name in "ab":
        runner.add(name, [1, 2, 1, 2])
    runner.step(proposer, ["a"], {"a": [1]})
    runner.step(proposer, ["b"], {"b": [1]})
    assert not seen
    runner.step(proposer, ["b"], {"b": [2]})
    assert len(seen) == 1
