"""`python -m sam.replay --traces FILES --drafter sam --scope group --k 3`: how drafters do on recorded responses.

All samples of a prompt start together. In every round each of them drafts, has its draft compared with the recorded
tokens, and advances by the accepted tokens and the bonus token. A drafter sees a sample's prompt and tokens, and the
accepted tokens of the samples that share it. Within a round the samples go round robin, so that the second sample's
drafter has seen the first one's new tokens.

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

from sam.command import run_command
from sam.record.responses import read_recording
from sam.replay.baselines import NAMES, make_drafter
from sam.replay.cost import measure_cost
from sam.replay.round_robin import replay

SETTINGS = ("scope", "k", "replicas", "delay", "epochs")  # that stand in every JSON object
DELAY = 64  # tokens: what a request generates in a second or two
# Columns of the table: name, row's key, width.
COLUMNS = (
    ("file", "file", 28), ("drafter", "drafter", 17), ("k", "k", 2), ("length", "mean_acceptance_length", 7),
    ("rate", "acceptance_rate", 7), ("calibration", "calibration_error", 11), ("us/step", "draft_us_per_step", 9),
    ("us/token", "us_per_token", 9), ("bytes/token", "bytes_per_token", 11),
)  # fmt: skip


def run(options: argparse.Namespace) -> Iterator[dict]:
    """Replay every file with every drafter; yields a row each."""
    how = {name: getattr(options, name) for name in ("replicas", "delay", "epochs")}
    for path in options.traces:
        recording = read_recording(path, options.tokenizer)
        for name in options.drafter:
            make = partial(make_drafter, name, options.scope, options.k, options.corpus)
            with tqdm(total=2 * recording.num_tokens, unit="tok", desc=f"{path.stem} {name}", mininterval=2.0) as bar:
                result = replay(recording, make, options.k, progress=bar.update, **how).summary()
                cost = measure_cost(recording, make, options.k, bar.update)
            head = {"file": path.name, "drafter": name} | {key: getattr(options, key) for key in SETTINGS}
            yield {**head, **result, **cost}


def table(rows: list[dict]) -> str:
    """Lay out the rows as text, one line for each file and drafter."""
    lines = [" ".join(f"{name:<{width}}" for name, _, width in COLUMNS)]
    for row in rows:
        row = row | ({} if row["drafter"] == "sam" else {"calibration_error": "-"})  # others predict nothing
        cells = [(f"{row[key]:.3f}" if type(row[key]) is float else str(row[key]), width) for _, key, width in COLUMNS]
        lines.append(" ".join(f"{text[:width]:<{width}}" for text, width in cells))
    return "\n".join(lines)


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
    parser.add_argument("--corpus", type=Path, help="file of sam.corpus that sam drafts from as well")
    parser.add_argument("--tokenizer", help="for .jsonl dumps: folder or name of the tokenizer")
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
        return map(json.dumps, rows) if options.json else table(rows)

    return run_command(shown)


if __name__ == "__main__":
    sys.exit(main())
