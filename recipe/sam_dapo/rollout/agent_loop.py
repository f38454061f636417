"""Seeds for every response, whatever agent loop makes it: verl's setting `rollout.agent.agent_loop_manager_class`."""

import copy
import math
import re
import time
import traceback
from collections import Counter
from typing import Any

import ray
import transfer_queue as tq
from tensordict import TensorDict
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ, AgentLoopWorkerTQ
from verl.utils import tensordict_utils as tu
from verl.workers.rollout.replica import TokenOutput

from recipe.sam_dapo.rollout import further_seed, parse_prompt_uid, sample_seed
from recipe.sam_dapo.rollout.client import with_hints

ROW = "__row__"  # which prompt of its step or validation a prompt is
FAILURE = "failure_said"  # tag of a prompt one of whose responses failed
SPAN = "generated_s"  # of a response: when it was asked for and when it was there, Unix seconds
INSTALLED = re.compile(r"(site|dist)-packages/|/lib/python\d")
FRAME = re.compile(r'  File "(.+?\.py", line \d+).*\n')
CHAINED = "\nThe above exception was the direct cause of the following exception:"


class SeededManager(AgentLoopManagerTQ):
    """verl's manager, which numbers the prompts of a step or a validation in the order of the data."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.agent_loop_workers_class = ray.remote(SeededWorker)
        self._rows: Counter[tuple[bool, int]] = Counter()  # numbered so far, of a validation or training, by step
        self._last: tuple[bool, int] | None = None

    def generate_sequences(self, prompts: TensorDict) -> None:
        """verl's."""
        validates = bool(prompts["validate"]) if "validate" in prompts else False
        now, last = (validates, int(prompts["global_steps"])), self._last
        if validates and now != last:
            self._rows[now] = 0  # a validation has the same seeds whenever it is made; training may go on behind it
        self._last, first = now, self._rows[now]
        self._rows[now] += len(prompts)
        rows = list(range(first, self._rows[now]))
        for key in {ROW, *({"index"} - set(prompts.keys()))}:  # a user's dataset may lack the index that verl reads
            tu.assign_non_tensor_stack(prompts, key, rows)
        super().generate_sequences(prompts)


class SeededWorker(AgentLoopWorkerTQ.__ray_metadata__.modified_class):
    """verl's worker, whose agent loops ask for tokens through a client that gives their requests seeds."""

    async def _run_agent_loop(self, sampling_params: dict[str, Any], trajectory: dict[str, Any], **kwargs):
        row, uid, sample = kwargs.pop(ROW), str(kwargs["uid"]), int(kwargs["session_id"])
        partition, split = ("val", "validation") if trajectory["validate"] else ("train", "train")
        step, prompt = parse_prompt_uid(uid) or (int(trajectory["step"]), row)
        session = copy.copy(self)  # a worker runs many agent loops at once
        session.llm_client = copy.copy(self.llm_client)
        seed = sample_seed(self.rollout_config.seed, split, step, prompt, sample)
        session.requests = SeededRequests(self.llm_client.generate, seed)
        session.llm_client.generate = session.requests.generate
        try:
            return await super(SeededWorker, session)._run_agent_loop(sampling_params, trajectory, **kwargs)
        except Exception as error:
            tag = {FAILURE: describe(error, kwargs.get("data_source"))}
            await tq.async_kv_put(key=uid, partition_id=partition, tag=tag)
            raise

    async def _compute_score(self, outputs: list, kwargs: dict[str, Any]) -> None:
        """verl's, which would train on a reward that is no number; says when each response was generated."""
        for output in outputs:
            output.extra_fields[SPAN] = self.requests.span()
        await super()._compute_score(outputs, kwargs)
        if not math.isfinite(score := outputs[-1].reward_score):  # a TypeError that names the kind of anything else
            raise ValueError(f"the reward is {score}, expected a finite number")


class SeededRequests:
    """verl's `generate` for the requests of one response: no two of them draw the same random numbers.

    A request whose prompt begins with an earlier one's prompt and output is the next turn of its conversation, and goes
    on with its seed: what follows a token does not depend on whether the response was cut there. Drafters are told
    where the conversation began. Any other request but the first has a seed of its own. A seed that the agent loop
    gives stays.
    """

    def __init__(self, generate, seed: int):
        self._generate = generate
        self._seed = seed
        self._begun: Counter[tuple[int, ...]] = Counter()
        # Of each that has ended: its tokens, seed, tokens of the conversation's first prompt, and turn.
        self._ended: list[tuple[list[int], int, int, int]] = []
        self._began = time.time()
        self._finished = self._began

    def span(self) -> list[float]:
        """When the first request was sent and the last one was answered, Unix seconds."""
        return [self._began, self._finished]

    async def generate(self, request_id, *, prompt_ids, sampling_params: dict[str, Any], **kwargs) -> TokenOutput:
        """verl's. It takes token ids: text that nobody reads would be made anew of every token.

        An asynchronous trainer's client goes on with an interrupted response below this, with the same parameters.
        """
        prompt = [int(token) for token in prompt_ids]
        seed, first, turn = self._turn_of(prompt)
        given = {"detokenize": bool(sampling_params.get("stop")), **sampling_params}
        if given.get("seed") is None:
            given["seed"] = seed
        given = with_hints(given, prompt_tokens=first, turn=turn if turn > 1 else None)
        output = await self._generate(request_id, prompt_ids=prompt_ids, sampling_params=given, **kwargs)
        self._finished = time.time()
        self._ended.append((prompt + list(output.token_ids), seed, first, turn))
        return output

    def _turn_of(self, prompt: list[int]) -> tuple[int, int, int]:
        if before := [one for one in self._ended if prompt[: len(one[0])] == one[0]]:
            longest = max(before, key=lambda one: len(one[0]))
            self._ended.remove(longest)  # a second continuation would draw the first one's numbers
            _, seed, first, turn = longest
            return seed, first, turn + 1
        is_first, repeat = not self._begun, self._begun[tuple(prompt)]
        self._begun[tuple(prompt)] += 1
        return self._seed if is_first else further_seed(self._seed, prompt, repeat), len(prompt), 1


def describe(error: Exception, data_source: Any) -> str:
    """One line: the data source, the last line of code that is in no installed package, and the exception.

    Of exceptions that caused each other, the first; of one in another process, by the traceback that Ray brings.
    """
    blocks = "".join(traceback.format_exception(error)).split(CHAINED)
    text = next((block for block in blocks if FRAME.search(block)), blocks[-1])
    *frames, last = FRAME.split(text)  # what stands before each frame, its place, and what stands behind all
    own = [one for one in frames[1::2] if not INSTALLED.search(one) and not one.startswith(__file__)] or frames[1::2]
    place = [one.replace('", line ', ":") for one in own[-1:]]
    said = re.search(r"^\S.*", last, re.MULTILINE | re.DOTALL)
    return f"data_source {data_source!r}: {': '.join([*place, ' '.join((said or [last])[0].split())[:200]])}"
