"""The rounds of recipe.routing_bench: which variants, which prompts, in which order."""

import argparse

from tqdm import tqdm

from recipe.report.gantt import Span, draw
from recipe.routing_bench.engines import Engines
from recipe.routing_bench.results import Rollout, Variant
from recipe.routing_bench.table import as_text, rows

REFERENCE = "verl"


def variants_of(options: argparse.Namespace) -> list[Variant]:
    """verl's router first, then ours, for each kind of engine; recorded lengths have no earlier epoch."""
    made = [Variant(REFERENCE, "verl"), Variant("context", "context")]
    made += [Variant(f"context, chunks of {chunk}", "context", chunk_tokens=chunk) for chunk in options.chunk]
    made += [Variant("context, an epoch before", "history"), Variant("oracle's order", "oracle")]
    chunk = options.chunk[0]
    made += [Variant("verl, sam", "verl", "sam"), Variant("verl, sam, sharing", "verl", "shared")]
    made.append(Variant("context, sam, sharing", "context", "shared"))
    made.append(Variant("context, an epoch before, sam, sharing", "history", "shared"))
    made.append(Variant(f"context, sam, sharing, chunks of {chunk}", "context", "shared", chunk))
    made = [variant for variant in made if options.lengths is None or variant.router != "history"]
    return [variant for variant in made if variant.engines in options.engines]


def prompts_of(variants: list[Variant]) -> dict[str, int]:
    """Which of a round's sets of prompts each variant has, by name.

    Engines without drafts have the first. Drafters keep the text of prompts that they have seen and would copy another
    variant's responses: each variant that drafts has a set of its own.
    """
    drafting = [variant.name for variant in variants if variant.engines != "off"]
    return {variant.name: 0 for variant in variants} | {name: i for i, name in enumerate(drafting, start=1)}


async def play(options: argparse.Namespace, engines: Engines) -> tuple[dict, str]:
    """Play a warm-up round and the rounds that count; returns the results and their table."""
    variants = variants_of(options)
    sets = prompts_of(variants)
    each_round = (max(sets.values()) + 1) * options.groups
    rounds: list[dict[str, Rollout]] = []
    with tqdm(total=(options.rounds + 1) * len(variants), unit="rollout", disable=None) as bar:
        for round_ in range(options.rounds + 1):
            found, first = {}, round_ % len(variants)
            for variant in variants[first:] + variants[:first]:
                bar.set_description(variant.name)
                work = engines.work(round_, round_ * each_round + sets[variant.name] * options.groups)
                found[variant.name] = await engines.run(variant, work, f"round_{round_}")
                bar.update()
            if round_:
                rounds.append({variant.name: found[variant.name] for variant in variants})
    reference = variants[0].name
    results = rows(rounds, reference, {name for name, number in sets.items() if number != sets[reference]})
    if options.output:
        panels = [panel(name, rounds[0][name], options.samples) for name in (v.name for v in shown(variants))]
        draw(panels, options.output / "rollouts.png")
    each = [{name: one.numbers() for name, one in round_.items()} for round_ in rounds]
    return {"rows": results, "rounds": each}, as_text(results, reference)


def shown(variants: list[Variant]) -> list[Variant]:
    """The variants in the picture: verl's router, the context router whole and in chunks, and all together."""
    first = [variant for variant in variants if variant.engines == "off" and variant.router in ("verl", "context")][:3]
    return [*first, *[variant for variant in variants if variant.engines == "shared"][:1]]


def panel(name: str, rollout: Rollout, samples: int) -> tuple[str, list[Span], bool]:
    """A picture's panel of one rollout."""
    spans = [Span(request, request // samples, *where) for request, *where in rollout.spans]
    heading = f"{name}: {rollout.seconds:.1f} s, tail {rollout.tail_seconds:.1f} s"
    return heading, spans, not name.startswith("verl")
