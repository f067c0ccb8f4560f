"""Fills the generated tables of the docs from the registry and the committed records."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from typing import Any

import pandas as pd
import verdict_words as said
from measured_tables import (
    after_pretraining_table,
    alarms_sentence,
    alarms_table,
    census_table,
    evaluation_table,
    history_odds_table,
    mnist_table,
    studies_sentence,
    watching_table,
)
from placement_sections import linked, sections

from lamina.core.architectures import ARCHITECTURES, conversions
from lamina.jobs.columns import RESULT_COLUMNS
from lamina.lab.papers.engine.verdicts import all_verdicts
from lamina.placements import names
from lamina.placements.wirings import WIRINGS

ROOT = Path(__file__).resolve().parent.parent
PAGES = tuple(
    path.relative_to(ROOT).as_posix()
    for path in sorted((ROOT / "docs").rglob("*.md"))
    if "<!-- /" in path.read_text(encoding="utf-8")
)
"""The pages with a generated table: it stands between ``<!-- name -->`` and ``<!-- /name -->``."""
SUITES = {  # tools/reliability/NAME.py: what each of its cases does, and what is right
    "command_lines": ("calls a command with an invalid value, file or pipe", "one line names the mistake, exit code 2"),
    "damaged_files": (
        "cuts, edits, deletes or exchanges a file of a run, study, preflight, probe, checkpoint or cache",
        "one line names the file, or the result is bit-identical",
    ),
    "models": ("loads a saved model with broken files", "one line names the fault, and no code of the model runs"),
    "kills": (
        "kills a run or a watched loop at a random moment and resumes it",
        "losses, records by layer and weights are bit-identical; a watched loop keeps its rows from before the kill",
    ),
    "families": (
        "probes a small random model of a model family of transformers",
        "every number equals the result of independent code, or one line gives the reason",
    ),
}


_STAR = "\\*"


def wirings_table() -> str:
    """One row per wiring: name, equation, source."""
    rows = ["| wiring | equation | source |", "|---|---|---|"]
    for name in WIRINGS.names():
        wiring = WIRINGS.get(name)
        rows.append(f"| `{name}` | `{wiring.equation}` | {linked(wiring.source)} |")
    return "\n".join(rows)


def columns_table() -> str:
    """Every column of a run's result, with its name on the pages where that is another one."""
    columns = []
    for column in RESULT_COLUMNS:
        title = column.title or column.name.replace("_", " ")
        shown = f" ({title})" if title != column.name.replace("_", " ") else ""
        columns.append(f"`{column.name}`{_STAR * column.optional}{shown}")
        stars = (
            "\\* A starred column is absent if no run has a value. On report pages, the "
            "name in parentheses is the column's title"
        )
    return f"{', '.join(columns)}.\n\n{stars}"


def verified_types() -> str:
    """The model types whose wiring is tested against transformers: all that Lamina knows."""
    others = [row.title for row in ARCHITECTURES.values() if row.conversion is None]
    page = "edit-layers.md#convert-from-transformers-and-back"
    return f"We test {', '.join(others)} and all model types that [`lamina convert`]({page}) takes."


def conversions_table() -> str:
    """One row per placement that model types of transformers have: the types, the placement, half precision."""
    rows = {}
    for model_type, conversion in conversions().items():
        note = f": {conversion.note}" if conversion.note else ""
        half = "rounded" if conversion.rounds else "the same"
        rows.setdefault(f"`{conversion.placement}`{note} | {half} |", []).append(f"`{model_type}`")
    lines = ["| model type | placement in Lamina | logits in half precision |", "|---|---|---|"]
    return "\n".join([*lines, *(f"| {', '.join(types)} | {row}" for row, types in rows.items())])


