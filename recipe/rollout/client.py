"""verl's client of the rollout servers, which generates a response in chunks and tells the router how long it is."""

from typing import Any
from uuid import uuid4

import numpy as np
import ray
from verl.utils import normalize_token_ids
from verl.workers.rollout.llm_server import LLMServerClient
from verl.workers.rollout.replica import TokenOutput

from sam.drafting.token_ids import digest
from sam.vllm.runner_hooks import PART, WAITING

# Sampling parameters that read the response's tokens so far, which an engine takes for the prompt's in a later chunk.
UNDIVIDED = (
    "stop", "structured_outputs", "thinking_token_budget", "min_tokens", "presence_penalty", "frequency_penalty",
    "bad_words", "repetition_detection",
)  # fmt: skip
SPECULATION_COUNTS = ("spec_num_draft_tokens", "spec_num_accepted_tokens", "spec_num_verify_steps")
MOST_FAILURES = 8  # replicas that may die under one response


class RoutedClient(LLMServerClient):
    """Generates each response in chunks of `routing.chunk_tokens`, each at the replica that the router names.

    A chunk's prompt is the response's prompt and its tokens so far: a token's uniform counts from the prompt's first
    token, so tokens are those of the whole (sam.verify.uniforms). If a replica dies, the response goes on elsewhere.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._lb_require_acquire_fields = self._lb_require_release_fields = []  # the router is known
        self._acquire_with: dict[str, dict[str, Any]] = {}  # what the router is told of each request under way
        self._server_of: dict[str, str] = {}

    async def _acquire_server(self, request_id: str, *, sampling_params: dict[str, Any], **_):
        told = self._acquire_with[request_id]
        self._server_of.pop(request_id, None)
        acquire = self._load_balancer.acquire_server.remote
        server_id, server, waiting = await acquire(request_id=request_id, tell_waiting=True, **told)
        self._server_of[request_id] = server_id
        if waiting:  # for the switch; the server is given this dictionary next
            sampling_params["extra_args"] = {**(sampling_params.get("extra_args") or {}), WAITING: waiting}
        return server_id, server

    def _release_server(self, server_id: str, request_id: str | None = None) -> None:
        """Done by `generate`: only the last chunk releases."""

    def describe(self, prompt_ids: list[int], sampling_params: dict[str, Any], limit: int) -> dict[str, Any]:
        """What the router is told of a new request: arguments of ContextRouter.acquire_server."""
        return {"group": group_of(prompt_ids), "prompt_tokens": len(prompt_ids), "limit": limit}

    async def generate(
        self, request_id, *, prompt_ids: list[int], sampling_params: dict[str, Any], **kwargs: Any
    ) -> TokenOutput:
        """verl's, in chunks: token ids, log-probabilities, routed experts, counts and the stop reason are joined."""
        prompt_ids = normalize_token_ids(prompt_ids)
        rollout = self.config.actor_rollout_ref.rollout
        # With full_determinism ids come again with other prompts: they name requests, and no conversations.
        deterministic = rollout.get("full_determinism", False)
        name, conversation = (request_id, uuid4().hex) if deterministic else (uuid4().hex, request_id)
        limit = response_limit(rollout, len(prompt_ids), sampling_params)
        chunk = self.config.routing.chunk_tokens
        if chunk is None or chunk >= limit or any(sampling_params.get(key) for key in UNDIVIDED):
            chunk = limit
        about = self.describe(prompt_ids, sampling_params, limit)
        self._acquire_with[name] = {**about, "conversation": conversation}
        joined, emitted, died, failures = None, None, None, 0
        try:
            while True:
                given = joined.token_ids if joined else []
                part_parameters = chunk_parameters(sampling_params, len(prompt_ids), len(given), limit, chunk)
                try:
                    part = await super().generate(
                        name, prompt_ids=prompt_ids + given, sampling_params=part_parameters, **kwargs
                    )
                except Exception as error:
                    if name not in self._server_of:
                        if died is None or is_dead(error):  # the router's own death
                            raise
                        raise died from error  # no replica is left: why is what matters
                    died, failures = error, failures + 1
                    if not is_dead(error) or failures > MOST_FAILURES:
                        raise
                    self._acquire_with[name] = {"emitted": 0, "failed_server": self._server_of.pop(name)}
                    continue
                joined = part if joined is None else join(joined, part)
                emitted = len(part.token_ids) if part.stop_reason != "aborted" else None
                if part.stop_reason != "length" or len(joined.token_ids) >= limit:
                    break
                self._acquire_with[name], emitted = {"emitted": emitted}, None
            if joined.stop_reason == "length":
                joined.stop_reason = "completed"
            return joined
        finally:
            del self._acquire_with[name]
            server = self._server_of.pop(name, "")
            self._load_balancer.release_server.remote(server, request_id=name, emitted=emitted)


def response_limit(rollout, prompt_tokens: int, sampling_params: dict[str, Any]) -> int:
    """Most tokens of a response, by the rule of verl's server (vLLMHttpServer.generate)."""
    longest = rollout.get("max_model_len") or rollout.prompt_length + rollout.response_length
    asked = sampling_params.get("max_tokens", sampling_params.get("max_new_tokens"))
    if asked is None:
        asked = min(rollout.response_length, rollout.prompt_length + rollout.response_length - prompt_tokens)
    return max(1, min(asked, longest - prompt_tokens))


def chunk_parameters(
    sampling_params: dict[str, Any], prompt_tokens: int, generated: int, limit: int, chunk: int
) -> dict[str, Any]:
    """The sampling parameters of the chunk after `generated` tokens; those of a whole response stay as they are."""
    if chunk >= limit and not generated:
        return dict(sampling_params)
    dropped = ("max_new_tokens", *(["prompt_logprobs"] if generated else []))
    parameters = {key: value for key, value in sampling_params.items() if key not in dropped}
    parameters["max_tokens"] = min(chunk, limit - generated)
    parameters["extra_args"] = {**(sampling_params.get("extra_args") or {}), PART: (prompt_tokens, limit)}
    return parameters


def group_of(prompt_ids: list[int]) -> str:
    """The name of the group: its prompt's tokens, hashed."""
    return digest(np.asarray(prompt_ids)).hex()


def is_dead(error: Exception) -> bool:
    """Whether the server, or the engine behind it, is gone. vLLM's error comes as a subclass that Ray makes."""
    names = {one.__name__ for one in type(error).__mro__}
    return isinstance(error, ray.exceptions.RayActorError) or "EngineDeadError" in names


def join(first: TokenOutput, part: TokenOutput) -> TokenOutput:
    """`first` and the chunk after it as one output, as verl's FullyAsyncLLMServerClient joins them."""
    extra, later = dict(first.extra_fields), part.extra_fields
    extra["global_steps"] = later.get("global_steps")
    extra["max_global_steps"] = later.get("max_global_steps")
    for count in SPECULATION_COUNTS:
        if count in later:
            extra[count] = extra.get(count, 0) + later[count]
    experts = first.routed_experts
    if part.routed_experts is not None and part.token_ids:
        new = part.routed_experts[-len(part.token_ids) :]
        experts = part.routed_experts if experts is None else np.concatenate([experts, new])
    with_log_probs = first.log_probs is not None and part.log_probs is not None
    counted = [count for count in (first.num_preempted, part.num_preempted) if count is not None]
    return TokenOutput(
        token_ids=[*first.token_ids, *part.token_ids],
        log_probs=[*first.log_probs, *part.log_probs] if with_log_probs else None,
        routed_experts=experts,
        stop_reason=part.stop_reason,
        num_preempted=sum(counted) if counted else None,
        extra_fields=extra,
    )
