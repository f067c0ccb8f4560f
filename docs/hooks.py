"""Hooks of the site (mkdocs.yml): pages from files at the root, and links to what is no page.

README.md, CONTRIBUTING.md and CHANGELOG.md are pages of the site where they stand; nothing is copied. A link to a file
of the repository that the site does not hold becomes its text, once the file is known to exist.
"""

from __future__ import annotations

import logging
import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

logger = logging.getLogger("mkdocs.hooks")  # mkdocs counts its warnings under --strict

ROOT = Path(__file__).resolve().parent.parent
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
_SOURCES = {page: source for source, page in PAGES.items()}
# Code first: what looks like a link in it is none.
_LINK = re.compile(
    r"(?P<code>^```.*?^```|`[^`\n]+`)|(?P<image>!?)\[(?P<label>[^\]\[]*)\]\((?P<target>[^)\s]+)\)",
    re.DOTALL | re.MULTILINE,
)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that stand at the root of the repository."""
    for source, page in PAGES.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let each link of a page lead to a page or a file of the site."""
    source = _SOURCES.get(page.file.src_uri, f"docs/{page.file.src_uri}")
    return site_links(markdown, source, files)


def site_links(markdown: str, source: str, files: Files) -> str:
    """The Markdown of ``source``, a path from the root, with its links as the site needs them."""
    page = _page_of(source)

    def link(found: re.Match[str]) -> str:
        if found["code"]:
            return found[0]
        target, mark, anchor = found["target"].partition("#")
        if not target or re.match(r"[a-z]+:", target):
            return found[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        inside = _page_of(path)
        if inside and files.get_file_from_path(inside) is not None:
            way = posixpath.relpath(inside, posixpath.dirname(page) or ".")
            return f"{found['image']}[{found['label']}]({way}{mark}{anchor})"
        if not (ROOT / path).exists():
            logger.warning("%s: the link to %s leads nowhere", source, found["target"])
        return found["label"]

    return _LINK.sub(link, markdown)


def _page_of(path: str) -> str:
    """A file's place in the site, by its path from the root; "" for what is not in the site."""
    return PAGES.get(path) or (path.removeprefix("docs/") if path.startswith("docs/") else "")