def placements_speed(name: str) -> str:
    """How fast placements train beside transformers, from a record of benchmarks/train_step.py."""
    record = _record(name)
    if record is None:
        return _unmeasured(name)
    rows = [row for row in record["results"] if row["model"] in names()]
    speeds, memory = ([row[column] for row in rows] for column in ("speed_ratio", "memory_ratio"))
    s = record["settings"]
    return (
        f"We compared {len(rows)} of {len(names())} placements with transformers' Llama (eager, "
        f"{s['num_hidden_layers']} layers of width {s['hidden_size']}). The placements train at {min(speeds):.2f} to "
        f"{max(speeds):.2f} times the Llama's speed, and take {min(memory):.2f} to {max(memory):.2f} times its memory. "
        f"{_where(name)}"
    )


_BESIDE = ("transformers", "lamina")  # the others only compiled


def training_table(name: str) -> str:
    """The largest size of a record of benchmarks/training.py: each contender's speed and memory."""
    record = _record(name)
    if record is None:
        return _unmeasured(name)
    part = record["parts"][-1]
    lines = ["| trained in fp32 | speed | peak memory | time of the first step |", "|---|---|---|---|"]
    measured = [row for row in part["results"] if "absent" not in row]
    for row in (row for row in measured if not _label(row).endswith("eager") or _label(row).startswith(_BESIDE)):
        cells = [_label(row), f"{row['speed_ratio']:.2f}", f"{row['peak_memory_mib']:,} MiB"]
        cells.append(f"{row['first_step_seconds']:.0f} s")
        lines.append(f"| {' | '.join(cells)} |")
    size = f"{part['size'].upper()} parameters and {part['num_hidden_layers']} layers of width {part['hidden_size']}"
    return "\n".join([*lines, "", f"The model has {size}. {_where(name)}"])


def wirings_speed(*records: str) -> str:
    """What wirings cost beside Pre-LN, from records of benchmarks/train_step.py: compiled, then eager."""
    measured = [_record(name) for name in records]
    if any(record is None for record in measured):
        return _unmeasured(records[0])
    ratios = [{row["model"]: row for row in record["results"]} for record in measured if record]
    lines = ["| wiring | compiled speed | eager speed | compiled memory |", "|---|---|---|---|"]
    for model in ratios[0]:
        compiled, eager = (each[model] for each in ratios)
        cells = [f"{compiled['speed_ratio']:.2f}", f"{eager['speed_ratio']:.2f}", f"{compiled['memory_ratio']:.2f}"]
        lines.append(f"| `{model}` | {' | '.join(cells)} |")
    links = " and ".join(f"[{name}](../benchmarks/results/{name}.json)" for name in records)
    return "\n".join([*lines, "", f"Records: {links}."])


def depth_speed(name: str) -> str:
    """What compiling costs by depth, and the deepest models that were trained, from a record of benchmarks/depth.py."""
    record = _record(name)
    if record is None:
        return _unmeasured(name)
    compiled = []
    for case in record["compiling"]:
        shallow, deep = case["runs"][0]
        compiled.append(f"{case['compile_ratio']:.2f} times as long (`{deep['placement']}`)")
        fewest, most = shallow["num_layers"], deep["num_layers"]
    trained = [
        f"{row['num_layers']} blocks with `{row['placement']}` ({row['parameters'] / 1e9:.1f}B parameters, "
        f"{row['step_seconds']:.0f} s per step, {row['peak_memory_mib'] / 1024:.1f} GiB)"
        for row in record["training"]
    ]
    return (
        f"{most:,} layers take {' or '.join(compiled)} to compile as {fewest} layers. On a CPU, we trained "
        f"{' and '.join(trained)}. {_where(name)}"
    )


def claims_sentence() -> str:
    """How many claims of papers have which verdict."""
    return said.counts(all_verdicts())[0]


def _unmeasured(name: str) -> str:
    return f"Not measured yet: benchmarks/results/{name}.json is missing."


