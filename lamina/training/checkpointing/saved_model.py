"""The model that a run leaves: model/ in its folder."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lamina.jobs.manifest import seal
from lamina.modeling.configuration_lamina import backbone_of
from lamina.training.checkpointing.model_card import ModelCard
from lamina.training.checkpointing.sharding import full_state, is_sharded, own_class
from lamina.training.execution.processes import Processes
from lamina.training.objectives.objective import Processor


def save_model(
    model: PreTrainedModel, processor: Processor, folder: Path, processes: Processes, card: ModelCard | None = None
) -> None:
    """Write a model and its tokenizer or image processor whole or not at all; a sharded model is gathered first."""
    state = full_state(model) if is_sharded(model) else None

    def write() -> None:
        draft = folder.with_name(".model-draft")
        shutil.rmtree(draft, ignore_errors=True)
        with own_class(model):
            model.save_pretrained(draft, state_dict=state)
        if isinstance(processor, PreTrainedTokenizerBase):
            processor.model_max_length = backbone_of(model.config).max_position_embeddings
        processor.save_pretrained(draft)
        if card is not None:
            card.write(model, draft)
        seal(draft)
        previous = folder.with_name(".gone-model")
        shutil.rmtree(previous, ignore_errors=True)
        if folder.exists():
            os.replace(folder, previous)
        os.replace(draft, folder)
        shutil.rmtree(previous, ignore_errors=True)

    processes.by_first(write)
