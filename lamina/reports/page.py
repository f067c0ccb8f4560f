"""The page itself: one file that loads nothing from any server (its content security policy forbids it)."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from string import Template

from plotly.offline import get_plotlyjs

from lamina.jobs import digests
from lamina.jobs.manifest import sync
from lamina.reports.style import FONT

logger = logging.getLogger(__name__)

PAGE = "report.html"

_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"


@dataclass(frozen=True, kw_only=True)
class Section:
    """A part of the page. ``html`` is trusted: its builder escapes what users wrote."""

    name: str
    title: str
    html: str

    @property
    def anchor(self) -> str:
        """The anchor in the page's navigation."""
        return re.sub(r"[^a-z]+", "-", self.name.lower())


def write_page(path: Path, *, title: str, facts: Sequence[str], command: str, sections: Iterable[Section]) -> Path:
    """Write the page under a temporary name, then rename it: a reader never sees half of it."""
    parts = [section for section in sections if section.html]
    links = "".join(f'<a href="#{part.anchor}">{escape(part.name)}</a>' for part in parts)
    damage = digests.differences(path.parent)
    for line in damage:
        logger.warning("%s: %s", path.parent, line)
    body = callouts(f"{line}: the page shows content that was changed after it was written." for line in damage)
    body += "".join(f'<section id="{part.anchor}"><h2>{escape(part.title)}</h2>{part.html}</section>' for part in parts)
    facts_line = '<span class="dot">·</span>'.join(f"<span>{escape(fact)}</span>" for fact in facts if fact)
    page = Template(_PAGE).substitute(
        policy=_POLICY,
        title=escape(title),
        style=_STYLE.replace("FONT", FONT),
        facts=facts_line,
        command=f"<pre class=command>{escape(command)}</pre>" if command else "",
        links=links,
        body=body,
        plotly=get_plotlyjs() if "plotly-graph-div" in body else "",
    )
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(page, encoding="utf-8")
    sync(partial)
    os.replace(partial, path)
    return path


def prose(texts: Iterable[str], colors: Mapping[str, str]) -> str:
    """Plain sentences as paragraphs, the placements' names in them set off with their colors."""
    return "".join(f"<p>{_names(escape(text), colors)}</p>" for text in texts)


def callouts(texts: Iterable[str]) -> str:
    """Warnings; a command-line flag is set as code, with its value."""
    flag = r"(--[a-z-]+(?: (?:[\d.,e-]+\d|same:\w+|recommended\b))?)"
    marked = (re.sub(flag, r"<code>\1</code>", escape(text)) for text in texts)
    return "".join(f'<p class="notice">{text}</p>' for text in marked)


def figure(html: str, caption: str, heading: str = "") -> str:
    """A figure with its caption below."""
    top = f"<h3>{escape(heading)}</h3>" if heading else ""
    return f"<figure>{top}{html}<figcaption>{escape(caption)}</figcaption></figure>"


def details(summary: str, html: str) -> str:
    """A part that starts folded."""
    # a figure in a folded part has no width of its own until it is opened
    resize = " ontoggle=\"dispatchEvent(new Event('resize'))\"" if "plotly-graph-div" in html else ""
    return f"<details{resize}><summary>{escape(summary)}</summary>{html}</details>"


def sentence(text: str) -> str:
    """A text with its first letter in upper case."""
    return text[:1].upper() + text[1:]


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


_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="$policy">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="generator" content="lamina">
<link rel="icon" href="data:,">
<title>$title</title>
<style>$style</style>
<script>$plotly</script>
</head>
<body>
<header><div class="brand">Lamina</div><h1>$title</h1><p class="facts">$facts</p>$command</header>
<nav>$links</nav>
<main>$body</main>
</body>
</html>
"""

_STYLE = """
:root { --ink: #1f2933; --grey: #66717d; --rule: #e1e5ea; --soft: #f7f8fa; --accent: #0b63a5;
  --mono: ui-monospace, 'SF Mono', Menlo, Consolas, 'DejaVu Sans Mono', monospace; }
