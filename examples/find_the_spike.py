"""Find the step, the layer and the likely cause of a loss spike.

    python examples/find_the_spike.py [--folder runs/spike] [--steps 300]

A small Llama trains in a plain PyTorch loop. After two thirds of the steps, the script multiplies the learning rate by
40, as a wrong schedule would. `lamina.watch` records every layer, and `lamina.diagnose` finds the cause in the records.
The script takes a minute on one core, prints the step of the jump, and writes the page runs/spike/diagnosis.html.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import lamina

TEXT = b"The norm sits before the module, after it, or on the sum. Where it sits decides how deep a model may be. "
LENGTH = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path("runs/spike"))
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args()
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256, hidden_size=64, intermediate_size=172, num_hidden_layers=6, num_attention_heads=4,
            max_position_embeddings=LENGTH,
        )
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    text = torch.tensor(list(TEXT * 20))

    with lamina.watch(model, optimizer, output=str(options.folder), overwrite=True):  # the only new line
        for step in range(options.steps):
            if step == options.steps * 2 // 3:
                optimizer.param_groups[0]["lr"] *= 40
            rows = text[torch.randint(0, len(text) - LENGTH, (16, 1)) + torch.arange(LENGTH)]
            loss = model(input_ids=rows, labels=rows).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

    diagnosis = lamina.diagnose(options.folder)
    print(f"planted: the learning rate times 40 at step {options.steps * 2 // 3}")
    print(diagnosis)


if __name__ == "__main__":
    main()
