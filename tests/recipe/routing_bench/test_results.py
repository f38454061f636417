"""What a rollout took, and the table of several."""

from recipe.routing_bench.results import Rollout, half_empty_from
from recipe.routing_bench.table import as_text, rows


def rollout(seconds, tail, responses=((1, 2), (3,))):
    return Rollout(seconds, tail, 0.5, 0.1, 2, [list(one) for one in responses], [], {"moves": 1})


def test_the_tail_begins_when_fewer_than_half_of_the_slots_are_busy_for_good():
    long, short = (0, 0, 0.0, 10.0), (1, 0, 0.0, 2.0)
    assert half_empty_from([long, short], slots=4) == 2.0
    # Two run again later: only then does the tail begin.
    assert half_empty_from([long, short, (2, 1, 3.0, 7.0)], slots=4) == 7.0
    assert half_empty_from([long], slots=4) == 0.0, "never half full: all of it is tail"


def test_ratios_are_of_the_same_round():
    rounds = [
        {"verl": rollout(10.0, 4.0), "ours": rollout(5.0, 1.0)},
        {"verl": rollout(4.0, 2.0), "ours": rollout(4.0, 2.0)},
        {"verl": rollout(12.0, 4.0), "ours": rollout(8.0, 2.0)},
    ]
    verl, ours = rows(rounds, "verl")
    assert (ours["speedup"], ours["speedup_range"]) == (1.5, [1.0, 2.0])
    assert (ours["tail"], ours["tail_range"]) == (0.5, [0.25, 1.0])
    assert (ours["all_rounds"], ours["all_tails"]) == (1.5294, 0.5)  # 26 s over 17 s
    assert (verl["speedup"], verl["identical"], ours["identical"]) == (1.0, True, True)
    assert ours["moves"] == 3 and ours["as_drawn"] == 1.0
    assert "1.50x (1.00-2.00)" in as_text([verl, ours], "verl")


def test_one_different_token_is_seen():
    rounds = [{"verl": rollout(1.0, 1.0), "ours": rollout(1.0, 1.0, ((1, 2), (4,)))}]
    assert not rows(rounds, "verl")[1]["identical"]
    assert " NO" in as_text(rows(rounds, "verl"), "verl")


def test_responses_to_other_prompts_are_not_compared():
    rounds = [{"verl": rollout(1.0, 1.0), "ours": rollout(1.0, 1.0, ((1, 2), (4,)))}]
    found = rows(rounds, "verl", {"ours"})
    assert [row["identical"] for row in found] == [True, None]
    assert as_text(found, "verl").endswith("own prompts")
