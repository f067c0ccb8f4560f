"""Fills the README's generated tables from the registry and the committed benchmark records."""

from __future__ import annotations

import json
import re
from pathlib import Path

from lamina.placements import get, names

ROOT = Path(__file__).resolve().parent.parent


def placements_table() -> str:
    """A row a placement: name, equation, source."""
    rows = ["| placement | equation | source |", "|---|---|---|"]
    for name in names():
        placement = get(name)
        equation = "<br>".join(f"`{re.sub(r'  +', ' ', line)}`" for line in placement.equation)
        rows.append(f"| `{name}` {placement.title} | {equation} | {placement.source} |")
    return "\n".join(rows)


def train_step_table() -> str:
    """A row a model of the newest benchmark record, with where it was measured."""
    record = json.loads((ROOT / "benchmarks/results/train_step.json").read_text(encoding="utf-8"))
    rows = ["| model | tokens/s | speed against the peer | peak memory | against the peer |", "|---|---|---|---|---|"]
    rows += [
        f"| {r['model']} | {r['tokens_per_second']:,} | {r['speed_ratio']:.2f} | {r['peak_memory_mib']:,} MiB "
        f"| {r['memory_ratio']:.2f} |"
        for r in record["results"]
    ]
    s, machine = record["settings"], record["machine"]
    where = (
        f"d {s['hidden_size']}, {s['num_hidden_layers']} layers, vocabulary {s['vocab_size']:,}, "
        f"batch {s['batch_size']} × "
        f"{s['sequence_length']}, fp32, eager, {s['threads']} threads; {machine['processor'] or machine['platform']}, "
        f"{machine['cores']} cores; torch {record['versions']['torch']}, "
        f"transformers {record['versions']['transformers']}; "
        f"{record['date']}, revision {record['revision']}."
    )
    return "\n".join([*rows, "", where])


def filled(text: str) -> str:
    """The README with its generated tables as they are now."""
    for name, table in (("placements", placements_table()), ("train_step", train_step_table())):
        block = f"<!-- {name} -->\n{table}\n<!-- /{name} -->"
        text = re.sub(rf"<!-- {name} -->.*?<!-- /{name} -->", lambda _, block=block: block, text, flags=re.DOTALL)
    return text


if __name__ == "__main__":
    readme = ROOT / "README.md"
    readme.write_text(filled(readme.read_text(encoding="utf-8")), encoding="utf-8")
