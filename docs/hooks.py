"""Hooks of the site (mkdocs.yml): its first page is README.md, and links to files that are no page.

A link to a file of the repository that the site does not hold becomes its text, once the file is known to exist.
"""

from __future__ import annotations

import gzip
import importlib.util
import json
import logging
import posixpath
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from nbclient import NotebookClient

logger = logging.getLogger("mkdocs.hooks")  # mkdocs counts its warnings under --strict

ROOT = Path(__file__).resolve().parent.parent
PAGES = {"README.md": "index.md"}
DOCS = ROOT / "docs"
PLOTLY = "assets/plotly.min.js"
_PLOTLY = f'<script src="../{PLOTLY}"></script>'  # from a folder below the site's
PACKED = ROOT / "lamina" / "reports" / "assets" / "plotly-cartesian.min.js.gz"
RECORDS = "benchmarks/results/"  # in the site under records/, as the pages link what they rest on
RESULTS = "results/"  # the pages of claims: found by links, not by the navigation or the search
_SEARCH = 'data-md-component="search" role="dialog" aria-label="Search"'
_OPTIONS = '{responsive: true, displaylogo: false, modeBarButtons: [["toImage", "zoom2d", "pan2d", "resetScale2d"]]}'
_PICTURE = re.compile(r"^!\[[^\]\[]*\]\((?P<path>[^)\s]+\.svg)\)$", re.MULTILINE)
_SOURCES = {page: source for source, page in PAGES.items()}
# Code first: what looks like a link in it is none.
_LINK = re.compile(
    r"(?P<code>^```.*?^```|`[^`\n]+`)|(?P<image>!?)\[(?P<label>[^\]\[]*)\]\((?P<target>[^)\s]+)\)",
    re.DOTALL | re.MULTILINE,
)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages from the root of the repository, those that are generated, and what draws the figures."""
    for source, page in PAGES.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))
    for record in sorted((ROOT / RECORDS).glob("*.json")):
        files.append(File.generated(config, f"records/{record.name}", abs_src_path=str(record)))
    files.append(File.generated(config, PLOTLY, content=gzip.decompress(PACKED.read_bytes()).decode()))
    notebooks = {f"notebooks/{path.stem}.md": notebook_page(path) for path in (DOCS / "notebooks").glob("*.ipynb")}
    for page, text in (_reference() | notebooks).items():
        files.append(File.generated(config, page, content=text))
    return files


def notebook_page(path: Path) -> str:
    """A notebook as Markdown: its texts, its code with what it prints at a small size, and a link to the file."""
    parts = [_PLOTLY, "We ran this notebook with smaller parameters than the file has, so your outputs will differ."]
    for number, cell in enumerate(ran(path).cells):
        if cell.cell_type == "markdown":
            parts.append(cell.source)
        elif not cell.metadata.get("small"):
            parts += [f"```python\n{cell.source}\n```", *_outputs(cell, f"{path.stem}-{number}")]
    parts[:3] = [parts[2], *parts[:2]]  # the title first
    return "\n\n".join([*parts, f"[Download this notebook]({path.name})"]) + "\n"


def ran(path: Path) -> Any:
    """A notebook after it has run in an empty folder, with ``small.json``'s parameters behind its own."""
    notebook = nbformat.read(path, as_version=4)
    notebook.cells = [cell for cell in notebook.cells if "colab" not in cell.metadata.get("tags", ())]
    (at,) = (at for at, cell in enumerate(notebook.cells) if "parameters" in cell.metadata.get("tags", ()))
    small = json.loads(path.with_name("small.json").read_text(encoding="utf-8"))[path.stem]
    notebook.cells.insert(at + 1, nbformat.v4.new_code_cell(small, metadata={"small": True}))
    with tempfile.TemporaryDirectory() as folder:
        NotebookClient(notebook, timeout=300, resources={"metadata": {"path": folder}}).execute()
    return notebook


