"""Tasks' data from a folder in place of the hub: ``DIR/NAME/CONFIG/SPLIT.jsonl``, NAME being the hub's.

Also .arrow and .parquet. CONFIG is ``default`` for a data set without configurations. ``DIR/tasks`` holds task files of
the user's own, whose ``dataset_path`` may be such a name, too.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from lamina.core.json_types import Json
from lamina.core.values import home
from lamina.errors import UserError, nearest

READERS = {".jsonl": "json", ".json": "json", ".arrow": "arrow", ".parquet": "parquet"}
DEFAULT = "default"
_SPLITS = ("training_split", "validation_split", "test_split", "fewshot_split")


@dataclass(frozen=True, kw_only=True)
class DataFolder:
    """A folder with the data of tasks.

    Attributes:
        path: the folder.
    """

    path: Path

    @staticmethod
    def open(path: str) -> DataFolder:
        """The folder. Raises UserError if it does not exist."""
        folder = home("data_dir", path)
        if not folder.is_dir():
            raise UserError(f"data_dir: {path!r} is no folder (allowed: a folder with NAME/CONFIG/SPLIT.jsonl)")
        return DataFolder(path=folder.resolve())

    @property
    def tasks(self) -> Path:
        """The folder of the user's own task files; it need not exist."""
        return self.path / "tasks"

    def files(self, name: str, config: str | None) -> dict[str, Path]:
        """The data file of each split; empty if the folder does not hold the data set."""
        folder = self.path / name / (config or DEFAULT)
        if not folder.is_dir() or self.path not in folder.resolve().parents:
            return {}
        return {file.stem: file for file in sorted(folder.iterdir()) if file.suffix in READERS}

    def localized(self, config: Json, task: str) -> Json:
        """The task's configuration, reading from the folder if it holds the task's data.

        A split that the folder does not hold is left out of the configuration, so that the harness takes another.

        Raises:
            UserError: the data set is not there (with the nearest name that is), no split of it that the task can be
                scored on is there, or a .jsonl line is malformed (with its number).
        """
        name, part = config.get("dataset_path"), config.get("dataset_name")
        if not isinstance(name, str) or name in set(READERS.values()):
            return config
        files = self.files(name, part)
        if not files:
            raise UserError(f"data_dir: no data for the task {task!r}: {self._missing(name, part)}")
        kinds = {file.suffix for file in files.values()}
        if len({READERS[kind] for kind in kinds}) > 1:
            raise UserError(f"data_dir: {name}/{part or DEFAULT} mixes {', '.join(sorted(kinds))} (allowed: one kind)")
        for file in files.values():
            if READERS[file.suffix] == "json":
                check_lines(file)
        splits = {key: config[key] for key in _SPLITS if config.get(key) is not None}
        present = {key: split for key, split in splits.items() if split in files}
        if not any(key in present for key in ("validation_split", "test_split")):
            needed = " or ".join(sorted({s for k, s in splits.items() if k in ("validation_split", "test_split")}))
            raise UserError(
                f"data_dir: {name}/{part or DEFAULT} holds {', '.join(sorted(files))}, but the task {task!r} is scored "
                f"on {needed}"
            )
        reader = READERS[next(iter(files.values())).suffix]
        local = {
            "dataset_path": reader,
            "dataset_name": None,
            "dataset_kwargs": {"data_files": {split: str(file) for split, file in files.items()}},
        }
        return {**config, **local, **{key: present.get(key) for key in splits}}

    def _missing(self, name: str, part: str | None) -> str:
        wanted = f"{name}/{part or DEFAULT}"
        held = {
            file.parent.relative_to(self.path).as_posix()
            for kind in READERS
            for file in self.path.rglob(f"*{kind}")
            if self.tasks not in file.parents
        }
        return (
            f"{str(self.path)!r} has no {wanted}/SPLIT.jsonl{nearest(wanted, held)} (allowed: put it there, as `make "
            "eval-data` does for many tasks; or leave out --data-dir to read from the hub)"
        )


def check_lines(file: Path) -> None:
    """Raise UserError, naming the line, if a line of a .jsonl file is no JSON object."""
    number = 0
    try:
        with file.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip() and not isinstance(json.loads(line), dict):
                    raise UserError(f"data_dir: {str(file)!r}, line {number}: no JSON object")
    except UnicodeDecodeError as error:
        raise UserError(f"data_dir: {str(file)!r} is not UTF-8 text ({error.reason})") from None
    except (ValueError, RecursionError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"data_dir: {str(file)!r}, line {number}: no JSON ({error})") from None
    except OSError as error:
        raise UserError(f"data_dir: {str(file)!r}: {error.strerror}") from None
