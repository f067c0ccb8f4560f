"""Whether a task file of the user's own runs Python code, which `--run-code` must allow."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import yaml


def brings_code(file: Path) -> bool:
    """Whether a task file, or a file that it includes, names a Python function or class of the user's own.

    YAML's parser says it, which sees through escapes and quotes and runs nothing. A file that it can't read counts.
    """
    return _names_code(file, frozenset())


def _names_code(file: Path, outer: frozenset[Path]) -> bool:
    """``outer``: the files that include this one."""
    try:
        root = yaml.compose(file.read_text(encoding="utf-8", errors="replace"), Loader=yaml.SafeLoader)
        nodes = [] if root is None else list(_nodes(root))
    except yaml.YAMLError:
        return True
    included: list[yaml.Node] = []
    for node in nodes:
        if not node.tag.startswith("tag:yaml.org,2002:") or "python/" in node.tag:
            return True
        for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
            if key.value == "class":
                return True
            included += _nodes(value) if key.value == "include" else ()
    inner = {file.parent / str(node.value) for node in included if isinstance(node, yaml.ScalarNode)}
    return any(_names_code(path, outer | {file}) for path in inner - outer - {file} if path.is_file())


def _nodes(root: yaml.Node) -> Iterator[yaml.Node]:
    """A node of a document and all below it, each once: an alias may stand in a thousand places."""
    seen, waiting = set(), [root]
    while waiting:
        node = waiting.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        yield node
        if isinstance(node, yaml.MappingNode):
            waiting += [inner for pair in node.value for inner in pair]
        elif isinstance(node, yaml.SequenceNode):
            waiting += node.value
