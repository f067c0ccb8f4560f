"""The content of another trainer's checkpoint, and a reader for the files of torch.distributed."""

from __future__ import annotations

import pickle
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePath

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as load_distributed
from transformers import PreTrainedConfig

from lamina.errors import UserError, one_line
from lamina.placements import Plan


@dataclass(frozen=True, kw_only=True)
class ForeignCheckpoint:
    """The content of a trainer's checkpoint, with the configuration of the same model in transformers."""

    weights: Mapping[str, torch.Tensor]
    config: PreTrainedConfig
    adapter: Mapping[str, object] | None = None
    placement: str = ""  # empty if the checkpoint does not name the norm placement
    options: Mapping[str, object] = field(default_factory=dict)  # the placement's options in the checkpoint
    # Weights that are not in the trainer's table, under Lamina's names.
    wiring: Mapping[str, torch.Tensor] = field(default_factory=dict)
    has_biases: bool = True  # if not, the biases that the checkpoint lacks are 0
    # A function that adapts the placement's layers to the checkpoint.
    settled: Callable[[Plan], Plan] = field(default=lambda plan: plan)


class _Metadata(pickle.Unpickler):
    """An unpickler for the index of a checkpoint. For safety, the unpickler loads only harmless classes."""

    def find_class(self, module: str, name: str, /) -> object:
        if name == "_StorageInfo":
            return _StorageInfo
        cls = super().find_class(module, name) if module.partition(".")[0] in ("torch", "collections") else None
        if module.startswith("pathlib") and name.endswith("Path"):
            return PurePath
        plain = isinstance(cls, torch.dtype | torch.layout | torch.memory_format) or (module, name) == _LAYOUT
        if plain or cls in (torch.Size, OrderedDict) or module.startswith("torch.distributed.checkpoint."):
            return cls
        raise UserError(
            f"source: the index .metadata names {module}.{name}, a class that checkpoints do not need. Give a "
            "checkpoint from a source that you trust."
        )


class _Reader(FileSystemReader):
    def read_metadata(self, *args: object, **kwargs: object) -> Metadata:
        with open(Path(self.path) / ".metadata", "rb") as file:
            metadata = _Metadata(file).load()
        metadata.storage_meta = getattr(metadata, "storage_meta", None) or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


_LAYOUT = ("torch.serialization", "_get_layout")


def distributed(folder: Path, *prefixes: str) -> dict[str, torch.Tensor]:
    """Read the tensors with one of the ``prefixes`` from a torch.distributed checkpoint."""
    if not (folder / ".metadata").is_file():
        raise UserError(
            f"source: {str(folder)!r} holds no torch.distributed checkpoint: .metadata is missing. Give the folder "
            "with the file .metadata."
        )
    reader = _Reader(folder)
    entries = reader.read_metadata().state_dict_metadata
    tensors = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in entries.items()
        if isinstance(entry, TensorStorageMetadata) and name.startswith(prefixes)
    }
    load_distributed(dict(tensors), storage_reader=reader, no_dist=True)
    return tensors


@contextmanager
def alone() -> Iterator[None]:
    """Suppress torch's warning that torch.distributed is disabled."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield


@contextmanager
def reading(folder: Path, trainer: str) -> Iterator[None]:
    """Raise UserError instead of the many errors that a damaged file can cause."""
    try:
        yield
    except (UserError, OSError, MemoryError):
        raise
    except Exception as error:
        why = one_line(error).partition(". ")[0]  # the rest of torch's message is advice about torch's own options
        raise UserError(
            f"source: {str(folder)!r} is not a {trainer} checkpoint, or is damaged ({why}). Give a folder that "
            f"{trainer} wrote."
        ) from error


def file_of(folder: Path, name: str) -> Path:
    path = folder / name if folder.is_dir() else folder
    if not path.is_file():
        raise UserError(f"source: {str(folder)!r} holds no {name}. Give a folder that the trainer wrote.")
    return path
