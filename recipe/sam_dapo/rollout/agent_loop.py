"""What asks for responses: verl's agent loops, whose requests get seeds, and verl's client of the rollout servers.

A response has its seed whatever agent loop makes it: verl's setting `rollout.agent.agent_loop_manager_class`. The
client generates it in chunks, and tells the router how long it is.
"""

import copy
import math
import re
import time
import traceback
from collections import Counter
from types import SimpleNamespace
from typing import Any, NamedTuple
from uuid import uuid4

import numpy as np
import ray
import transfer_queue as tq
from tensordict import TensorDict
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ, AgentLoopWorkerTQ
from verl.utils import normalize_token_ids
from verl.utils import tensordict_utils as tu
from verl.utils.rollout_trace import rollout_trace_op
from verl.workers.rollout.llm_server import LLMServerClient
from verl.workers.rollout.replica import TokenOutput

from recipe.sam_dapo.rollout import further_seed, parse_prompt_uid, sample_seed
from recipe.sam_dapo.rollout.router import RoutedRequest
from sam.drafting.texts import digest
from sam.engine.requests import RequestHints

ROW = "__row__"  # which prompt of its step or validation a prompt is
FAILURE = "failure_said"  # tag of a prompt one of whose responses failed
SPAN = "generated_s"  # of a response: when it was asked for and when it was there, Unix seconds
INSTALLED = re.compile(r"(site|dist)-packages/|/lib/python\d")
FRAME = re.compile(r'  File "(.+?\.py)", line (\d+).*\n')  # of a traceback that Ray brings as text
CHAINED = "\nThe above exception was the direct cause of the following exception:"
# Sampling parameters that read the response's tokens so far, which an engine takes for the prompt's in a later chunk.
UNDIVIDED = (
    "stop", "structured_outputs", "thinking_token_budget", "min_tokens", "presence_penalty", "frequency_penalty",
    "bad_words", "repetition_detection",
)  # fmt: skip
COUNTS = ("spec_num_draft_tokens", "spec_num_accepted_tokens", "spec_num_verify_steps")  # of verl's own MTP drafts


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
        now = (validates, int(prompts["global_steps"]))
        if validates and now != self._last:
            self._rows[now] = 0  # a validation has the same seeds whenever it is made; training may go on behind it
        self._last = now
        first = self._rows[now]
        self._rows[now] += len(prompts)
        rows = list(range(first, self._rows[now]))
        tu.assign_non_tensor_stack(prompts, ROW, rows)
        if "index" not in prompts.keys():  # verl reads it, and a user's dataset may lack it
            tu.assign_non_tensor_stack(prompts, "index", rows)
        super().generate_sequences(prompts)


class SeededWorker(AgentLoopWorkerTQ.__ray_metadata__.modified_class):
    """verl's worker, whose agent loops ask for tokens through a client that gives their requests seeds."""

    async def _run_agent_loop(self, sampling_params: dict[str, Any], trajectory: dict[str, Any], **kwargs):
        row = kwargs.pop(ROW)
        uid = str(kwargs["uid"])
        step, prompt = parse_prompt_uid(uid) or (int(trajectory["step"]), row)
        split = "validation" if trajectory["validate"] else "train"
        seed = sample_seed(self.rollout_config.seed, split, step, prompt, int(kwargs["session_id"]))
        session = copy.copy(self)  # a worker runs many agent loops at once
        session.llm_client = copy.copy(self.llm_client)
        session.requests = SeededRequests(self.llm_client.generate, seed)
        session.llm_client.generate = session.requests.generate
        try:
            return await super(SeededWorker, session)._run_agent_loop(sampling_params, trajectory, **kwargs)
        except Exception as error:  # of users' code, of any kind: named, and raised
            tag = {FAILURE: describe(error, kwargs.get("data_source"))}
            partition = "val" if trajectory["validate"] else "train"  # verl's names
            await tq.async_kv_put(key=uid, partition_id=partition, tag=tag)
            raise

    async def _compute_score(self, outputs: list, kwargs: dict[str, Any]) -> None:
        """verl's, which would train on a reward that is no number; says when each response was generated."""
        for output in outputs:
            output.extra_fields[SPAN] = self.requests.span()
        await super()._compute_score(outputs, kwargs)
        score = outputs[-1].reward_score
        if not math.isfinite(score):  # a TypeError that names the kind of anything else
            raise ValueError(f"the reward is {score}, expected a finite number")


