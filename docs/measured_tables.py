"""What docs/tables.py fills in of single benchmarks: the monitor's alarms, what watching costs, digits, tasks."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from lamina.core.architectures import conversions
from lamina.jobs.files import read_json
from lamina.reports.causes import HISTORIES, NOT_KNOWN


def history_odds_table() -> str:
    """How often the causes told from other tools' histories were right, by the odds that were told."""
    record, held = (
        read_json(HISTORIES),
        {
            "loss": "the loss only",
            "norm": "the loss and the gradient norm",
            "layers": "the loss and gradient norms by layer",
        },
    )
    ranges = [name for name in record["views"]["loss"]["judged"]["rate"] if name != NOT_KNOWN]
    heads = [f"causes with odds of {name.replace('% to', ' to').replace('%', ' %')}" for name in ranges]
    lines = [f'| the history has | {" | ".join(heads)} | runs with "not known" |']
    lines.append("|---" * (len(ranges) + 2) + "|")
    for view, words in held.items():
        cells = record["views"][view]["judged"]["rate"]
        right = " | ".join(f"{cells[name][1]} of {cells[name][0]} right" for name in ranges)
        lines.append(f"| {words} | {right} | {cells[NOT_KNOWN][0]} |")
    runs = record["runs"]
    counted = (
        f"We fitted the odds on {runs['fitted']} broken runs, and tested the odds on {runs['judged']} broken runs with "
        "other seeds."
    )
    return "\n".join([*lines, "", f"{counted} After we had seen the results, we chose the limit of 70 %."])


def alarms_table(record: dict[str, Any] | None, where: str) -> str:
    """A row per failure, first those of which Lamina missed something, a line for healthy set-ups, and counts."""
    if record is None:
        return _unmeasured("alarms")
    missed, found = list[str](), list[str]()
    for counts in record["kinds"].values():
        runs, early = counts["failures"], f"{counts['before']}" if counts["rose"] else ""
        place = f"{counts['place']} of {counts['placed']}" if counts["placed"] else ""
        is_whole = runs == counts["told"] == counts["cause"]
        is_whole &= counts["rose"] == counts["before"] and counts["placed"] == counts["place"]
        cells = [_marked(counts["what"], counts), runs, counts["told"], counts["rose"], early, place, counts["cause"]]
        (found if is_whole else missed).append(f"| {' | '.join(map(str, cells))} |")
    setups = {"other set-ups" if name == "other" else name: counts for name, counts in record["setups"].items()}
    healthy = [
        f"{_marked(name, counts)} ({counts['alarmed_steps']} of {counts['healthy_steps']:,} steps)"
        for name, counts in setups.items()
        if counts["alarmed_steps"]
    ]
    parts = record["parts"].items()
    names = {"seen": "seen before", "judged": "in this table", "fitted": "of the fit"}
    lines = [
        "| failure | runs | runs with an alarm | loss rose | alarm before | right location | right cause |",
        "|---|---|---|---|---|---|---|",
        *missed,
        *found,
        "",
        *(f"- **Runs {names.get(name, name)}.** {_alarm_counts(c)}" for name, c in parts if c["failures"]),
    ]
    if healthy:
        lines.append(f"- **Healthy runs with an alarm.** These set-ups raised alarms: {', '.join(healthy)}.")
    return "\n".join([*lines, "", where])


def alarms_sentence(record: dict[str, Any] | None) -> str:
    """How good the alarms of watched runs were where nothing was fitted on, in two sentences."""
    if record is None:
        return _unmeasured("alarms")
    counts = record["parts"]["judged"]
    return (
        f"We broke {counts['failures']} watched runs of small models. Lamina named the right cause in "
        f"{counts['cause']} runs. In {counts['placed']} runs, we broke one part of the model, and Lamina named the "
        f"right part in {counts['place']} runs. In {counts['rose']} runs, the loss rose two or more steps after the "
        f"fault, and an alarm came before the rise in {counts['before']} runs. In healthy runs, "
        f"{counts['alarmed_steps']} of {counts['healthy_steps']:,} steps had an alarm ([evidence](evidence/alarms.md))."
    )


