"""Check that Lamina recognizes parameters of transformers' model families by their names.

    python -m tools.calibration.parameter_names

The script builds every family that has a default configuration, on the meta device and with few layers. The class of
a module (FooAttention, FooMLP) shows whether a parameter belongs to attention or to a feed-forward. The script prints
how many families `owners.py` recognizes completely, and the first wrong parameter of each other family. Such parameters
show which words `owners.py` lacks.
"""

from __future__ import annotations

import argparse
import json
import logging
import re
import signal
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers import AutoModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from lamina.reports.histories.owners import Owner, places_of

ATTENTION = r"Attention|Attn|Mixer$|Mamba|SSM|RecurrentBlock|ShortConv|DeltaNet|TimeMix|Rwkv"
FEED_FORWARD = (
    r"MLP|Mlp|FeedForward|FFN|MoE|Moe|Experts|DenseReluDense|DenseActDense|DenseGatedActDense|Intermediate$|SwiGLU|GLU"
)
SECONDS = 20  # for one family


def shrunk(config: Any) -> Any:
    """Reduce the number of layers in a configuration, and in the configurations inside."""
    for name, value in list(vars(config).items()):
        if re.fullmatch(
            r"(num|n)_?(hidden|encoder|decoder|)_?layers?|encoder_layers|decoder_layers|n_layer|depth", name
        ):
            if isinstance(value, int) and value > 3:
                setattr(config, name, 3)
        elif hasattr(value, "to_diff_dict"):
            shrunk(value)
    if isinstance(getattr(config, "layer_types", None), list) and isinstance(
        getattr(config, "num_hidden_layers", None), int
    ):
        config.layer_types = config.layer_types[: config.num_hidden_layers]
    return config


def models() -> Iterator[tuple[str, nn.Module]]:
    def late(*_: Any) -> None:
        raise TimeoutError

    signal.signal(signal.SIGALRM, late)
    for family in sorted(CONFIG_MAPPING):
        signal.alarm(SECONDS)
        try:
            config = shrunk(CONFIG_MAPPING[family]())
            with torch.device("meta"):
                yield family, AutoModel.from_config(config)
        except Exception as error:  # a family that needs files, or another package
            logging.getLogger(__name__).debug("%s: %s", family, error)
        finally:
            signal.alarm(0)


def owners_of(names: Sequence[str]) -> Mapping[str, Owner]:
    return places_of(names).owners


def truth(model: nn.Module) -> dict[str, str]:
    """Return whether each parameter belongs to attention or to a feed-forward, by the class of the outermost module."""
    kinds: dict[str, str] = {}
    found: dict[str, str] = {}
    for path, module in model.named_modules():
        if any(path.startswith(f"{outer}.") for outer in kinds):
            continue
        name = type(module).__name__
        if "Norm" in name:
            continue
        kind = "attention" if re.search(ATTENTION, name) else "feed_forward" if re.search(FEED_FORWARD, name) else None
        layered = re.search(r"Layer$|Block$|Encoder$|Decoder$|Model$|Stage$", name) and not re.search(
            r"DenseBlock", name
        )
        if kind and path and not layered and any(part.isdigit() for part in path.split(".")):
            kinds[path] = kind
    for name, _ in model.named_parameters():
        for path, kind in kinds.items():
            if name.startswith(f"{path}."):
                found[name] = kind
    return found


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    wrong: dict[str, str] = {}
    families = right = parameters = 0
    for family, model in models():
        known, families = truth(model), families + 1
        places = owners_of([name for name, _ in model.named_parameters()])
        bad = {name: kind for name, kind in known.items() if places.get(name, (0, "", ""))[1] != kind}
        right, parameters = right + len(known) - len(bad), parameters + len(known)
        for name, kind in bad.items():
            wrong.setdefault(family, f"{name}: {places.get(name)} for {kind}")
        del model
    print(json.dumps(wrong, indent=1))
    print(f"{families - len(wrong)} of {families} families, {right} of {parameters} parameters")


if __name__ == "__main__":
    main()
