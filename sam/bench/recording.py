"""Groups of a recording whose responses are forced: real text on a model of any weights."""

from pathlib import Path

from sam.bench.loads import Group, group_sizes
from sam.record.responses import read_recordings


def read_groups(
    path: Path, tokenizer: str, loads: list[int], samples: int, max_tokens: int | None
) -> tuple[list[Group], list[str]]:
    """Groups for all loads, those of different prompts first.

    A prompt with more responses than a group takes gives several groups.

    Args:
        path: a recording's file, or a run directory.
        tokenizer: folder, for recordings of text.
        loads: requests of each load.
        samples: requests of one prompt.
        max_tokens: of a response; what follows is cut off. None: responses are whole.

    Returns:
        Groups, and what a reader must know of them.

    Raises:
        ValueError: it cannot be read, or has no prompt with enough responses.
    """
    recording = read_recordings(path, tokenizer)
    size = max(group_sizes(max(loads), samples))
    pieces: list[tuple[int, Group]] = []
    largest = short = 0
    for prompt, its in zip(recording.prompts, recording.responses, strict=True):
        responses = [response[:max_tokens].tolist() for response in its if len(response)]
        largest = max(largest, len(responses))
        short += len(responses) < size
        for first in range(0, len(responses) - size + 1, size):
            pieces.append((first, Group(prompt.tolist(), responses[first : first + size])))
    if not pieces:
        raise ValueError(
            f"{path}: its largest group has {largest} responses, --samples {samples} needs {size}: "
            f"set --samples {largest} or less"
        )
    notes = []
    if short:
        notes.append(f"{short} of {len(recording.prompts)} prompts have fewer than {size} responses and are left out")
    pieces.sort(key=lambda piece: piece[0])
    return [group for _, group in pieces], notes
