"""Groups of settings that several jobs share: the text, the output, the machine."""

from __future__ import annotations

from dataclasses import dataclass

from lamina.core.values import comma_separated, corpus_name, path, place, seed_number
from lamina.jobs.settings import Settings, at_least, setting


@dataclass(frozen=True, kw_only=True)
class TextSettings(Settings):
    """The text, and how it is cut into blocks of tokens."""

    group = "data"

    corpus: str = setting(
        "embedded",
        "embedded, a .txt/.jsonl file (also .gz/.xz/.zst), a folder, or hf:NAME",
        corpus_name,
    )
    text_field: str = setting("text", "field of a .jsonl or dataset row that holds the text")
    tokenizer: str | None = setting(
        None, "bytes, or a transformers tokenizer's name or folder (default: the checkpoint's)", place
    )
    sequence_length: int | None = setting(
        None, "tokens per block (default: 256, or the model's maximum if lower)", at_least(1)
    )


@dataclass(frozen=True, kw_only=True)
class BatchSettings(Settings):
    """How many blocks are processed at a time."""

    group = "steps and learning rate"

    batch_size: int = setting(4, "blocks per forward pass", at_least(1))


@dataclass(frozen=True, kw_only=True)
class SequencesSettings(Settings):
    """How many blocks are measured."""

    group = "data"

    sequences: int | None = setting(None, "maximum number of blocks", at_least(1))


@dataclass(frozen=True, kw_only=True)
class ProbesSettings(Settings):
    """The probes to run."""

    group = "records"

    probes: str = setting(
        "all",
        "all, or comma-separated probes, each with its options: name(option=value); or a Python file with your "
        "own probe, which runs",
        comma_separated,
        decides=False,
    )


@dataclass(frozen=True, kw_only=True)
class SeedSettings(Settings):
    """The seed of everything that is random."""

    group = "steps and learning rate"

    seed: int = setting(0, "seed of everything that is random", seed_number)


@dataclass(frozen=True, kw_only=True)
class DeviceSettings(Settings):
    """The device of the tensors."""

    group = "machine"

    device: str | None = setting(None, "cpu, cuda, mps, ... (default: the fastest one available)", decides=False)


@dataclass(frozen=True, kw_only=True)
class ThreadSettings(Settings):
    """The number of CPU threads."""

    group = "machine"

    threads: int | None = setting(None, "CPU threads (default: PyTorch's)", at_least(1), decides=False)


@dataclass(frozen=True, kw_only=True)
class WorkerSettings(Settings):
    """The number of parallel processes."""

    group = "machine"

    workers: int | None = setting(
        None,
        "trials that run at the same time, each in its own process (default: one per core)",
        at_least(1),
        decides=False,
    )


@dataclass(frozen=True, kw_only=True)
class OutputSettings(Settings):
    """The folder that a job writes."""

    group = "output"

    output: str | None = setting(None, "output folder", path, decides=False)
