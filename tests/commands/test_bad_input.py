"""The user's mistakes: exit code 2, one line that names what is wrong, no traceback, nothing written over."""

import pytest
from training.tiny_runs import SMALL, flags, start

from lamina.cli import main

TINY = {**SMALL, "steps": 2}


@pytest.fixture
def tiny(corpus, tmp_path):
    return lambda command="pretrain", **given: [
        command, *flags(**{**TINY, "corpus": corpus, "output": tmp_path / "out", **given})
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["comapre"], "unknown command 'comapre'; did you mean 'compare'?"),
        (["xyz"], "unknown command 'xyz' (allowed: compare, "),
        (["pretrain", "--num-layer", "3"], "unknown option --num-layer; did you mean '--num-layers'?"),
        (["compare", "--placementss", "keel"], "unknown option --placementss; did you mean '--placements'?"),
        (["pretrain", "--learning-rate", "fast"], "--learning-rate: 'fast' (allowed: a number"),
        (["pretrain", "--steps", "1.5"], "--steps: "),
        (["pretrain", "stray"], "stray"),
        (["placements", "keell"], "did you mean 'keel'?"),
        (["placements", "keel", "--svgg", "x"], "did you mean '--svg'?"),
        (["report", "no/such/folder"], "no/such/folder"),
        (["diagnose", "nosuch"], "'nosuch' is not a folder"),
    ],
)
def test_a_misspelled_command_line(refused, argv, said):
    assert said in refused(*argv)


@pytest.mark.parametrize("command", ["pretrain", "compare"])
@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"hidden_size": 17}, "hidden_size"),
        ({"hidden_size": 10, "num_heads": 4}, "num_heads"),
        ({"steps": 0}, "steps: 0 is not a whole number of at least 1"),
        ({"warmup": 5000}, "warmup"),
        ({"tokenizer": "bpe:many"}, "bpe:many"),
        ({"report_to": "tensorbord"}, "tensorbord"),
        ({"backbone": 300 * "x"}, "backbone: 'xxx"),
        ({"eval_data_dir": "items"}, "eval_data_dir: 'items' has no effect here (allowed: with --eval-tasks)"),
    ],
)
def test_a_value_without_meaning(refused, tiny, command, given, said):
    assert said in refused(*tiny(command, **given))


@pytest.mark.parametrize("command", ["pretrain", "compare"])
def test_a_launchers_number_without_meaning(refused, tiny, command, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "two")
    assert "WORLD_SIZE: 'two'" in refused(*tiny(command))


@pytest.mark.parametrize("name", [300 * "x", "no\0where"])
def test_a_name_that_no_file_can_have_is_refused_early(refused, name):
    assert "backbone: '" in refused("transfer", "--proxy-width", "16", f"--backbone={name}")


@pytest.mark.parametrize("command", ["pretrain", "compare"])
@pytest.mark.parametrize(
    ("argument", "value", "said"),
    [("optimm", "x", "did you mean 'optim'?"), ("max_steps", "9", "--steps"), ("optim", "no_such", "no_such")],
)
def test_a_trainer_argument_without_meaning(refused, tiny, command, argument, value, said):
    assert said in refused(*tiny(command), f"--trainer.{argument}", value)


def test_an_unknown_placement_suggests_the_nearest(refused, tiny):
    assert "did you mean 'keel'?" in refused(*tiny(placement="keal"))
    assert "did you mean 'keel'?" in refused(*tiny("compare", placements="pre_ln,keal"))
    assert "alpa" in refused(*tiny(placement="mix_ln(alpa=0.5)"))
    assert "mine.yaml" in refused(*tiny(placement="no/such/mine.yaml"))


@pytest.mark.parametrize("command", ["pretrain", "compare"])
@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "no text"),
        (b"too short", "too few"),
        (b"\x89PNG\x00\x01\x02\xff\xfe" * 50, "text"),
        (b"\xff\xfeabc" * 99, "UTF-8"),
    ],
    ids=["empty", "short", "binary", "not UTF-8"],
)
def test_a_corpus_that_cannot_be_used(refused, tiny, tmp_path, command, content, said):
    path = tmp_path / "corpus.txt"
    path.write_bytes(content)
    assert said in refused(*tiny(command, corpus=path))


