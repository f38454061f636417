from recipe.seeds import parse_prompt_uid, prompt_uid, sample_seed


def test_every_part_of_the_identity_changes_the_seed():
    base = (0, "train", 1, 2, 3)
    changed = [(1, "train", 1, 2, 3), (0, "validation", 1, 2, 3), (0, "train", 2, 2, 3), (0, "train", 1, 3, 3)]
    seeds = {sample_seed(*identity) for identity in [base, *changed, (0, "train", 1, 2, 4)]}
    assert len(seeds) == 6 and all(0 <= seed < 2**63 for seed in seeds)


def test_seeds_do_not_collide_over_a_run():
    seeds = {
        sample_seed(0, "train", step, prompt, sample)
        for step in range(20)
        for prompt in range(64)
        for sample in range(16)
    }
    assert len(seeds) == 20 * 64 * 16


def test_seed_is_the_same_on_every_machine():
    assert sample_seed(0, "train", 1, 2, 3) == 8678129737287521143


def test_uids_sort_in_dispatch_order_and_parse_back():
    uids = [prompt_uid(7, prompt) for prompt in range(2000)]
    assert uids == sorted(uids)
    assert parse_prompt_uid(uids[1234]) == (7, 1234)
    assert parse_prompt_uid("0b5ff1f0-6a4c-4f5e-9d1b-7d2f0d0c9f11") is None


def test_samples_of_a_prompt_have_their_own_seeds_and_are_not_detokenised(monkeypatch):
    import asyncio
    from types import SimpleNamespace

    from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop

    from recipe.rollout.agent_loop import SeededAgentLoop

    seen = []

    async def run(self, sampling_params, **kwargs):
        seen.append(sampling_params)

    monkeypatch.setattr(SingleTurnAgentLoop, "run", run)
    loop = object.__new__(SeededAgentLoop)
    loop.config = SimpleNamespace(seed=0)
    given = {"temperature": 1.0}
    for sample in (0, 1):
        asyncio.run(loop.run(given, session_id=sample, uid=prompt_uid(1, 2), global_steps=1, index=0))
    assert [params["seed"] for params in seen] == [sample_seed(0, "train", 1, 2, sample) for sample in (0, 1)]
    assert all(params["detokenize"] is False and params["temperature"] == 1.0 for params in seen)
    assert given == {"temperature": 1.0}
