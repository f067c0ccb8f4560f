"""`lamina emit PLACEMENT --to TRAINER`: write a norm placement as one file for another trainer."""

from __future__ import annotations

import shlex
from pathlib import Path

from lamina.api.models import emit
from lamina.commands.arguments import Parser
from lamina.core.terminal import show
from lamina.errors import UserError

EXAMPLES = """
  lamina emit keel --to pytorch --num-layers 24
  lamina emit fusenorm --to nanogpt --num-layers 12 --output fusenorm_block.py --with-test
  lamina emit "mix_ln(alpha=0.5)" --to nanogpt --num-layers 12 --output mix_ln_block.py
"""


def parser() -> Parser:
    from lamina.ports.targets import TARGETS

    flags = Parser(
        "emit",
        "Write the code of a placement (where the norms sit) as one file for your own trainer. The file holds the\n"
        "block, the constants for your depth, and the matching initializer. The file does not import Lamina, so you "
        "can\ncommit it to your repository. For TRL or transformers, you need no file: build the model with "
        "lamina.build.",
        EXAMPLES,
        "PLACEMENT ",
    )
    flags.add_word("placement", "a placement: a name, name(option=value, ...), or a file (Lamina executes a .py file)")
    flags.add_flag("--to", f"the trainer: {', '.join(TARGETS)}", metavar="TRAINER")
    flags.add_flag("--num-layers", "the number of blocks", kind=int)
    flags.add_flag("--init", "the initializer in the file (default: recommended)", "recommended", "NAME")
    flags.add_flag("--output", "the file to write (default: Lamina prints the code)", metavar="FILE")
    flags.add_flag("--with-test", "also write a test that compares the file's model with Lamina's model", False)
    flags.add_flag("--overwrite", "replace existing files", False)
    return flags


def run(argv: list[str]) -> int:
    from lamina.ports.targets import target_of

    options = vars(parser().parse(argv))
    if options["to"] is not None:
        target_of(options["to"])  # before a message suggests a command with this name
    for name in ("to", "num_layers"):
        if options[name] is None:
            to, layers = options["to"] or "pytorch", 24 if options["num_layers"] is None else options["num_layers"]
            example = f"lamina emit {shlex.quote(options['placement'])} --to {to} --num-layers {layers}"
            raise UserError(f"--{name.replace('_', '-')}: not given. Run: {example}")
    code = emit(**options)
    if options["output"] is None:
        show(code.rstrip())
    else:
        file = Path(options["output"])
        show(f"the file: {file}")
        if options["with_test"]:
            test, needs = file.with_name(f"test_{file.name}"), target_of(options["to"]).needs
            show(f"the test: {test}")
            show(f"To run the test{f', {needs} and run' * bool(needs)}: pytest {shlex.quote(str(test))}")
    return 0