_WORDS = {  # the record's words, and the page's
    "readout": "output head",
    "drawn anew, larger": "drawn again, with larger values",
    "higher rate": "higher learning rate",
    "'s group has": "'s parameter group has",
    "reaches the stream": "reaches the residual stream",
    "missing in the optimizer, the norm is not": "missing from the optimizer, but not its norm",
    "missing in the": "missing from the",
    "lost, the count of steps is not": "lost, but not the count of steps",
    "shifted once more": "shifted by one token too many",
    "the same batch again and again": "the same batch comes many times in a row",
    "under a loss many times as heavy, unclipped": "with a much larger loss, without clipping",
    "LoRA under reentrant": "LoRA with reentrant",
    "the optimizer's steps make": "steps of the optimizer make",
    "under float16 autocast with": "in float16 training with",
    "tokens have other numbers, as of another": "token ids come from another",
    "habit-head-first-llama": "a Llama that trains its head first",
}


def _marked(name: str, counts: dict[str, Any]) -> str:
    for old, new in _WORDS.items():
        name = name.replace(old, new)
    return name if counts["fitted"] else rf"{name} \*"


def _alarm_counts(counts: dict[str, Any]) -> str:
    spikes = f" ({counts['in_spikes']} in a real spike of the loss)" if counts.get("in_spikes") else ""
    healthy = (
        f"In healthy runs, {counts['alarmed_steps']} of {counts['healthy_steps']:,} steps had an alarm{spikes}, and "
        f"{counts['diverged']} of {counts['healthy_runs']} runs diverged. "
    )
    heard = (
        f". In {counts['heard_before']} of these failures, Lamina had also raised an alarm by then"
        if "heard_before" in counts
        else ""
    )
    return (
        f"{healthy if counts['healthy_runs'] else ''}In {counts['rose']} failures, the loss rose two or more steps "
        f"after the fault. In {counts['before']} of these failures, the first anomaly came before the rise{heard}. "
        f"Lamina named the right location in {counts['place']} of {counts['placed']} failures, and the right cause in "
        f"{counts['cause']} of {counts['failures']} failures. Lamina named a wrong cause in {counts['wrong_cause']} "
        f"failures, and raised no alarm in {counts['failures'] - counts['told']} failures."
    )


def census_table(record: dict[str, Any] | None, where: str) -> str:
    """A row per layout, the commonest first, with the model types that have it; then those that are not known."""
    if record is None:
        return _unmeasured("census")
    layouts, own = dict[str, list[str]](), dict[str, list[str]]()
    unknown = 0
    for row in record["families"]:
        name = f"**{row['family']}**" if row["family"] in conversions() else row["family"]
        if row["match"] is None:
            unknown += 1
        else:
            layouts.setdefault(_layout(row["match"]), []).append(name)
            own.setdefault(_layout(row["match"]), []).append(row["match"]["placement"].partition("(")[0])
    lines = ["| layout | count | model types |", "|---|---|---|"]
    shared = {layout: names for layout, names in layouts.items() if len(names) > 1}
    for layout, names in sorted(shared.items(), key=lambda one: -len(one[1])):
        told = sorted(names, key=lambda name: not name.startswith("**"))  # first those that convert takes
        more = f", and {len(told) - 6} more" if len(told) > 6 else ""
        others = sorted({f", `{name}`" for name in own[layout] if f"`{name}" not in layout})
        lines.append(f"| {layout}{''.join(others)} | {len(names)} | {', '.join(told[:6])}{more} |")
    alone = f"Each of {len(layouts) - len(shared)} other model types has a unique layout"
    return "\n".join(
        [*lines, "", f"{alone}. Lamina cannot determine the norms' layout in {unknown} model types. {where}"]
    )


def _layout(match: dict[str, Any]) -> str:
    """The placement without what stands around its layers, and in what the layers differ, without numbers."""
    written = [match["placement"], *match["others"]]
    chosen = next((spec for spec in written if spec.startswith("sandwich_ln")), written[0])  # Gemma's are its kin
    name, _, options = chosen.partition("(")
    ends = ("final_norm", "embedding_norm", "embedding_scale", "qk_norm", "v_norm")
    inside = [o for o in options.rstrip(")").split(", ") if o and not o.startswith(ends)]
    kept = [o.partition("=")[0] for o in inside if not o.startswith("wiring=")]
    wiring = [o for o in inside if o.startswith("wiring=")]
    shown = f"`{name}({wiring[0]})`" if wiring else f"`{name}`"
    shown += f" with another {' and '.join(kept)}" if kept else ""
    differs = [
        re.sub(r" is [\d.]+ instead of .*| instead of .*| in layer [\d, -]*\d", "", d) for d in match["differences"]
    ]
    return f"{shown}, but {'; '.join(dict.fromkeys(differs))}" if differs else shown


