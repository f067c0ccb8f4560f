"""Fields of a model's configuration by which transformers would fetch code from the hub and run it."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator, Mapping

from lamina.errors import UserError, one_line

_CHOOSING = re.compile(r"implementation|kernel")  # parts of the names of fields that choose code
_FLASH = re.compile(r"flash_attention_\d+")
_OF_THE_HUB = ("sonicmoe", "deepgemm")  # experts whose kernels transformers fetches from the hub


def refuse_fetched(data: Mapping[str, object], source: str) -> None:
    """Raise UserError naming the field, at any depth, of config.json or adapter_config.json that asks for code."""
    for path, value in _texts(data):
        if _CHOOSING.search(path) is None:
            continue
        name = value.rpartition("|")[2]
        fetched = "/" in name or (name in _OF_THE_HUB and "experts" in path) or _falls_back(name)
        if fetched:
            allowed = "eager, batched_mm, grouped_mm" if "experts" in path else "eager, sdpa, flex_attention"
            raise UserError(
                f"{source}: {one_line(path)}: {one_line(repr(value))} is code of the hub, which is never run unasked "
                f"(allowed: {allowed}; `lamina generate` takes --trust-remote-code)"
            )
    core = data.get("megatron_core")
    if data.get("megatron_config") is not None and core != "megatron.core":  # an adapter's: peft would import it
        raise UserError(f"{source}: megatron_core: {one_line(repr(core))} (allowed: 'megatron.core')")


def _falls_back(name: str) -> bool:
    """Return whether transformers would take a kernel of the hub in place of a package that is missing."""
    packages = ("kernels", "flash_attn", "flash_attn_interface")
    kernels, *installed = (importlib.util.find_spec(package) is not None for package in packages)
    return _FLASH.fullmatch(name) is not None and kernels and not any(installed)


def _texts(data: object, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield all texts inside of JSON data with their paths, without those of plain lists' indices."""
    if isinstance(data, str):
        yield path, data
    elif isinstance(data, Mapping):
        for name, value in data.items():
            yield from _texts(value, f"{path}.{name}" if path and name else path or str(name))
    elif isinstance(data, list):
        for value in data:
            yield from _texts(value, path)
