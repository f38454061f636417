"""Random numbers of a response's requests, and rewards that are none; tests/end_to_end/test_replicas.py has one that
raises."""

import asyncio
from types import SimpleNamespace

import pytest
from verl.workers.rollout.replica import TokenOutput

from recipe.sam_dapo.rollout import parse_prompt_uid, prompt_uid, sample_seed
from recipe.sam_dapo.rollout.agent_loop import ROW, SeededRequests, SeededWorker, describe


@pytest.mark.parametrize(("score", "said"), [(float("nan"), "is nan, expected a finite"), ("0.5", "must be real")])
def test_a_reward_that_is_no_number_is_refused(monkeypatch, score, said):
    async def judge(self, outputs, kwargs):
        outputs[-1].reward_score = score

    monkeypatch.setattr(SeededWorker.__mro__[1], "_compute_score", judge)
    worker = object.__new__(SeededWorker)
    worker.requests = SeededRequests(None, 11)
    output = SimpleNamespace(extra_fields={})
    with pytest.raises((ValueError, TypeError), match=said):
        asyncio.run(SeededWorker._compute_score(worker, [output], {}))
    begin, end = output.extra_fields["generated_s"]
    assert begin <= end


def test_a_response_says_when_it_was_generated(monkeypatch):
    """Whatever agent loop makes it; other responses of the worker are made at the same time."""

    async def generate(request_id, **_):
        await asyncio.sleep(0.01)
        return TokenOutput(token_ids=[1])

    async def loop(self, sampling_params, trajectory, **kwargs):
        await self.llm_client.generate("r", prompt_ids=[7], sampling_params={})
        output = SimpleNamespace(extra_fields={}, reward_score=None)
        await self._compute_score([output], kwargs)
        return output

    async def judge(self, outputs, kwargs):
        outputs[-1].reward_score = 1.0

    monkeypatch.setattr(SeededWorker.__mro__[1], "_run_agent_loop", loop)
    monkeypatch.setattr(SeededWorker.__mro__[1], "_compute_score", judge)
    worker = object.__new__(SeededWorker)
    worker.llm_client = SimpleNamespace(generate=generate)
    worker.rollout_config = SimpleNamespace(seed=0)
    trajectory = {"validate": False, "step": 1}

    async def both():
        of = [{ROW: 0, "uid": prompt_uid(1, 0), "session_id": sample} for sample in range(2)]
        return await asyncio.gather(*(worker._run_agent_loop({}, trajectory, **one) for one in of))

    for output in asyncio.run(both()):
        begin, end = output.extra_fields["generated_s"]
        assert begin < end


def ask(*conversation):
    """What a loop asks for, as pairs of a prompt and the output; returns the parameters of each request."""
    asked = []

    async def generate(request_id, *, prompt_ids, sampling_params, **_):
        asked.append(sampling_params)
        return TokenOutput(token_ids=conversation[len(asked) - 1][1])

    async def play():
        requests = SeededRequests(generate, 11)
        for prompt, _, *parameters in conversation:
            await requests.generate("id", prompt_ids=prompt, sampling_params=dict(*parameters))

    asyncio.run(play())
    return asked


def test_requests_of_a_response_share_no_random_numbers():
    """A turn, or the rest of a response that was cut, goes on with the seed; anything else is a text of its own."""
    turn, rest, again, branch, other = [1, 2, 7, 8, 3], [1, 2, 7, 8, 3, 9], [1, 2], [1, 2, 7, 8, 4], [6]
    asked = ask(([1, 2], [7, 8]), (turn, [9]), (rest, [5]), (again, [7, 8]), (again, [7]), (branch, [1]), (other, [1]))
    seeds = [one["seed"] for one in asked]
    assert seeds[0] == seeds[1] == seeds[2] == 11
    assert seeds[5] == seeds[3]  # after the same tokens, drawn anew
    assert len({seeds[0], seeds[3], seeds[4], seeds[6]}) == 4
    first = {"sam_prompt_tokens": 2}  # for drafters
    second, third = ({**first, "sam_turn": turn} for turn in (2, 3))
    alone = {"sam_prompt_tokens": 1}
    assert [one["extra_args"] for one in asked] == [first, second, third, first, first, second, alone]


def test_what_a_loop_sets_stays_and_text_that_nobody_reads_is_not_made():
    own, stop, none = ask(([1], [], {"seed": 3, "top_p": 0.5}), ([2], [], {"stop": ["x"]}), ([3], [], {"seed": None}))
    assert (own["seed"], own["top_p"], own["detokenize"], stop["detokenize"]) == (3, 0.5, False, True)
    assert type(none["seed"]) is int


def raised(code, name="mine.py"):
    """The exception that a user's code raises."""
    try:
        exec(compile(code, name, "exec"), {})
    except Exception as error:
        return error


REMOTE = """ray::Reward.score() (pid=7, ip=10.0.0.1)
  File "/home/me/reward.py", line 3, in score
    return 1 / 0
ZeroDivisionError: division by zero

The above exception was the direct cause of the following exception:

ray::Loop.run() (pid=8, ip=10.0.0.1)
  File "/x/site-packages/verl/loop.py", line 9, in run
ValueError: it failed
"""
CAUSED = "try:\n  int('x')\nexcept ValueError as error:\n  raise RuntimeError('late') from error"
FAILURES = [
    (raised("import json\n\njson.loads('{')"), "mine.py:3: json.decoder.JSONDecodeError: Expecting property name"),
    (raised(CAUSED), "mine.py:2: ValueError: invalid literal for int() with base 10: 'x'"),
    (raised(f"raise RuntimeError({REMOTE!r})"), "/home/me/reward.py:3: ZeroDivisionError: division by zero"),
    (raised("x = (", "wrong.py"), "wrong.py:1: SyntaxError: "),
    (KeyError("a"), "KeyError: 'a'"),
]


@pytest.mark.parametrize(("error", "said"), FAILURES)
def test_a_failure_names_the_users_last_line(error, said):
    assert describe(error, "x").startswith(f"data_source 'x': {said}")


def test_every_part_of_the_identity_changes_the_seed_and_uids_sort():
    base = (0, "train", 1, 2, 3)
    changed = [(1, "train", 1, 2, 3), (0, "validation", 1, 2, 3), (0, "train", 2, 2, 3), (0, "train", 1, 3, 3)]
    seeds = {sample_seed(*identity) for identity in [base, *changed, (0, "train", 1, 2, 4)]}
    assert len(seeds) == 6 and all(0 <= seed < 2**63 for seed in seeds)
    assert sample_seed(*base) == 8678129737287521143, "the same on every machine"
    uids = [prompt_uid(7, prompt) for prompt in range(2000)]
    assert uids == sorted(uids) and parse_prompt_uid(uids[1234]) == (7, 1234)
    assert parse_prompt_uid("0b5ff1f0-6a4c-4f5e-9d1b-7d2f0d0c9f11") is None
