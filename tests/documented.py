"""What README, the pages of docs and the commands' help say to type, read once for all tests of it."""

import re
import shlex
from pathlib import Path

from lamina.catalog import COMMANDS
from lamina.commands.run_job import parser

ROOT = Path(__file__).resolve().parent.parent
PAGES = {path.name: path.read_text("utf-8") for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))}
BLOCKS = {p: re.findall(r"^```(\w*)[^\n]*\n(.*?)^```$", text, re.MULTILINE | re.DOTALL) for p, text in PAGES.items()}


def blocks(*languages):
    return [(page, code) for page, found in BLOCKS.items() for language, code in found if language in languages]


def commands():
    """Each command of the pages, without comments, on one line."""
    return [(page, line) for page, code in blocks("bash") for line in lines_of(code)]


def lines_of(code):
    stripped = (re.sub(r"(^|\s)#(?!SBATCH).*", "", line).strip() for line in joined(code))
    return [line for line in stripped if line and not line.startswith("#")]


def help_commands(name):
    """Each example of a command's help, without what is said beside it, on one line."""
    examples = parser(name).examples
    return [re.split(r"\s{4,}", line.strip())[0] for line in joined(examples) if line.strip()]


def typed():
    """What each page, and each command's help under "lamina NAME --help", says to type: lines and blocks of Python.

    In their order, as ("bash", line) and ("python", code).
    """
    pages = {}
    for page, found in BLOCKS.items():
        for language, code in found:
            if language in ("bash", "python"):
                pages.setdefault(page, []).extend((language, each) for each in READ[language](code))
    return pages | {f"lamina {name} --help": [("bash", line) for line in help_commands(name)] for name in COMMANDS}


def joined(code):
    return re.sub(r"\\\n\s*", "", code).splitlines()


READ = {"bash": lines_of, "python": lambda code: [code]}


def words_of(command):
    """The part of a command that Lamina reads, as it stands; None if there is none."""
    words = shlex.split(command.split(" > ")[0])
    if "lamina" in words[1:] and words[0] in ("torchrun", "accelerate"):
        words = words[words.index("lamina") :]
    return words[1:] if words[0] == "lamina" else None