class Turn(NamedTuple):
    """A request of a conversation: its token ids, its seed, the first prompt's tokens, and its number from 1."""

    tokens: list[int]
    seed: int
    first_prompt: int
    number: int


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
        self._ended: list[Turn] = []
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
        turn = self._turn_of(prompt)
        parameters = {"detokenize": bool(sampling_params.get("stop")), **sampling_params}
        if parameters.get("seed") is None:
            parameters["seed"] = turn.seed
        number = turn.number if turn.number > 1 else None
        parameters = with_hints(parameters, prompt_tokens=turn.first_prompt, turn=number)
        output = await self._generate(request_id, prompt_ids=prompt_ids, sampling_params=parameters, **kwargs)
        self._finished = time.time()
        self._ended.append(turn._replace(tokens=prompt + list(output.token_ids)))
        return output

    def _turn_of(self, prompt: list[int]) -> Turn:
        """Which turn of which conversation a request is."""
        before = [turn for turn in self._ended if prompt[: len(turn.tokens)] == turn.tokens]
        if before:
            last = max(before, key=lambda turn: len(turn.tokens))
            self._ended.remove(last)  # a second continuation would draw the first one's numbers
            return last._replace(tokens=prompt, number=last.number + 1)
        seed = self._seed
        repeat = self._begun[tuple(prompt)]
        if self._begun:
            seed = further_seed(seed, prompt, repeat)
        self._begun[tuple(prompt)] = repeat + 1
        return Turn(prompt, seed, first_prompt=len(prompt), number=1)


def describe(error: Exception, data_source: Any) -> str:
    """One line: the data source, the last line of code that is in no installed package, and the exception.

    Of exceptions that caused each other, the first; of one in another process, by the traceback that Ray brings.
    """
    chain = [error]
    while chain[-1].__cause__ is not None:
        chain.append(chain[-1].__cause__)
    for cause in reversed(chain):
        frames, message = _frames_and_message(cause)
        if frames:
            break
    own = [frame for frame in frames if not INSTALLED.search(frame[0]) and frame[0] != __file__]
    place = "".join(f"{file}:{line}: " for file, line in (own or frames)[-1:])
    return f"data_source {data_source!r}: {place}{' '.join(message.split())[:200]}"


def _frames_and_message(error: BaseException) -> tuple[list[tuple[str, int | str]], str]:
    """File and line of each frame, the innermost last, and the exception in words.

    Where an exception's text has frames, as that of another process which Ray brings, the words come behind them.
    """
    frames: list[tuple[str, int | str]] = []
    for frame in traceback.extract_tb(error.__traceback__):
        if frame.filename.endswith(".py"):
            frames.append((frame.filename, frame.lineno))
    blocks = "".join(traceback.format_exception_only(error)).split(CHAINED)
    block = next((block for block in blocks if FRAME.search(block)), blocks[-1])
    frames += FRAME.findall(block)
    behind = FRAME.split(block)[-1]  # the code of the last frame, which is indented, and then the exception
    message = re.search(r"^\S.*", behind, re.MULTILINE | re.DOTALL)
    return frames, message[0] if message else behind


