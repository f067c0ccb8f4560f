"""The settings of `lamina probe`."""

from __future__ import annotations

from typing import Literal

from lamina.core.values import place
from lamina.jobs.setting_groups import (
    BatchSettings,
    DeviceSettings,
    OutputSettings,
    ProbesSettings,
    SeedSettings,
    SequencesSettings,
    TextSettings,
    ThreadSettings,
)
from lamina.jobs.settings import between, changed, setting


class ProbeSettings(
    ProbesSettings,
    TextSettings,
    SequencesSettings,
    BatchSettings,
    DeviceSettings,
    SeedSettings,
    ThreadSettings,
    OutputSettings,
):
    """The model, the probes and the text of `lamina probe`."""

    command_name = "probe"
    main = (
        *("checkpoint", "probes", "corpus", "tokenizer", "sequences", "sequence_length"),
        *("batch_size", "tolerance", "device", "output"),
    )
    order = (
        *("checkpoint", "probes", *TextSettings.names(), "sequences", "batch_size", "tolerance", "layers", "device"),
        "dtype",
    )

    checkpoint: str = setting("", "folder with config.json, a run's folder, a .gguf file, or a name on the hub", place)
    sequences: int | None = changed(
        None, help="maximum number of text blocks (default: your whole corpus, or 64 blocks of the embedded corpus)"
    )
    corpus: str = changed(
        "embedded",
        help="embedded, a .txt/.jsonl file (.gz/.xz/.zst), a folder or hf:NAME. For a vision model: noise, a .npy "
        "file or a folder",
    )
    tolerance: float | None = setting(
        None,
        "stop early once all relative standard errors are at most this value; 0 measures all text blocks, except in "
        "probes that limit their tokens (default: 0 for your corpus, 0.02 for the embedded corpus)",
        between(0.0, 1.0, open_high=True),
    )
    layers: str | None = setting(
        None, "module path of the list of layers, e.g. encoder.block (default: Lamina finds it)"
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = setting(
        "float32", "float32, bfloat16, float16, or auto (the checkpoint's)"
    )
    output: str = changed("probe")

    def check_names(self) -> None:
        super().check_names()
        from lamina.data.corpus import check_corpus
        from lamina.data.tokenizers import validate_spec
        from lamina.probes.engine.registry import check_probes

        check_probes(self.probes)
        check_corpus(self.corpus)
        if self.tokenizer is not None:
            validate_spec(self.tokenizer)
