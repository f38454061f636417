"""What a history holds, for tests."""

import numpy as np
import pytest

from sam.drafting.texts import digest
from sam.history.database import read, read_files


def kept(folder, prompt) -> list[list[int]]:
    """The responses to a prompt in all files of a folder, those of older weights first, without damaged ones."""
    rows, key = [], digest(np.array(prompt, np.int32))
    read_files(folder, None, lambda connection: rows.extend(read(connection, key)), pytest.fail)
    return [tokens.tolist() for *_, tokens in sorted(rows, key=lambda row: row[0]) if tokens is not None]
