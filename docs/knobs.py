"""Write docs/knobs.md from the comments of sam/configs/*/knobs.yaml: `python docs/knobs.py`."""

import re
from pathlib import Path

DOCS = Path(__file__).parent
HEAD = """# Knobs

Written by `python docs/knobs.py` from `sam/configs/speculation/knobs.yaml` and `sam/configs/routing/knobs.yaml`.
Behind a run script they are overrides, as `speculation.num_speculative_tokens=5`; in plain vLLM they are keys of
`additional_config["speculation"]`.
"""
INTRODUCTION = "# @package"  # of a file: its first comment is about the file


def rows(text: str) -> list[tuple[str, str, str]]:
    """(key, default, meaning) of each knob; keys that share a comment follow it, and it stands with the first."""
    found, comment = [], []
    for paragraph in text.split("\n\n"):
        lines = paragraph.strip().splitlines()
        comment = [line.lstrip("# ") for line in lines if line.startswith("#") and not line.startswith(INTRODUCTION)]
        meaning = re.sub(r" \(docs/\w+\.md\)", "", " ".join(comment))
        for line in lines:
            if pair := re.match(r"(\w+): *(.*)$", line):
                found.append((pair[1], pair[2] or "null", meaning or "see the line above"))
                meaning = ""
    return found


def page() -> str:
    parts = [HEAD]
    for group in ("speculation", "routing"):
        parts.append(f"\n## {group}\n\n| key | default | meaning |\n|---|---|---|\n")
        text = (DOCS.parent / "sam" / "configs" / group / "knobs.yaml").read_text()
        parts += [f"| `{key}` | `{default}` | {meaning} |\n" for key, default, meaning in rows(text)]
    return "".join(parts)


if __name__ == "__main__":
    (DOCS / "knobs.md").write_text(page())
