"""The policy of resuming: a resumed job may change how it runs, but not what it computes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lamina.errors import UserError


@dataclass(frozen=True, kw_only=True)
class ResumePolicy:
    """The settings that one kind of job may change when it resumes.

    Attributes:
        what: the noun in the messages: "run", "study".
        free: the settings that may change.
        compared: settings whose content the job compares itself: files and folders that may have moved.
    """

    what: str
    free: frozenset[str]
    compared: frozenset[str] = frozenset()

    def merge(
        self, stored: Mapping[str, object], given: Mapping[str, object], defaults: Mapping[str, object]
    ) -> dict[str, object]:
        """Return the settings to resume with: the user's over the stored ones; ``auto`` keeps the job's first choice.

        Args:
            stored: the folder's settings.
            given: the user's settings now.
            defaults: for settings in neither.

        Raises:
            UserError: if the user changed a setting that may not change; it names the first one.
        """
        given = {name: value for name, value in given.items() if value != "auto" or name in self.free}
        for name, value in given.items():
            old = stored.get(name, defaults.get(name))
            if name not in self.free and name not in self.compared and value != old:
                others = ", ".join(sorted(set(self.free) - {"output"}))
                raise UserError(
                    f"{name}: {value!r} differs from the {self.what}'s {old!r} (allowed with --resume: the same, or "
                    f"another of {others}; else another --output)"
                )
        return {**stored, **given}
