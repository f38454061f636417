"""How long earlier responses to a prompt were, for who plans a rollout before any of its responses has finished."""

import logging
import math
from collections import defaultdict
from pathlib import Path

from sam.history.database import read_files

logger = logging.getLogger(__name__)

MAX_PROMPTS = 1 << 20  # whose lengths are kept; beyond, those of prompts that were read first go
QUERY = (
    "SELECT hex(prompt), version, num_tokens FROM responses WHERE version >= ? AND num_tokens > 0 "
    "AND typeof(version) = 'integer' AND typeof(num_tokens) = 'integer'"
)


class ResponseLengths:
    """The geometric mean of the responses to each prompt that the newest weights gave, of all files of a history.

    Equal responses count once, those of a single token not at all: the file does not keep them. One thread may refresh
    while another asks: nobody who asks waits for a file.

    Attributes:
        errors: files that could not be read; the first is warned of.
    """

    def __init__(self, folder: Path):
        self._folder, self._newest, self.errors = folder, 0, 0
        self._known: dict[str, tuple[int, float]] = {}  # by prompt: the version of the weights, tokens

    def __len__(self) -> int:
        return len(self._known)

    def expected(self, prompt: str) -> int | None:
        """Tokens of a response to the prompt with this sam.drafting.texts.digest, in hexadecimal digits; None if
        it has had none."""
        found = self._known.get(prompt.upper())
        return round(found[1]) if found else None

    def refresh(self) -> None:
        """Read what was written since the last call; files that cannot be read are counted and left out."""
        # Not only newer weights: the last responses of a step are written a moment after those of the next begin.
        since, logs = self._newest - 1, defaultdict(list)

        def read(connection) -> None:
            for prompt, version, num_tokens in connection.execute(QUERY, (since,)).fetchall():
                logs[prompt, version].append(math.log(num_tokens))

        read_files(self._folder, None, read, self._failed)
        for (prompt, version), found in logs.items():
            if version >= self._known.get(prompt, (0, 0.0))[0]:
                self._known[prompt] = version, math.exp(sum(found) / len(found))
            self._newest = max(self._newest, version)
        for prompt in list(self._known)[: len(self._known) - MAX_PROMPTS]:
            del self._known[prompt]

    def _failed(self, error: Exception) -> None:
        if self.errors == 0:
            logger.warning("lengths of earlier responses: %s (logged once, then counted)", error)
        self.errors += 1
