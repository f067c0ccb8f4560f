"""Format the text that each kind of job prints when it ends. The job's page shows the same numbers and warnings."""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from lamina.core.json_types import Json
from lamina.jobs.files import finite, read_json
from lamina.jobs.kinds import Kind
from lamina.jobs.manifest import MODEL, how_to_load
from lamina.jobs.names import COORDINATES, PAGE, RESULT, RESULTS, SLOPES, TRANSFER
from lamina.reports.pages import max_rate
from lamina.reports.pages.transfer import sentences
from lamina.reports.ranking import is_above_bigram, notices, summarize
from lamina.reports.records import Frame, is_number, rows_of
from lamina.reports.registry import ending_of
from lamina.reports.tables import in_form
from lamina.studies.record import read_record

_PRETRAINED = {
    "eval_loss": "eval loss {:.4f}",
    "accuracy": "accuracy {:.2%}",
    "top5_accuracy": "top-5 accuracy {:.2%}",
    "perplexity": "perplexity {:.2f}",
    "bits_per_byte": "{:.3f} bits per byte",
}
_SPEED = {"tokens_per_second": "{:,.0f} tokens/s", "mfu": "MFU {:.1%}"}


def run_ended(folder: Path, result: Json, *, forms: Mapping[str, str]) -> str:
    """Return a run's status and results as text. ``forms`` maps names of results to formats, such as "loss {:.4f}".

    A format may also contain the names of other results.
    """
    ended = result["status"] != "interrupted"
    forms = {**forms, **(_SPEED if ended else {})}
    values = {name: result.get(name) for name in forms}
    numbers = [forms[n].format(v, **result) for n, v in values.items() if isinstance(v, int | float) and v == v]
    text = result["status"] + (f": {', '.join(numbers)}" if numbers else "")
    text += f" ({result['reason']})" if result.get("reason") else ""
    if not ended:
        return text
    text += f"\nthe page:  {folder / PAGE}"
    return text + (f"\n{how_to_load(folder / MODEL)}" if (folder / MODEL / "config.json").is_file() else "")


ending_of(Kind.RUN)(partial(run_ended, forms=_PRETRAINED))


@ending_of(Kind.COMPARE)
def compare(folder: Path, results: Frame) -> str:
    return f"{ranking(results, read_record(folder)['settings'])}\n\n{_files(folder, RESULTS)}"


def ranking(results: Frame, settings: Mapping[str, object] | None = None) -> str:
    summary = summarize(results)
    lines, above = [f"{'':>3} {'placement':<24} {'status':<20} {'eval loss':>17} {'learning rate':>13}"], []
    for row in rows_of(summary):
        rank, loss = in_form(row["rank"], ".0f", "-"), in_form(row["eval_loss"], ".4f", "-")
        loss += f" ± {row['eval_loss_std']:.4f}" if is_number(row["eval_loss_std"]) else ""
        name, rate = row["placement"], row["learning_rate"]
        lines.append(f"{rank:>3} {name:<24} {row['status_text']:<20} {loss:>17} {rate:>13g}")
        above += [name] if row["finished"] and is_above_bigram(row) else []
    bigram = summary["bigram_entropy"].mean()
    if bigram == bigram:
        lines.append(f"    {'a bigram table':<24} {'':<20} {bigram:>17.4f}")
    texts = notices(summary, results, settings=settings)
    if above:
        texts.insert(
            0,
            "Lamina does not rank these placements, because their loss is no better than the loss of a bigram table of "
            f"the training text: {', '.join(above)}.",
        )
    return "\n".join([*lines, "", *(f"note: {notice}" for notice in texts)])


@ending_of(Kind.MAX_LR)
def max_lr(folder: Path, results: Frame) -> str:
    rows = max_rate.summarize(results)
    width = max(12, *(len(row["placement"]) for row in rows))
    lines = [f"{'placement':<{width}} {'largest learning rate':>24} {'its loss':>10}  stopped by"]
    for row in rows:
        loss = in_form(row["loss"], ".3f", "-")
        lines.append(f"{row['placement']:<{width}} {max_rate.spread(row):>24} {loss:>10}  {row['ends']}")
    lines += ["", *(f"note: {notice}" for notice in max_rate.notices(rows))]
    return "\n".join([*lines, "", _files(folder, RESULTS)])


