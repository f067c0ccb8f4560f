"""Groups of settings that jobs on several floors share: which text, where to, on what."""

from __future__ import annotations

from dataclasses import dataclass

from lamina.core.values import comma_separated, path, place, seed_number
from lamina.jobs.settings import Settings, at_least, setting


@dataclass(frozen=True, kw_only=True)
class TextSettings(Settings):
    """Which text, and how it is cut into blocks of tokens."""

    corpus: str = setting(
        "embedded",
        "embedded, a .txt/.jsonl file (.gz/.xz/.zst too), a folder, or hf:NAME",
        place,
    )
    text_field: str = setting("text", "field of a .jsonl row or a dataset that holds the text")
    tokenizer: str | None = setting(
        None, "bytes, or a transformers tokenizer's name or folder (default: the checkpoint's)", place
    )
    sequence_length: int | None = setting(
        None, "tokens per block (default: 256, or the most that the model takes)", at_least(1)
    )


@dataclass(frozen=True, kw_only=True)
class BatchSettings(Settings):
    """How many blocks at a time."""

    batch_size: int = setting(4, "blocks per forward pass", at_least(1))


@dataclass(frozen=True, kw_only=True)
class SequencesSettings(Settings):
    """How many blocks are measured."""

    sequences: int = setting(64, "maximum number of blocks", at_least(1))


@dataclass(frozen=True, kw_only=True)
class ProbesSettings(Settings):
    """Which probes."""

    probes: str = setting(
        "all",
        "all, or a comma-separated list of probes, each with its options: name(option=value); a Python file with a "
        "probe of your own runs as code",
        comma_separated,
    )


@dataclass(frozen=True, kw_only=True)
class SeedSettings(Settings):
    """The seed of everything that is drawn at random."""

    seed: int = setting(0, "seed of everything that is drawn at random", seed_number)


@dataclass(frozen=True, kw_only=True)
class DeviceSettings(Settings):
    """Where the tensors are."""

    device: str | None = setting(None, "cpu, cuda, mps, ... (default: the fastest one available)")


@dataclass(frozen=True, kw_only=True)
class ThreadSettings(Settings):
    """Threads on the CPU."""

    threads: int | None = setting(None, "CPU threads (default: PyTorch's)", at_least(1))


@dataclass(frozen=True, kw_only=True)
class WorkerSettings(Settings):
    """Processes that work side by side."""

    workers: int | None = setting(
        None, "trials that run at the same time, each in its own process (default: one per core)", at_least(1)
    )


@dataclass(frozen=True, kw_only=True)
class OutputSettings(Settings):
    """The folder that a job leaves."""

    output: str | None = setting(None, "output folder", path)
