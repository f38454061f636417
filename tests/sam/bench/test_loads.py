"""What the requests of a load are, in each round."""

import pytest

from sam.bench.loads import WARM_UP, Group, batches_of, check_prompts, come_again, group_sizes, groups_before
from tests.sam.bench.test_settings import settings

LOADS = [1, 4, 12]
PROMPTS = [Group([number]) for number in range(100)]


def batches(number, round_, seeds=True, prompts=PROMPTS, responses=8):
    return batches_of(settings(requests=LOADS, samples=8, responses=responses, seeds=seeds), number, round_, prompts)


def requests(number, round_, **others):
    """Of all batches."""
    return [row for rows in batches(number, round_, **others) for row in rows]


def prompts_of(rows):
    return {row["prompt_token_ids"][0] for row in rows}


def test_a_load_is_prompts_times_samples():
    assert [row["prompt_token_ids"] for row in requests(2, 0)] == [[2]] * 8 + [[3]] * 4
    assert [row["prompt_token_ids"] for row in requests(1, 0)] == [[1]] * 4
    assert group_sizes(8, 8) == [8]


def test_a_round_of_a_small_load_is_several_batches_of_other_prompts():
    first = 1 + 1 + 2  # one batch of each load to warm up
    assert [prompts_of(rows) for rows in batches(0, 1)] == [{first + batch} for batch in range(8)]
    assert [len(rows) for rows in batches(0, 1)] == [1] * 8
    assert [[row["prompt_token_ids"] for row in rows] for rows in batches(1, 1)] == [[[12]] * 4, [[13]] * 4]
    assert [len(rows) for rows in batches(2, 1)] == [12]
    assert prompts_of(requests(0, 2)) == set(range(16, 24))


def test_as_many_batches_as_give_enough_responses():
    assert [len(batches(1, 1, responses=least)) for least in (1, 4, 5, 9)] == [1, 1, 2, 3]
    assert [len(batches(number, WARM_UP)) for number in range(3)] == [1, 1, 1]


@pytest.mark.parametrize("responses", [1, 8, 30])
def test_no_batch_repeats_a_prompt_or_a_seed_of_another(responses):
    needed = groups_before(LOADS, 8, responses, 5)
    just_enough = [Group([number]) for number in range(needed)]
    runs = [
        rows
        for round_ in range(5)
        for number in range(3)
        for rows in batches(number, round_, prompts=just_enough, responses=responses)
    ]
    seeds = [row["seed"] for rows in runs for row in rows]
    assert len(set(seeds)) == len(seeds)
    prompts = [prompts_of(rows) for rows in runs]
    assert sum(map(len, prompts)) == len(set.union(*prompts)) == needed


def test_few_prompts_come_again_with_other_seeds():
    few = PROMPTS[:4]
    first, again = requests(2, 0, prompts=few), requests(2, 1, prompts=few)
    assert prompts_of(first) == {2, 3} and prompts_of(again) == {2, 3}
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
    assert [row["response"] for row in rows] == [[2, i] for i in range(8)] + [[0, 4 + i] for i in range(4)]
    assert len({row["seed"] for row in rows}) == 12
    assert [row["response"] for row in requests(1, 1, prompts=groups)] == [[n, i] for n in (0, 1) for i in range(4)]
    assert groups[1].longest_text(1) == 3 and Group([1, 2]).longest_text(5) == 7


def test_a_group_that_comes_again_gives_its_other_responses_first():
    groups = [Group([number], [[number, sample] for sample in range(8)]) for number in range(3)]
    given = [row["response"] for row in requests(0, 1, prompts=groups)]
    assert given == [[1, 1], [2, 1], [0, 2], [1, 2], [2, 2], [0, 3], [1, 3], [2, 3]]


def test_whether_groups_come_again():
    """Batches take 1, 1 and 2 groups to warm up, then 8, 2 and 2 in a round."""
    of = settings(requests=LOADS, samples=8, responses=8)
    for available, first in ((3, (0, 2)), (4, (1, 0)), (13, (1, 1)), (16, (2, 0)), (100, None)):
        places = [(round_, number) for round_ in range(3) for number in range(3)]
        again = [place for place in places if come_again(of, place[1], place[0], PROMPTS[:available])]
        assert again == (places[places.index(first) :] if first else [])
