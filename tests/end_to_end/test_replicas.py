"""Two replicas of the rollout, and a user's own data, reward, agent loop and tool: the same responses whether verl's
balancer sends them out whole, or the recipe's router chunks of them, most of which wait, with drafts.

Each replica drafts from the history that both write, and from what the other writes at the same time.
"""

import re

import pytest

from recipe.sam_dapo.report.page import main as report
from recipe.sam_dapo.tiny.tokenizer import build_tokenizer
from sam.tools.replay import main as replay
from tests.end_to_end.runs import PROMPTS, SAMPLES, SLOTS, STEPS, TURNS, log_of, own_run, rows

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def sam(own, assets):
    return own_run(own, assets, "sam", "routing=context", "routing.chunk_tokens=16", "speculation.scope=history")


def recorded(run, step):
    """A step's responses, but for when they were generated."""
    found = rows(run.directory / "rollouts" / f"{step}.jsonl")
    for row in found:
        begin, end = row.pop("generated_s")
        assert begin < end
    return found


def test_chunks_that_wait_are_the_responses_that_verl_sends_out_whole(sam, off):
    (run, _), (verl, _) = sam, off
    for step in range(1, STEPS + 1):
        mine, theirs = run.metrics[step], verl.metrics[step]
        assert recorded(run, step) == recorded(verl, step)
        responses, failed = len(recorded(run, step)), mine["rollout/failed_responses"]
        assert responses + failed == mine["rollout/rounds"] * PROMPTS * SAMPLES
        assert mine["actor/grad_norm"] == theirs["actor/grad_norm"] > 0
        for key in ("rounds", "dropped_groups", "surplus_groups", "reward_all/mean", "failed_responses"):
            assert mine[f"rollout/{key}"] == theirs[f"rollout/{key}"], "the rounds of dynamic sampling"
        assert mine["rollout/routing/waiting_max"] >= SLOTS and mine["rollout/preemptions"] == 0
        assert mine["rollout/routing/admissions"] > responses, "chunks"
        assert mine["rollout/spec_accepted_tokens"] > 0 == theirs["rollout/spec_drafted_tokens"]
        # The engine steps on disk are the first replica's, the metrics are of both.
        assert 0 < float(run.recorded[step].emitted.sum()) < mine["rollout/tokens"]
    for step in (0, STEPS):
        validated = {key: value for key, value in run.metrics[step].items() if key.startswith("val-")}
        assert validated and validated.items() <= verl.metrics[step].items()
    assert "routing: context, chunks of 16 tokens (routing=verl: verl's balancer)" in log_of(run.directory)


def test_a_users_own_data_reward_and_agent_loop_are_used(sam, off):
    outputs = []
    for run, screen in (sam, off):
        assert sum(row.get("rollout/failed_responses", 0) for row in run.metrics.values()) > 0
        assert {row["reward"] for row in recorded(run, 1)} == {0.0, 3.0}
        assert "responses failed in" in screen and "own_reward.py:9: ValueError: no verdict for 0" in screen
        validated = rows(run.directory / "validation" / "0.jsonl")
        outputs.append(sorted((one["input"], one["output"]) for one in validated))
    assert outputs[0] == outputs[1]
    assert len({output for _, output in outputs[0]}) == len(outputs[0]) > 4, "a problem many times over"


def test_turns_and_tools_are_one_text_of_the_prompts_group(sam, off, capsys):
    (run, _), decode, given, generated = sam, build_tokenizer().decode, 0, 0
    for step in range(1, STEPS + 1):
        for row in recorded(run, step):
            tokens, begin, spans = row["response_tokens"], 0, row["given_spans"]
            assert len(spans) < TURNS
            for first, last in spans:  # verl ends the turn before, and begins the next one
                its = re.search(r"\d\+\d", line := decode(tokens[begin:first]))
                assert f"tool\n{f'{its[0]} is ' if its else 'no sum'}" in decode(tokens[first:last]), line
                begin = last
            given += (part := sum(last - first for first, last in spans))
            generated += len(tokens) - part
        assert any(row["given_spans"] for row in recorded(run, step))
        assert run.metrics[step]["rollout/spec_accept_length/turn_2"] > 1
    assert replay(["--traces", str(run.directory)]) == 0
    tokens, others, length = capsys.readouterr().out.splitlines()[1].split()[2:5]
    assert (int(tokens), int(others)) == (generated, given) and float(length) > 1
    assert report([str(run.directory), str(off[0].directory)]) == 0
    assert "by turn (first replica)" in capsys.readouterr().out


def test_two_replicas_draft_from_what_both_write(sam):
    run, log = sam[0], log_of(sam[0].directory)
    assert "speculation.sharing: 2 replicas see" in log, "auto stands for that with two"
    assert "sharing between replicas" not in log, "nothing fails, and the log's end with the run's is no failure"
    found = {name.rpartition("/")[2]: value for name, value in run.metrics[STEPS].items() if "/drafter/" in name}
    # What the other wrote in the epoch before, in the file that both write to; and at the same time.
    assert found["history_found_prompts"] > 0 and found["sharing_received_tokens"] > 0
    assert found["history_errors"] == found["sharing_errors"] == found["draft_errors"] == 0
