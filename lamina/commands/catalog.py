"""The commands, each with what it does: `lamina --help` lists them."""

from __future__ import annotations

COMMANDS = {
    "compare": "train placements side by side on your text and write one page about them (the main job)",
    "preflight": "before a run: will it train, why not, and what to change",
    "pretrain": "train one model, from scratch or from a checkpoint",
    "sft": "fine-tune a model on instructions or conversations",
    "reward": "train a reward model on preferences",
    "rlhf": "train a policy by reinforcement learning: ReMax, RLOO or GRPO",
    "dpo": "train a policy on preferences directly",
    "coord-check": "check that no module's output grows with the width, before and after a few steps",
    "transfer": "find the learning rates that are stable and best on a narrow proxy, and from them a wide target's",
    "max-lr": "find the largest learning rate that each placement tolerates: one warm-up until it fails",
    "study": "run, list or show studies: each table and figure of the papers, with a verdict on its claim",
    "probe": "measure what each layer of a checkpoint does, and write one page about it",
    "eval": "evaluate models: perplexity of a text, tasks of lm-evaluation-harness, tables as the papers print them",
    "placements": "list the placements, or show one: equation, diagram, options, source",
    "backbones": "list the backbones that a placement can be put on",
    "diagnose": "say what went wrong first in a run: in which layer, at which step, and what to change",
    "report": "rewrite the page of a folder, whichever command wrote the folder",
    "generate": "continue a text with a trained model",
    "convert": "turn a transformers checkpoint into a Lamina one with the same logits, or back",
}
