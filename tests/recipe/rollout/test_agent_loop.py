"""Seeds of every response, whatever agent loop makes it and whatever the data call their rows."""

import asyncio
import re
from collections import Counter
from types import SimpleNamespace
from uuid import uuid4

import numpy
import pytest
import torch
from omegaconf import OmegaConf
from verl.experimental.agent_loop import agent_loop as verls
from verl.utils import tensordict_utils as tu
from verl.workers.rollout.replica import TokenOutput

from sam_recipe.rollout import prompt_uid, sample_seed
from sam_recipe.rollout.agent_loop import SeededManager, SeededRequests, SeededWorker, describe

RUN_SEED = 5


class Own:
    """A user's agent loop, which may take none but the keys of the data."""

    def __init__(self, server_manager, **_):
        self.client = server_manager

    async def run(self, sampling_params, raw_prompt, uid, session_id, index, **others):
        assert not [name for name in others if name.startswith("__")]
        return await self.client.generate("id", prompt_ids=[1, 2], sampling_params={"temperature": 1.0})


class Worker(SeededWorker):
    """Without Ray and models; notes the seeds that its engine is asked with."""

    def __init__(self, n):
        rollout = {"n": n, "val_kwargs": {"n": n, "top_p": 1.0, "top_k": -1, "temperature": 1.0}, "temperature": 1.0}
        rollout |= {"top_p": 1.0, "top_k": -1, "calculate_log_probs": True, "agent": {"default_agent_loop": "own"}}
        self.config = OmegaConf.create({"actor_rollout_ref": {"rollout": rollout}, "data": {}})
        self.rollout_config = SimpleNamespace(seed=RUN_SEED)
        self.llm_client, self.background_tasks, self.seeds = SimpleNamespace(generate=self._generate), set(), []
        self.tokenizer = self.processor = self.hf_model_type = self.dataset_cls = None
        self.tools = []

    async def _generate(self, request_id, *, prompt_ids, sampling_params, **_):
        self.seeds.append(sampling_params["seed"])
        return TokenOutput(token_ids=[7, 8])

    async def _agent_loop_postprocess(self, output, validate, **kwargs):
        pass


@pytest.fixture
def seeds(monkeypatch):
    """Puts batches, (rows by their index, columns, step, whether it validates), through the manager and a worker."""

    async def no_queue(**_):
        pass

    monkeypatch.setattr("verl.trainer.ppo.v1.agent_loop_tq.tq", SimpleNamespace(async_kv_put=no_queue))
    monkeypatch.setattr("verl.trainer.ppo.v1.agent_loop_tq.ray.get", lambda _: None)
    monkeypatch.setitem(verls._agent_loop_registry, "own", {"_target_": f"{__name__}.Own"})

    async def play(worker, batches):
        manager = object.__new__(SeededManager)
        manager._last, manager._rows, sent = None, Counter(), []
        manager.agent_loop_workers = [SimpleNamespace(generate_sequences=SimpleNamespace(remote=sent.append))]
        for indices, uids, step, validates in batches:
            texts = {"raw_prompt": ["go"] * len(indices), "index": list(indices)}
            batch = tu.get_tensordict(texts | {"uid": uids or [str(uuid4()) for _ in indices]})
            tu.assign_non_tensor_data(batch, "global_steps", step)
            if validates:
                tu.assign_non_tensor_data(batch, "validate", True)
            manager.generate_sequences(batch)
            await worker.generate_sequences(sent.pop())
            await asyncio.gather(*worker.background_tasks)

    def run(*batches, n=1):
        asyncio.run(play(worker := Worker(n), batches))
        return worker.seeds

    return run


@pytest.mark.parametrize(
    "indices", [[str(uuid4()) for _ in range(8)], [0] * 8, range(8), [None] * 8], ids=["uuid", "same", "number", "none"]
)
def test_validation_goes_by_the_rows_of_the_file_whatever_their_index(seeds, indices):
    wanted = [sample_seed(RUN_SEED, "validation", 3, row, sample) for row in range(8) for sample in range(2)]
    found = seeds((indices[:5], None, 3, True), (indices[5:], None, 3, True), n=2)
    assert sorted(found) == sorted(wanted)


def test_training_goes_by_the_prompts_uid_and_sample(seeds):
    wanted = [sample_seed(RUN_SEED, "train", 4, prompt, sample) for prompt in (6, 7) for sample in (0, 1)]
    assert sorted(seeds(([9, 9], [prompt_uid(4, 6), prompt_uid(4, 7)], 4, False), n=2)) == sorted(wanted)


VALIDATION, TRAIN = "validation", "train"


@pytest.mark.parametrize(
    ("steps", "numbered"),  # of batches of two rows
    [
        ([(VALIDATION, 1), (VALIDATION, 1), (VALIDATION, 2)], [(0, 1), (2, 3), (0, 1)]),
        ([(TRAIN, 5), (VALIDATION, 5), (TRAIN, 5)], [(0, 1), (0, 1), (2, 3)]),
    ],
    ids=["a validation begins at the first row", "verl's uids: the rows of its step, also behind a validation"],
)
def test_rows_are_counted_by_step(seeds, steps, numbered):
    found = seeds(*(([0, 0], None, step, split == VALIDATION) for split, step in steps))
    rows = [(split, step, row) for (split, step), rows in zip(steps, numbered, strict=True) for row in rows]
    assert found == [sample_seed(RUN_SEED, *row, 0) for row in rows]


