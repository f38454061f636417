"""A progress bar for a run whose output goes to a file."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tqdm import tqdm

from recipe.record.run_directory import METRICS_FILE


def progress_bar(**arguments) -> tqdm:
    """A bar that moves on a terminal and writes a line now and then into a file."""
    return tqdm(mininterval=1.0 if sys.stderr.isatty() else 30.0, file=sys.stderr, **arguments)


class Progress:
    """Follows a run's metrics.jsonl: one tick per training step, with reward and rollout time beside it."""

    def __init__(self, run_directory: Path, total_steps: int | None):
        self.path = run_directory / METRICS_FILE
        self._size = 0
        self.bar = progress_bar(total=total_steps, unit="step", desc="starting verl, Ray and vLLM")

    def update(self) -> None:
        size = self.path.stat().st_size if self.path.exists() else 0
        if size == self._size:
            self.bar.update(0)
            return
        self._size = size
        last = json.loads(self.path.read_text().splitlines()[-1])
        self.bar.n = last["step"]
        self.bar.set_description("training", refresh=False)
        if "rollout/reward_all/mean" in last:
            self.bar.set_postfix(
                reward=f"{last['rollout/reward_all/mean']:+.2f}", rollout=f"{last['rollout/seconds']:.1f}s"
            )
        self.bar.refresh()

    def close(self) -> None:
        self.bar.close()
