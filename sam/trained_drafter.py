"""What kind of trained drafter a folder holds, by its config.json."""

import json
from pathlib import Path
from typing import Any


def settings_of(folder: Path) -> dict[str, Any]:
    """config.json; empty if it cannot be read, which other checks say."""
    try:
        return json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):
        return {}


def is_eagle3_head(folder: Path) -> bool:
    """Whether it holds an EAGLE3 head rather than a language model.

    The first published ones name a plain language model as their architecture; a vocabulary for drafts gives them away.
    """
    settings = settings_of(folder)
    return any("Eagle3" in name for name in settings.get("architectures") or []) or "draft_vocab_size" in settings