@ending_of(Kind.TRANSFER)
def transfer(folder: Path, results: Frame) -> str:
    del results
    summary = read_json(folder / TRANSFER)
    return f"{transferred(summary)}\n\n{_files(folder, RESULTS, TRANSFER)}"


def transferred(summary: Json) -> str:
    lines = [f"{'learning rate':>13} {'on the proxy':<13} {'eval loss':>9}  at another width"]
    for rate in summary["rates"]:
        loss = in_form(rate["eval_loss"], ".4f", "-") + ("*" if rate["best"] else " ")
        lines.append(f"{rate['learning_rate']:>13g} {rate['status']:<13} {loss:>10} {rate['risk']}")
    lines += ["", *sentences(summary)]
    if summary["learning_rate"] is not None:
        heading = f"at width {summary['target_width']}"
        lines += ["", f"{heading:<26} {'learning rate':>13} {'weight decay':>13} {'factor':>8}"]
        for role, row in summary["roles"].items():
            lines.append(f"{role:<26} {row['learning_rate']:>13.4g} {row['weight_decay']:>13.4g} {row['factor']:>8.4g}")
    return "\n".join(lines)


@ending_of(Kind.COORD_CHECK)
def coord_check(folder: Path, slopes: Frame) -> str:
    sizes = slopes[slopes["metric"] == "size"]
    last = int(sizes["step"].max())
    lines = [f"{'module':<36} {'at the start':>13} {f'after {last} steps':>14}  over the steps"]
    for module, rows in sizes.groupby("module", sort=False):
        slope = rows.set_index("step")["slope"]
        worst = next((v for v in ("broken", "grows", "shrinks") if rows["verdict"].eq(v).any()), "flat")
        lines.append(f"{module:<36} {slope[0]:>+13.2f} {slope[last]:>+14.2f}  {worst}")
    result = read_json(folder / RESULT)
    names = f" ({', '.join(result['modules'])})" if result["modules"] else ""
    shrinking = sorted(set(sizes.loc[sizes["verdict"] == "shrinks", "module"]))
    expected = f". As the scheme expects, these outputs shrink: {', '.join(shrinking)}" * bool(shrinking and not names)
    lines += ["", f"{result['verdict']}{names}, with a tolerance of {result['tolerance']:g}{expected}"]
    return "\n".join([*lines, _files(folder, SLOPES, COORDINATES)])


@ending_of(Kind.PREFLIGHT)
def preflight(folder: Path | None, rows: Frame) -> str:
    records = rows_of(rows)
    width = max(9, *(len(row["placement"]) for row in records))
    lines = [
        f"{'placement':<{width}} {'learning rate':>13}  {'verdict':<14} {'gain x0→xN':>11} {'context':>8} "
        f"{'FP16 headroom':>22}"
    ]
    for row in records:
        headroom = f"{row['fp16_headroom']:.3g} × ({math.log2(row['fp16_headroom']):.1f} bits)"
        lines.append(
            f"{row['placement']:<{width}} {row['learning_rate']:>13g}  {row['verdict']:<14} "
            f"{10 ** row['jacobian']:>11.2g} {round(row['context'], 3) + 0.0:>8.3f} {headroom:>22}"
        )
    for row in records:
        lines.append(f"\n{row['placement']} at {row['learning_rate']:g}: {row['verdict']}")
        texts = {"reason": row["reason"], "change": row["change"], "layers": _layers(row), "papers": row["advice"]}
        said = [f"  {label}: {text}" for label, text in {**texts, "note": row["note"]}.items() if text]
        lines += [textwrap.fill(text, 110, subsequent_indent="    ") for text in said]
    return "\n".join([*lines, *(["", f"the page:    {folder / PAGE}"] if folder else [])])


