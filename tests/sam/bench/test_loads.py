"""What the requests of a load are, in each round."""

import pytest

from sam.bench.loads import Group, check_prompts, group_sizes, requests_of

LOADS = [1, 4, 12]
PROMPTS = [Group([number]) for number in range(100)]


def requests(number, round_, seeds=True, prompts=PROMPTS):
    return requests_of(LOADS, number, round_, 8, prompts, seeds)


def test_a_load_is_prompts_times_samples():
    assert [row["prompt_token_ids"] for row in requests(2, 0)] == [[2]] * 8 + [[3]] * 4
    assert [row["prompt_token_ids"] for row in requests(1, 0)] == [[1]] * 4
    assert group_sizes(8, 8) == [8]


def test_no_round_repeats_a_prompt_or_a_seed_of_another():
    runs = [requests(number, round_) for round_ in range(5) for number in range(3)]
    seeds = [row["seed"] for rows in runs for row in rows]
    assert len(set(seeds)) == len(seeds)
    prompts = [{row["prompt_token_ids"][0] for row in rows} for rows in runs]
    assert sum(map(len, prompts)) == len(set.union(*prompts))


def test_few_prompts_come_again_with_other_seeds():
    few = PROMPTS[:4]
    first, again = requests(2, 0, prompts=few), requests(2, 1, prompts=few)
    assert {row["prompt_token_ids"][0] for row in first} == {2, 3} == {row["prompt_token_ids"][0] for row in again}
    assert not {row["seed"] for row in first} & {row["seed"] for row in again}


def test_without_seeds():
    assert {row["seed"] for row in requests(1, 1, seeds=False)} == {None}


def test_a_load_needs_enough_prompts():
    check_prompts(LOADS, 8, 2, "here")
    with pytest.raises(ValueError, match="here: 1 prompts, 12 requests of 8 samples each need 2"):
        check_prompts(LOADS, 8, 1, "here")


def test_forced_responses_come_with_their_prompt():
    groups = [Group([number], [[number, sample] for sample in range(8)]) for number in range(3)]
    (one,) = requests(0, 0, prompts=groups)
    assert (one["prompt_token_ids"], one["response"]) == ([0], [0, 0])
    rows = requests(2, 0, prompts=groups)
    assert [row["response"] for row in rows] == [[2, i] for i in range(8)] + [[0, i] for i in range(4)]
    assert len({row["seed"] for row in rows}) == 12
    assert groups[1].longest_text(1) == 3 and Group([1, 2]).longest_text(5) == 7
