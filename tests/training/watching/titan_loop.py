"""torchtitan's own trainer on its own Llama 3, watched by the line of docs/watch.md: ``titan_loop.py FOLDER LINE``.

torchtitan runs on accelerators only. Here a CPU stands for one, and a dense mask for flex attention, which has no
backward pass on a CPU. Writes a digest of the weights.
"""

import hashlib
import json
import os
import sys
import types
from pathlib import Path

import torch
from tokenizers import ByteLevelBPETokenizer
from torch.distributed.tensor import DTensor
from torch.nn.attention.flex_attention import create_mask
from torch.nn.functional import scaled_dot_product_attention

import lamina

TEXT = "The norms of a Transformer sit before, after or around its sub-layers. " * 400


class Device(types.ModuleType):
    set_device = reset_peak_memory_stats = empty_cache = staticmethod(lambda *_: None)
    get_device_name = staticmethod(lambda *_: "CPU")
    get_device_properties = staticmethod(lambda *_: types.SimpleNamespace(total_memory=2**34, name="CPU"))
    memory_stats = staticmethod(lambda *_: {})
    device_count = staticmethod(lambda: 1)
    current_device = staticmethod(lambda: 0)

    def __getattr__(self, name):
        return getattr(torch.cpu, name)


def dense(q, k, v, *, block_mask, scale, enable_gqa, **_):
    mask = create_mask(block_mask.mask_mod, q.shape[0], 1, q.shape[2], k.shape[2], device="cpu")
    out = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=enable_gqa)
    return out, None


def files(folder):
    """A tokenizer and a data set as torchtitan reads them."""
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator([TEXT], vocab_size=400, special_tokens=["<s>", "</s>"])
    for name in ("tokenizer", "text"):
        (folder / name).mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer" / "tokenizer.json"))
    ends = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True, "add_eos_token": True}
    (folder / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(ends))
    lines = [json.dumps({"text": TEXT[start : start + 900]}) for start in range(0, len(TEXT), 900)]
    (folder / "text" / "data.json").write_text("\n".join(lines))


def trainer_of(folder, kind):
    from torchtitan.distributed import utils
    from torchtitan.models.common.attention import FlexAttention
    from torchtitan.models.llama3 import config_registry
    from torchtitan.tools.logging import init_logger

    utils.set_pg_timeouts = lambda *_, **__: None  # of a later torch
    FlexAttention._compiled_flex_attn = dense
    files(folder)
    whole = config_registry.llama3_debugmodel_ce_loss
    config = config_registry.llama3_debugmodel() if kind == "chunked" else whole()
    config.compile.enable = kind == "compiled"
    config.hf_assets_path, config.dataloader.dataset_path = str(folder / "tokenizer"), str(folder / "text")
    config.training.local_batch_size, config.training.global_batch_size = 1, 2
    config.training.seq_len, config.training.steps = 32, 4
    config.validator.enable = config.checkpoint.enable = False
    config.dump_folder, config.debug.seed = str(folder / "dump"), 1
    init_logger()
    return config.build()


def main(folder, kind, line):
    cpu = Device("cpu")
    torch._utils._get_available_device_type, torch._utils._get_device_module = lambda: "cpu", lambda *_: cpu
    sys.path.append(os.environ["LAMINA_TRAINERS"])
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    trainer = trainer_of(Path(folder), kind)
    exec(line, {"lamina": lamina, "trainer": trainer})
    trainer.train()
    digest = hashlib.sha256()
    for parameter in trainer.model_parts[0].parameters():
        value = parameter.detach()
        digest.update((value.full_tensor() if isinstance(value, DTensor) else value).numpy().tobytes())
    Path("weights").write_text(digest.hexdigest())
    trainer.close()  # as torchtitan.train ends
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
