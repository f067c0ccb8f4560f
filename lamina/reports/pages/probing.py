"""The page of `lamina probe`: one section per probe, built from the folder's files alone."""

from __future__ import annotations

import json
import math
from html import escape
from pathlib import Path
from typing import Any

import pandas as pd
import plotly.io

from lamina.core.json_types import Json
from lamina.errors import UserError
from lamina.jobs.kinds import Kind
from lamina.jobs.names import ENVIRONMENT, PAGE, RESULT
from lamina.probes.job.compact import compact
from lamina.reports import tables
from lamina.reports.page import Section, callouts, details, figure, moment, prose, sentence, write_page
from lamina.reports.records import Frame, read_parquet, rows_of
from lamina.reports.registry import report_of
from lamina.reports.style import polish_own
from lamina.reports.table import Field, Row, Table, in_form

MOST_ROWS = 60  # of a table of main numbers


@report_of(Kind.PROBING)
def probing_report(folder: Path) -> Path:
    """Write ``folder/report.html``. Raises UserError where the folder holds no result of `lamina probe`."""
    folder = Path(folder)
    result = _json(folder / RESULT)
    if not isinstance(result.get("probes"), dict):
        raise UserError(f"{str(folder)!r}: no result of `lamina probe` (result.json with its probes)")
    environment = _json(folder / ENVIRONMENT)
    model, probes = result.get("model") or {}, result["probes"]
    return write_page(
        folder / PAGE,
        title=f"What each layer does: {Path(str(model.get('name') or 'a model')).name}",
        facts=_facts(result, environment),
        command=str(environment.get("command") or ""),
        sections=[
            _in_short(result, probes),
            _model(model),
            *(_probe(folder, name, entry) for name, entry in probes.items()),
            _settings(result, environment),
        ],
    )


def main_numbers(frame: Frame) -> Frame:
    """Summarize a probe's values: one row per metric, with the places of the extremes.

    Sub-layers, roles, number formats and meanings of a drop stand apart. Columns: those of them that the frame has,
    then rows, lowest, at, median, highest, at_highest.
    """
    apart = ("metric", "sublayer", "role", "format", "meaning")
    by = [name for name in apart if name in frame and frame[name].notna().any()]
    columns = [name for name in ("layer", "other", "start", "size", "index", "step") if name in frame]
    values: Frame = pd.to_numeric(frame["value"], errors="coerce")
    frame = frame.assign(value=values.where(values.abs() < math.inf))
    rows = []
    groups = frame.groupby(by, sort=False, dropna=False) if by else [((), frame)]
    for key, group in groups:
        known: Frame = group.dropna(subset=["value"])
        row: Json = dict(zip(by, key if isinstance(key, tuple) else (key,), strict=True))
        row |= {"rows": len(group), "not finite": len(group) - len(known)}
        if len(known):
            low, high = known.loc[known["value"].idxmin()], known.loc[known["value"].idxmax()]
            row |= {"lowest": low["value"], "at": _place(low, columns)}
            row |= {"median": known["value"].median(), "highest": high["value"], "at ": _place(high, columns)}
        rows.append(row)
    return pd.DataFrame(rows)


def _place(row: Any, columns: list[str]) -> str:
    return ", ".join(
        f"{name} {row[name]:g}" for name in columns if isinstance(row[name], int | float) or row[name] == row[name]
    )


def _facts(result: Json, environment: Json) -> list[str]:
    model, inputs = result.get("model") or {}, result.get("inputs") or {}
    facts = [] if result.get("status") == "finished" else [f"status: {result.get('status')}"]
    facts += [str(model["model_type"])] if model.get("model_type") else []
    if model.get("num_layers"):
        facts.append(f"{model['num_layers']} layers of width {model.get('hidden_size')}")
    facts += [f"{model['parameters']:,} parameters"] if isinstance(model.get("parameters"), int) else []
    facts += [str(model["placement"])] if model.get("placement") else []
    facts += [str(inputs["text"])] if inputs.get("text") else []
    version = (environment.get("versions") or {}).get("lamina")
    return [*facts, f"lamina {version}" if version else "", moment(result.get("created"))]


def _in_short(result: Json, probes: Json) -> Section:
    lines = "".join(
        f'<p class="short"><a href="#{_section(name, entry, "").anchor}">{escape(str(entry.get("title") or name))}</a>'
        f"<span>{escape(str(entry['sentences'][0]))}</span></p>"
        for name, entry in probes.items()
        if entry.get("sentences")
    )
    first = [str(warning) for warning in result.get("warnings") or ()]
    notes = [str(note) for note in result.get("notes") or ()]
    if result.get("reason"):
        notes.insert(0, str(result["reason"]))
    return Section(name="In short", title="In short", html=callouts(first) + lines + callouts(notes))