def _outputs(cell: Any, name: str) -> Iterator[str]:
    """What a cell has printed, as Markdown: figures interactive, tables, and text."""
    for number, output in enumerate(cell.outputs):
        data = output.get("data", {})
        if drawn := data.get("application/vnd.plotly.v1+json"):
            yield _drawn(f"{name}-{number}", {"data": drawn["data"], "layout": drawn["layout"]})
        elif "text/html" in data:
            yield re.sub(r"<style.*?</style>\s*|^\s+", "", data["text/html"], flags=re.DOTALL | re.MULTILINE)
        elif output.get("name") != "stderr":
            yield f"```text\n{data.get('text/plain', output.get('text', '')).strip()}\n```"


def _reference() -> dict[str, str]:
    """The generated pages of the reference."""
    spec = importlib.util.spec_from_file_location("reference", DOCS / "reference.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.pages()


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let each link of a page lead to a page or a file of the site, and keep the results out of the search."""
    if page.file.src_uri.startswith(RESULTS):
        page.meta["search"] = {"exclude": True}
    page.meta.setdefault("title", _title(page.file.src_uri, markdown, config) or page.title)
    source = _SOURCES.get(page.file.src_uri, f"docs/{page.file.src_uri}")
    return with_figures(site_links(markdown, source, files), page.file)


def _title(page: str, markdown: str, config: MkDocsConfig) -> str:
    """The title of the tab of the first page, and of a page of results, whose heading follows a comment; or ""."""
    if page in _SOURCES:
        return config.site_description or ""
    heading = re.search("^# (.+)$", markdown, re.MULTILINE)
    return heading[1] if heading and page.startswith(RESULTS) else ""


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Let a keyboard scroll the code, and a screen reader name the search: the theme leaves both out."""
    output = re.sub(r"(<pre[^>]*>(?:<span></span>)?<code)(?=>| )", r'\1 tabindex="0"', output)
    return output.replace('data-md-component="search" role="dialog"', _SEARCH)


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
        if not source.startswith("docs/notebooks/"):  # elsewhere a notebook is its page
            inside = re.sub(r"\.ipynb$", ".md", inside)
        if inside and files.get_file_from_path(inside) is not None:
            way = posixpath.relpath(inside, posixpath.dirname(page) or ".")
            return f"{found['image']}[{found['label']}]({way}{mark}{anchor})"
        if not (ROOT / path).exists():
            logger.warning("%s: the link to %s leads nowhere", source, found["target"])
        return found["label"]

    return _LINK.sub(link, markdown)


def _drawn(name: str, drawn: dict[str, Any]) -> str:
    """A figure in its place; one that is folded away is drawn when it is opened, as only then its width is known."""
    drawn["layout"].pop("template", None)
    text = json.dumps(drawn, separators=(",", ":")).replace("<", "\\u003c")
    return (
        f'<div id="{name}" style="height:{drawn["layout"].get("height", 420)}px"></div>\n'
        f'<script>{{const drawn = {text}; const fold = document.getElementById("{name}").closest("details"); '
        f'const draw = () => Plotly.newPlot("{name}", drawn.data, drawn.layout, {_OPTIONS}); '
        'fold && !fold.open ? fold.addEventListener("toggle", draw, {once: true}) : draw();}</script>'
    )


def with_figures(markdown: str, page: File) -> str:
    """A page with its figures interactive: those whose picture has its data, a JSON file of the same name, beside it.

    The data are in the page, as a browser reads no other file from a file. The picture is linked below, for a paper.
    """

    def figure(found: re.Match[str]) -> str:
        data = DOCS / posixpath.dirname(page.src_uri) / found["path"]
        if not data.with_suffix(".json").is_file():
            return found[0]
        drawn = json.loads(data.with_suffix(".json").read_text(encoding="utf-8"))
        return f"{_drawn(data.stem, drawn)}\n\n[For a paper: SVG]({found['path']})"

    changed = _PICTURE.sub(figure, markdown)
    way = posixpath.relpath(PLOTLY, posixpath.dirname(page.src_uri) or ".")
    return changed if changed == markdown else f'<script src="{way}"></script>\n\n{changed}'


def _page_of(path: str) -> str:
    """A file's place in the site, by its path from the root; "" for what is not in the site."""
    if path.startswith(RECORDS):
        return f"records/{path.removeprefix(RECORDS)}"
    return PAGES.get(path) or (path.removeprefix("docs/") if path.startswith("docs/") else "")
