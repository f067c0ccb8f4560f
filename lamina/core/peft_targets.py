"""Tell PEFT which modules of a Lamina model to adapt, so that ``LoraConfig()`` needs no ``target_modules``.

For each method, such as LoRA, PEFT has a table that lists the modules to adapt in each model type. Lamina adds the type
"lamina" to each table. The new entry lists the modules that PEFT adapts in a Llama, with their names in all models that
Lamina supports. PEFT skips names that a model does not have.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from types import ModuleType

# One projection may have several roles.
_STACKED = {
    "query_key_value": ("query", "key", "value"),
    "query_key_value_by_head": ("query", "key", "value"),
    "key_value": ("key", "value"),
    "gate_and_in": ("gate", "feed_forward_in"),
}
# Without the final norm: a plan without a final norm has an Identity there, which PEFT can't adapt.
_NORMS = ("pre_norm", "key_norm", "value_norm", "out_norm", "post_norm", "embedding_norm")


def targets(of_llama: Iterable[str]) -> list[str]:
    """Translate the names of the modules that PEFT adapts in a Llama to names in Lamina's models."""
    from lamina.core.architectures import ROLES  # here, so that `import lamina` stays light

    names: set[str] = set()
    for adapted in of_llama:
        role = ROLES.get(adapted)
        if role is None:
            names.update(_NORMS)  # a Llama has only linear layers and norms
        for name, module_role in ROLES.items():
            if role in (module_role, *_STACKED.get(module_role, ())):
                names.add(name.replace(".", ".module."))  # "attention.Wo": the module is inside the residual
    return sorted(names)


def put_rows(module: ModuleType) -> None:
    """Add "lamina" to each of PEFT's tables that has an entry for "llama"."""
    for name, table in vars(module).items():
        of_llama = table.get("llama") if isinstance(table, dict) else None
        if re.fullmatch(r"TRANSFORMERS_MODELS_TO_\w+_MODULES_MAPPING", name) and isinstance(of_llama, list):
            table.setdefault("lamina", targets(of_llama))
