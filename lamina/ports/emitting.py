"""Write a norm placement as a file for another trainer, with a test that compares the file with Lamina's model."""

from __future__ import annotations

import re
import sys
import textwrap
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from lamina.core.extras import require
from lamina.core.initializers import check
from lamina.errors import UserError
from lamina.placements.plan import Plan
from lamina.placements.registry import get, names
from lamina.placements.resolution import find, resolve
from lamina.ports.port import WIDTH, Port, nameless
from lamina.ports.targets import FOLDER, target_of

if TYPE_CHECKING:
    from jinja2 import Environment


@dataclass(frozen=True, kw_only=True)
class Emitted:
    """The code of a norm placement for a trainer, a test of the code, and the placement's plan."""

    plan: Plan
    code: str
    test: str


def emit(
    placement: str | Plan, target: str, num_layers: int, *, init: str = "recommended", module: str = ""
) -> Emitted:
    """Return the code of a norm placement for ``num_layers`` blocks in a trainer, and a test.

    The test imports the code as ``module``. Raises UserError for an unknown placement, trainer or initializer, and for
    a placement that the trainer can't express.
    """
    require("emit", "report")
    table = target_of(target)
    if isinstance(placement, Plan):
        plan, spec = placement, placement.placement
        found = get(spec) if spec in names() else nameless(plan)
    else:
        plan, spec = resolve(placement, num_layers), placement
        found = find(spec)
    chosen = ""
    if init != "recommended":
        check(init)
        if not table.roles:
            raise UserError(f"init: {init!r}, but a file for {table.title} initializes no weights. Remove --init.")
        plan, chosen = replace(plan, initialization=init), f" --init {_quoted(init)}"
    port = Port(found, plan, table)
    used = {
        "p": port,
        "n": num_layers,
        "version": sys.modules["lamina"].__version__,
        "spec": spec,
        "command": f"lamina emit {_quoted(spec)} --to {target} --num-layers {num_layers}{chosen}",
        "options": ", ".join(f"{name} = {value}" for name, value in plan.options.items()),
        "module": module or f"{plan.placement}_block",
        "camel": "".join(part.capitalize() for part in plan.placement.split("_")),
    }
    environment = _environment()
    code = environment.get_template(table.template).render(used)
    parts = {part: environment.from_string(text).render(used).strip() for part, text in table.test.items()}
    beside = (f"from {used['module']} ", "from model ")  # modules in the same folder
    lines = sorted([*parts["imports"].splitlines(), *_IMPORTS], key=lambda line: (line[0] == "f", line))
    parts["imports"] = "\n".join(line for line in lines if not line.startswith(beside))
    parts["beside"] = "\n".join(line for line in lines if line.startswith(beside))
    test = environment.get_template("_test.py.j2").render(used, **parts)
    return Emitted(plan=plan, code=tidied(code), test=tidied(test))


_IMPORTS = ("import lamina", "from lamina.ports.weights import weights_for")


def _quoted(word: str) -> str:
    return f'"{word}"' if re.search(r"[^\w./-]", word) else word


def _environment() -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    made = Environment(loader=FileSystemLoader(FOLDER), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    made.filters["wrap"] = lambda text: textwrap.fill(text, WIDTH, break_long_words=False, break_on_hyphens=False)

    def ends(names: list[str]) -> str:
        quoted = ", ".join(f'"{name}"' for name in names)
        return quoted if len(names) == 1 else f"({quoted})"

    made.filters["ends"] = ends
    return made


def tidied(text: str) -> str:
    """Remove trailing spaces and extra blank lines from code."""
    text = "\n".join(line.rstrip() for line in text.strip().splitlines())
    head, end, body = text.partition('"""\n\n')
    head = re.sub(r"\n{3,}", "\n\n", head)
    return head + end + re.sub(r"\n{4,}", "\n\n\n", body) + "\n"