def watching_table(records: Mapping[str, dict[str, Any] | None]) -> str:
    """A row per record: how much longer a watched loop takes."""
    lines = ["| Llama | tokens in a batch | median extra time | range (repetitions) |", "|---|---|---|---|"]
    for name, record in records.items():
        if record is None:
            return _unmeasured(name)
        settings, extra = record["settings"], sorted(100 * (ratio - 1) for ratio in record["time_ratios"])
        model = f"{settings['size']}{'' if settings.get('compile', 'off') == 'off' else ', compiled'}"
        cells = [f"[{model}](../benchmarks/results/{name}.json)"]
        cells += [
            f"{settings['batch_size']} × {settings['sequence_length']}",
            f"{100 * (record['time_ratio'] - 1):.1f} %",
        ]
        lines.append(f"| {' | '.join(cells)} | {extra[0]:.1f} to {extra[-1]:.1f} % ({len(extra)}) |")
    return "\n".join(lines)


def mnist_table(record: dict[str, Any] | None, where: str) -> str:
    """A row per placement that the recipe trained."""
    if record is None:
        return _unmeasured("mnist")
    rows = [
        f"| `{row['placement']}` | {100 * row['accuracy']:.1f} % | {row['cpu_minutes']:.1f} |" for row in record["rows"]
    ]
    return "\n".join(["| placement | test accuracy | CPU minutes |", "|---|---|---|", *rows, "", where])


def evaluation_table(record: dict[str, Any] | None, where: str) -> str:
    """A row per task that both sides were asked, then the two targets."""
    if record is None:
        return _unmeasured("evaluation")
    rows = [
        f"| `{row['task']}` | {row['items']} | {row['largest_difference']:.1g} | {row['harness_seconds']:.1f} s | "
        f"{row['seconds']:.1f} s |"
        for row in record["tasks"]
    ]
    head = [
        "| task | items | largest difference in log-likelihood (nats) | lm-evaluation-harness's time | Lamina's time |",
        "|---|---|---|---|---|",
    ]
    largest = record["largest_difference"]
    differ = f"differ by at most {largest:.1g} nats" if largest else "are equal"
    summary = (
        f"In all tasks, the log-likelihoods {differ}. Lamina evaluates {record['throughput_ratio']:.2f} times as many "
        "items per second as lm-evaluation-harness."
    )
    return "\n".join([*head, *rows, "", summary, "", where])


def after_pretraining_table(record: dict[str, Any] | None, where: str) -> str:
    """A row per placement that tools/runs/whole_path.py took through the stages."""
    if record is None:
        return _unmeasured("after_pretraining")
    rows = [
        f"| `{row['placement']}` | {' + '.join(f'{minutes:.0f}' for minutes in row['minutes'].values())} | "
        f"{100 * row['reward_accuracy']:.0f} % | {row['reward_gain']:+.3f} ({row['reward_gain_low']:+.3f} to "
        f"{row['reward_gain_high']:+.3f}) | {row['eval_kl']:.2f} |"
        for row in record["rows"]
    ]
    head = [
        "| placement | minutes of the four stages | reward model's accuracy | "
        "gain of the held-out reward (95 % interval) | KL in nats |",
        "|---|---|---|---|---|",
    ]
    return "\n".join([*head, *rows, "", where])


def studies_sentence(record: dict[str, Any] | None, where: str) -> str:
    """How long the engine of studies takes to start the next trial."""
    if record is None:
        return _unmeasured("studies")
    return f"In a study, {record['overhead']['between']:.1f} seconds pass between two trials. {where}"


def _unmeasured(name: str) -> str:
    return f"Not measured yet: there is no benchmarks/results/{name}.json (`python benchmarks/{name}.py`)."
