"""The rounds of recipe.routing_bench: which variants, what work, in which order."""

import argparse
import asyncio
import secrets
from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from tqdm import tqdm

from recipe.report.gantt import Span, draw
from recipe.routing_bench.results import Rollout, Variant, Work
from recipe.routing_bench.rollout import run
from recipe.routing_bench.servers import start_servers
from recipe.routing_bench.table import as_text, rows
from recipe.seeds import sample_seed
from sam.sharing.shard import start_shards
from sam.simulate.lengths import LogNormal

REFERENCE = "verl"
SHARD_BYTES = 64 << 20


def variants_of(options: argparse.Namespace) -> list[Variant]:
    """verl's router first, then ours, for each kind of engine."""
    made = [Variant(REFERENCE, "verl"), Variant("context", "context")]
    made += [Variant(f"context, chunks of {chunk}", "context", chunk_tokens=chunk) for chunk in options.chunk]
    made.append(Variant("oracle's order", "oracle"))
    chunk = options.chunk[0]
    made += [Variant("verl, sam", "verl", "sam"), Variant("verl, sam, sharing", "verl", "shared")]
    made.append(Variant("context, sam, sharing", "context", "shared"))
    made.append(Variant(f"context, sam, sharing, chunks of {chunk}", "context", "shared", chunk))
    return [variant for variant in made if variant.engines in options.engines]


def make_work(options: argparse.Namespace, tokenizer, texts: list, round_: int) -> Work:
    """The requests of a round, those of a prompt one after the other, as verl gives them."""
    lengths = LogNormal(options.mean, options.cap, options.sigma, options.correlation)
    drawn = lengths.draw(options.groups, options.samples, seed=round_).lengths.tolist()
    first = round_ * options.groups
    chosen = [texts[(first + number) % len(texts)] for number in range(options.groups)]
    prompts = [tokenizer.apply_chat_template(text, add_generation_prompt=True, return_dict=False) for text in chosen]
    seeds = [
        sample_seed(0, "train", round_, group, sample)
        for group in range(options.groups)
        for sample in range(options.samples)
    ]
    return Work([prompt for prompt in prompts for _ in range(options.samples)], seeds, drawn)


async def play(options: argparse.Namespace, configs: dict[str, DictConfig], folder: Path) -> tuple[dict, str]:
    """Start the engines, play a warm-up round and the rounds that count; returns the results and their table."""
    import pandas
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(options.assets / "model")
    table = pandas.read_parquet(options.assets / "train.parquet")["prompt"]
    texts = [list(map(dict, row)) for row in table.head((options.rounds + 1) * options.groups)]
    end_token = tokenizer.convert_tokens_to_ids(chr(0)) if chr(0) in tokenizer.get_vocab() else 0
    variants = variants_of(options)
    servers, _shards = await start_engines(options, configs)  # an actor ends when nobody holds its handle
    rounds: list[dict[str, Rollout]] = []
    logs = options.output or folder
    with tqdm(total=(options.rounds + 1) * len(variants), unit="rollout", disable=None) as bar:
        for round_ in range(options.rounds + 1):
            work, found = make_work(options, tokenizer, texts, round_), {}
            first = round_ % len(variants)
            for variant in variants[first:] + variants[:first]:
                bar.set_description(variant.name)
                place = logs / f"round_{round_}" / variant.name.replace(", ", "_").replace(" ", "_")
                found[variant.name] = await run(
                    variant, servers[variant.engines], configs[variant.engines], work, end_token, place
                )
                bar.update()
            if round_:
                rounds.append({variant.name: found[variant.name] for variant in variants})
    reference = variants[0].name
    results = rows(rounds, reference)
    if options.output:
        panels = [panel(name, rounds[0][name], options.samples) for name in (v.name for v in shown(variants))]
        draw(panels, options.output / "rollouts.png")
    kept = {key: str(value) if isinstance(value, Path) else value for key, value in vars(options).items()}
    each = [{name: one.numbers() for name, one in round_.items()} for round_ in rounds]
    return {"options": kept, "rows": results, "rounds": each}, as_text(results, reference)


async def start_engines(options: argparse.Namespace, configs: dict[str, DictConfig]) -> tuple[dict, list]:
    """Servers by kind of engine, by name; and the shards by which those that share do."""
    servers: dict[str, dict[str, Any]] = {}
    started, shards = [], []
    for number, (kind, config) in enumerate(configs.items()):
        handles, starting = start_servers(config, options.replicas, number * options.replicas)
        servers[kind] = {f"replica {i}": handle for i, handle in enumerate(handles)}
        started += starting
    with tqdm(total=len(started), unit="engine", desc="starting engines", disable=None) as bar:
        for one in asyncio.as_completed(started):
            await one
            bar.update()
    if "shared" in servers:
        cluster, shards = start_shards(1, secrets.token_hex(8), SHARD_BYTES)
        await asyncio.gather(*(server.share.remote(cluster) for server in servers["shared"].values()))
    return servers, shards


def shown(variants: list[Variant]) -> list[Variant]:
    """The variants in the picture: verl's router, the context router whole and in chunks, and all together."""
    first = [variant for variant in variants if variant.engines == "off" and variant.router != "oracle"][:3]
    return [*first, *[variant for variant in variants if variant.engines == "shared"][:1]]


def panel(name: str, rollout: Rollout, samples: int) -> tuple[str, list[Span], bool]:
    """A picture's panel of one rollout."""
    spans = [Span(request, request // samples, *where) for request, *where in rollout.spans]
    heading = f"{name}: {rollout.seconds:.1f} s, tail {rollout.tail_seconds:.1f} s"
    return heading, spans, not name.startswith("verl")
