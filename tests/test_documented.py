"""Every documented command line runs as it stands: all of its flags, on small data and tiny models.

``SCENES`` says what has to lie in the folder where the lines of a page, or of a command's help, are typed one after
another. A line that cannot run is in ``NOT_RUN``, with the reason.
"""

from pathlib import Path

import pytest
from documented import typed, words_of
from posttraining.tiny import preferences, sorting, write_model, write_rows

from lamina.cli import main
from lamina.posttraining.examples.templates import TEMPLATES

TYPED = typed()
POSITIONS = 512  # the longest sequence of any example, which a model must take


def after_pretraining(written):
    """Models, data and a reward function for the jobs after pretraining."""
    pytest.importorskip("trl")
    pytest.importorskip("peft")
    models = dict.fromkeys(("runs/keel-64", "runs/keel-64-sft", "HuggingFaceTB/SmolLM2-135M"), "causal_lm")
    models["runs/keel-64-reward"] = "sequence_classification"
    for name in models.keys() - written:
        template = TEMPLATES["alpaca"] if name == "runs/keel-64-sft" else None  # as fine-tuning leaves it
        write_model(Path(name), head=models[name], template=template, positions=POSITIONS)
    conversations = [[row["instruction"], row["output"]] for row in sorting(12)]
    turns = [[{"role": ("user", "assistant")[i], "content": t} for i, t in enumerate(two)] for two in conversations]
    pairs = [{"chosen": good, "rejected": [good[0], {"role": "assistant", "content": "no"}]} for good in turns]
    files = {
        "instructions.jsonl": sorting(12),
        "questions.jsonl": sorting(12),
        "chats.jsonl": [{"messages": messages} for messages in turns],
        "preferences.jsonl": preferences(12),
        "prompts.jsonl": [{"prompt": f"Sort {row['instruction']}"} for row in sorting(9)],
        "sums.jsonl": [{"prompt": f"{a} + 1 =", "sum": a + 1} for a in range(9)],
        "GAIR/lima/train.jsonl": [{"conversations": two, "source": "a list"} for two in conversations],
        "trl-lib/ultrafeedback_binarized/train.jsonl": pairs,
    }
    for name, rows in files.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        write_rows(Path(name), rows)
    Path("sums.py").write_text("def is_right(prompt, answer, row):\n    return float(str(row['sum']) in answer)\n")


SCENES = {  # a page, or a command's help: what makes the files that it names, but those that its lines write
    "posttraining.md": after_pretraining,
    **{f"lamina {job} --help": after_pretraining for job in ("sft", "reward", "rlhf", "dpo")},
}
NOT_RUN = {  # the beginning of a line: why it is not typed
    "pip install": "changes the environment; the extras are compared with pyproject.toml",
}


@pytest.mark.parametrize("page", SCENES)
def test_the_lines_of_a_page_run_as_they_stand(tmp_path, monkeypatch, capsys, page):
    monkeypatch.chdir(tmp_path)
    if page.endswith("--help"):  # most of the time; the pages' own lines write theirs
        monkeypatch.setattr("lamina.api.pages.write_page_once", lambda folder: None)
    lines = TYPED[page]
    SCENES[page]({line.split("--output ")[1].split()[0] for line in lines if "--output " in line})
    for line in lines:
        if line.startswith(tuple(NOT_RUN)):
            continue
        argv = words_of(line)
        assert argv is not None, f"{line}: another program's, and no reason why it is not run"
        assert main(argv) == 0, f"{line}: {capsys.readouterr().err}"


def test_what_is_not_run_is_written_somewhere():
    lines = [line for page in SCENES for line in TYPED[page]]
    for start in NOT_RUN:
        assert any(line.startswith(start) for line in lines), start
