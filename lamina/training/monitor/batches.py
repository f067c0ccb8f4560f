"""Record the rows of unusual batches in batches.jsonl, to show the text that caused a spike."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from lamina.core.json_types import Json
from lamina.jobs.files import write_lines
from lamina.jobs.names import BATCHES
from lamina.jobs.run_folder import parse_lines
from lamina.training.monitor.guard import OutlierRule
from lamina.training.monitor.writers import LOSS, Row

if TYPE_CHECKING:
    import torch
    from torch import nn

    from lamina.modeling.processes import Processes

logger = logging.getLogger(__name__)

Rows: TypeAlias = list["torch.Tensor"]
SPARE = 64  # steps for which batches are kept beyond the interval between records, because alarms come late
MOST_BYTES = 2**28  # the largest size of the kept batches
MOST_STEPS = 100  # the largest number of steps in batches.jsonl
SHOWN = 64  # tokens of a row's beginning
_LONGEST = 200  # characters of a row's beginning
HIGH = 6.0  # standard deviations by which a loss is an outlier
_BESIDE = ("mask", "position", "type")  # parts of the names of inputs that only describe another input


class Tokenizer(Protocol):
    """An object that turns a list of token ids into text, such as a tokenizer of transformers or tiktoken."""

    def decode(self, ids: list[int], /) -> Any: ...


class KeptBatches:
    """Keep the batches of the last steps in one process. Only the method ``rows`` waits for the device."""

    def __init__(self, every: int):
        self.steps: dict[int, list[tuple[torch.Tensor, torch.Tensor | None]]] = {}
        # on a GPU, Lamina checks for alarms only once in ``every`` steps
        self._most, self._bytes = every + SPARE, 0
        self._open: list[tuple[torch.Tensor, torch.Tensor | None]] = []  # micro-batches of the step that is under way

    def see(self, inputs: Mapping[str, torch.Tensor], main: str | None) -> None:
        """Keep a micro-batch's tokens and padding mask. Without tokens, keep the model's main input."""
        tensors = {name: value.detach() for name, value in inputs.items() if value.ndim}
        names = [*([main] if main in tensors else []), *(n for n in tensors if not any(part in n for part in _BESIDE))]
        whole = {name for name in names if not tensors[name].is_floating_point()}
        tokens = next((name for name in names if name in whole and tensors[name].ndim in (2, 1 + (name != main))), None)
        name = tokens or next(iter(names), None)
        if name is None:
            return
        value, mask = tensors[name], tensors.get("attention_mask")
        value = value[None] if tokens and value.ndim == 1 else value  # sequences in one row, without a batch dimension
        fits = mask is not None and mask is not value and mask.shape == value.shape
        self._open.append(
            (value.clone().int() if tokens else value.clone(), mask.bool() if fits and mask is not None else None)
        )

    def end_step(self, step: int) -> None:
        self.steps[step], self._open = self._open, []
        self._bytes += _bytes_of(self.steps[step])
        while len(self.steps) > self._most or (self._bytes > MOST_BYTES and len(self.steps) > 1):
            self._bytes -= _bytes_of(self.steps.pop(next(iter(self.steps))))

    def rows(self, step: int) -> Rows:
        """Return the rows of a step's batch on the CPU, without padding."""
        rows: Rows = []
        for value, mask in self.steps.get(step, []):
            kept = None if mask is None else mask.cpu()
            rows += [row if kept is None else row[kept[number]] for number, row in enumerate(value.cpu())]
        return [row if row.is_floating_point() else row[row >= 0] for row in rows]  # labels have -100 for no token


