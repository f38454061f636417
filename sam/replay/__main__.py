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
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path

from tqdm import tqdm

from sam.command import new_figure, run_command
from sam.record.responses import read_recording
from sam.replay.baselines import NAMES, make_drafter
from sam.replay.cost import measure_cost
from sam.replay.round_robin import ORDERS, replay

SETTINGS = ("scope", "k", "order", "replicas", "delay", "epochs", "cross_prompt")  # that stand in every JSON object
DELAY = 64  # tokens: what a request generates in a second or two


def run(options: argparse.Namespace) -> Iterator[dict]:
    """Replay every file with every drafter; yields a row each."""
    how = {name: getattr(options, name) for name in ("order", "replicas", "delay", "epochs")}
    for path in options.traces:
        recording = read_recording(path, options.tokenizer)
        for name in options.drafter:
            make = partial(make_drafter, name, options.scope, options.k, options.corpus, options.cross_prompt)
            total = recording.num_tokens * (1 if options.no_cost else 2)
            with tqdm(total=total, unit="tok", desc=f"{path.stem} {name}", mininterval=2.0) as bar:
                result = replay(recording, make, options.k, progress=bar.update, **how)
                cost = {} if options.no_cost else measure_cost(recording, make, options.k, bar.update)
            head = {"file": path.name, "drafter": name} | {key: getattr(options, key) for key in SETTINGS}
            yield {**head, **result.summary(), **cost, "by_position": result.positions()}


def table(rows: list[dict]) -> str:
    """Lay out the rows as text, one line for each file and drafter."""
    names = ("calibration_error", "draft_us_per_step", "us_per_token", "bytes_per_token")
    lines = [
        f"{'file':28} {'drafter':18} {'k':>2} {'length':>7} {'rate':>6} {'calibration':>11} "
        f"{'us/step':>11} {'us/token':>11} {'bytes/token':>11}"
    ]
    for row in rows:
        shown = row | ({} if row["drafter"] == "sam" else {"calibration_error": None})  # others predict nothing
        values = [f"{'' if shown.get(name) is None else round(shown[name], 3):>11}" for name in names]
        lines.append(
            f"{row['file'][:28]:28} {row['drafter']:18} {row['k']:>2} {row['mean_acceptance_length']:7.3f} "
            f"{row['acceptance_rate']:6.3f} {' '.join(values)}"
        )
    return "\n".join(lines)


def plot(rows: list[dict], path: Path) -> None:
    """Draw acceptance length over response position, a panel for each recording and a line for each drafter.

    Raises:
        ValueError: matplotlib is not installed.
    """
    files = list(dict.fromkeys(row["file"] for row in rows))
    figure = new_figure(5.5 * len(files), 3.4)
    for axes, file in zip(figure.subplots(1, len(files), squeeze=False)[0], files, strict=True):
        for row in rows:
            if row["file"] == file:
                label = f"{row['drafter']}, {row['mean_acceptance_length']:.2f}"
                axes.plot(*zip(*row["by_position"], strict=True), marker=".", label=label)
        axes.set_title(f"{file}, k={rows[0]['k']}, scope {rows[0]['scope']}", fontsize=10)
        axes.set(xlabel="position in the response, tokens", ylabel="mean acceptance length")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.savefig(path, dpi=110)


def options_of(arguments: list[str] | None) -> argparse.Namespace:
    """Parse the command line, and refuse options that do not go together."""
    parser = argparse.ArgumentParser(prog="python -m sam.replay", description=__doc__.splitlines()[0])
    parser.add_argument("--traces", nargs="+", type=Path, required=True, help=".npz recordings or verl's .jsonl dumps")
    parser.add_argument("--drafter", nargs="+", default=["sam"], metavar="NAME", help=", ".join(NAMES))
    parser.add_argument("--scope", choices=("request", "group", "history"), default="group")
    parser.add_argument("--k", type=int, default=3, help="draft tokens per step (default 3)")
    parser.add_argument("--replicas", type=int, default=1, help="spread a prompt's samples over N drafters (default 1)")
    parser.add_argument("--sharing", action="store_true", help="replicas see each other's tokens, --delay tokens late")
    parser.add_argument("--delay", type=int, metavar="TOKENS", help=f"of a sample, with --sharing (default {DELAY})")
    parser.add_argument("--epochs", action="store_true", help="epoch by epoch, the first one not counted")
    parser.add_argument(
        "--cross-prompt", action=argparse.BooleanOptionalAction, default=True, help="sam remembers other prompts"
    )
    parser.add_argument("--corpus", type=Path, help="file of sam.corpus that sam drafts from as well")
    parser.add_argument("--order", choices=ORDERS, default="turns", help="within a round (default turns)")
    parser.add_argument("--tokenizer", help="for .jsonl dumps: folder or name of the tokenizer")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="draw acceptance length over response position")
    parser.add_argument("--no-cost", action="store_true", help="leave out the second pass, which measures cost")
    parser.add_argument("--json", action="store_true", help="one JSON object per line instead of a table")
    options = parser.parse_args(arguments)
    for name in ("k", "replicas"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} {getattr(options, name)}: expected 1 or more")
    if options.delay is not None and (options.delay < 0 or not options.sharing):
        parser.error(f"--delay {options.delay}: expected 0 or more, and --sharing")
    if options.sharing and options.replicas == 1:
        parser.error("--sharing: expected --replicas 2 or more")
    if options.sharing and options.delay is None:
        options.delay = DELAY
    options.epochs = "together" if not options.epochs else "kept" if options.scope == "history" else "forgotten"
    return options


def main(arguments: list[str] | None = None) -> int:
    options = options_of(arguments)

    def shown() -> str | Iterable[str]:
        rows = list(run(options))
        if options.plot:
            plot(rows, options.plot)
        return map(json.dumps, rows) if options.json else table(rows)

    return run_command(shown)


if __name__ == "__main__":
    sys.exit(main())
