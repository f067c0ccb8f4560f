"""Run `lamina pretrain` on blocks of random ids as a contender, with Lamina's loader, Trainer, guard and records."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from common import llama_config, sizes_of
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from lamina.data.blocks import ArrayBlocks, Blocks, BlockStats
from lamina.data.packed import PackedBlocks
from lamina.modeling.processes import Processes
from lamina.training.checkpointing.resuming import RunIdentity
from lamina.training.execution import compiling
from lamina.training.pretrain import Pretraining
from lamina.training.run import TrainingRun, train
from lamina.training.settings import PretrainSettings

FOREVER = 10**6
BLOCKS = 4096


class RandomPretraining(Pretraining):
    """`lamina pretrain` with random ids instead of a corpus. ``baton`` times the steps and ends the training."""

    def __init__(self, task: dict[str, Any], baton: Any, folder: Path):
        super().__init__()
        self.task, self.baton, self.folder = task, baton, folder

    def read(self, processes: Processes, *, bar: bool) -> None:
        length, vocabulary = self.task["sequence_length"], sizes_of(self.task["size"])["vocab_size"]
        ids = np.random.default_rng(0).integers(0, vocabulary, (BLOCKS, length), dtype=np.uint16)
        ids.tofile(self.folder / "train.bin")
        tokens = BLOCKS * length
        stats = BlockStats(
            unigram_entropy=float(np.log(vocabulary)),
            fingerprint="random",
            train_tokens=tokens,
            eval_tokens=64 * length,
            train_bytes=4 * tokens,
            eval_bytes=4 * 64 * length,
            vocab_size=vocabulary,
            sequence_length=length,
            documents=1,
        )
        packed = PackedBlocks(self.folder / "train.bin", "uint16", BLOCKS, length)
        self.splits = Blocks(train=packed, eval=ArrayBlocks(ids[:64]), stats=stats)
        words = Tokenizer(WordLevel({str(i): i for i in range(vocabulary)}, unk_token="0"))
        self.processor = PreTrainedTokenizerFast(tokenizer_object=words)
        self.identity = RunIdentity(self.settings, self.resolved.plan, stats.fingerprint)

    def model(self, run: TrainingRun) -> Any:
        model = super().model(run)
        if self.task.get("recomputed"):  # as on a CPU
            compiling.compile_blocks(model)
        self.baton.parameters = sum(p.numel() for p in model.parameters())
        return model

    def callbacks(self, run: TrainingRun) -> list[Any]:
        return [*super().callbacks(run), self.baton]


def pretrain(task: dict[str, Any], baton: Any, folder: Path, layers: int | None = None) -> None:
    """Train until ``baton`` raises Done. ``layers`` replaces the number of layers."""
    folder.mkdir(parents=True)
    config = llama_config(task["size"], task["sequence_length"])
    config.num_hidden_layers = config.num_hidden_layers if layers is None else layers
    config.layer_types = None
    config.save_pretrained(folder / "backbone")
    settings = PretrainSettings(
        placement=task["name"].partition(":")[2],
        backbone=str(folder / "backbone"),
        corpus="random",
        output=str(folder / "run"),
        steps=FOREVER,
        batch_size=task["batch_size"],
        gradient_accumulation=task.get("accumulation", 1),
        sequence_length=task["sequence_length"],
        precision=task["precision"],
        compile=task["compile"],
        learning_rate=5e-5,
        init="normal",
        logging_steps=500,
        eval_steps=FOREVER,
        eval_blocks=16,
        threads=task.get("threads"),
    )
    train(RandomPretraining(task, baton, folder), settings, bar=False)
