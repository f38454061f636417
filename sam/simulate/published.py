"""`python -m sam.simulate.published`: the figures of the published set-ups beside those that sam.simulate gives for
their settings; with `--predict` also what other policies are predicted to give there, with `--parts` what each part of
the recipe brings."""

import argparse
import json
import sys

from tqdm import tqdm

from sam.command import run_command
from sam.simulate.__main__ import parse, run
from sam.simulate.setups import SETUPS, load_step_cost

PREDICTED_SEEDS = 2
# Settings to try instead of the published one, as options of sam.simulate.
PREDICTED = (
    "--policy threshold goodput --scope request group",
    "--policy goodput --routing prompt shared",
    "--policy goodput --routing shared --k 8",
)
PARTS_CHUNK = 2048  # tokens


def simulate(name: str, options: str) -> list[dict]:
    """The rows of `python -m sam.simulate --setup NAME` with further options, the first without speculation."""
    report, _ = run(parse(["--setup", name, *options.split()]))
    return report["rows"]


def reproduce(name: str) -> dict:
    """Published and simulated figures side by side."""
    setup, made_of = SETUPS[name], load_step_cost(name).fingerprint
    options = f"--policy threshold --scope request --drafter first-occurrence --seeds {setup.seeds}"
    off, row = simulate(name, options)
    rounds = float(made_of["rounds_a_step"]) / setup.seeds
    return {
        "setup": name,
        "published_gain_percent": [round(percent, 2) for percent in setup.gains],
        "gain_percent": _gain(off["seconds"], row["seconds"]),
        "mean_gain_percent": _gain(off["mean_seconds"], row["mean_seconds"]),
        "published_seconds": [setup.off, setup.on],
        "seconds": [round(rounds * one["seconds"]) for one in (off, row)],
        "published_tail_speedup": setup.tail_speedup,
        "tail_speedup": round(row["tail_speedup"], 3),
        "accept_length": round(row["accept_length"], 3),
        "mean_response_tokens": made_of["mean_response_tokens"],
        "rounds_a_step": float(made_of["rounds_a_step"]),
    }


def predict(name: str) -> list[dict]:
    """The published switch with sam's drafts, and other policies, scopes and routings.

    Of fewer rounds than `reproduce` takes: gains differ from its by a point or two, and among each other by what they
    say. Each is predicted twice, since the published tails, which are all of long contexts, do not say what verifying
    costs in short ones: as fitted, and as much in every context as in theirs.
    """
    rows = []
    for options in PREDICTED:
        options += f" --seeds {min(SETUPS[name].seeds, PREDICTED_SEEDS)}"
        off, *found = simulate(name, options)
        # Without drafts the cautious table costs the same.
        _, *cautious = simulate(name, f"{options} --step-cost {name}_cautious")
        for row, other in zip(found, cautious, strict=True):
            kept = ("scope", "routing", "tail_speedup", "accept_length", "switched_on")
            gains = [_gain(off["seconds"], one["seconds"]) for one in (row, other)]
            head = {"setup": name, "policy": row["label"], "gain_percent": gains[0], "cautious_gain_percent": gains[1]}
            rows.append({**head, **{key: row[key] for key in kept}})
    return rows


def parts(name: str, chunk: int = PARTS_CHUNK) -> list[dict]:
    """What the recipe's router, chunks, drafts and shared drafting context bring, alone and together: gains over no
    speculation with verl's router."""
    chunks, rows = f"--chunk 0 {chunk} --seeds 1", []
    base, ordered, divided = simulate(name, f"--policy never --router context {chunks}")
    _, own, shared = simulate(name, "--policy goodput --routing least-loaded shared --seeds 1")
    _, whole, everything = simulate(name, f"--policy goodput --routing shared --router context {chunks}")
    named = {"routing": ordered, "routing, chunks": divided, "drafts": own, "drafts, sharing": shared,
             "routing, drafts, sharing": whole, "all": everything}  # fmt: skip
    for part, row in named.items():
        gain, tail = _gain(base["seconds"], row["seconds"]), base["last_tenth_seconds"] / row["last_tenth_seconds"]
        rows.append({"setup": name, "part": part, "gain_percent": gain, "tail_speedup": round(tail, 2)})
    return rows


def table_of_parts(rows: list[dict]) -> str:
    lines = [f"{'parts':12} {'':>24} {'gain %':>7} {'last tenth':>10}   predicted, over verl's router without drafts"]
    line = "{setup:12} {part:>24} {gain_percent:7.2f} {tail_speedup:9.2f}x"
    return "\n".join([*lines, *map(line.format_map, rows)])


def _gain(off: float, on: float) -> float:
    """Percent by which the rollout without speculation takes longer, as published."""
    return round(100 * (off / on - 1), 2)


def table(reproduced: list[dict], predicted: list[dict]) -> str:
    """Lay out the rows of `reproduce` and `predict` as text."""
    lines = [
        "gains are off / on - 1, as published; step costs are fitted to published figures, not measured",
        f"{'set-up':18} {'published gain %':>17} {'simulated':>9} {'seconds, published':>19} {'simulated':>14} "
        f"{'tail':>5} {'simulated':>9}",
    ]
    for row in reproduced:
        gains = " and ".join(f"{gain:.2f}" for gain in row["published_gain_percent"])
        published, simulated = (" to ".join(f"{s:.0f}" for s in row[key]) for key in ("published_seconds", "seconds"))
        lines.append(
            f"{row['setup']:18} {gains:>17} {row['gain_percent']:9.2f} {published:>19} {simulated:>14} "
            f"{row['published_tail_speedup'] or '':>5} {row['tail_speedup']:9.3f}"
        )
    if predicted:
        lines.append(
            f"{'predicted':18} {'policy':>17} {'scope':>8} {'routing':>13} {'gain %':>7} {'cautious':>8} {'tail':>6} "
            f"{'length':>7} {'on':>5}"
        )
    line = (
        "{setup:18} {policy:>17} {scope:>8} {routing:>13} {gain_percent:7.2f} {cautious_gain_percent:8.2f} "
        "{tail_speedup:6.3f} {accept_length:7.3f} {switched_on:5.2f}"
    )
    return "\n".join([*lines, *map(line.format_map, predicted)])


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m sam.simulate.published", description=__doc__)
    parser.add_argument("--setup", nargs="+", choices=tuple(SETUPS), default=list(SETUPS))
    parser.add_argument("--predict", action="store_true", help="other policies too; minutes")
    parser.add_argument("--parts", action="store_true", help="what each part of the recipe brings too; minutes")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    options = parser.parse_args(arguments)

    def shown() -> str:
        reproduced = [reproduce(name) for name in tqdm(options.setup, unit="set-up", disable=None)]
        predicted = [row for name in options.setup if options.predict for row in predict(name)]
        bring = [row for name in options.setup if options.parts for row in parts(name)]
        if options.json:
            return json.dumps({"published": reproduced, "predicted": predicted, "parts": bring})
        return "\n".join([table(reproduced, predicted), *([table_of_parts(bring)] if bring else [])])

    return run_command(shown)


if __name__ == "__main__":
    sys.exit(main())
