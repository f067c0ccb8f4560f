"""Settings that several jobs share."""

from __future__ import annotations

from lamina.core.values import comma_separated, corpus_name, path, place, seed_number
from lamina.jobs.settings import Settings, at_least, setting


class TextSettings(Settings, group="data"):
    """The settings for the text and its division into blocks of tokens."""

    corpus: str = setting(
        "embedded",
        "text to use: embedded, a .txt/.jsonl file (also .gz/.xz/.zst), a folder, or hf:NAME",
        corpus_name,
    )
    text_field: str = setting("text", "field of a .jsonl or dataset row that holds the text")
    tokenizer: str | None = setting(
        None, "tokenizer to use: bytes, or a transformers tokenizer's name or folder (default: the checkpoint's)", place
    )
    sequence_length: int | None = setting(
        None, "tokens per text block (default: 256, or the model's maximum if lower)", at_least(1)
    )


class BatchSettings(Settings, group="steps and learning rate"):
    """The number of text blocks per forward pass."""

    batch_size: int = setting(4, "text blocks or images per forward pass", at_least(1))


class SequencesSettings(Settings, group="data"):
    """The largest number of text blocks to measure."""

    sequences: int | None = setting(None, "maximum number of text blocks", at_least(1))


class ProbesSettings(Settings, group="records"):
    """The probes to run."""

    probes: str = setting(
        "all",
        "probes to run: all, or a comma-separated list of probes, such as name(option=value). A probe can also be your "
        "own Python file, which Lamina executes",
        comma_separated,
        decides=False,
    )


class SeedSettings(Settings, group="steps and learning rate"):
    """The seed of all random numbers."""

    seed: int = setting(0, "seed of all random numbers", seed_number)


class DeviceSettings(Settings, group="machine"):
    """The device to compute on."""

    device: str | None = setting(
        None, "device to use: cpu, cuda, mps, ... (default: the fastest available device)", decides=False
    )


class ThreadSettings(Settings, group="machine"):
    """The number of CPU threads."""

    threads: int | None = setting(None, "number of CPU threads (default: PyTorch's)", at_least(1), decides=False)


class WorkerSettings(Settings, group="machine"):
    """The number of parallel processes."""

    workers: int | None = setting(
        None,
        "number of runs that train at the same time, each in a separate process (default: one per GPU, or per core)",
        at_least(1),
        decides=False,
    )


class OutputSettings(Settings, group="output"):
    """The output folder."""

    output: str | None = setting(None, "output folder", path, decides=False)
