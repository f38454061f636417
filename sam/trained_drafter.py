"""What kind of trained drafter a folder holds, by its config.json."""

from pathlib import Path
from typing import Any

from sam.reading import ReadError, json_object


def settings_of(folder: Path) -> dict[str, Any]:
    """config.json; empty if it cannot be read, which other checks say."""
    try:
        return json_object(folder / "config.json")
    except ReadError:
        return {}


def is_eagle3_head(folder: Path) -> bool:
    """Whether it holds an EAGLE3 head rather than a language model.

    The first published ones name a plain language model as their architecture; a vocabulary for drafts gives them away.
    """
    settings = settings_of(folder)
    return "Eagle3" in str(settings.get("architectures")) or "draft_vocab_size" in settings


def wrong_kind(folder: Path, method: str) -> str | None:
    """What it holds, in words, if that is not what draft_model or eagle3 drafts with; hybrid drafts with either."""
    is_head = is_eagle3_head(folder)
    if method == "hybrid" or is_head == (method == "eagle3"):
        return None
    return "an EAGLE3 head" if is_head else "no EAGLE3 head"