* { box-sizing: border-box; }
html { scroll-behavior: smooth; scroll-padding-top: 60px; }
body { margin: 0; color: var(--ink); background: #fff; font: 16px/1.6 FONT; -webkit-text-size-adjust: 100%; }
header, nav, main { max-width: 1140px; margin: 0 auto; padding: 0 20px; }
header { padding-top: 40px; }
.brand { color: var(--grey); font-size: 13px; letter-spacing: .09em; text-transform: uppercase; font-weight: 600; }
h1 { margin: 4px 0 6px; font-size: 31px; line-height: 1.22; letter-spacing: -.012em; font-weight: 650;
  overflow-wrap: anywhere; }
.facts { margin: 0 0 14px; color: var(--grey); font-size: 15px; }
.facts .dot { margin: 0 8px; color: #b6bec7; }
pre.command { margin: 0 0 8px; padding: 10px 14px; background: var(--soft); border: 1px solid var(--rule);
  border-radius: 7px; font: 13px/1.5 var(--mono); white-space: pre-wrap; overflow-wrap: anywhere; }
nav { position: sticky; top: 0; z-index: 20; background: rgba(255,255,255,.96); border-bottom: 1px solid var(--rule);
  display: flex; flex-wrap: wrap; gap: 2px 22px; padding-top: 10px; padding-bottom: 10px; margin-top: 10px; }
nav a { color: var(--grey); text-decoration: none; font-size: 14px; }
nav a:hover, nav a:focus-visible { color: var(--accent); text-decoration: underline; }
section { padding-top: 34px; }
h2 { margin: 0 0 12px; font-size: 21px; line-height: 1.3; font-weight: 650; letter-spacing: -.006em; }
h3 { margin: 0 0 2px; font-size: 15.5px; font-weight: 600; }
section > p { max-width: 840px; margin: 0 0 12px; }
#what-happened > p:not(.notice) { font-size: 17.5px; line-height: 1.62; }
b.placement { font-weight: 600; border-bottom: 2.5px solid; white-space: nowrap; }
.notice { padding: 10px 15px; background: #fff8e6; border-left: 3px solid #d9a520; border-radius: 0 6px 6px 0;
  font-size: 14.5px; line-height: 1.5; }
code { font: .91em var(--mono); background: rgba(31,41,51,.06); padding: 1px 5px; border-radius: 4px; }
.scroll { overflow-x: auto; margin: 4px 0 14px; }
table { border-collapse: collapse; width: 100%; font-size: 14px; font-variant-numeric: tabular-nums; }
th { text-align: left; font-weight: 500; color: var(--grey); font-size: 13px; border-bottom: 1px solid #c9d0d8;
  padding: 7px 10px; white-space: nowrap; vertical-align: bottom; }
tbody tr:last-child td { border-bottom: 0; }
td { padding: 9px 10px; border-bottom: 1px solid var(--rule); white-space: nowrap; }
tbody tr:hover { background: var(--soft); }
.number { text-align: right; }
.main { font-weight: 650; font-size: 15px; }
.spread { font-weight: 400; color: var(--grey); font-size: 13px; }
.rank { color: var(--grey); width: 1%; }
.name { font-weight: 550; max-width: 320px; overflow: hidden; text-overflow: ellipsis; }
.unfinished td { color: var(--grey); }
.unfinished .main { font-weight: 400; }
.none { color: #a3acb6; }
.reason { white-space: normal; min-width: 240px; color: var(--grey); overflow-wrap: anywhere; }
table.trials { font-size: 13px; }
table.trials td { padding: 6px 10px; }
.swatch { display: inline-block; width: 11px; height: 11px; border-radius: 3px; margin-right: 9px;
  vertical-align: -1px; }
.chip { display: inline-block; padding: 1px 9px; border-radius: 20px; font-size: 12.5px; line-height: 1.55;
  background: #eef1f4; color: #4b5763; }
.chip.finished { background: #e5f3ec; color: #1c6b4c; }
.chip.short { background: #e3eef8; color: #1d5483; }
.chip.stuck { background: #fdf0d3; color: #825a00; }
.chip.diverged, .chip.failed { background: #fbe4e0; color: #9c2f1b; }
figure { margin: 6px 0 30px; }
figcaption { max-width: 840px; margin-top: 4px; color: var(--grey); font-size: 14px; line-height: 1.5; }
.plans { display: flex; flex-wrap: wrap; gap: 16px; align-items: stretch; }
.plan { border: 1px solid var(--rule); border-radius: 10px; padding: 14px 16px 12px; display: flex;
  flex-direction: column; flex: 0 0 auto; max-width: 100%; border-top: 3px solid; }
.plan .drawing { flex: none; text-align: center; padding: 4px 0 6px; }
.plan pre { margin: 0; font: 12px/1.6 var(--mono); white-space: pre-wrap; }
.plan .source { margin: auto 0 0; padding-top: 7px; color: var(--grey); font-size: 12.5px; }
.plan .spec { font: 12.5px var(--mono); color: var(--grey); margin-left: 8px; font-weight: 400; }
details { border-top: 1px solid var(--rule); padding: 9px 0; }
summary { cursor: pointer; font-size: 15px; color: var(--accent); }
details[open] summary { margin-bottom: 10px; }
.settings { columns: 3 290px; column-gap: 34px; margin: 6px 0 10px; font-size: 13.5px; }
.settings div { display: flex; justify-content: space-between; gap: 16px; padding: 4px 0; break-inside: avoid;
  border-bottom: 1px solid var(--rule); }
.settings dt { color: var(--grey); flex: none; }
.settings dd { margin: 0; text-align: right; overflow-wrap: anywhere; font-variant-numeric: tabular-nums; }
.drawn.several { display: grid; grid-template-columns: 1fr 1fr; gap: 0 26px; }
.drawn figure { min-width: 0; }
.lead { color: var(--grey); font-size: 15px; }
p.short { display: grid; grid-template-columns: 190px 1fr; gap: 2px 22px; padding: 8px 0; max-width: none;
  border-bottom: 1px solid var(--rule); margin: 0; }
.short a { color: var(--accent); text-decoration: none; font-weight: 550; }
.short a:hover { text-decoration: underline; }
.short + .notice { margin-top: 16px; }
p.source { color: var(--grey); font-size: 13.5px; margin: 6px 0; }
pre.definition { margin: 0; padding: 10px 14px; background: var(--soft); border-radius: 7px; overflow-wrap: anywhere;
  font: 13px/1.55 var(--mono); white-space: pre-wrap; }
table.numbers { font-size: 13px; }
table.numbers td { padding: 5px 10px; }
main { padding-bottom: 70px; }
@media (max-width: 1000px) { .drawn.several { grid-template-columns: minmax(0, 1fr); } }
@media (max-width: 700px) { h1 { font-size: 25px; } .short { grid-template-columns: 1fr; }
  nav { position: static; } #what-happened > p:not(.notice) { font-size: 16px; } }
@media print { nav { display: none; } figure, .plan { break-inside: avoid; } }
"""
