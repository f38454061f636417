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
from verl.workers.rollout import llm_server
from verl.workers.rollout.replica import TokenOutput

from sam_recipe.rollout import agent_loop as module
from sam_recipe.rollout import prompt_uid, sample_seed
from sam_recipe.rollout.agent_loop import FAILURE, SeededManager, SeededRequests, SeededWorker, describe

RUN_SEED = 5


class Own:
    """A user's agent loop, which may take none but the keys of the data."""

    def __init__(self, server_manager, **_):
        self.client = server_manager

    async def run(self, sampling_params, raw_prompt, uid, session_id, index, **others):
        assert not [name for name in others if name.startswith("__")]
        if raw_prompt == "raise":
            raise ValueError("no such\ntool")
        output = await self.client.generate("id", prompt_ids=[1, 2], sampling_params={"temperature": 1.0})
        return index, session_id, output


class Client:
    """Notes what it is asked."""

    def __init__(self):
        self.asked = []

    async def generate(self, request_id, *, prompt_ids, sampling_params, **_):
        self.asked.append(sampling_params)
        return TokenOutput(token_ids=[7, 8])


class Worker(SeededWorker):
    """Without Ray and models."""

    def __init__(self, n):
        rollout = {"n": n, "val_kwargs": {"n": n, "top_p": 1.0, "top_k": -1, "temperature": 1.0}, "temperature": 1.0}
        rollout |= {"top_p": 1.0, "top_k": -1, "calculate_log_probs": True, "agent": {"default_agent_loop": "own"}}
        self.config = OmegaConf.create({"actor_rollout_ref": {"rollout": rollout}, "data": {}})
        self.rollout_config = SimpleNamespace(seed=RUN_SEED)
        self.llm_client, self.background_tasks = Client(), set()
        self.tokenizer = self.processor = self.hf_model_type = self.dataset_cls = None
        self.tools, self.made = [], []

    async def _agent_loop_postprocess(self, output, validate, **kwargs):
        index, sample, _ = output
        self.made.append((kwargs["uid"], index, sample))


class Queue:
    """TransferQueue's tags."""

    def __init__(self):
        self.tags = {}

    async def async_kv_put(self, key, partition_id, tag):
        self.tags.setdefault((partition_id, key), {}).update(tag)


@pytest.fixture
def queue(monkeypatch):
    queue = Queue()
    monkeypatch.setattr(module, "tq", queue)
    monkeypatch.setattr("verl.trainer.ppo.v1.agent_loop_tq.tq", queue)
    monkeypatch.setitem(verls._agent_loop_registry, "own", {"_target_": f"{__name__}.Own"})
    return queue


def run(batches, n=1):
    """Each batch's columns through the manager and a worker; returns the worker."""
    worker = Worker(n)

    async def generate():
        manager = object.__new__(SeededManager)
        manager._last, manager._rows, sent = None, Counter(), []
        manager.agent_loop_workers = [SimpleNamespace(generate_sequences=SimpleNamespace(remote=sent.append))]
        for columns, step, validate in batches:
            batch = tu.get_tensordict(columns)
            tu.assign_non_tensor_data(batch, "global_steps", step)
            if validate:
                tu.assign_non_tensor_data(batch, "validate", True)
            manager.generate_sequences(batch)
            await worker.generate_sequences(sent.pop())
            await asyncio.gather(*worker.background_tasks)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("verl.trainer.ppo.v1.agent_loop_tq.ray.get", lambda _: None)
        asyncio.run(generate())
    return worker


def rows(indices, **columns):
    count = len(indices)
    texts = {"raw_prompt": ["go"] * count, "uid": [str(uuid4()) for _ in indices], "index": list(indices)}
    return texts | columns


def validation_seeds(batches, step=0, n=1):
    return [asked["seed"] for asked in run([(rows(one), step, True) for one in batches], n).llm_client.asked]


UUIDS = [str(uuid4()) for _ in range(8)]


@pytest.mark.parametrize(
    "indices", [UUIDS, [0] * 8, list(range(8)), [None] * 8], ids=["uuid", "same", "number", "none"]
)
def test_validation_goes_by_the_rows_of_the_file_whatever_their_index(queue, indices):
    wanted = [sample_seed(RUN_SEED, "validation", 3, row, sample) for row in range(8) for sample in range(2)]
    assert sorted(validation_seeds([indices[:5], indices[5:]], 3, n=2)) == sorted(wanted)


def test_validations_begin_at_the_first_row_again(queue):
    asked = run([(rows([0, 0]), step, True) for step in (1, 1, 2)]).llm_client.asked
    numbered = [(1, 0), (1, 1), (1, 2), (1, 3), (2, 0), (2, 1)]
    assert [one["seed"] for one in asked] == [sample_seed(RUN_SEED, "validation", *one, 0) for one in numbered]


def test_training_goes_by_the_prompts_uid_and_sample(queue):
    worker = run([(rows([9, 9], uid=[prompt_uid(4, 6), prompt_uid(4, 7)]), 4, False)], n=2)
    wanted = [sample_seed(RUN_SEED, "train", 4, prompt, sample) for prompt in (6, 7) for sample in (0, 1)]
    assert sorted(asked["seed"] for asked in worker.llm_client.asked) == sorted(wanted)


def test_training_with_verls_uids_goes_by_the_rows_of_its_step_also_behind_a_validation(queue):
    asked = run([(rows([0, 0]), 5, validates) for validates in (False, True, False)]).llm_client.asked
    numbered = [("train", 0), ("train", 1), ("validation", 0), ("validation", 1), ("train", 2), ("train", 3)]
    assert [one["seed"] for one in asked] == [sample_seed(RUN_SEED, split, 5, row, 0) for split, row in numbered]


def test_an_interrupted_response_goes_on_with_its_seed_in_its_prompts_group(monkeypatch):
    """verl's asynchronous trainers' client; a uniform goes by the seed and the tokens before, the prompt's too."""
    parts, asked = [TokenOutput(token_ids=[7, 8], stop_reason="aborted"), TokenOutput(token_ids=[9])], []

    async def generate(self, request_id, *, prompt_ids, sampling_params, **_):
        asked.append((prompt_ids, sampling_params["seed"], sampling_params["extra_args"]))
        return parts.pop(0)

    async def no_pause(seconds):
        pass

    monkeypatch.setattr(llm_server.LLMServerClient, "generate", generate)
    monkeypatch.setattr(llm_server, "asyncio", SimpleNamespace(sleep=no_pause))
    requests = SeededRequests(llm_server.FullyAsyncLLMServerClient(SimpleNamespace()).generate, 5)
    output = asyncio.run(requests.generate("id", prompt_ids=[1, 2], sampling_params={}))
    assert output.token_ids == [7, 8, 9]
    assert asked == [(prompt, 5, {"sam_prompt_tokens": 2}) for prompt in ([1, 2], [1, 2, 7, 8])]


def test_a_response_that_fails_says_what_of(queue):
    columns = rows([0, 0], raw_prompt=["go", "raise"], data_source=["a", "b"])
    assert len(run([(columns, 0, True)]).made) == 1
    tags = queue.tags["val", columns["uid"][1]]
    assert tags["status"] == "failure" and FAILURE not in queue.tags["val", columns["uid"][0]]
    assert re.fullmatch(rf"data_source 'b': {__file__}:\d+: ValueError: no such tool", tags[FAILURE])


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
