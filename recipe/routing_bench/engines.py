"""The engines of recipe.routing_bench, and rollouts of its variants on them."""

import argparse
import asyncio
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from omegaconf import DictConfig
from tqdm import tqdm

from recipe.routing_bench.results import Rollout, Variant
from recipe.routing_bench.rollout import run
from recipe.routing_bench.servers import start_servers
from recipe.routing_bench.work import Lengths, Work, make_work
from sam.bench.prompts import read_prompts
from sam.record.tokenizer import Tokenizer
from sam.sharing.shard import start_shards

SHARD_BYTES = 64 << 20


class Engines:
    """Engines that are up, by kind.

    Args:
        configs: of each kind.
        lengths: a round's, from its number.
        folder: for the routers' logs.
    """

    def __init__(
        self,
        options: argparse.Namespace,
        configs: dict[str, DictConfig],
        lengths: Callable[[int], Lengths],
        folder: Path,
    ):
        self._options, self._configs, self._lengths, self._folder = options, configs, lengths, folder
        model = options.assets / "model"
        self._end_token = Tokenizer(model).whole.get_vocab().get(chr(0), 0)
        self._prompts = read_prompts(options.assets / "train.parquet", model)
        self._servers: dict[str, dict[str, Any]] = {}
        self._shards: list[Any] = []  # an actor ends when nobody holds its handle

    @classmethod
    async def start(cls, *arguments) -> Self:
        """Start them all; arguments as of the class."""
        engines = cls(*arguments)
        await engines._start()
        return engines

    async def _start(self) -> None:
        started, replicas = [], self._options.replicas
        for number, (kind, config) in enumerate(self._configs.items()):
            handles, starting = start_servers(config, replicas, number * replicas)
            self._servers[kind] = {f"replica {i}": handle for i, handle in enumerate(handles)}
            started += starting
        with tqdm(total=len(started), unit="engine", desc="starting engines", disable=None) as bar:
            for one in asyncio.as_completed(started):
                await one
                bar.update()
        if (milliseconds := self._options.least_step_ms) > 0:
            servers = [server for servers in self._servers.values() for server in servers.values()]
            await asyncio.gather(*(server.last_at_least.remote(milliseconds) for server in servers))
        if "shared" in self._servers:
            cluster, self._shards = start_shards(1, secrets.token_hex(8), SHARD_BYTES)
            await asyncio.gather(*(server.share.remote(cluster) for server in self._servers["shared"].values()))

    async def stop_sharing(self) -> None:
        """Before the shards end with this process: to a drafter that still asks, that is a failure to warn of."""
        if self._shards:
            await asyncio.gather(*(server.stop_sharing.remote() for server in self._servers["shared"].values()))

    def work(self, round_: int, first_prompt: int) -> Work:
        """The requests of a round, with prompts from number `first_prompt` on."""
        return make_work(self._options, self._prompts, self._lengths(round_), first_prompt)

    async def run(self, variant: Variant, work: Work, place: str) -> Rollout:
        """A rollout; the router's log goes to the folder `place`."""
        servers = dict(list(self._servers[variant.engines].items())[: variant.replicas])
        folder = self._folder / place / variant.name.replace(", ", "_").replace(" ", "_")
        return await run(variant, servers, self._configs[variant.engines], work, self._end_token, folder)