def gpu_table(name: str) -> str:
    """A table for each size of a record of benchmarks/gpu.py, and what watching cost; nothing without a record."""
    record = _record(name)
    if record is None:
        return ""
    lines = []
    for stage in (record["stages"].get(size) for size in ("50m", "400m")):
        rows = [row for row in (stage or {}).get("results", ()) if "tokens_per_second" in row]
        if not rows:
            continue
        lines += [
            f"**{stage['size'].upper()}**: {stage['num_hidden_layers']} blocks of width {stage['hidden_size']}, "
            f"vocabulary {stage['vocab_size']:,}, {stage['sequence_length']:,} tokens a block, bf16, compiled",
            "",
            "| contender | tokens/s | MFU | speed | peak memory | micro-batch |",
            "|---|---|---|---|---|---|",
        ]
        for row in rows:
            share = f"{row['mfu']:.1%}" if "mfu" in row else ""
            memory = f"{row['peak_memory_mib']:,} MiB" if "peak_memory_mib" in row else ""
            cells = [f"`{row['name']}`", f"{row['tokens_per_second']:,}", share, f"{row['speed_ratio']:.2f}", memory]
            lines.append(f"| {' | '.join([*cells, str(row['batch_size'])])} |")
        lines.append("")
    if "time_ratio" in (watched := record["stages"].get("watch", {})):
        lines += [f"A loop at 400M with `lamina.watch` takes {watched['time_ratio']:.3f} x its time without.", ""]
    return "\n".join([*lines, _where(name)])


_FRONT_PAGE = {
    "front-page": "std 0.09, branches scaled by depth",
    "front-page-second": "std 0.09, branches scaled, second text",
    "front-page-unscaled": "std 0.09, no branch scaled",
    "front-page-scaled": "std 0.02, branches scaled by depth",
}


def front_page_table() -> str:
    """Pre-LN's loss in each set-up of the front page, and the other placements' differences from it."""
    judged = {name: read for name in _FRONT_PAGE if (read := _judged(name))[1]}
    lines = [
        f"| placement | {' | '.join(_FRONT_PAGE[name] for name in judged)} |",
        "|---|" + "---|" * len(judged),
        f"| loss of `pre_ln` | {' | '.join(_loss(trials) for trials, _ in judged.values())} |",
    ]
    first = judged["front-page"][1]
    for name in sorted(first, key=lambda name: first[name]["margin"]):
        cells = [_gap(claims[name]) for _, claims in judged.values()]
        lines.append(f"| `{name}` against Pre-LN | {' | '.join(cells)} |")
    return "\n".join(
        [
            *lines,
            "",
            "Losses are in nats per byte. Each model has 32 blocks of width 48 (0.9M parameters) and "
            f"trains for 400 steps, with {first['fusenorm']['seeds']} seeds ([evidence](results/ours.md#front-page)).",
        ]
    )


def _loss(trials: pd.DataFrame, name: str = "pre_ln") -> str:
    return f"{trials.loc[trials['tuned'] & (trials['placement'] == name), 'eval_loss'].mean():.2f}"


def _gap(claim: dict[str, Any]) -> str:
    """A placement's difference from Pre-LN, in the word that its verdict allows."""
    word = {"holds": "below", "reversed": "above"}.get(claim["verdict"])
    return f"{abs(claim['margin']):.2f} {word}" if word else "we cannot tell"


def _judged(study: str) -> tuple[pd.DataFrame, dict[str, dict[str, Any]]]:
    """A recorded study's rows, and its claims by placement; none if it has not ended."""
    folder = ROOT / "studies" / "records" / f"{study}-cpu"
    judged = folder / "claims.json"
    claims = json.loads(judged.read_text(encoding="utf-8")) if judged.is_file() else []
    named = {one["claim"].partition("/")[2].replace("-", "_") or "fusenorm": one for one in claims}
    results = folder / "results.csv"
    return (pd.read_csv(results) if results.is_file() else pd.DataFrame()), named


