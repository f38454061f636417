"""One rollout: all requests given at once, as verl does in a training step, to the servers of a variant."""

import asyncio
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import ray
from omegaconf import DictConfig, OmegaConf
from verl.workers.rollout.llm_server import LLMServerClient
from verl.workers.rollout.router import GlobalRequestLoadBalancer

from recipe.rollout.client import RoutedClient
from recipe.rollout.router import LOG_FILE, ContextRouterActor
from sam.vllm.bench.forced_text import ARGUMENT


@dataclass(frozen=True)
class Variant:
    """Who routes, and which engines generate.

    Attributes:
        router: verl, context, or oracle: the same policy with every length known beforehand.
        engines: off, sam, or shared: sam with speculation.sharing=replicas.
        chunk_tokens: as in the `routing` section.
    """

    name: str
    router: str
    engines: str = "off"
    chunk_tokens: int | None = None


@dataclass(frozen=True)
class Work:
    """The requests of a round: prompt, seed and length of each, in the order in which they are given."""

    prompts: list[list[int]]
    seeds: list[int]
    lengths: list[int]


@dataclass
class Rollout:
    """What a rollout took.

    Attributes:
        seconds: from when the requests are given to the last one's end.
        tail_seconds: from when fewer than half of the slots are busy, for good, to the end.
        start_to_end_seconds: from the last request's first token to the end.
        idle_share: of the slots' seconds in which no request ran.
        responses: token ids, by request.
        spans: request, replica, seconds of its first and last token there since the requests were given, of each chunk.
        status: the router's own counts at the end; empty with verl's.
    """

    seconds: float
    tail_seconds: float
    start_to_end_seconds: float
    idle_share: float
    responses: list[list[int]] = field(repr=False)
    spans: list[tuple[int, int, float, float]] = field(repr=False)
    status: dict[str, Any] = field(default_factory=dict)

    def numbers(self) -> dict[str, Any]:
        """For JSON: all but the responses and spans."""
        return {key: value for key, value in asdict(self).items() if key not in ("responses", "spans")}


class OracleClient(RoutedClient):
    """Tells the router each response's length before it starts."""

    lengths: list[int] = []

    def describe(self, prompt_ids, sampling_params, limit):
        number = sampling_params["extra_args"][ARGUMENT]
        about = super().describe(prompt_ids, sampling_params, limit)
        return {**about, "group": str(number), "expected": self.lengths[number]}


def make_client(variant: Variant, servers: dict[str, Any], config: DictConfig, folder: Path):
    """The variant's client and router, which begin anew in every rollout."""
    if variant.router == "verl":
        router = ray.remote(GlobalRequestLoadBalancer).options(num_cpus=0).remote(servers=servers)
        return LLMServerClient(config, router), router
    config = OmegaConf.merge(config, {"routing": {"chunk_tokens": variant.chunk_tokens}})
    drafts = config.speculation.num_speculative_tokens if variant.engines != "off" else 0
    routing = OmegaConf.to_container(config.routing, resolve=True)
    settings = {**routing, "lookahead_tokens": drafts, "log": str(folder / LOG_FILE)}
    router = ContextRouterActor.remote(servers, settings)
    return (OracleClient if variant.router == "oracle" else RoutedClient)(config, router), router


async def run(
    variant: Variant, servers: dict[str, Any], config: DictConfig, work: Work, end_token: int, folder: Path
) -> Rollout:
    """Generate all responses of `work`; the router's log goes to `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    await asyncio.gather(*(server.begin.remote(work.lengths, end_token) for server in servers.values()))
    client, router = make_client(variant, servers, config, folder)
    await router.get_status.remote()  # it is there
    client.lengths = work.lengths
    common = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "ignore_eos": True, "detokenize": False}

    async def respond(number: int) -> list[int]:
        own = {"seed": work.seeds[number], "stop_token_ids": [end_token], "extra_args": {ARGUMENT: number}}
        output = await client.generate(
            f"{number}", prompt_ids=list(work.prompts[number]), sampling_params={**common, **own}
        )
        return list(output.token_ids)

    began = time.time()
    responses = await asyncio.gather(*map(respond, range(len(work.prompts))))
    seconds = time.time() - began
    spans = []
    for replica, server in enumerate(servers.values()):
        spans += [(n, replica, a - began, b - began) for n, a, b in await server.take_spans.remote()]
    status = await router.get_status.remote() if variant.router != "verl" else {}
    ray.kill(router)
    slots = len(servers) * config.actor_rollout_ref.rollout.max_num_seqs
    last = max(start for _, _, start, _ in spans if start) if spans else 0.0
    busy = sum(end - start for _, _, start, end in spans)
    return Rollout(
        seconds,
        seconds - half_empty_from(spans, slots),
        seconds - last,
        1 - busy / (slots * seconds),
        responses,
        spans,
        {name: status[name] for name in ("moves", "prefill_tokens", "held_by_kv") if name in status},
    )


def half_empty_from(spans: list[tuple[int, int, float, float]], slots: int) -> float:
    """Seconds from which on fewer than half of the slots are busy, until the end.

    Example:
        >>> half_empty_from([(0, 0, 0.0, 3.0), (1, 0, 0.0, 5.0), (2, 1, 1.0, 9.0)], slots=4)
        5.0
    """
    ends = np.sort([end for *_, end in spans])
    starts = np.sort([start for _, _, start, _ in spans])
    for end in ends[::-1]:
        # Busy just before this end.
        if np.searchsorted(starts, end, side="left") - np.searchsorted(ends, end, side="left") >= slots / 2:
            return float(end)
    return 0.0
