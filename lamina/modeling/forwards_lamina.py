"""Insert method calls into the source code of a module's forward.

Serving engines read and rewrite the source code of a forward. A call that is only in the bytecode would be missing in
the rewritten forward. This file does not import the package, because transformers copies this file beside a checkpoint.
"""

from __future__ import annotations
import __future__

import ast
import functools
import inspect
import linecache
import textwrap
import zlib
from collections.abc import Mapping
from types import CellType, CodeType, FunctionType

from torch import nn


class _Calls(ast.NodeTransformer):
    """Insert method calls into a syntax tree, before and after the calls of inner modules."""

    def __init__(self, owner: str, before: Mapping[str, str], after: Mapping[str, str]):
        self.owner, self.before, self.after, self.found = owner, before, after, set[str]()

    def visit_Call(self, node: ast.Call) -> ast.Call:
        self.generic_visit(node)
        called = node.func
        if not (node.args and isinstance(called, ast.Attribute) and isinstance(called.value, ast.Name)):
            return node
        if called.value.id != self.owner:
            return node
        name = called.attr
        self.found.add(name)
        if name in self.before:
            node.args[0] = self._call(self.before[name], node.args[0])
        return self._call(self.after[name], node) if name in self.after else node

    def _call(self, name: str, argument: ast.expr) -> ast.Call:
        owner = ast.Name(id=self.owner, ctx=ast.Load())
        return ast.Call(func=ast.Attribute(value=owner, attr=name, ctx=ast.Load()), args=[argument], keywords=[])


def with_calls(base: type[nn.Module], before: Mapping[str, str], after: Mapping[str, str]) -> FunctionType:
    """Return a module's forward with additional method calls, before and after the calls of inner modules.

    ``before`` maps the name of an inner module to the name of the method that changes the module's input. ``after``
    does the same for the output. Raises ValueError if the forward does not call an inner module, or if the forward's
    source code is not available.
    """
    name = f"{base.__name__}.forward"
    wrappers, forward = list[FunctionType](), base.forward
    while isinstance(forward, FunctionType) and hasattr(forward, "__wrapped__"):
        wrappers, forward = [forward, *wrappers], vars(forward)["__wrapped__"]
    tree = _tree(forward)
    if tree is None or not isinstance(forward, FunctionType) or not forward.__code__.co_argcount:
        raise ValueError(f"{name}: its source is not available. Define the method in a file.")
    calls = _Calls(forward.__code__.co_varnames[0], before, after)
    calls.visit(tree)
    if absent := [module for module in (*after, *before) if module not in calls.found]:
        raise ValueError(f"{name} does not call {absent[0]!r} itself. Choose another backbone or placement.")
    made = _compiled(tree, forward, f"{base.__module__}.{name}")
    added = {*before.values(), *after.values()}
    if made.__code__.co_varnames != forward.__code__.co_varnames or not (
        {*made.__code__.co_names} - added <= {*forward.__code__.co_names}
    ):
        raise ValueError(
            f"{name}: its source differs from the code that runs. Restart Python after a change of the file."
        )
    for wrapper in wrappers:
        cells = wrapper.__closure__ or ()
        holds = [cell.cell_contents is vars(wrapper)["__wrapped__"] for cell in cells]
        if not any(holds):
            raise ValueError(
                f"{name}: {wrapper.__qualname__} is a decorator that hides the wrapped method. Use a plain decorator."
            )
        closure = (CellType(made) if held else cell for cell, held in zip(cells, holds, strict=True))
        made = _twin(wrapper, wrapper.__code__, tuple(closure), made)
    return made


def _tree(forward: object) -> ast.FunctionDef | None:
    try:
        source = inspect.getsource(forward)  # type: ignore[arg-type]  # raises TypeError
        tree = ast.parse(f"class _:\n{source}" if source[:1].isspace() else source).body[0]
    except (OSError, TypeError, SyntaxError):
        return None
    tree = tree.body[0] if isinstance(tree, ast.ClassDef) else tree
    return tree if isinstance(tree, ast.FunctionDef) else None


def _compiled(tree: ast.FunctionDef, original: FunctionType, name: str) -> FunctionType:
    """Compile a changed method, and register the source code for ``inspect.getsource``."""
    names = original.__code__.co_freevars
    owner = original.__qualname__.rpartition(".")[0].rpartition(".")[2]
    text = textwrap.indent(ast.unparse(ast.fix_missing_locations(tree)), "    ")
    text = f"class {owner if owner.isidentifier() else '_'}:\n{text}\n"  # Python adds the class's name to private names
    if variables := [variable for variable in names if variable != "__class__"]:
        text = f"def enclosing({', '.join(variables)}):\n{textwrap.indent(text, '    ')}"
    file = f"<{name} with Lamina's norms {zlib.crc32(text.encode()):08x}>"
    linecache.cache[file] = len(text), None, text.splitlines(keepends=True), file
    flags = original.__code__.co_flags & __future__.annotations.compiler_flag
    codes: list[CodeType] = [compile(text, file, "exec", flags=flags, dont_inherit=True)]
    while (code := codes.pop(0)).co_name != tree.name:
        codes += [one for one in code.co_consts if isinstance(one, CodeType)]
    cells = dict(zip(names, original.__closure__ or (), strict=True))
    return _twin(original, code, tuple(cells[variable] for variable in code.co_freevars))


def _twin(
    original: FunctionType, code: CodeType, closure: tuple[CellType, ...], wrapped: FunctionType | None = None
) -> FunctionType:
    twin = FunctionType(code, original.__globals__, original.__name__, original.__defaults__, closure)
    functools.update_wrapper(twin, original)
    twin.__kwdefaults__ = original.__kwdefaults__
    if wrapped is None:
        del vars(twin)["__wrapped__"]
    else:
        vars(twin)["__wrapped__"] = wrapped
    return twin
