"""Registries of named objects, to which Lamina, plug-ins and users' files add objects with decorators."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Generic, TypeVar

from lamina.core.python_files import guarded, run_file
from lamina.errors import UserError, unknown

Entry = TypeVar("Entry")


def refuse_namesake(kind: str, name: str, owner: str, holder: str | None) -> None:
    """Raise UserError if another module has registered the name."""
    if holder not in (None, owner):  # a module may register a name again, because Lamina may read a file twice
        raise UserError(
            f"{kind} {name!r}: {owner} registers this name, but {holder} has already registered it. Choose another "
            "name."
        )


class Registry(Generic[Entry]):
    """A mapping from names to registered objects. The first use imports the modules that define the objects.

    Args:
        kind: the noun for an object in messages, such as "placement".
        modules: a function that returns the names of the modules to import.
        plugins: the entry-point group under which other packages can add objects.
    """

    def __init__(self, kind: str, *, modules: Callable[[], Iterable[str]] = tuple, plugins: str | None = None) -> None:
        self.kind = kind
        self._modules, self._plugins = modules, plugins
        self._entries: dict[str, tuple[Entry, str]] = {}  # with the module that registered it
        self._state = "new"  # new, loading, loaded
        self._failure: UserError | None = None

    def add(self, name: str, entry: Entry, owner: str) -> None:
        """Register an object of the module ``owner``. Raises UserError if another module has registered the name."""
        # Without _load: decorators call this method while Lamina imports a module.
        refuse_namesake(self.kind, name, owner, self._entries.get(name, (None, None))[1])
        self._entries[name] = entry, owner

    def registered(self, name: str) -> Entry | None:
        """Return the object with a name, or None. Unlike ``get``, this method imports no modules."""
        return self._entries[name][0] if name in self._entries else None

    def names(self) -> list[str]:
        self._load()
        return sorted(self._entries)

    def get(self, name: str, *, other_names: Iterable[str] = ()) -> Entry:
        """Return the object with a name. Raises UserError for an unknown name, and suggests the most similar name."""
        self._load()
        if name not in self._entries:
            raise unknown(self.kind, name, [*self._entries, *other_names])
        return self._entries[name][0]

    def from_file(self, path: Path) -> Entry:
        """Return the one object that a user's Python file registers. Raises UserError for any exception in the file."""
        if not path.is_file():
            raise UserError(f"{self.kind} {str(path)!r}: no such file")
        with self.isolated():
            before = dict(self._entries)
            run_file(self.kind, path)
            new = [entry[0] for name, entry in self._entries.items() if before.get(name) is not entry]
        if len(new) != 1:
            raise UserError(
                f"{self.kind} {str(path)!r}: this file registers {len(new)} {self.kind}s with @{self.kind}. Register "
                "one."
            )
        return new[0]

    @contextmanager
    def isolated(self) -> Iterator[None]:
        """Undo all registrations made inside the context."""
        self._load()  # before the copy: if a file made Lamina load its modules, their objects would be lost
        before = dict(self._entries)
        try:
            yield
        finally:
            self._entries = before

    def _load(self) -> None:
        """Import Lamina's modules, then the plug-ins. After a plug-in's failure, each call raises the same error."""
        if self._failure is not None:
            raise self._failure
        if self._state != "new":
            return
        self._state = "loading"  # a plug-in may use objects that are already registered
        try:
            for module in self._modules():
                importlib.import_module(module)
            for plugin in entry_points(group=self._plugins) if self._plugins else ():
                self._load_plugin(plugin)
            self._state = "loaded"
        finally:
            if self._state == "loading":
                self._state = "new"

    def _load_plugin(self, plugin: EntryPoint) -> None:
        package = "" if plugin.dist is None else f" of the package {plugin.dist.name} {plugin.dist.version}"
        subject = f"{self.kind} plug-in {plugin.name!r}{package}: {plugin.value}"
        before = dict(self._entries)
        try:
            with guarded(subject):
                plugin.load()
        except BaseException as error:
            self._entries = before
            if not isinstance(error, UserError):
                raise
            reason = str(error) if str(error).startswith(subject) else f"{subject}: {error}"
            self._failure = UserError(f"{reason}. Update or uninstall that package.")
            raise self._failure from error
