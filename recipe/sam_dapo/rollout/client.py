"""verl's client of the rollout servers, which generates a response in chunks and tells the router how long it is."""

from copy import copy
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import numpy as np
import ray
from verl.utils import normalize_token_ids
from verl.utils.rollout_trace import rollout_trace_op
from verl.workers.rollout.llm_server import LLMServerClient
from verl.workers.rollout.replica import TokenOutput

from recipe.sam_dapo.rollout.router import Request
from sam.drafting.texts import digest
from sam.engine.hints import RequestHints

# Sampling parameters that read the response's tokens so far, which an engine takes for the prompt's in a later chunk.
UNDIVIDED = (
    "stop", "structured_outputs", "thinking_token_budget", "min_tokens", "presence_penalty", "frequency_penalty",
    "bad_words", "repetition_detection",
)  # fmt: skip
COUNTS = ("spec_num_draft_tokens", "spec_num_accepted_tokens", "spec_num_verify_steps")  # of verl's own MTP drafts


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
        request = Request(uuid4().hex, group, len(prompt_ids), limit, request_id)
        chunk = self.config.routing.chunk_tokens or limit
        if any(sampling_params.get(key) for key in UNDIVIDED):
            chunk = limit
        joined = None
        ended_after = None
        client = copy(self)  # a client generates many responses at once
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
