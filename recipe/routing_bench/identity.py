"""`--identity`: whether every router gives the tokens of verl's balancer without speculation."""

import argparse

from tqdm import tqdm

from recipe.routing_bench.engines import Engines
from recipe.routing_bench.results import Rollout, Variant

REFERENCE = Variant("reference", "verl")
NO_CHUNKS = "no chunks"  # verl's balancer has none


def cells(options: argparse.Namespace) -> list[Variant]:
    """{verl, context} x {whole, each of --chunk} x {1, all replicas} x --engines; one replica shares with none."""
    ways = [("verl", None), ("context", None), *[("context", chunk) for chunk in options.chunk]]
    return [
        Variant(f"{router}, {chunk}, {replicas}, {engines}", router, engines, chunk, replicas)
        for router, chunk in ways
        for replicas in dict.fromkeys((1, options.replicas))
        for engines in options.engines
        if engines != "shared" or replicas > 1
    ]


async def play(options: argparse.Namespace, engines: Engines) -> tuple[dict, str]:
    """Play every cell once; returns a row for each, and their table.

    A cell that drafts has prompts of its own, and so has its reference: drafters keep the text of prompts that they
    have seen, and of a copy nothing is ever rejected.
    """
    rows, references, prompts = [], {}, 0
    for cell in tqdm(cells(options), unit="cell", disable=None):
        if cell.engines != "off":
            prompts += options.groups
        first = prompts if cell.engines != "off" else 0
        work = engines.work(0, first)
        if first not in references:
            references[first] = await engines.run(REFERENCE, work, f"prompts_{first}")
        rows.append(compare(cell, await engines.run(cell, work, f"prompts_{first}"), references[first]))
    lengths = engines.work(0, 0).lengths
    longer = [f"{sum(length > chunk for length in lengths)} of more than {chunk}" for chunk in options.chunk]
    heading = (
        f"of {len(lengths)} responses ({', '.join(longer)} tokens) equal to those of verl's balancer without drafts:"
    )
    return {"rows": rows}, "\n".join([heading, *as_text(rows, options.chunk)])


def compare(cell: Variant, own: Rollout, base: Rollout) -> dict:
    """A row: the cell, how many responses are the reference's token for token, and whether all are."""
    equal = sum(a == b for a, b in zip(own.responses, base.responses, strict=True))
    about = {"router": cell.router, "chunk": cell.chunk_tokens, "replicas": cell.replicas, "engines": cell.engines}
    return {**about, "equal": equal, "responses": len(base.responses), "identical": equal == len(base.responses)}


def as_text(rows: list[dict], chunks: list[int]) -> list[str]:
    """Lay out the cells: a line for each router and chunk, a column for each number of replicas and kind of engine."""
    found = {(row["router"], row["chunk"], row["replicas"], row["engines"]): row["equal"] for row in rows}
    columns = list(dict.fromkeys((row["replicas"], row["engines"]) for row in rows))
    columns.sort(key=lambda column: column[0])
    names = [f"{engines}, {replicas} replica{'s' if replicas > 1 else ''}" for replicas, engines in columns]
    lines = [" " * 24 + "".join(f"{name:>20}" for name in names)]
    for router in ("verl", "context"):
        for chunk in (None, *chunks):
            name = f"{router}, {'whole' if chunk is None else f'chunks of {chunk}'}"
            cells_of = [found.get((router, chunk, *column), NO_CHUNKS) for column in columns]
            lines.append(f"{name:24}" + "".join(f"{cell:>20}" for cell in cells_of))
    return lines
