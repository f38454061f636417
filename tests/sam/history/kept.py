"""What a history holds, for tests."""

from contextlib import closing

import numpy as np

from sam.drafting.token_ids import digest
from sam.history.database import open_to_read, read


def kept(folder, prompt) -> list[list[int]]:
    """The responses to a prompt in all files of a folder, those of older weights first, without damaged ones."""
    rows = []
    for file in sorted(folder.glob("*.sqlite")):
        with closing(open_to_read(file)) as connection:
            rows += read(connection, digest(np.array(prompt, np.int32)))
    return [tokens.tolist() for _, _, tokens in sorted(rows, key=lambda row: row[1]) if tokens is not None]
