"""Find out where a checkpoint's norms sit, what each layer does, and which layer you can remove.

    python examples/inspect_and_prune.py MODEL [--folder runs/inspected] [--drop 1] [--tokenizer bytes]

MODEL is a folder with a config.json and safetensors, or a name on the Hugging Face hub. If the model was trained on
bytes and has no tokenizer, add --tokenizer bytes. For a few million parameters, the script takes a minute. The script
writes the page runs/inspected/probed/report.html, and a smaller model to runs/inspected/pruned.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import lamina


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--folder", type=Path, default=Path("runs/inspected"))
    parser.add_argument("--drop", type=int, default=1, help="number of layers to remove")
    parser.add_argument("--corpus", default="embedded", help="text for the measurements: a file or a folder")
    parser.add_argument("--tokenizer", help="tokenizer for a model without a tokenizer: bytes, or a folder")
    options = parser.parse_args()
    text = {"corpus": options.corpus, **({"tokenizer": options.tokenizer} if options.tokenizer else {})}

    print(lamina.placement_of(options.model))
    probed = options.folder / "probed"
    result = lamina.api.probe_folder(
        checkpoint=options.model, probes="hidden_states,layer_drop", output=str(probed), overwrite=True, **text
    )
    for probe in result["probes"].values():
        print(*probe["sentences"], sep="\n")
    print(f"the page is {probed / 'report.html'}")
    pruned = lamina.prune(
        options.model, options.folder / "pruned", by="layer_drop", drop=options.drop, overwrite=True, **text
    )
    print(
        f"without layers {pruned['dropped']} the loss is {pruned['loss']:.3f} nats per token; "
        f"it was {pruned['loss_before']:.3f}"
    )


if __name__ == "__main__":
    main()
