"""How long earlier responses to a prompt were, for who plans a rollout before any of its responses has finished."""

import logging
import math
import sqlite3
from contextlib import closing, suppress
from pathlib import Path

from sam.history.database import EmptyFile, HistoryError, files, open_to_read

logger = logging.getLogger(__name__)

MAX_PROMPTS = 1 << 20  # whose lengths are kept; beyond, those of prompts that were read first go
QUERY = (
    "SELECT hex(prompt), version, count(*), sum(log_of(num_tokens)) FROM responses "
    "WHERE version >= ? AND typeof(version) = 'integer' GROUP BY 1, 2"
)


class ResponseLengths:
    """The geometric mean of the responses to each prompt that the newest weights gave, of all files of a history.

    Engines write every response that ends, whether its group is trained on or dropped, so the means are of all. Equal
    responses of a prompt count once, those of a single token not at all: the file does not keep them.

    One thread may refresh while another asks: nobody who asks waits for a file.

    Args:
        path: the folder of the history, which need not exist yet.

    Attributes:
        errors: files that could not be read; the first is warned of.
    """

    def __init__(self, path: Path):
        self._path = path
        self._known: dict[str, tuple[int, float]] = {}  # by prompt: the version of the weights, tokens
        self._newest = 0
        self.errors = 0

    def __len__(self) -> int:
        return len(self._known)

    def expected(self, prompt: str) -> int | None:
        """Tokens of a response to the prompt with this sam.drafting.token_ids.digest, in hexadecimal digits; None if
        it has had none."""
        found = self._known.get(prompt.upper())
        return round(found[1]) if found else None

    def refresh(self) -> None:
        """Read what was written since the last call; files that cannot be read are counted and left out."""
        # Not only newer weights: the last responses of a step are written a moment after those of the next begin.
        since, found = self._newest - 1, {}
        for file in files(self._path):
            try:
                with suppress(EmptyFile), closing(open_to_read(file)) as connection:
                    connection.create_function("log_of", 1, lambda tokens: math.log(max(1, tokens)))
                    for prompt, version, responses, log_sum in connection.execute(QUERY, (since,)):
                        count, total = found.get((prompt, version), (0, 0.0))
                        found[prompt, version] = count + responses, total + log_sum
            except (HistoryError, sqlite3.Error) as error:
                if self.errors == 0:
                    logger.warning("lengths of earlier responses: %s (logged once, then counted)", error)
                self.errors += 1
        for (prompt, version), (count, total) in found.items():
            if version >= self._known.get(prompt, (0, 0.0))[0]:
                self._known[prompt] = version, math.exp(total / count)
            self._newest = max(self._newest, version)
        for prompt in list(self._known)[: len(self._known) - MAX_PROMPTS]:
            del self._known[prompt]
