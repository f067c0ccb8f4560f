"""Values of wrong kinds given from Python: an error that names the field, never one from deep inside."""

from __future__ import annotations

import random
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tools.reliability.record import SILENT, TRACEBACK, WRONG, Case

TINY: dict[str, Any] = {
    "corpus": "corpus.txt", "output": "out", "num_layers": 2, "hidden_size": 16, "num_heads": 2, "sequence_length": 16,
    "batch_size": 2, "steps": 2, "threads": 1, "bar": False,
}  # fmt: skip
ODD: list[Any] = [
    object(), b"bytes", 1j, {"a"}, memoryview(b"abc"), float("nan"), float("inf"), -1, 10**400, [], {}, "a\0b", print,
]  # fmt: skip


def suite(folder: Path, drawn: random.Random, count: int) -> Iterator[Case]:
    """``count`` seeded calls of the public functions with a value of a wrong kind."""
    rows = list(calls())
    drawn.shuffle(rows)
    for name, call, word in rows[:count]:
        yield judged(name, call, word)


def calls() -> Iterator[tuple[str, Callable[[], Any], str]]:
    """A call's name, the call, and the field that its message has to name."""
    import lamina
    from lamina.placements import resolve

    fields = {
        lamina.pretrain: ("placement", "backbone", "num_layers", "hidden_size", "corpus", "tokenizer", "steps",
                          "batch_size", "learning_rate", "warmup", "seed", "output", "trainer", "init", "report_to",
                          "streaming", "precision", "untie_embeddings", "beta1", "from_model"),
        lamina.compare: ("placements", "learning_rates", "seeds", "workers", "output", "steps", "backbone", "init"),
        lamina.preflight: ("placements", "learning_rates", "flops", "burn_in", "seed", "steps", "corpus"),
    }  # fmt: skip
    for function, names in fields.items():
        for name in names:
            for value in ODD:
                if _allowed(name, value):
                    continue
                given = {k: v for k, v in TINY.items() if not (function is lamina.preflight and k in ("output",))}
                shown = f"{function.__name__}({name}={repr(value)[:30]})"
                yield shown, lambda f=function, g=given, n=name, v=value: f(**{**g, n: v}), name
        yield f"{function.__name__}(nosuch=1)", lambda f=function: f(nosuch=1), "nosuch"
    for value in ODD:
        shown = repr(value)[:30]
        yield f"build({shown}, keel)", lambda v=value: lamina.build(v, "keel"), "backbone"
        yield f"build(llama-nano, {shown})", lambda v=value: lamina.build("llama-nano", v), "placement"
        yield f"resolve(keel, {shown})", lambda v=value: resolve("keel", v), "num_layers"
        for name in ("num_layers", "hidden_size", "num_heads", "vocab_size", "num_labels", "head", "init"):
            if not (name == "head" and not value and value != 0):
                call = lambda n=name, v=value: lamina.build("llama-nano", "keel", **{n: v})  # noqa: E731
                yield f"build({name}={shown})", call, name
        yield f"wire({shown})", lambda v=value: lamina.wire(v, v, v, v), "attention"
        yield f"probe({shown})", lambda v=value: lamina.probe(v), "checkpoint"


def _allowed(name: str, value: Any) -> bool:
    """Whether a value that is odd elsewhere has a meaning for this field."""
    return name == "trainer" and value == {}


def judged(name: str, call: Callable[[], Any], word: str) -> Case:
    """The case of a call."""
    try:
        call()
    except (ValueError, TypeError) as error:
        said = str(error)
        from lamina.errors import UserError

        depth = len(traceback.extract_tb(error.__traceback__))
        if not isinstance(error, UserError) and depth > 3:
            return Case("Python", name, TRACEBACK, f"{type(error).__name__} from {depth} calls deep: {said[:200]}")
        if word.removesuffix("s").replace("_", " ") not in said.replace("_", " ").replace("-", " ") or len(said) > 2500:
            return Case("Python", name, WRONG, f"does not name {word}: {said[:300]}")
        return Case("Python", name)
    except Exception:
        return Case("Python", name, TRACEBACK, traceback.format_exc()[-500:])
    return Case("Python", name, SILENT, "accepted")