REMOTE = """ray::RewardLoopWorker.compute_score() (pid=2)
  File "/x/site-packages/verl/dapo.py", line 9, in run_single
    result = self.compute_score(
  File "/my/reward.py", line 12, in compute_score
    raise ValueError("boom")
  File "/usr/lib/python3.11/re.py", line 1, in compile
ValueError: boom
  of two lines"""
UNLOADABLE = """The actor died because of an error raised in its creation task, ray::RewardLoopWorker() (pid=2)
  File "/my/reward.py", line 1, in <module>
    import nothing_such
ModuleNotFoundError: No module named 'nothing_such'

The above exception was the direct cause of the following exception:

ray::RewardLoopWorker.__init__() (pid=2, ip=10.0.0.1)
  File "/x/site-packages/verl/import_utils.py", line 9, in load_module
RuntimeError: Error loading module from module_path='/my/reward.py'"""


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (REMOTE, "/my/reward.py:12: ValueError: boom of two lines"),
        (UNLOADABLE, "/my/reward.py:1: ModuleNotFoundError: No module named 'nothing_such'"),
    ],
)
def test_what_raises_in_another_process_is_named_by_its_own_line(text, said):
    for cause in (None, ValueError("boom")):
        error = RuntimeError(text)
        error.__cause__ = cause
        assert describe(error, "own") == f"data_source 'own': {said}"
    with pytest.raises(ValueError) as raised:
        raise ValueError("no such\ntool")
    here = describe(raised.value, "own")  # and in this one
    assert re.fullmatch(rf"data_source 'own': {__file__}:\d+: ValueError: no such tool", here)


REWARDS = [(1.0, True), (0, True), (True, True), (torch.tensor(0.5), True), (numpy.float32(1), True)]
NONE = [None, float("nan"), -float("inf"), "0.5", "good", {"reward": 1.0}, (1.0, "info")]


@pytest.mark.parametrize(("score", "is_right"), [*REWARDS, *((score, False) for score in NONE)])
def test_a_reward_that_is_no_number_is_refused(monkeypatch, score, is_right):
    async def judge(self, outputs, kwargs):
        outputs[-1].reward_score = score

    monkeypatch.setattr(SeededWorker.__mro__[1], "_compute_score", judge)
    judging = SeededWorker._compute_score(Worker(1), [SimpleNamespace()], {})
    if is_right:
        return asyncio.run(judging)
    with pytest.raises(ValueError, match=f"^the reward is {re.escape(repr(score))}, expected a finite number$"):
        asyncio.run(judging)


def ask(conversation):
    """What a loop asks for, as pairs of a prompt and the output; returns the parameters of each request."""
    asked = []

    async def generate(request_id, *, prompt_ids, sampling_params, **_):
        asked.append(sampling_params)
        return TokenOutput(token_ids=outputs[len(asked) - 1])

    outputs = [output for _, output, *_ in conversation]
    requests = SeededRequests(generate, 11)

    async def play():
        for prompt, _, *parameters in conversation:
            await requests.generate("id", prompt_ids=prompt, sampling_params=dict(*parameters))

    asyncio.run(play())
    return asked


def test_requests_of_a_response_share_no_random_numbers():
    """A turn, or the rest of a response that was cut, goes on with the seed; anything else is a text of its own."""
    turn, rest, again, branch, other = [1, 2, 7, 8, 3], [1, 2, 7, 8, 3, 9], [1, 2], [1, 2, 7, 8, 4], [6]
    asked = ask(
        [([1, 2], [7, 8]), (turn, [9]), (rest, [5]), (again, [7, 8]), (again, [7]), (branch, [1]), (other, [1])]
    )
    seeds = [one["seed"] for one in asked]
    assert seeds[0] == seeds[1] == seeds[2] == 11
    assert seeds[5] == seeds[3]  # after the same tokens, drawn anew
    assert len({seeds[0], seeds[3], seeds[4], seeds[6]}) == 4
    first = {"sam_prompt_tokens": 2}  # for drafters
    second, third = ({**first, "sam_turn": turn} for turn in (2, 3))
    alone = {"sam_prompt_tokens": 1}
    assert [one["extra_args"] for one in asked] == [first, second, third, first, first, second, alone]


def test_what_a_loop_sets_stays_and_text_that_nobody_reads_is_not_made():
    own, stop, none = ask([([1], [], {"seed": 3, "top_p": 0.5}), ([2], [], {"stop": ["x"]}), ([3], [], {"seed": None})])
    assert (own["seed"], own["top_p"], own["detokenize"], stop["detokenize"]) == (3, 0.5, False, True)
    assert type(none["seed"]) is int