@pytest.mark.parametrize("command", ["pretrain", "compare"])
@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"num_layer: 3", "did you mean 'num_layers'?"),
        (b"steps: many", "'many'"),
        (b"steps: [1, 2]", "steps"),
        (b"a: [", "not readable as YAML"),
        (b"- 1", "mapping"),
        (b"", "mapping"),
        (b"\xff\xfe\x00", "not readable as YAML"),
        (b"trainer: {optimm: x}", "optim"),
        (None, "config.yaml': no such file"),
    ],
)
def test_a_bad_configuration_file_is_named(refused, tmp_path, command, text, said):
    if text is not None:
        (tmp_path / "config.yaml").write_bytes(text)
    assert said in refused(command, *flags(config=tmp_path / "config.yaml", output=tmp_path / "out"))


@pytest.mark.parametrize(
    ("words", "value"),
    [
        (["--steps", "ten", "--steps", "4"], "ten"),
        (["--steps", "4", "--steps", "ten"], "ten"),
        (["--steps=ten", "--steps", "4"], "ten"),
        (["--steps", "4.5", "--steps=4"], "4.5"),
        (["--steps", "1e2", "--steps", "4"], "1e2"),
        (["--steps", "", "--steps", "4"], ""),
        (["--steps", "true", "--steps", "4"], "true"),
    ],
)
def test_of_an_option_given_twice_the_invalid_value_is_named(refused, words, value):
    assert refused("pretrain", *words) == f"lamina: --steps: {value!r} (allowed: a whole number)"


def test_an_invalid_value_of_the_file_is_named_and_not_that_of_the_command_line(refused, tmp_path):
    (tmp_path / "job.yaml").write_text("steps: ten\n")
    assert "'ten'" in refused("pretrain", "--config", tmp_path / "job.yaml", "--steps", "4")


def test_the_command_line_wins_over_the_file_whose_1e_3_is_a_number(tmp_path, corpus):
    """YAML 1.1 reads 1e-3 as a string."""
    path = tmp_path / "c.yaml"
    path.write_text("seed: 5\nsteps: 3\nlearning_rate: 1e-3\nbeta1: 0.8\n")
    assert main(["pretrain", *flags(**TINY, config=path, corpus=corpus, output=tmp_path / "out")]) == 0
    stored = (tmp_path / "out" / "config.yaml").read_text()
    assert "seed: 5" in stored
    assert "learning_rate: 0.001" in stored
    assert "steps: 2" in stored


@pytest.mark.parametrize("command", ["pretrain", "compare"])
class TestOutputFolders:
    def test_what_lamina_did_not_write_is_left_alone(self, refused, tiny, tmp_path, command):
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "thesis.tex").write_text("years of work")
        assert "in use" in refused(*tiny(command))
        assert "did not write" in refused(*tiny(command, overwrite=True))
        assert "contradict" in refused(*tiny(command, resume=True, overwrite=True))

    @pytest.mark.parametrize("below", [".", "out"])
    def test_a_file_is_no_folder_and_holds_none(self, refused, tiny, tmp_path, command, below):
        (tmp_path / "file").write_text("a file")
        assert "file' is a file, not a folder" in refused(*tiny(command, output=tmp_path / "file" / below))

    @pytest.mark.parametrize("name", ["config.yaml", "study.yaml"])
    def test_resuming_what_lamina_did_not_write_is_refused(self, refused, tiny, tmp_path, command, name):
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / name).write_text("settings: {debug: true}\ndebug: true\n")
        refused(*tiny(command, resume=True))
        refused(command, "--output", tmp_path / "out", "--steps", 2, "--resume")


def test_a_diagram_into_a_folder_that_is_missing(tmp_path):
    assert main(["placements", "keel", "--svg", str(tmp_path / "missing" / "keel.svg")]) == 0
    assert (tmp_path / "missing" / "keel.svg").is_file()


@pytest.mark.parametrize("command", ["pretrain", "compare"])
def test_a_mistake_is_one_line_in_a_process_too(tiny, command):
    several = {"placements": "pre_ln,keel"} if command == "compare" else {}
    process = start(*tiny(command, corpus="no/such/corpus.txt", **several))
    out, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert len(err.splitlines()) == 1
    assert "no/such/corpus.txt" in err
    assert not out
