"""Write a page as one file that loads nothing from a server."""

from __future__ import annotations

import base64
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from html import escape
from importlib.resources import files
from pathlib import Path

from jinja2 import Environment, PackageLoader, Template, select_autoescape
from markupsafe import Markup

from lamina.jobs.files import write_text
from lamina.jobs.names import PAGE
from lamina.reports.plotting import Figure
from lamina.reports.records import faults
from lamina.reports.style import FONT, TURNS, to_html

logger = logging.getLogger(__name__)

_ASSETS = files("lamina.reports") / "assets"


@dataclass(frozen=True)
class Section:
    """A section of a page. The page inserts ``html`` unchanged, so escape users' texts in ``html``."""

    name: str
    title: str
    html: str

    @property
    def anchor(self) -> str:
        return re.sub(r"[^a-z]+", "-", self.name.lower())


def write_page(
    folder: Path, *, title: str, facts: Sequence[str], command: object, sections: Iterable[Section], name: str = PAGE
) -> Path:
    """Write a page into a folder, and return the page's path. The page omits empty facts and empty sections."""
    parts = [section for section in sections if section.html]
    damage = faults(folder)
    for line in damage:
        logger.warning("%s: %s", folder, line)
    page = _template().render(
        title=title,
        facts=[fact for fact in facts if fact],
        command=str(command or ""),
        changed=Markup(callouts(f"{line}, so the page omits it." for line in damage)),
        sections=[(part, Markup(html)) for part, html in zip(parts, _said_once(parts), strict=True)],
        style=Markup(_ASSETS.joinpath("page.css").read_text(encoding="utf-8").replace("FONT", FONT)),
        script=Markup(_ASSETS.joinpath("page.js").read_text(encoding="utf-8")),
        plotly=packed_plotly() if any("plotly-graph-div" in part.html for part in parts) else "",
    )
    write_text(folder / name, page)
    return folder / name


def _said_once(parts: Sequence[Section]) -> list[str]:
    """Return the sections' HTML. Only the first note about alternating dashes remains."""
    first = next((part for part in parts if TURNS in part.html), None)
    kept = {id(part): part.html.partition(TURNS) for part in parts}
    return [
        before + (TURNS if part is first else "") * bool(found) + after.replace(TURNS, "")
        for part, (before, found, after) in ((part, kept[id(part)]) for part in parts)
    ]


def prose(texts: Iterable[str], colors: Mapping[str, str], kind: str = "") -> str:
    """Return each text as an HTML paragraph of the CSS class ``kind``, with the placements' names in color."""
    start = f'<p class="{kind}">' if kind else "<p>"
    return "".join(f"{start}{_names(escape(text), colors)}</p>" for text in texts)


def callouts(texts: Iterable[str]) -> str:
    """Return warnings as HTML, with commands and flags as code."""
    code = r"((?<=[Rr]un: )(?:lamina|pip) .+$|--[a-z-]+(?: (?:[\d.,e-]+\d|same:\w+|recommended\b))?)"
    marked = (re.sub(code, r"<code>\1</code>", escape(text)) for text in texts)
    return "".join(f'<p class="notice">{text}</p>' for text in marked)


def figure(chart: Figure | None, caption: str, heading: str = "") -> str:
    if chart is None:
        return ""
    top = f"<h3>{escape(heading)}</h3>" if heading else ""
    return f"<figure>{top}{to_html(chart)}<figcaption>{escape(caption)}</figcaption></figure>"


def details(summary: str, html: str) -> str:
    return f"<details><summary>{escape(summary)}</summary>{html}</details>" if html else ""


def moment(created: object) -> str:
    """Return an ISO time in UTC, to the minute. Any other text stays unchanged."""
    text = str(created or "")
    if re.fullmatch(r"\d{4}-\d\d-\d\d", text):
        return text  # a date alone has no time of day
    try:
        return datetime.fromisoformat(text).astimezone(UTC).strftime("%Y-%m-%d %H:%M UTC")
    except ValueError:
        return text


def sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def words(name: str) -> str:
    return name.replace("feed_forward", "feed-forward").replace("_", " ")


@lru_cache(maxsize=1)
def packed_plotly() -> str:
    """Return the part of plotly.js that the charts need, gzipped, as base64. All of plotly.js is 3 times as large."""
    return base64.b64encode(_ASSETS.joinpath("plotly-cartesian.min.js.gz").read_bytes()).decode()


@lru_cache(maxsize=1)
def _template() -> Template:
    environment = Environment(loader=PackageLoader("lamina.reports", "assets"), autoescape=select_autoescape(["html"]))
    return environment.get_template("page.html")


def _names(text: str, colors: Mapping[str, str]) -> str:
    escaped = {escape(name): color for name, color in colors.items() if name}
    if not escaped:
        return text
    pattern = "|".join(re.escape(name) for name in sorted(escaped, key=len, reverse=True))
    return re.sub(
        rf"(?<![\w-])({pattern})(?![\w-])",
        lambda m: f'<b class="placement" style="border-color:{escaped[m[1]]}">{m[1]}</b>',
        text,
    )
