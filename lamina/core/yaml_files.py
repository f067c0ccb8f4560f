"""Read users' YAML safely. Limits on size and depth keep a file from exhausting memory or time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from lamina.core.json_types import Json
from lamina.errors import UserError, shortened

LARGEST = 4 * 2**20  # bytes. A full plan of 512 layers has less than 1 MiB
DEEPEST = 20  # levels. A full plan has five
MOST_VALUES = 200_000  # with all aliases expanded
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_Dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


class _Strict(_Loader):
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> Json:
        """Return a node's mapping. Raises ConstructorError for a repeated key, where YAML would keep the last value."""
        keys: set[tuple[str, str]] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and (key.tag, key.value) in keys:
                problem = f"the key {key.value!r} is given twice"
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
            keys.add((key.tag, str(key.value)))
        return super().construct_mapping(node, deep=deep)


def safe_load(text: str) -> object:
    """Parse a YAML text that Lamina wrote. Raises YAMLError."""
    return yaml.load(text, Loader=_Loader)


def read_back(data: Json) -> object:
    return safe_load(yaml.dump(data, Dumper=_Dumper))


def read_mapping(path: Path, needed: str = "lines NAME: VALUE") -> Json:
    """Read a YAML file that holds a mapping. Raises UserError if the file can't be read or holds no mapping."""
    source = repr(str(path))
    try:
        if not path.exists():
            raise UserError(f"{source}: no such file. Give a YAML file.")
        if not path.is_file():
            raise UserError(f"{source} is not a file. Give a YAML file.")
        with path.open("rb") as file:
            content = file.read(LARGEST + 1)
        if len(content) > LARGEST:
            raise UserError(
                f"{source} is too large for a YAML file of settings. Shorten the file to {LARGEST // 2**20} MiB."
            )
        text = content.decode("utf-8")
        _bounded(source, text)
        data = yaml.load(text, Loader=_Strict)
    except UserError:
        raise
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError, OSError, AttributeError, TypeError) as error:
        # ValueError: bytes other than UTF-8, numbers of thousands of digits, invalid dates
        reason = shortened(" ".join(str(getattr(error, "problem", None) or error).split()), 300)
        mark = getattr(error, "problem_mark", None)
        where = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise UserError(f"{source} is not valid YAML{where} ({reason}). Correct the file.") from None
    if not isinstance(data, dict):
        raise UserError(f"{source} holds no mapping. Give {needed}.")
    return data


def _bounded(source: str, text: str) -> None:
    """Raise UserError if a YAML file is nested too deep or has too many values. Lamina has built no value yet."""
    sizes: dict[str, int] = {}  # the number of values of each anchor, with all aliases expanded
    open_: list[tuple[str | None, int]] = [(None, 0)]
    for event in yaml.parse(text, Loader=_Loader):
        anchor, size = getattr(event, "anchor", None), 0
        if isinstance(event, yaml.CollectionStartEvent):
            if len(open_) > DEEPEST:
                raise UserError(f"{source} is nested too deep. Use at most {DEEPEST} levels.")
            open_.append((anchor, 1))
            continue
        if isinstance(event, yaml.AliasEvent):
            if anchor not in sizes:
                raise UserError(
                    f"{source}: the alias *{anchor} has no earlier anchor, or is inside the anchor's value. Remove "
                    "this alias."
                )
            size, anchor = sizes[anchor], None
        elif isinstance(event, yaml.ScalarEvent):
            size = 1
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, size = open_.pop()
        if anchor is not None:
            sizes[anchor] = size
        name, count = open_[-1]
        open_[-1] = (name, count + size)
        if count + size > MOST_VALUES:
            raise UserError(f"{source} has more than {MOST_VALUES} values, with each alias expanded. Shorten the file.")
