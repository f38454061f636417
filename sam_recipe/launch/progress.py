"""What the screen shows of a run whose output goes to a file: one line of progress, or the file itself."""

import io
import sys
import time
from pathlib import Path

from tqdm import tqdm

from sam.log import LINE
from sam_recipe.launch.ending import LOG_FILE
from sam_recipe.record import METRICS_FILE, RUNNING, STATE_FILE, VALIDATING, read_json, read_metrics

SECONDS_BETWEEN_LINES = 30.0  # where the screen is a pipe or a file
# Of a step's metrics.
SHOWN = {
    "rollout/reward_all/mean": "reward {:+.2f}",
    "response_length/mean": "response {:.0f} tokens",
    "rollout/seconds": "rollout {:.1f} s",
    "rollout/spec_accept_length": "acceptance length {:.2f}",
}


class _Lines(io.TextIOBase):
    """What tqdm writes, on a standard error that is no terminal: whole lines, without carriage returns."""

    def write(self, text: str) -> None:
        if text.strip():
            print(text.strip(), file=sys.stderr, flush=True)


def progress_bar(**arguments) -> tqdm:
    """A bar that moves on a terminal; in a pipe or a file, a line now and then."""
    if sys.stderr.isatty():
        return tqdm(mininterval=1.0, file=sys.stderr, dynamic_ncols=True, **arguments)
    return tqdm(mininterval=SECONDS_BETWEEN_LINES, file=_Lines(), ncols=0, **arguments)


class Progress:
    """Follows a run: what it starts, then its metrics.jsonl, one tick per training step, with its most important
    metrics beside it. What this project's loggers add to the log comes above it, each message once. `first`: the step
    that a resumed run goes on from.
    """

    def __init__(self, run_directory: Path, total_steps: int | None, first: int = 0):
        self.run_directory, self.first = run_directory, first
        self._log_read, self._size = self._size_of(LOG_FILE), self._size_of(METRICS_FILE)
        self._warned: set[tuple[str, str]] = set()
        self._phase = "starting"
        self.bar = progress_bar(
            total=total_steps, initial=first, unit="step", desc=self._phase, smoothing=0.0, miniters=1
        )

    def update(self) -> None:
        """Show what is new; called a few times a second."""
        self._show_warnings()
        self._enter(read_json(self.run_directory / STATE_FILE).get("phase", ""))
        if (size := self._size_of(METRICS_FILE)) != self._size:
            self._size = size
            step = max(metrics := read_metrics(self.run_directory), default=0)
            row = metrics.get(step, {})
            drafted = row.get("rollout/spec_drafted_tokens")
            named = [key for key in SHOWN if key in row and (drafted or key != "rollout/spec_accept_length")]
            self.bar.set_postfix_str(", ".join(SHOWN[key].format(row[key]) for key in named), refresh=False)
            self.bar.update(max(self.first, step) - self.bar.n)
        elif sys.stderr.isatty():
            self.bar.refresh()  # its clock goes on

    def close(self) -> None:
        """Leave the last line on the screen."""
        self.bar.close()

    def _enter(self, phase: str) -> None:
        """Show a phase that begins. The clock of the steps, from which their estimate comes, begins with training."""
        if phase == self._phase or not (phase.startswith("starting") or phase in (VALIDATING, RUNNING)):
            return
        self._phase = phase
        if phase == RUNNING:
            self.bar.start_t, self.bar.last_print_t = time.time(), 0.0  # the first step is shown at once
        self.bar.set_description("training" if phase == RUNNING else phase)

    def _show_warnings(self) -> None:
        """The messages since the last call, with the logger's name before each."""
        if self._size_of(LOG_FILE) == self._log_read:
            return
        with open(self.run_directory / LOG_FILE, "rb") as file:
            file.seek(self._log_read)
            whole_lines = file.read().rpartition(b"\n")[0]
        self._log_read += len(whole_lines)
        for said in LINE.findall(whole_lines.decode(errors="replace")):
            if said not in self._warned:
                self._warned.add(said)
                self.bar.write(f"warning: {': '.join(said)}", file=sys.stderr)

    def _size_of(self, name: str) -> int:
        path = self.run_directory / name
        return path.stat().st_size if path.exists() else 0


class LogOnScreen:
    """In place of Progress: copies to stdout what is appended to the log."""

    def __init__(self, log: Path):
        self.file = open(log, "rb")
        self.file.seek(0, 2)

    def update(self) -> None:
        sys.stdout.write(self.file.read().decode(errors="replace"))
        sys.stdout.flush()

    def close(self) -> None:
        self.update()
        self.file.close()
