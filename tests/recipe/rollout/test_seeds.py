import numpy as np

from sam_recipe.rollout import parse_prompt_uid, prompt_uid, sample_seed


def test_every_part_of_the_identity_changes_the_seed():
    base = (0, "train", 1, 2, 3)
    changed = [(1, "train", 1, 2, 3), (0, "validation", 1, 2, 3), (0, "train", 2, 2, 3), (0, "train", 1, 3, 3)]
    seeds = {sample_seed(*identity) for identity in [base, *changed, (0, "train", 1, 2, 4)]}
    assert len(seeds) == 6 and all(0 <= seed < 2**63 for seed in seeds)
    assert sample_seed(*base) == 8678129737287521143, "the same on every machine"


def test_uids_sort_in_dispatch_order_and_parse_back():
    uids = [prompt_uid(7, prompt) for prompt in range(2000)]
    assert uids == sorted(uids)
    assert parse_prompt_uid(uids[1234]) == (7, 1234)
    assert parse_prompt_uid("0b5ff1f0-6a4c-4f5e-9d1b-7d2f0d0c9f11") is None


def test_no_two_rows_of_the_published_files_share_a_seed():
    """DAPO-Math-17k has 1,791,700 rows and AIME-2024 960; each of these is sampled 32 times in ten validations."""
    train = (sample_seed(0, "train", 1, row, 0) for row in range(1_791_700))
    validation = (
        sample_seed(0, "validation", step, row, sample)
        for step in range(0, 100, 10)
        for row in range(960)
        for sample in range(32)
    )
    seeds = np.fromiter((seed for part in (train, validation) for seed in part), np.int64)
    assert len(np.unique(seeds)) == len(seeds) == 1_791_700 + 10 * 960 * 32
