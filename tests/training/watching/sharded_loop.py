"""Run by torchrun in two processes: a watched loop under DDP, FSDP or DeepSpeed, and what one process computes by hand.

DDP and FSDP are wrapped by PyTorch's own calls, and by accelerate.
"""

import json
import os
import sys
from functools import partial
from pathlib import Path

import torch
from torch import distributed
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from training.watching.loops import Naive, Tokens, llama, llama_parts
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import lamina

STEPS = 3


def batch_of(step, rank, size):
    each = 4 // size
    return Tokens(items=4 * STEPS).ids[4 * step :][:4][rank * each : (rank + 1) * each]


def by_hand():
    """One process with the whole batch: gradients before clipping and updates of the last step."""
    model = llama()
    naive, optimizer = Naive(model, llama_parts()), torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        ids = batch_of(step, 0, 1)
        output = model(input_ids=ids, labels=ids, output_hidden_states=True)
        stream = output.hidden_states[:-1]  # the last one is behind the final norm
        output.loss.backward()
        naive.keep()
        gradients = naive.norms(naive.gradients)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        updates = naive.updates()
        optimizer.zero_grad()
    places = [(-1, "block", "all"), *((layer, "feed_forward", "all") for layer in range(len(stream) - 1))]
    return {
        "gradient_norm": gradients,
        "update_norm": updates,
        "first_moment": naive.moments(optimizer, "exp_avg"),
        "hidden_variance": {place: float(x.var(correction=0)) for place, x in zip(places, stream, strict=True)},
        "hidden_abs_max": {place: float(x.abs().max()) for place, x in zip(places, stream, strict=True)},
    }


def whole(parameter):
    if hasattr(parameter, "ds_id"):
        from deepspeed.utils import safe_get_full_fp32_param

        return safe_get_full_fp32_param(parameter)
    value = parameter.detach()
    return (value.full_tensor() if isinstance(value, DTensor) else value).clone()


def accelerated(kind, model):
    from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin

    wrapping = {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["LlamaDecoderLayer"]}
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, **wrapping) if kind.endswith("fsdp2") else None
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    if plugin is not None:  # accelerate shards on accelerators only, but its code for that runs on a CPU as well
        accelerator.state.distributed_type, accelerator.state.fsdp_plugin = DistributedType.FSDP, plugin
    wrapped, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    assert isinstance(wrapped, DistributedDataParallel if plugin is None else FSDPModule)
    return wrapped, optimizer, accelerator.backward, accelerator.clip_grad_norm_


def wrapped_by_hand(kind, model):
    if kind.endswith("compiled-layers"):
        for layer in model.model.layers:
            layer.compile(backend="aot_eager")
    if kind.startswith("fsdp2"):
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
    wrapped, clip = DistributedDataParallel(model) if kind.startswith("ddp") else model, torch.nn.utils.clip_grad_norm_
    wrapped = torch.compile(wrapped, backend="aot_eager") if kind == "ddp-compiled" else wrapped
    if kind.startswith("fsdp1"):
        policy = partial(transformer_auto_wrap_policy, transformer_layer_cls={LlamaDecoderLayer})
        own = {"use_orig_params": kind != "fsdp1-flat", "device_id": torch.device("cpu")}
        wrapped = FullyShardedDataParallel(model, auto_wrap_policy=policy, **own)
        clip = lambda parameters, limit: wrapped.clip_grad_norm_(limit)  # noqa: E731
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-2)
    return wrapped, optimizer, torch.Tensor.backward, clip


def deepspeeds(kind, model):
    """ZeRO 1, 2 or 3 by DeepSpeed itself, which clips in its own step."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    sys.path.append(os.environ["LAMINA_DEEPSPEED"])
    import deepspeed

    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # else it compiles its own communication
    engine, optimizer, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2),
        config={
            "train_micro_batch_size_per_gpu": 2,
            "gradient_clipping": 0.1,
            "zero_optimization": {"stage": int(kind[4]), "stage3_param_persistence_threshold": 0},
        },
    )
    return engine, optimizer, engine.backward, lambda parameters, limit: None


def watched(kind, folder):
    by_name = {"acce": accelerated, "zero": deepspeeds}
    wrap = by_name.get(kind[:4], wrapped_by_hand)
    wrapped, optimizer, backward, clip = wrap(kind, llama())
    context = lamina.watch(wrapped, optimizer, output=str(folder), every=STEPS) if folder else torch.enable_grad()
    if one_line := bool(folder) and kind.endswith("one-line"):
        context.start()
        context = torch.enable_grad()
    with context as monitor:
        for step in range(STEPS):
            ids = batch_of(step, distributed.get_rank(), 2)
            loss = wrapped(input_ids=ids, labels=ids).loss
            backward(loss)
            clip(wrapped.parameters(), 0.1)
            (wrapped if kind.startswith("zero") else optimizer).step()
            optimizer.zero_grad()
            if folder and not one_line:
                monitor.step(loss)
    return [whole(parameter) for parameter in wrapped.parameters()]


def main(kind, folder):
    distributed.init_process_group("gloo")
    torch.set_num_threads(1)
    same = [torch.equal(a, b) for a, b in zip(watched(kind, None), watched(kind, Path(folder) / "run"), strict=True)]
    if distributed.get_rank() == 0:
        hand = {metric: [[*place, value] for place, value in values.items()] for metric, values in by_hand().items()}
        (Path(folder) / "by_hand.json").write_text(json.dumps({"same": same, "hand": hand}))
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