class BatchRecords:
    """Write batches.jsonl, with a line for each row of an unusual batch.

    A batch is unusual if the step has an alarm, an unusual gradient or an unusual loss. The key "beginning" holds a
    row's first tokens as text, or as token ids if there is no tokenizer.

    Args:
        folder: the folder of the file, or None in all processes except the first.
        step: the last step before training began or resumed.
        tokenizer: the tokenizer that decodes rows (default: the model's tokenizer).
    """

    def __init__(
        self, kept: KeptBatches, folder: Path | None, step: int, tokenizer: Tokenizer | None, model: nn.Module | None
    ):
        self.kept, self.folder, self.tokenizer, self._model = kept, folder, tokenizer, model
        self._lines: list[Json] = []
        self._high = OutlierRule(sigmas=HIGH)
        if folder is not None and (before := read_batches(folder)):
            self._lines = [line for line in before if line["step"] <= step]
            write_lines(folder / BATCHES, self._lines)

    def write(self, steps: Iterable[int], series: Iterable[Row], processes: Processes) -> None:
        """Write the batches of the given steps and of steps with an unusually high loss. Call this in all processes."""
        steps = {*steps, *(row.step for row in series if row.metric == LOSS and self._high.see(LOSS, row.value))}
        written = {line["step"] for line in self._lines}
        new = sorted(step for step in set(steps) - written if self.kept.steps.get(step))
        new = new[: max(0, MOST_STEPS - len(written))]
        new = processes.everyones(new)[0]
        if not new:
            return
        mine = [
            {
                "step": step,
                "process": processes.rank,
                "row": number,
                "hash": hash_of_row(row),
                "beginning": self._begin(row),
            }
            for step in new
            for number, row in enumerate(self.kept.rows(step))
        ]
        lines = [line for lines in processes.everyones(mine) for line in lines]
        if self.folder is not None and lines:
            self._lines = sorted([*self._lines, *lines], key=lambda line: (line["step"], line["process"], line["row"]))
            write_lines(self.folder / BATCHES, self._lines)

    def _begin(self, row: torch.Tensor) -> str | list[int] | None:
        if row.ndim != 1 or row.is_floating_point():
            return None
        ids = row[:SHOWN].tolist()
        if self.tokenizer is None and self._model is not None:
            self.tokenizer, self._model = tokenizer_of(self._model), None
        try:
            if self.tokenizer is None:
                return ids
            return str(self.tokenizer.decode(ids))[:_LONGEST].encode("utf-8", "replace").decode()
        except Exception as error:  # a user's tokenizer may fail, but the training must go on
            logger.warning("lamina.watch: batches: the tokenizer cannot decode a batch (%s)", error)
            self.tokenizer = self._model = None
            return ids


def hash_of_row(row: torch.Tensor) -> str:
    """Return the first 16 hexadecimal digits of a row's SHA-256. Token ids are hashed as int64, values as float32."""
    values = row.float().numpy().astype("<f4") if row.is_floating_point() else row.numpy().astype("<i8")
    return hashlib.sha256(values.tobytes()).hexdigest()[:16]


def tokenizer_of(model: nn.Module) -> Tokenizer | None:
    """Return a transformers model's tokenizer from the model's folder or the local cache, or None."""
    config = getattr(model, "config", None)
    name = getattr(config, "name_or_path", None) or getattr(config, "_name_or_path", None)
    if not name:
        return None
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(name, local_files_only=True)
    except Exception:  # there is no usable tokenizer
        return None
    return tokenizer if len(tokenizer) <= getattr(config, "vocab_size", 0) else None


def read_batches(folder: Path) -> list[Json]:
    """Read batches.jsonl, and skip damaged lines."""
    names = {"step", "process", "row", "hash", "beginning"}
    return [line for line in parse_lines(folder / BATCHES)[0] if line.keys() == names]


def beginning_of(line: Json) -> str:
    """Return the beginning of a recorded row as one line of text, or as token ids."""
    beginning = line["beginning"]
    if isinstance(beginning, str):
        return " ".join(beginning.split())
    return "" if beginning is None else f"token ids {' '.join(map(str, beginning[:12]))}"


def _bytes_of(micro_batches: list[tuple[torch.Tensor, torch.Tensor | None]]) -> int:
    return sum(
        value.numel() * value.element_size() + (0 if mask is None else mask.numel()) for value, mask in micro_batches
    )
