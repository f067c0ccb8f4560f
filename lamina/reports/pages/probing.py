"""Write the page of `lamina probe`, with one section per probe, and save the figures as PNGs."""

from __future__ import annotations

import json
import math
import re
import shlex
import tempfile
from functools import partial
from html import escape
from pathlib import Path
from typing import Any, cast

import pandas as pd
import plotly.io

from lamina.core.json_types import Json
from lamina.core.values import real_path
from lamina.errors import UserError
from lamina.jobs.files import read_json
from lamina.jobs.kinds import Kind
from lamina.jobs.names import ENVIRONMENT, RESULT
from lamina.probes.engine.probe_settings import ProbeSettings
from lamina.probes.job.compact import compact
from lamina.reports import sections, tables
from lamina.reports.page import Section, callouts, details, figure, moment, prose, sentence, write_page
from lamina.reports.plotting import Figure
from lamina.reports.records import Frame, groups, lenient_mapping, read_table, rows_of
from lamina.reports.registry import drawing_of, report_of
from lamina.reports.screenshot import screenshot
from lamina.reports.style import FONT, polish_own
from lamina.reports.tables import Field, Row, in_form, table

_PICTURE_WIDTH = 900
OPEN = 4  # figures: first those of the title's probe; those of later probes are folded
MOST_ROWS = 60  # of a table of main numbers


@report_of(Kind.PROBING)
def probing_report(folder: Path) -> Path:
    """Write ``folder/report.html``. Raises UserError if the folder holds no result of `lamina probe`."""
    result, environment = lenient_mapping(folder / RESULT), lenient_mapping(folder / ENVIRONMENT)
    if not isinstance(result.get("probes"), dict):
        raise UserError(
            f"{str(folder)!r}: no result of `lamina probe`: result.json lists no probes. Give a folder that `lamina "
            "probe` wrote."
        )
    model, probes = result.get("model") or {}, result["probes"]
    facts = {k: v for k, v in model.items() if k != "notes" and v not in (None, "", [])}
    notes = callouts(str(note) for note in model.get("notes") or ())
    told = _removal(probes) if model.get("num_layers") else []
    opened, count, telling = {}, 0, _telling(probes)
    for name in sorted(probes, key=lambda name: name != telling):
        opened[name] = count < OPEN
        count += len(probes[name].get("figures") or ())
    return write_page(
        folder,
        title=_headline(Path(str(model.get("name") or "a model")).name, probes),
        facts=_facts(result, environment),
        command=environment.get("command"),
        sections=[
            _in_short(result, probes),
            _prune(result, probes),
            Section("Model", "The model", (tables.settings_table(facts) if facts else "") + notes),
            *(_probe(folder, name, entry, opened[name], told) for name, entry in probes.items()),
            sections.settings_of(result.get("settings"), environment),
        ],
    )


@drawing_of(Kind.PROBING)
def draw(folder: Path) -> list[Path]:
    """Save each figure as FOLDER/figures/NAME.png. Raises UserError if no working browser is installed."""
    result = read_json(folder / RESULT)
    pictures = []
    for drawn in (drawn for entry in result["probes"].values() for drawn in entry.get("figures") or ()):
        source = folder / "figures" / Path(drawn["file"]).name
        picture = _read(source)
        drawn_as = json.loads(picture.to_json())
        html = plotly.io.to_html(drawn_as, full_html=False, include_plotlyjs=True, config={"displayModeBar": False})
        with tempfile.TemporaryDirectory() as scratch:
            page = Path(scratch) / "figure.html"
            page.write_text(
                "<!doctype html><meta charset=utf-8><body style='margin:0;background:#fff'><h3 style='font:600 16px "
                f"{escape(FONT)};color:#1f2933;margin:10px 16px 0'>{escape(drawn['title'])}</h3>{html}</body>",
                encoding="utf-8",
            )
            height = int(picture.layout["height"]) + 34
            pictures.append(screenshot(page, source.with_suffix(".png"), _PICTURE_WIDTH, height))
    return pictures


def _read(path: Path) -> Figure:
    """Read a stored figure, and style it for the page. Raises OSError or ValueError."""
    small = cast("Any", compact(plotly.io.from_json(path.read_text(encoding="utf-8")))[0])
    return polish_own(Figure([trace.to_plotly_json() for trace in small.data], small.layout.to_plotly_json()))


