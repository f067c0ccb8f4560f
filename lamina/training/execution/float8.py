"""Let linear layers multiply in float8 during training, with torchao. The weights stay in float32."""

from __future__ import annotations

import importlib.util
import logging

import torch
from torch import nn

from lamina.core.extras import install
from lamina.errors import UserError
from lamina.modeling.wiring_lamina import Block

logger = logging.getLogger(__name__)

_MULTIPLE = 16  # a GPU's float8 product needs sizes that are multiples of this
_CAPABLE = (8, 9)  # the minimum compute capability for float8 products


def check_float8(device: torch.device, tokens: int, tensor_parallel: int) -> None:
    """Raise UserError if float8 training is impossible on this machine, or with ``tokens`` tokens per micro-batch."""
    if importlib.util.find_spec("torchao") is None:
        raise UserError(f"precision: 'float8' needs torchao. Run: {install('quantize')}")
    if device.type == "cuda" and (capability := torch.cuda.get_device_capability(device)) < _CAPABLE:
        raise UserError(
            f"precision: 'float8' does not work on a GPU of compute capability {'.'.join(map(str, capability))} "
            f"(needed: {'.'.join(map(str, _CAPABLE))}; allowed here: auto, fp32, bf16, fp16)"
        )
    if device.type not in ("cuda", "cpu"):
        raise UserError(f"precision: 'float8' does not work on {device.type} (allowed here: auto, fp32, bf16, fp16)")
    if tokens % _MULTIPLE:
        raise UserError(
            f"precision: 'float8' does not work with {tokens} tokens in a process's micro-batch. Choose batch_size "
            f"and sequence_length so that this number is a multiple of {_MULTIPLE}."
        )
    if tensor_parallel > 1:
        raise UserError(
            f"precision: 'float8' does not work with tensor_parallel = {tensor_parallel}. Use --tensor-parallel 1, or "
            "bf16."
        )


def to_float8(model: nn.Module, device: str) -> None:
    """Let the linear layers of a model's blocks multiply in float8, with one scale per tensor.

    The embedding, the output head, routers, fused experts, and layers with a size that is not a multiple of 16 stay
    unchanged. Raises UserError if no layer is left.
    """
    torchao = importlib.import_module("torchao.float8")  # an optional package

    def chosen(layer: nn.Module, name: str) -> bool:
        sizes = (layer.in_features, layer.out_features) if isinstance(layer, nn.Linear) else (1,)
        converted.append(not any(size % _MULTIPLE for size in sizes) and name.rpartition(".")[2] != "gate")
        return converted[-1]

    converted: list[bool] = []
    for block in [module for module in model.modules() if isinstance(module, Block)]:
        config = torchao.Float8LinearConfig(emulate=device == "cpu")
        torchao.convert_to_float8_training(block, module_filter_fn=chosen, config=config)
    if not any(converted):
        raise UserError(
            f"precision: 'float8' finds no layer whose sizes are multiples of {_MULTIPLE}. Use --precision bf16."
        )
    if device == "cpu":
        logger.warning("precision: a CPU only emulates float8, which is slower than fp32")
