"""Every probe on tiny models of every family of transformers, against code that shares nothing with the probes.

A case is one probe on one family. It is right where its numbers are those of ``expected_numbers``, written with hooks
on the family's own list of layers and plain formulas, or where the probe refuses the family in one line.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from lamina.errors import UserError
from lamina.probes.engine.measure import make_context, run
from lamina.probes.engine.probe_settings import ProbeSettings
from lamina.probes.engine.registry import make_all
from tools.reliability.expected_numbers import CHECKS, UNCHECKED, Facts
from tools.reliability.record import RIGHT, TRACEBACK, WRONG, Case, main
from tools.reliability.tiny_families import buildable, count_of, inputs, layer_calls, tiny_model

PROBES = {
    **dict.fromkeys(("hidden_states", "similarity", "gradients", "gains", "attention"), ""),
    "angular_distance": "(tokens=all)",
    "layer_drop": "(meaning=remove, standard_error=0)",
    "logit_lens": "(tokens=0)",
    "low_precision": "",
    "jacobian": "(tokens=3, sequences=1, tolerance=0.0001, total=false)",
    "bounds": "(tokens=3, sequences=1)",
    "spectra": "(few_tokens=warn)",
}


class MaskToken:
    """As much of a tokenizer as probes ask of one."""

    mask_token_id = 5
    decode = staticmethod(str)
    convert_ids_to_tokens = staticmethod(str)


def cases_of(family: str, seed: int = 0) -> list[Case]:
    """One case a probe; one case in all where the family is refused as a whole."""
    model = tiny_model(family, seed)
    given = inputs(model, seed=seed + 1)
    try:
        batch = next(iter(given.values()), None)
        context = make_context(model, ProbeSettings(tolerance=0.0), batch, tokenizer=MaskToken())
    except UserError as error:
        return [Case("refused as a whole", family, *_one_line(error))]
    except Exception as error:
        return [Case("refused as a whole", family, TRACEBACK, _told(error))]
    try:
        facts = Facts(model, layer_calls(model, count_of(family)), given, MaskToken.mask_token_id)
    except LookupError:
        return []  # the suite can't find the layers itself, so nothing is checked and the family is not listed
    found = []
    for name, options in PROBES.items():
        try:
            frame = run(context, make_all(name + options), strict=True)[name]
        except UserError as error:
            found.append(Case(name, family, *_one_line(error)))
            continue
        except Exception as error:
            found.append(Case(name, family, TRACEBACK, _told(error)))
            continue
        try:
            told = CHECKS[name](frame, facts)
        except Exception as error:
            told = f"the suite's own code: {_told(error)}"
        if told != UNCHECKED:  # a case counts only where it was checked
            found.append(Case(name, family, WRONG if told else RIGHT, told))
    return found


def suite(count: int, seed: int) -> Iterator[Case]:
    """The cases of ``count`` families (0: of all that can be built small), drawn with ``seed``."""
    names = [family for family, why in buildable() if not why]
    if count:
        names = sorted(random.Random(seed).sample(names, min(count, len(names))))
    for number, family in enumerate(names):
        torch.manual_seed(seed)
        print(f"{number + 1}/{len(names)} {family}", file=sys.stderr, flush=True)
        yield from cases_of(family, seed)


def families_of(cases: list[Case]) -> dict[str, Any]:
    """Which families were measured, by how many probes, and which refused as a whole with what words."""
    measured: dict[str, int] = {}
    refused: dict[str, str] = {}
    for case in cases:
        if case.group == "refused as a whole":
            refused[case.name] = case.detail
        elif not case.detail.startswith("refused"):
            measured[case.name] = measured.get(case.name, 0) + (case.outcome == RIGHT)
    return {"measured": measured, "refused": refused}


def _one_line(error: UserError) -> tuple[str, str]:
    text = str(error)
    return (RIGHT, f"refused: {text}") if "\n" not in text and len(text) < 600 else (WRONG, f"not one line: {text}")


def _told(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


if __name__ == "__main__":
    seen: list[Case] = []

    def remembered(count: int, seed: int) -> Iterator[Case]:
        for case in suite(count, seed):
            seen.append(case)
            yield case

    code = main("families", remembered, 0)
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path)
    output = parser.parse_known_args()[0].output
    if output is not None:  # the page lists them
        record = json.loads(output.read_text(encoding="utf-8"))
        record["families"] = families_of(seen)
        output.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    sys.exit(code)
