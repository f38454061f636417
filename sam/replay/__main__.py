"""`python -m sam.replay --traces FILES --drafter sam --scope group --k 3`: how drafters do on recorded responses.

All samples of a prompt start together. In every round each of them drafts, has its draft compared with the recorded
tokens, and advances by the accepted tokens and the bonus token. A drafter sees a sample's prompt and tokens, and the
accepted tokens of the samples that share it. Within a round the samples go round robin (`--order turns`), so that the
second sample's drafter has seen the first one's new tokens; an engine drafts for all of them at once (`--order
engine`), which accepts a little less where many samples share a drafter.

With `--replicas N` a prompt's samples are spread round robin over N replicas, each with a drafter of its own. With
`--sharing` they see each other's tokens, which arrive when the sample has generated `--delay` more. With `--epochs` a
recording of several epochs is replayed epoch by epoch, and the first one is not counted; drafters remember earlier ones
with `--scope history`, and are new in each epoch otherwise.

Cost is measured in a second pass, as an engine would pay it: up to 256 requests run at once, one call appends for all
of them and one drafts, on one replica. Prints one JSON object for each file and drafter, or a table.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from tqdm import tqdm

from sam.command import run_command
from sam.record.responses import read_recording
from sam.replay.baselines import NAMES, make_drafter
from sam.replay.cost import measure_cost
from sam.replay.paths import compare_paths, paths_table
from sam.replay.round_robin import ORDERS, replay

SETTINGS = ("scope", "k", "order", "replicas", "delay", "epochs", "cross_prompt")  # that stand in every JSON object
DELAY = 64  # tokens: what a request generates in a second or two


def run(options: argparse.Namespace) -> Iterator[dict]:
    """Replay every file with every drafter; yields a row each."""
    for path in options.traces:
        recording = read_recording(path, options.tokenizer)
        for name in options.drafter:
            make = partial(
                make_drafter, name, options.scope, options.k, options.corpus, options.cross_prompt, options.datastore
            )
            total = recording.num_tokens * (1 if options.no_cost else 2)
            with tqdm(total=total, unit="tok", desc=f"{path.stem} {name}", mininterval=2.0) as bar:
                result = replay(
                    recording,
                    make,
                    options.k,
                    options.samples,
                    options.order,
                    bar.update,
                    replicas=options.replicas,
                    delay=options.delay,
                    epochs=options.epochs,
                )
                cost = {} if options.no_cost else measure_cost(recording, make, options.k, bar.update)
            head = {"file": path.name, "drafter": name} | {key: getattr(options, key) for key in SETTINGS}
            positions = result.positions() if options.by_position else None
            yield {**head, **result.summary(), **cost, "by_position": positions}


def table(rows: list[dict]) -> str:
    """Lay out the rows as text, one line for each file and drafter."""
    lines = [
        f"{'file':28} {'drafter':18} {'k':>2} {'length':>7} {'rate':>6} {'calibration':>11} "
        f"{'us/step':>8} {'ns/append':>9} {'us/token':>8} {'bytes/token':>11}"
    ]
    for row in rows:
        error = row["calibration_error"] if row["drafter"] == "sam" else None
        names = ("draft_us_per_step", "extend_ns_per_token", "us_per_token", "bytes_per_token")
        values = zip([error, *map(row.get, names)], (3, 2, 0, 2, 0), strict=True)
        shown = ["" if value is None else f"{value:.{digits}f}" for value, digits in values]
        lines.append(
            f"{row['file'][:28]:28} {row['drafter']:18} {row['k']:>2} {row['mean_acceptance_length']:7.3f} "
            f"{row['acceptance_rate']:6.3f} {shown[0]:>11} {shown[1]:>8} {shown[2]:>9} {shown[3]:>8} {shown[4]:>11}"
        )
    for row in rows:
        if row["by_position"]:
            pairs = [f"{position}: {length:.2f}" for position, length in row["by_position"]]
            lines += [f"{row['file']} {row['drafter']}, mean acceptance length from position", "  " + "  ".join(pairs)]
    return "\n".join(lines)


def _check_replicas(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    if options.replicas < 1:
        parser.error(f"--replicas {options.replicas}: expected 1 or more")
    if options.replicas > 1 and options.samples:
        parser.error("--samples and --replicas: expected one of them")
    if options.delay is not None and (options.delay < 0 or not options.sharing):
        parser.error(f"--delay {options.delay}: expected 0 or more, and --sharing")
    if options.sharing:
        if options.replicas == 1:
            parser.error("--sharing: expected --replicas 2 or more")
        options.delay = DELAY if options.delay is None else options.delay


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m sam.replay", description=__doc__.splitlines()[0])
    parser.add_argument("--traces", nargs="+", type=Path, required=True, help=".npz recordings or verl's .jsonl dumps")
    parser.add_argument("--drafter", nargs="+", default=["sam"], metavar="NAME", help=", ".join(NAMES))
    parser.add_argument("--scope", choices=("request", "group", "history"), default="group")
    parser.add_argument("--k", type=int, default=3, help="draft tokens per step (default 3)")
    parser.add_argument("--samples", type=int, help="samples of a prompt that share a drafter (default: all)")
    parser.add_argument("--replicas", type=int, default=1, help="spread a prompt's samples over N drafters (default 1)")
    parser.add_argument("--sharing", action="store_true", help="replicas see each other's tokens, --delay tokens late")
    parser.add_argument("--delay", type=int, metavar="TOKENS", help=f"of a sample, with --sharing (default {DELAY})")
    parser.add_argument("--epochs", action="store_true", help="epoch by epoch, the first one not counted")
    parser.add_argument(
        "--cross-prompt", action=argparse.BooleanOptionalAction, default=True, help="sam remembers other prompts"
    )
    parser.add_argument("--corpus", type=Path, help="file of sam.corpus that sam drafts from as well")
    parser.add_argument("--datastore", nargs="+", type=Path, default=[], help="recordings that rest looks up")
    parser.add_argument("--paths", nargs="+", type=int, help="paths of draft tokens; by complete siblings known")
    parser.add_argument("--order", choices=ORDERS, default="turns", help="within a round (default turns)")
    parser.add_argument("--tokenizer", help="for .jsonl dumps: folder or name of the tokenizer")
    parser.add_argument("--by-position", action="store_true", help="acceptance length over response position")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="draw acceptance length over response position")
    parser.add_argument("--no-cost", action="store_true", help="leave out the second pass, which measures cost")
    parser.add_argument("--json", action="store_true", help="one JSON object per line instead of a table")
    options = parser.parse_args(arguments)
    if options.k < 1:
        parser.error(f"--k {options.k}: expected 1 or more")
    _check_replicas(parser, options)
    options.epochs = "together" if not options.epochs else "kept" if options.scope == "history" else "forgotten"
    if options.paths and min(options.paths) < 1:
        parser.error(f"--paths {min(options.paths)}: expected 1 or more")
    options.by_position |= options.plot is not None

    def shown() -> str | Iterator[str]:
        if options.paths:
            rows = list(
                compare_paths(options.traces, options.paths, options.k, options.cross_prompt, options.tokenizer)
            )
            return map(json.dumps, rows) if options.json else paths_table(rows)
        rows = list(run(options))
        if options.plot:
            from sam.replay.plot import plot_by_position

            plot_by_position(rows, options.plot)
        return map(json.dumps, rows) if options.json else table(rows)

    return run_command(shown)


if __name__ == "__main__":
    sys.exit(main())