def main_numbers(frame: Frame) -> Frame:
    """Summarize a probe's values: one row per metric, sub-layer, role, number format and way to drop a layer.

    The columns hold the lowest, median and highest value, and the layers of the lowest and the highest value. Two more
    columns count the rows and the values that are not finite.
    """
    apart = ("metric", "sublayer", "role", "format", "meaning")
    by = [name for name in apart if name in frame and frame[name].notna().any()]
    columns = [name for name in ("layer", "other", "start", "size", "index", "step") if name in frame]
    values: Frame = pd.to_numeric(frame["value"], errors="coerce")
    frame = frame.assign(value=values.where(values.abs() < math.inf))
    rows = []
    for row, group in groups(frame, by):
        measured: Frame = group.dropna(subset=["value"])
        row |= {"rows": len(group), "not finite": len(group) - len(measured)}
        if len(measured):
            low, high = measured.loc[measured["value"].idxmin()], measured.loc[measured["value"].idxmax()]
            row |= {"lowest": low["value"], "at": _place(low, columns)}
            row |= {"median": measured["value"].median(), "highest": high["value"], "at ": _place(high, columns)}
        rows.append(row)
    return pd.DataFrame(rows)


def _place(row: Any, columns: list[str]) -> str:
    return ", ".join(
        f"{name} {row[name]:g}" for name in columns if isinstance(row[name], int | float) or row[name] == row[name]
    )


def _telling(probes: Json) -> str | None:
    """Return the probe that gives the page a title: an urgent probe, layer_drop, or the first probe with sentences."""
    urgent = [name for name, entry in probes.items() if entry.get("urgent")]
    return next((name for name in (*urgent, "layer_drop", *probes) if probes.get(name, {}).get("sentences")), None)


def _headline(model: str, probes: Json) -> str:
    if (name := _telling(probes)) is None:
        return f"What each layer does: {model}"
    said = str(probes[name]["sentences"][0])
    found = re.split(r"[,;:] ", re.sub(r" \([^)]*\)", "", said))[0].rstrip(".")
    return f"{model}: {found[0].lower()}{found[1:]}"


def _facts(result: Json, environment: Json) -> list[str]:
    model, inputs = result.get("model") or {}, result.get("inputs") or {}
    parameters, version = model.get("parameters"), (environment.get("versions") or {}).get("lamina")
    return [
        "" if result.get("status") == "finished" else f"status: {result.get('status')}",
        str(model.get("model_type") or ""),
        f"{model['num_layers']} layers of width {model.get('hidden_size')}" if model.get("num_layers") else "",
        f"{parameters:,} parameters" if isinstance(parameters, int) else "",
        str(model.get("placement") or ""),
        str(inputs.get("text") or ""),
        f"lamina {version}" if version else "",
        moment(result.get("created")),
    ]


def _in_short(result: Json, probes: Json) -> Section:
    lines = "".join(
        f'<p class="short"><a href="#{_section(name, entry, "").anchor}">{escape(str(entry.get("title") or name))}</a>'
        f"<span>{escape(str(entry['sentences'][0]))}</span></p>"
        for name, entry in sorted(probes.items(), key=lambda item: not item[1].get("urgent"))
        if entry.get("sentences")
    )
    reason = [result["reason"]] if result.get("reason") else []
    notes = callouts(map(str, (*reason, *(result.get("notes") or ()))))
    return Section("In short", "In short", callouts(map(str, result.get("warnings") or ())) + lines + notes)


def _prune(result: Json, probes: Json) -> Section:
    """Return the section about removing layers, with the `lamina prune` command."""
    done = [name for name in ("layer_drop", "angular_distance") if probes.get(name, {}).get("status") == "finished"]
    model, settings = result.get("model") or {}, result.get("settings") or {}
    if not done or not model.get("num_layers"):
        return Section("Prune", "Remove layers", "")
    predicted = (
        "The angular distance only predicts how much a removal harms. Before you remove layers, measure the harm with "
        "--probes layer_drop."
    )
    texts = _removal(probes) if done[0] == "layer_drop" else [predicted]
    if len(done) == 2 and not any("angular distance" in text for text in texts):
        texts.append("If the angular distance disagrees, trust layer_drop, because it measures the harm of a removal.")
    command = f"lamina prune {shlex.quote(str(model.get('name') or 'MODEL'))} --by {done[0]} --drop 1"
    for name in ("corpus", "tokenizer", "sequences", "sequence_length"):  # the text that the probe measured
        if settings.get(name) not in (None, ProbeSettings.default(name)):
            command += f" --{name.replace('_', '-')} {shlex.quote(str(settings[name]))}"
    command += " --output pruned"
    run = (
        f'<p>To remove the layer that matters least, run:</p><pre class="command" tabindex="0">{escape(command)}</pre>'
    )
    return Section("Prune", "Remove layers", prose(texts, {}) + run)


