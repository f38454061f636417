"""MkDocs' hooks (mkdocs.yml): the pages as they lie in the repository, README.md first, become pages of the site."""

import re
from pathlib import Path

from mkdocs.structure.files import File


def on_files(files, config):
    """Add the pages beside docs/."""
    for page in Path(config.config_file_path).parent.glob("*.md"):
        files.append(File.generated(config, page.name, content=page.read_text()))


def on_page_markdown(markdown, **_):
    """Have links lead to the site's pages, and blocks in numbered lists begin where MkDocs' Markdown wants them."""
    return re.sub(r"^ {3}(?! )", " " * 4, re.sub(r"\]\((\.\./|docs/)", "](", markdown), flags=re.M)
