"""What users and their scripts rely on; a change here is a change for them, made on purpose."""

import subprocess
import sys

import pytest

import lamina
from lamina.cli import COMMANDS, main
from lamina.jobs.catalog import JOBS

SETTINGS = {name: row.record for name, row in JOBS.items()}
EXPORTED = {"__version__", "build", "evaluate", "placements", "probe", "probe_folder", "LayerMonitor", "watch", "wire"}
EXPORTED |= {name.replace("-", "_") for name in COMMANDS} - {"placements", "probe"} | {"placement_of"}


def test_the_package_exports_these_names():
    assert set(lamina.__all__) == EXPORTED
    assert all(hasattr(lamina, name) for name in lamina.__all__)


_WRITTEN = "placements backbones diagnose report generate convert prune graft"


def test_the_command_line_has_these_commands():
    jobs = "compare preflight pretrain sft reward rlhf dpo coord-check transfer max-lr study probe eval"
    assert list(COMMANDS) == [*jobs.split(), *_WRITTEN.split()]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_a_help_with_an_example(command, capsys):
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    out = capsys.readouterr().out
    assert f"  lamina {command}" in out.split("\nexamples:")[1]


HEAVY = {"torch", "transformers", "argparse", "pandas", "numpy", "yaml", "pyarrow", "plotly"}
MODELS = {"torch", "transformers"}
CALLED = "from lamina.cli import main\ntry: main({!r})\nexcept SystemExit: pass"
LIGHT = {  # what is run: what it must not load
    **{CALLED.format(words): HEAVY for words in (["--help"], [], ["--version"], ["no-such-command"])},
    **{CALLED.format(words): MODELS | {"pandas"} for words in (["convert", "--help"], ["probe", "--list"])},
    "import lamina; dir(lamina), lamina.api; lamina.placements.resolve('keel', 4)": HEAVY - {"argparse", "yaml"},
    "import lamina.preflights.settings, lamina.studies.settings": MODELS | {"numpy", "pandas"},
    "from lamina.data.corpus import Corpus; next(Corpus.parse('embedded').documents())": MODELS | {"numpy", "datasets"},
    "from lamina.data.tokenizers import validate_spec; validate_spec('bpe:300')": MODELS | {"tokenizers", "numpy"},
    "from lamina.probes.engine.registry import listed; listed()": MODELS | {"pandas"},
    "from lamina.placements import diagram, resolve; diagram.svg(resolve('keel', 2))": HEAVY - {"argparse", "yaml"},
    "import lamina.papers.judging": {"torch", "pandas", "numpy", "scipy"},
    "import lamina.papers.pages.study_figures, lamina.papers.pages.matplotlib_figures": MODELS,
    "import lamina.reports.pages.probing": MODELS,
}


@pytest.mark.parametrize("code", LIGHT)
def test_what_needs_no_model_loads_nothing_heavy(code):
    code = f"import sys\n{code}\nprint(sorted({LIGHT[code]!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr


def test_help_lists_every_command(capsys):
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(f"\n  {name} " in out for name in COMMANDS)


def test_python_m_lamina_is_lamina_and_says_its_version():
    done = subprocess.run([sys.executable, "-m", "lamina", "--version"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, f"lamina {lamina.__version__}\n")