def _model(model: Json) -> Section:
    facts = {k: v for k, v in model.items() if k != "notes" and v not in (None, "", [])}
    notes = callouts(str(note) for note in model.get("notes") or ())
    return Section(name="Model", title="The model", html=(tables.settings_table(facts) if facts else "") + notes)


def _probe(folder: Path, name: str, result: Json) -> Section:
    summary = f'<p class="lead">{escape(sentence(str(result.get("summary") or "")))}</p>'
    if result.get("status") != "finished":
        reason = str(result.get("reason") or f"not measured ({result.get('status') or 'not reached'})")
        return _section(
            name, result, summary + callouts([f"Not measured: {reason}" if result.get("reason") else reason])
        )
    html = summary + prose((str(text) for text in result.get("sentences") or ()), {})
    html += callouts(str(note) for note in result.get("notes") or ())
    pictures = ""
    for drawn in result.get("figures") or ():
        try:
            path = _inside(folder, str(drawn["file"]))
            picture = plotly.io.from_json(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, KeyError) as error:
            pictures += callouts([f"A figure is missing: {error}"])
            continue
        heading = str(drawn.get("title") or "")
        pictures += figure(polish_own(compact(picture)[0]), str(drawn.get("caption") or ""), heading)
    several = " several" if len(result.get("figures") or ()) > 1 else ""
    html += f'<div class="drawn{several}">{pictures}</div>' if pictures else ""
    html += _numbers(folder, name)
    definition = f'<pre class="definition">{escape(str(result.get("definition") or ""))}</pre>'
    measured = f'<p class="source">Source: {escape(str(result.get("source") or "-"))}{escape(_measured(result))}</p>'
    return _section(name, result, html + details("Definition and source", definition + measured))


def _section(name: str, result: Json, html: str) -> Section:
    title = str(result.get("title") or name)
    return Section(name=title, title=title, html=html)


def _measured(result: Json) -> str:
    error = result.get("standard_error")
    parts = [f"{result['forwards']} forward passes"] if result.get("forwards") else []
    parts += [f"largest relative standard error {error:.2g}"] if isinstance(error, float) and error else []
    parts += [f"{result['seconds']:.1f} s"] if isinstance(result.get("seconds"), int | float) else []
    return f". Measured: {', '.join(parts)}." if parts else ""


def _numbers(folder: Path, name: str) -> str:
    try:
        frame = read_parquet(_inside(folder, f"{name}.parquet"))
        numbers = main_numbers(frame)
    except (OSError, ValueError, KeyError) as error:
        return callouts([f"{name}.parquet cannot be shown: {error}"])
    rows = numbers.loc[:, [c for c in numbers if c != "not finite" or numbers[c].any()]].head(MOST_ROWS)
    table = _table(rows)
    more = f"<p>The first {MOST_ROWS} of {len(numbers)} rows.</p>" if len(numbers) > MOST_ROWS else ""
    return details(f"Main numbers (all {len(frame):,} in {name}.parquet)", table + more)


def _table(frame: Frame) -> str:
    words = ("metric", "sublayer", "role", "at", "at ")
    fields = [_column(str(name), "" if name in words else "number") for name in frame]
    return Table(fields=fields, rows=rows_of(frame), kind="numbers").html()


def _column(name: str, kind: str) -> Field:
    def cell(row: Row) -> str:
        value = row[name]
        if isinstance(value, float):
            return in_form(value, ".4g")
        return escape("–" if value is None else str(value).replace("_", " "))

    return Field(title=name.strip(), kind=kind, cell=cell)


def _settings(result: Json, environment: Json) -> Section:
    settings = result.get("settings") or {}
    html = details("Settings", tables.settings_table(settings)) if settings else ""
    html += details("Environment", tables.settings_table(environment)) if environment else ""
    return Section(name="Settings", title="Settings and environment", html=html)


def _inside(folder: Path, name: str) -> Path:
    """Return a file of the folder. Raises an error for a name that leads out of it."""
    path = folder / name
    if not path.resolve().is_relative_to(folder.resolve()):
        raise ValueError(f"{name!r} leads out of the folder")
    return path


def _json(path: Path) -> Json:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}
