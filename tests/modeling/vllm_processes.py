"""Serve models as vLLM's own files of the Transformers backend do: its fusers decide and rewrite, its layers are stubs.

    python vllm_processes.py FILES MODELS

FILES holds ``vllm/model_executor/models/transformers`` of a wheel; each folder in MODELS is a saved model. Prints for
each the difference of the logits from the model's own, and what was fused.
"""

import importlib.machinery
import importlib.util
import json
import logging
import sys
import types
from pathlib import Path
from unittest.mock import MagicMock

import torch
from torch import nn

BASE = "vllm.model_executor.models.transformers"
ROOT = Path(sys.argv[1], *BASE.split("."))
sys.path.insert(0, str(Path(__file__).parents[1]))
from modeling.engines import Engine, Linear, RMSNorm, attention  # noqa: E402


class Parallel(Linear):
    """A merged projection of vLLM's: made of the numbers that its constructor gets."""

    def __init__(self, input_size=0, output_sizes=(), bias=False, **heads):
        if heads.get("total_num_heads"):
            input_size = heads["hidden_size"]
            output_sizes = [heads["head_size"] * heads[f"total_num_{kind}"] for kind in ("heads", *["kv_heads"] * 2)]
        super().__init__(*(nn.Linear(input_size, size, bias=bias, device="meta") for size in output_sizes))


class Norm(RMSNorm):
    def __init__(self, hidden_size, eps, has_weight=True, dtype=None):
        super().__init__(hidden_size if has_weight else 0, eps)

    def forward(self, x, residual=None):
        return super().forward(x)


class GemmaNorm(Norm):
    def __init__(self, hidden_size, eps):
        super().__init__(hidden_size, eps)
        self.zero_centered = True


class ActAndMul(nn.Module):
    def forward(self, x):
        gate, up = x.chunk(2, dim=-1)
        return nn.functional.silu(gate) * up


def module(name, **attributes):
    made = types.ModuleType(name)
    vars(made).update(attributes, __path__=[])
    return made


class Finder:
    """Real files of the backend, stubs for everything else of vllm."""

    def find_spec(self, name, path=None, target=None):
        if not name.startswith("vllm"):
            return None
        rest = name.removeprefix(BASE).strip(".").replace(".", "/") if name.startswith(BASE) else ""
        if rest == "fusers":
            return importlib.util.spec_from_file_location(name, ROOT / rest / "__init__.py")
        if rest and (ROOT / f"{rest}.py").exists():
            return importlib.util.spec_from_file_location(name, ROOT / f"{rest}.py")
        stub = module(name) if name == BASE else MagicMock(name=name, __path__=[])

        class Loader:
            def create_module(self, spec):
                return stub

            def exec_module(self, module):
                pass

        return importlib.machinery.ModuleSpec(name, Loader(), is_package=True)


def joined(prefix, name):
    return f"{prefix}.{name}" if prefix else name


def cached(cache, key):
    """In place of cachetools', which not everybody has."""

    def of(function):
        def call(module):
            if (k := key(module)) not in cache:
                cache[k] = function(module)
            return cache[k]

        return call

    return of


layers, models = "vllm.model_executor.layers", "vllm.model_executor.models"
logger = logging.getLogger("vllm")
logger.debug_once, logger.info_once, logger.warning_once = logger.debug, logger.info, logger.warning
stubs = {
    "cachetools": {"cached": cached},
    "vllm": {},
    "vllm.logger": {"init_logger": lambda name: logger},
    "vllm.distributed.parallel_state": {"model_parallel_is_initialized": lambda: False},
    f"{layers}.linear": {"QKVParallelLinear": Parallel, "MergedColumnParallelLinear": Parallel},
    f"{layers}.activation": {"_ACTIVATION_AND_MUL_REGISTRY": {"silu": ActAndMul}},
    f"{models}.utils": {"maybe_prefix": joined, "ShardId": object, "WeightsMapper": MagicMock()},
    f"{BASE}.layers": {"RMSNorm": Norm, "GemmaRMSNorm": GemmaNorm, "get_act_and_mul_fn": lambda name: ActAndMul()},
    f"{BASE}.utils": {
        "replace_linear_class": lambda linear, style, *args, **kwargs: Linear(linear),
        "log_replacement": lambda *args: None,
    },
}
sys.modules.update({name: module(name, **attributes) for name, attributes in stubs.items()})
sys.meta_path.insert(0, Finder())
fuser = importlib.import_module(f"{BASE}.fuser")


class Files(Engine):
    """The engine whose fusers are vLLM's own."""

    def replace(self, rules, plan, tp_size):
        size = types.SimpleNamespace(tensor_parallel_size=1)
        head = self.config.head_dim or self.config.hidden_size // self.config.num_attention_heads
        of_model = types.SimpleNamespace(get_head_size=lambda: head, use_mla=False, dtype=self.dtype)
        vllm = types.SimpleNamespace(parallel_config=size, model_config=of_model, quant_config=None)
        self.fused, fusers = [], fuser.Fusers(self.model, vllm)

        def walk(parent, prefix):
            for name, child in parent.named_children():
                qualified = joined(prefix, name)
                if isinstance(child, nn.Linear):
                    setattr(parent, name, Linear(child))
                    continue
                made = child
                for one in fusers[child]:
                    stacked = enumerate(one.orig_to_new_stacked(qualified).items())
                    self.merged |= {old: (new, index) for index, (old, (new, _)) in stacked}
                    made = one.fuse(made, qualified, vllm)
                    self.fused.append(type(one).__name__)
                walk(made, qualified)
                if made is not child:
                    setattr(parent, name, made)

        walk(self.model, "")
        attentions = self.fused.count("AttentionFuser")
        assert attentions == self.config.num_hidden_layers, "vLLM would not find the attention of a layer"


if __name__ == "__main__":
    from transformers import AutoModelForCausalLM
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    import lamina.modeling  # noqa: F401

    ALL_ATTENTION_FUNCTIONS.register("vllm", attention)
    found = {}
    for folder in sorted(Path(sys.argv[2]).iterdir()):
        model = AutoModelForCausalLM.from_pretrained(folder).eval()
        ids = torch.randint(3, model.config.vocab_size, (1, 9), generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            expected = model(ids).logits
        served = Files(folder, "vllm").load(model)
        off = (served.logits(ids) - expected).abs().max() / expected.abs().max()
        found[folder.name] = {"off": off.item(), "fused": {name: served.fused.count(name) for name in served.fused}}
    sys.stdout.write(json.dumps(found))