class RoutedClient(LLMServerClient):
    """Generates each response in chunks of `routing.chunk_tokens`, each at the replica that the router names.

    A chunk's prompt is the response's prompt and its tokens so far: a token's uniform counts from the prompt's first
    token, so tokens are those of the whole (sam.verify.exact). If a replica dies, the response goes on elsewhere.
    """

    @rollout_trace_op
    async def generate(
        self, request_id, *, prompt_ids: list[int], sampling_params: dict[str, Any], **kwargs: Any
    ) -> TokenOutput:
        """verl's, in chunks: token ids, log-probabilities, routed experts, counts and the stop reason are joined."""
        prompt_ids = normalize_token_ids(prompt_ids)
        limit = response_limit(self.config.actor_rollout_ref.rollout, len(prompt_ids), sampling_params)
        first = RequestHints.of(SimpleNamespace(**sampling_params)).prompt_tokens or len(prompt_ids)
        group = digest(np.asarray(prompt_ids[:first])).hex()
        request = RoutedRequest(uuid4().hex, group, len(prompt_ids), limit, request_id)
        chunk = self.config.routing.chunk_tokens or limit
        if any(sampling_params.get(key) for key in UNDIVIDED):
            chunk = limit
        joined = None
        ended_after = None
        client = copy.copy(self)  # a client generates many responses at once
        try:
            client.placement = await self._load_balancer.acquire.remote(request)
            while True:
                given = joined.token_ids if joined else []
                parameters = dict(sampling_params)
                hints = {}
                if chunk < limit or given:
                    parameters["max_tokens"] = min(chunk, limit - len(given))
                    parameters.pop("max_new_tokens", None)
                    hints = {"prompt_tokens": first, "response_limit": len(prompt_ids) - first + limit}
                try:
                    part = await super(RoutedClient, client).generate(
                        request_id, prompt_ids=prompt_ids + given, sampling_params=with_hints(parameters, **hints),
                        **kwargs,
                    )  # fmt: skip
                except ray.exceptions.RayError as death:
                    if not is_dead(death):
                        raise
                    client.placement = await self._go_elsewhere(request.id, client.placement.server_id, death)
                    continue
                joined = join(joined, part)
                if part.stop_reason != "length" or len(joined.token_ids) >= limit:
                    break
                client.placement = await self._load_balancer.proceed.remote(request.id, len(part.token_ids))
            if joined.stop_reason != "aborted":
                ended_after = len(part.token_ids)
            if joined.stop_reason == "length":
                joined.stop_reason = "completed"
            return joined
        finally:
            self._load_balancer.release.remote(request.id, ended_after)

    async def _acquire_server(self, request_id: str, **_) -> tuple[str, Any]:
        return self.placement.server_id, self.placement.server

    def _release_server(self, server_id: str, request_id: str | None = None) -> None:
        """The router is told when the whole response ends."""

    async def _go_elsewhere(self, name: str, server_id: str, death: Exception):
        """Where a chunk begins again whose server has died; the death is the error where no server is left."""
        try:
            return await self._load_balancer.fail.remote(name, server_id)
        except ray.exceptions.RayError as error:
            if is_dead(error):  # the router's own death
                raise
            raise death from error


def response_limit(rollout, prompt_tokens: int, sampling_params: dict[str, Any]) -> int:
    """Most tokens of a response, by the rule of verl's server (vLLMHttpServer.generate)."""
    longest = rollout.get("max_model_len") or rollout.prompt_length + rollout.response_length
    asked = sampling_params.get("max_tokens", sampling_params.get("max_new_tokens"))
    if asked is None:
        asked = min(rollout.response_length, rollout.prompt_length + rollout.response_length - prompt_tokens)
    return max(1, min(asked, longest - prompt_tokens))


def with_hints(parameters: dict[str, Any], **hints: int) -> dict[str, Any]:
    """Sampling parameters with hints to the drafters of the engine."""
    if not hints:
        return parameters
    users = parameters.get("extra_args") or {}
    return {**parameters, "extra_args": {**users, **RequestHints(**hints).extra_args()}}


def is_dead(error: Exception) -> bool:
    """Whether the server, or the engine behind it, is gone. vLLM's error comes as a subclass that Ray makes."""
    names = {kind.__name__ for kind in type(error).__mro__}
    return isinstance(error, ray.exceptions.RayActorError) or "EngineDeadError" in names


def join(joined: TokenOutput | None, part: TokenOutput) -> TokenOutput:
    """The output of all chunks so far, `part` the last, as verl's FullyAsyncLLMServerClient joins them."""
    if joined is None:
        return part
    if part.routed_experts is not None and part.token_ids:
        joined.routed_experts = np.concatenate([joined.routed_experts, part.routed_experts[-len(part.token_ids) :]])
    with_log_probs = joined.log_probs is not None and part.log_probs is not None
    joined.log_probs = [*joined.log_probs, *part.log_probs] if with_log_probs else None
    joined.token_ids = [*joined.token_ids, *part.token_ids]
    joined.stop_reason = part.stop_reason
    if part.num_preempted is not None:
        joined.num_preempted = (joined.num_preempted or 0) + part.num_preempted
    for name in COUNTS:
        if name in part.extra_fields:
            joined.extra_fields[name] += part.extra_fields[name]
    return joined