@ending_of(Kind.PREFLIGHT, switch="json")
def preflight_json(folder: Path | None, rows: Frame) -> str:
    del folder
    return json.dumps(finite(rows_of(rows)), indent=2, ensure_ascii=False)


def _layers(row: Json) -> str:
    share = row["ffn_variance_share"]
    return (
        f"the last hidden state has {10 ** row['growth']:.2g} times the embedding's variance. The gradient of the "
        f"weights is smallest in layer {row['weight_gradient_layer']}. In the layer with the largest gradient, the "
        f"gradient is {10 ** -row['weight_gradient']:.2g} times larger. FuseNorm's Theorem 1 sums the ratio of "
        "feed-forward variance to skip variance over all layers, and assumes a sum of about 1. Before the first step, "
        f"this sum is {share:.2g}"
    )


@ending_of(Kind.EVALUATION)
def evaluation(folder: Path, result: Json) -> str:
    lines = [(folder / "table.md").read_text(encoding="utf-8").rstrip()]
    lines += [f"left out: {model['name']} ({model['left_out']})" for model in result["models"] if model["left_out"]]
    lines += _paired(result.get("paired") or [])
    notes = dict.fromkeys(f"{unit['unit']}: {note}" for unit in result["units"] for note in unit["notes"])
    return "\n".join([*lines, *(f"note: {note}" for note in notes), "", _files(folder, RESULTS)])


def _paired(rows: list[Json]) -> list[str]:
    if not rows:
        return []
    width = max(5, *(len(row["model"]) for row in rows))
    tasks = max(4, *(len(row["column"]) for row in rows))
    heads = f"{'difference':>11} {'95 % interval':>18} {'p (Holm)':>9}  smallest to show"
    lines = ["", f"scores minus {rows[0]['against']}, same items:", f"{'model':<{width}}  {'task':<{tasks}} {heads}"]
    for row in rows:
        low, high, p, smallest = (math.nan if row[k] is None else row[k] for k in ("low", "high", "p_holm", "smallest"))
        smallest = f"{smallest:.2%}" if math.isfinite(smallest) else "none"
        lines.append(
            f"{row['model']:<{width}}  {row['column']:<{tasks}} {row['difference']:>+11.2%} "
            f"{f'{low:+.2%} to {high:+.2%}':>18} {p:>9.2g}  {smallest} of {row['items']:,} items"
        )
    return lines


@ending_of(Kind.PROBING)
def probing(folder: Path, result: Json) -> str:
    model = result["model"]
    lines = [
        f"{model['model_type'] or model['class']}: {model['num_layers']} layers of width {model['hidden_size']}, "
        f"{model['placement']}; {result['inputs']['text']}"
    ]
    for warning in result.get("warnings") or ():
        lines += ["", *textwrap.wrap(f"warning: {warning}", 110)]
    for name, record in sorted(result["probes"].items(), key=lambda item: not item[1].get("urgent")):
        texts = record.get("sentences") or [record.get("reason") or "no sentence"]
        if record["status"] != "finished":
            texts = [f"{record['status']}: {texts[0]}"]
        lines.append(f"\n{name}" + (f" ({record['seconds']:.1f} s)" if record.get("seconds") else ""))
        for text in texts:
            lines += textwrap.wrap(str(text), 110, initial_indent="  ", subsequent_indent="  ")
        for note in record.get("notes") or ():
            lines += textwrap.wrap(f"note: {note}", 110, initial_indent="  ", subsequent_indent="  ")
    lines += [f"\nnote: {note}" for note in result["notes"]]
    return "\n".join([*lines, f"\nthe page:   {folder / PAGE}\nthe tables: {folder}/NAME.parquet"])


def _files(folder: Path, *numbers: str) -> str:
    listed = ", ".join(str(folder / name) for name in numbers)
    return f"the page:    {folder / PAGE}\nthe numbers: {listed}"
