"""One rollout: all requests given at once, as verl does in a training step, to the servers of a variant."""

import asyncio
import time
from pathlib import Path
from typing import Any

import ray
from omegaconf import DictConfig, OmegaConf
from verl.workers.rollout.llm_server import LLMServerClient
from verl.workers.rollout.router import GlobalRequestLoadBalancer

from recipe.rollout.client import RoutedClient
from recipe.rollout.router import LOG_FILE, ContextRouterActor
from recipe.routing_bench.results import Rollout, Variant, half_empty_from
from recipe.routing_bench.work import Work
from sam.vllm.bench.forced_text import ARGUMENT


class HistoryClient(RoutedClient):
    """Tells the router what a history would: the mean of each prompt's lengths in an earlier epoch."""

    work: Work

    def describe(self, prompt_ids, sampling_params, limit):
        number = sampling_params["extra_args"][ARGUMENT]
        return {**super().describe(prompt_ids, sampling_params, limit), "expected": self.work.expected[number]}


class OracleClient(RoutedClient):
    """Tells the router each response's length before it starts."""

    work: Work

    def describe(self, prompt_ids, sampling_params, limit):
        number = sampling_params["extra_args"][ARGUMENT]
        about = super().describe(prompt_ids, sampling_params, limit)
        return {**about, "group": str(number), "expected": self.work.lengths[number]}


CLIENTS = {"context": RoutedClient, "history": HistoryClient, "oracle": OracleClient}


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
    return CLIENTS[variant.router](config, router), router


async def run(
    variant: Variant, servers: dict[str, Any], config: DictConfig, work: Work, end_token: int, folder: Path
) -> Rollout:
    """Generate all responses of `work`; the router's log goes to `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    await asyncio.gather(*(server.begin.remote(work.lengths, end_token) for server in servers.values()))
    client, router = make_client(variant, servers, config, folder)
    await router.get_status.remote()  # it is there
    client.work = work
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
        sum(len(tokens) == length for tokens, length in zip(responses, work.lengths, strict=True)),
        responses,
        spans,
        {name: status[name] for name in ("moves", "prefill_tokens", "held_by_kv") if name in status},
    )
