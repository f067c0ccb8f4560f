"""What `lamina probe` can be told."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any, Self

from lamina.core.values import check_kinds, number, path, seed_number, whole_number
from lamina.errors import UserError, unknown


@dataclass(frozen=True, kw_only=True)
class ProbeSettings:
    """The settings of `lamina probe`.

    Args:
        checkpoint: a folder with config.json, a run's folder, a .gguf file, or a name on the hub
        probes: all, or a comma-separated list of probes, each with its options: name(option=value); a Python file with
            a probe of your own runs as code
        corpus: embedded, a .txt/.jsonl file (.gz/.xz/.zst too), a folder, or hf:NAME; for a vision model noise, a .npy file or a folder of pictures
        text_field: the field of a .jsonl row or of a dataset that holds the text
        tokenizer: bytes or a transformers tokenizer's name or folder (default: the checkpoint's)
        sequence_length: tokens in a block (default: 256, or what the model takes)
        sequences: blocks at most
        batch_size: blocks in a forward pass
        tolerance: the relative standard error at which the forward passes stop (0: never before all blocks)
        layers: the path of the list of layers, e.g. encoder.block (default: found by following the tensors)
        device: cpu, cuda, mps, ... (default: the fastest there is)
        dtype: float32, bfloat16, float16, or auto (the checkpoint's)
        seed: of what is drawn at random
        threads: CPU threads (default: PyTorch's)
        output: the folder to write to
    """  # noqa: E501

    checkpoint: str = ""
    probes: str = "all"
    corpus: str = "embedded"
    text_field: str = "text"
    tokenizer: str | None = None
    sequence_length: int | None = None
    sequences: int = 64
    batch_size: int = 4
    tolerance: float = 0.02
    layers: str | None = None
    device: str | None = None
    dtype: str = "float32"
    seed: int = 0
    threads: int | None = None
    output: str = "probe"

    def __post_init__(self) -> None:
        """Raise UserError that names the setting whose value has no meaning."""
        check_kinds(self, lists=("probes",))
        for name in ("sequence_length", "threads"):
            if getattr(self, name) is not None:
                whole_number(name, getattr(self, name))
        for name in ("sequences", "batch_size"):
            whole_number(name, getattr(self, name))
        seed_number("seed", self.seed)
        number("tolerance", self.tolerance, 0.0, 1.0, open_high=True)
        object.__setattr__(self, "output", path("output", self.output))
        if self.dtype not in ("auto", "float32", "bfloat16", "float16"):
            raise UserError(f"dtype: {self.dtype!r} (allowed: auto, float32, bfloat16, float16)")

    def to_dict(self) -> dict[str, Any]:
        """As plain values, for config.yaml."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        """From plain values. Raises UserError for a name that is no setting."""
        known = {f.name for f in fields(cls)}
        for name in data:
            if name not in known:
                raise unknown("setting", name, known)
        return cls(**data)