def reliability_table() -> str:
    """A row per reliability suite: what it does, how often the result was right; then every fault that it found."""
    records = {name: record for name in SUITES if (record := _record(name, "docs/reliability"))}
    lines = ["| each case | the right result | right | cases |", "|---|---|---:|---:|"]
    for name, record in records.items():
        right = record["cases"] - len(record["faults"])
        does, means = SUITES[name]
        lines.append(f"| [{does}](reliability/{name}.json) | {means} | {right:,} | {record['cases']:,} |")
    faults = [fault for record in records.values() for fault in record["faults"]]
    lines += ["", *(f"- {f['outcome']}: {f['group']}: {f['name']}: {f['detail']}" for f in faults)] if faults else []
    return "\n".join(lines)


def families_sentence() -> str:
    """How many of transformers' families the probes were verified on."""
    record = _families()
    if record is None:
        return _no_families()
    found, faults = record["families"], {case["name"] for case in record["faults"]}
    right = len(set(found["measured"]) - faults)
    return (
        f"We checked the probes on tiny random models of {right} model families of transformers. Each probe's numbers "
        "match an independent calculation. If a probe does not apply, Lamina prints the reason. Lamina rejects "
        f"{len(found['refused'])} more families with a one-line error ([record](reliability/families.json))."
    )


def _families() -> dict[str, Any] | None:
    record = _record("families", "docs/reliability")
    return record if record and "families" in record else None


def _no_families() -> str:
    return (
        "Not measured yet: there is no docs/reliability/families.json (`python -m tools.reliability.families --output "
        "docs/reliability/families.json`)."
    )


def _record(name: str, folder: str = "benchmarks/results") -> dict[str, Any] | None:
    path = ROOT / folder / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def _label(row: dict[str, Any]) -> str:
    return f"{row['name']}, {row['precision']}, {'compiled' if row['compile'] == 'on' else 'eager'}"


def _where(name: str, folder: str = "benchmarks/results") -> str:
    """Where a record has what a page leaves out."""
    return f"See the [record](../{folder}/{name}.json)."


@functools.cache
def tables() -> dict[str, str]:
    """Every generated table by the name between its marks."""
    found = {
        "wirings": wirings_table(),
        "placements": sections(),
        "claims": claims_sentence(),
        "train_step": placements_speed("train_step"),
        "wirings-speed": wirings_speed("wirings-compiled", "wirings-eager"),
        "reliability": reliability_table(),
        "history-odds": history_odds_table(),
    }
    found |= {
        "front-page": front_page_table(),
        "verified": verified_types(),
        "conversions": conversions_table(),
        "columns": columns_table(),
    }
    made = {
        "after_pretraining": after_pretraining_table,
        "alarms": alarms_table,
        "census": census_table,
        "mnist": mnist_table,
        "evaluation": evaluation_table,
        "studies": studies_sentence,
    }
    for name, table in made.items():
        record = _record(name)
        found[name] = table(record, _where(name) if record else "")
    watching = ("watching", "watching-71m", "watching-71m-compiled")
    found["watching"] = watching_table({name: _record(name) for name in watching})
    found["alarms-in-short"] = alarms_sentence(_record("alarms"))
    found |= {"families": families_sentence()}
    return found | {
        "training-cpu": training_table("training-cpu"),
        "depth-cpu": depth_speed("depth-cpu"),
        "gpu": gpu_table("gpu"),
    }


def filled(text: str, page: Path) -> str:
    """The text of a page with its generated tables as they are now."""
    up = "../" * len(page.relative_to(ROOT / "docs").parent.parts)  # the tables' links are those of docs/
    for name, table in tables().items():
        block = f"<!-- {name} -->\n{table.replace('](', f']({up}')}\n<!-- /{name} -->"
        text = re.sub(rf"<!-- {name} -->.*?<!-- /{name} -->", lambda _, block=block: block, text, flags=re.DOTALL)
    return text


if __name__ == "__main__":
    for page in (ROOT / name for name in PAGES):
        page.write_text(filled(page.read_text(encoding="utf-8"), page), encoding="utf-8")