def _removal(probes: Json) -> list[str]:
    texts = [str(text) for text in probes.get("layer_drop", {}).get("sentences") or ()][1:]
    return [text for at, text in enumerate(texts) if at == 0 or "angular distance" in text]


def _probe(folder: Path, name: str, result: Json, opened: bool, told: list[str]) -> Section:
    html = f'<p class="lead">{escape(sentence(str(result.get("summary") or "")))}</p>'
    if result.get("status") != "finished":
        reason = result.get("reason")
        why = f"Not measured: {reason}" if reason else f"not measured ({result.get('status') or 'not reached'})"
        return _section(name, result, html + callouts([why]))
    told = told if name == "layer_drop" else []
    html += prose([text for text in map(str, result.get("sentences") or ()) if text not in told], {})
    html += callouts(map(str, result.get("notes") or ()))
    pictures = ""
    for drawn in result.get("figures") or ():
        try:
            picture = _read(_inside(folder, str(drawn["file"])))
        except (OSError, ValueError, KeyError) as error:
            pictures += callouts([f"A figure is missing: {error}"])
            continue
        pictures += figure(picture, str(drawn.get("caption") or ""), str(drawn.get("title") or ""))
    several = " several" if len(result.get("figures") or ()) > 1 else ""
    pictures = f'<div class="drawn{several}">{pictures}</div>' if pictures else ""
    html += pictures if opened else details("Charts", pictures)
    html += _numbers(folder, name)
    definition = f'<pre class="definition">{escape(str(result.get("definition") or ""))}</pre>'
    measured = f'<p class="source">Source: {escape(str(result.get("source") or "-"))}{escape(_measured(result))}</p>'
    return _section(name, result, html + details("Definition and source", definition + measured))


def _section(name: str, result: Json, html: str) -> Section:
    title = str(result.get("title") or name)
    return Section(title, title, html)


def _measured(result: Json) -> str:
    error = result.get("standard_error")
    parts = [f"{result['forwards']} forward passes"] if result.get("forwards") else []
    parts += [f"largest relative standard error {error:.2g}"] if isinstance(error, float) and error else []
    parts += [f"{result['seconds']:.1f} s"] if isinstance(result.get("seconds"), int | float) else []
    return f". Measured: {', '.join(parts)}." if parts else ""


def _numbers(folder: Path, name: str) -> str:
    try:
        frame = read_table(_inside(folder, f"{name}.parquet"))
        numbers = main_numbers(frame)
    except (OSError, ValueError, KeyError) as error:
        return callouts([f"{name}.parquet cannot be shown: {error}"])
    rows = numbers.loc[:, [c for c in numbers if c != "not finite" or numbers[c].any()]].head(MOST_ROWS)
    words = ("metric", "sublayer", "role", "at", "at ")
    fields = [Field(c.strip(), partial(_cell, c), "" if c in words else "number") for c in map(str, rows)]
    more = f"<p>The first {MOST_ROWS} of {len(numbers)} rows.</p>" if len(numbers) > MOST_ROWS else ""
    title = f"Main numbers (all {len(frame):,} in {name}.parquet)"
    return details(title, table(fields, rows_of(rows), "numbers") + more)


def _cell(name: str, row: Row) -> str:
    value = row[name]
    if isinstance(value, float):
        return in_form(value, ".4g")
    return escape("–" if value is None else str(value).replace("_", " "))


def _inside(folder: Path, name: str) -> Path:
    path = folder / name
    if not real_path(path).is_relative_to(real_path(folder)):
        raise ValueError(f"{name!r} is outside of the folder")
    return path
