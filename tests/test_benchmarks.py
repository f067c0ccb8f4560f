"""The benchmarks and their texts: what runs where little is installed, and the rows that they make."""

import dataclasses
import importlib.util
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from lab.posttraining.tiny import write_model  # here, because benchmarks/ has a training.py, too
from scripts import loaded

from lamina.training.monitor.alarms import read_alarms

ROOT = Path(__file__).resolve().parent.parent
# None of these may be needed by the GPU benchmark; trl, plotly and the others are asked for by name.
BLOCKED = ("datasets", "trl", "plotly", "litgpt", "x_transformers", "liger_kernel", "zstandard")
WITHOUT = f"""
import importlib.util, runpy, sys
blocked = {BLOCKED}
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in blocked:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Blocker())
find_spec = importlib.util.find_spec  # transformers and accelerate ask it what is installed
importlib.util.find_spec = lambda name, *more: None if name.partition(".")[0] in blocked else find_spec(name, *more)
script, *sys.argv[1:] = sys.argv[1:]
sys.argv[0] = script
runpy.run_path(script, run_name="__main__")
"""
SMOKE = {"size": "smoke", "batch_size": 2, "sequence_length": 16, "threads": 1}


@pytest.fixture(scope="module")
def common():
    before = list(sys.path)
    sys.path.insert(0, str(ROOT / "benchmarks"))
    yield importlib.import_module("common")
    sys.path[:] = before  # the scripts put themselves in front, too


def answers(**task):
    """What a worker says that trains two turns, without the blocked packages."""
    command = [sys.executable, "-c", WITHOUT, str(ROOT / "benchmarks" / "worker.py"), json.dumps({**SMOKE, **task})]
    turns = '{"steps": 2}\n{"steps": 1}\n{"steps": 0}\n'
    done = subprocess.run(command, input=turns, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line[1:]) for line in done.stdout.splitlines() if line.startswith("@")]


@pytest.mark.parametrize("name", ["lamina:keel", pytest.param("transformers", marks=pytest.mark.slow)])
def test_a_worker_needs_torch_transformers_and_accelerate_alone(name):
    ready, first, second, last = answers(name=name, precision="fp32", compile="off")
    assert ready["first_step"] > 0
    # 2 layers of 4 d^2 + 3 d inner, embedding and readout; norms: 2 a layer and the last one, in Keel 4 and none.
    gains = {"lamina:keel": 2 * 4 * 16 - 16, "transformers": 2 * 2 * 16 + 16}[name]
    assert ready["parameters"] == 2 * (4 * 16 * 16 + 3 * 16 * 48) + 2 * 64 * 16 + gains
    assert first["seconds"] > 0
    assert second["seconds"] > 0
    assert last["peak_memory_mib"] > 100


def test_an_absent_peer_says_so(common, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "litgpt", None)
    task = {**SMOKE, "name": "litgpt", "precision": "fp32", "compile": "off"}
    monkeypatch.setattr(sys, "argv", ["worker.py", json.dumps(task)])
    importlib.import_module("worker").main()
    assert json.loads(capsys.readouterr().out.removeprefix("@"))["absent"].startswith("not installed: ")


@pytest.mark.slow
def test_the_plain_loop_trains_the_same_model():
    ready, *_ = answers(name="nanogpt-style", precision="fp32", compile="off")
    assert ready["parameters"] == 2 * (4 * 16 * 16 + 3 * 16 * 48) + 2 * 64 * 16 + 5 * 16


def test_flops_are_counted_by_the_formula(common):
    """6 P + 12 N d T a token, P without the embedding."""
    weights = 2 * (4 * 16 * 16 + 3 * 16 * 48) + 64 * 16
    assert common.flops_per_token("smoke", 10) == 6 * weights + 12 * 2 * 16 * 10


@pytest.mark.slow  # four processes
def test_a_comparison_ends_in_ratios_and_a_table(tmp_path):
    """Two contenders, alternating; the record, and the page's table made of it."""
    command = [sys.executable, str(ROOT / "benchmarks" / "training.py"), "--suite", "placements", "--sizes", "smoke"]
    command += ["--placements", "keel", "--rounds", "2", "--threads", "1", "--output", str(tmp_path / "record.json")]
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "TORCH_COMPILE_DISABLE": "1"}
    subprocess.run(command, check=True, capture_output=True, cwd=ROOT, env=environment)
    record = json.loads((tmp_path / "record.json").read_text())
    first, second = record["parts"][0]["results"]
    assert (first["name"], second["name"], first["speed_ratio"]) == ("lamina:pre_ln", "lamina:keel", 1.0)
    rate = 2 * 16 / first["step_seconds"]
    assert first["tokens_per_second"] == pytest.approx(rate, rel=0.01)
    own = record["products_gflops_per_second"][first["precision"]]
    # The products' rates are rounded, and those of the turns after a contender's end are in the record alone.
    assert first["utilisation_of_own"] == pytest.approx(first["gflops_per_second"] / own, rel=0.5, abs=2e-3)


@pytest.fixture
def gpu(common):
    return importlib.import_module("gpu")


class Scripted:
    """A process of a contender that answers as the test says."""

    starts: list

    def __init__(self, command, environment):
        self.task, self.told = json.loads(command[-1]), []
        self.answers = type(self).starts.pop(0)(self.task)

    def say(self, **what):
        self.told.append(what)

    def answer(self, seconds):
        return next(self.answers, None)

    def kill(self):
        self.answers = iter(())


def runs_out(task):
    yield {"compiled": 1.0}
    raise absent("out of memory: tried to allocate")


def absent(why):
    return importlib.import_module("common").Absent(why)


def trains(task):
    yield {"compiled": 1.0}
    yield {"seconds_to_build": 1.0, "first_step": 1.0, "step_seconds": 0.5, "parameters": 8}


def test_a_contender_without_memory_is_built_again_alone_and_then_smaller(gpu, monkeypatch):
    monkeypatch.setattr(gpu, "Process", Scripted)
    Scripted.starts = [runs_out, runs_out, trains]
    entry = gpu.Entry("50m", {"name": "lamina:keel", "batch_size": 32, "accumulation": 8}, {})
    entry.start()
    assert entry.wait_until_ready(time.monotonic() + 9)
    assert (entry.task["batch_size"], entry.task["accumulation"]) == (16, 16)
    assert not Scripted.starts
    assert "absent" not in entry.row


def test_the_table_of_a_gpus_record_has_a_row_a_contender_and_none_without_one(monkeypatch):
    tables = loaded("docs/tables.py")
    monkeypatch.setattr(tables, "_record", lambda name: None)
    assert tables.gpu_table("gpu") == ""
    row = {"name": "lamina:keel", "tokens_per_second": 1_000_000, "mfu": 0.4, "speed_ratio": 1.01, "batch_size": 32}
    sizes = {"size": "50m", "num_hidden_layers": 8, "hidden_size": 640, "vocab_size": 8192, "sequence_length": 2048}
    record = {"date": "2026-11-28", "revision": "abc", "versions": {"torch": "2.11", "transformers": "5.17"}}
    record |= {"machine": {"gpu": "NVIDIA H100 80GB HBM3"}}
    stages = {"50m": {**sizes, "results": [row, {"name": "transformers", "absent": "out of memory"}]}}
    record["stages"] = {**stages, "watch": {"time_ratio": 1.0213}}
    monkeypatch.setattr(tables, "_record", lambda name: record)
    table = tables.gpu_table("gpu")
    assert "| `lamina:keel` | 1,000,000 | 40.0% | 1.01 |  | 32 |" in table
    assert "transformers` |" not in table
    assert "`lamina.watch` takes 1.021 x" in table


@pytest.mark.slow  # six processes
def test_the_gpu_benchmark_runs_in_small_on_a_cpu_and_goes_on_where_it_was(tmp_path):
    output = tmp_path / "gpu.json"
    command = [sys.executable, "-c", WITHOUT, str(ROOT / "benchmarks" / "gpu.py"), "--device", "cpu", "--size", "smoke"]
    command += ["--stages", "50m,watch", "--only", "nanogpt-style,lamina:keel", "--output", str(output)]

    def run(*more):
        subprocess.run([*command, *more], check=True, capture_output=True, cwd=ROOT, timeout=500)
        return json.loads(output.read_text())["stages"]

    stages = run()
    plain, ours = stages["50m"]["results"]
    assert (plain["name"], ours["name"], plain["speed_ratio"]) == ("nanogpt-style", "lamina:keel", 1.0)
    for row in (plain, ours):
        assert row["tokens_per_second"] == pytest.approx(2 * 4 * 16 / row["step_seconds"], rel=0.01)
        assert len(row["turns"]) == 2
        assert row["peak_memory_mib"] > 100
    assert "mfu" not in ours  # a CPU
    assert stages["watch"]["time_ratio"] > 0.5
    assert run("--then", "true") == {**stages, "then": run("--then", "true")["then"]}  # nothing is measured twice


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["sft", "dpo"])
def test_the_stages_after_pretraining_are_plain_trl(common, stage, tmp_path):
    """Lamina's losses and TRL's own, on the same rows in the same order, are the same numbers."""
    pytest.importorskip("trl")
    pytest.importorskip("peft")
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    module = importlib.import_module("posttraining_path")
    tokenizer = AutoTokenizer.from_pretrained(write_model(tmp_path / "tokenizer"))
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    ends = {"bos_token_id": 256, "eos_token_id": 256, "pad_token_id": 256}
    LlamaForCausalLM(LlamaConfig(**sizes, **ends, vocab_size=257)).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    data, held_out = module.written(tmp_path, stage, 24)
    task = {"stage": stage, "model": str(tmp_path / "model"), "data": str(data), "held_out": str(held_out)}
    task |= {"steps": 3, "logging": 1, "threads": 1}
    both = [module.SIDES[side]({**task, "output": str(tmp_path / side)})["losses"] for side in ("lamina", "trl")]
    assert both[0] == pytest.approx(both[1], abs=1e-6)
    assert len(set(both[0])) > 1


def test_the_arithmetic_of_memory_counts_weights_gradients_and_moments(common):
    from transformers import LlamaConfig, LlamaForCausalLM

    module = importlib.import_module("memory")
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(**sizes, vocab_size=50_000)
    weights = sum(parameter.numel() for parameter in LlamaForCausalLM(config).parameters())
    linear = 2 * (4 * 64 * 64 + 3 * 64 * 96)
    lora = 2 * 16 * (4 * (64 + 64) + 3 * (64 + 96))
    found = {title: module.needed(config, method, tokens=2) for title, method in module.METHODS.items()}
    assert found[module.ALL] == (4 + 4 + 8 + 4) * weights  # the last: the copy at a recorded step
    assert found["`sft --weights bf16`"] == found[module.ALL] / 2
    assert found["`dpo`, all weights"] == (4 + 4 + 4 + 8 + 4) * weights
    assert found["`--lora-rank 16`"] == 4 * weights + (4 + 4 + 8 + 4) * lora
    nf4 = linear * (0.5 + 1 / 64 + 1 / 4096) + 2 * (weights - linear) + (4 + 4 + 8 + 4) * lora
    assert found["`--lora-rank 16 --weights nf4`"] == pytest.approx(nf4)
    assert module.activations(module.on_meta(config), config, 32, 4.0) > 2 * 32 * 64 * 4


@pytest.mark.slow  # two trainings of 26 steps
def test_a_recorded_run_gives_the_alarms_of_the_run_itself(common, tmp_path, monkeypatch):
    """Of a run that breaks, judged while it trained and by its records; and one that goes on from a healthy one."""
    runs, alarms = (importlib.import_module(f"tools.calibration.{name}") for name in ("alarm_runs", "alarms"))
    monkeypatch.setattr(runs, "BREAKS", 18)
    monkeypatch.setattr(runs, "AFTER", 8)
    setup = dataclasses.replace(runs.SETUPS["llama-restarts"], layers=3, width=16, every=3, steps=30)
    monkeypatch.setitem(runs.SETUPS, "llama-restarts", setup)
    monkeypatch.setitem(alarms.SETUPS, "llama-restarts", setup)
    tape, about = runs.train("llama-restarts", "creep", 1.5, 0, tmp_path / "watched", live=True)
    tape.write(tmp_path / "alone.parquet", about)
    alone = alarms.Recorded.read(tmp_path / "alone.parquet")
    told = alone.replay().told
    assert told == read_alarms(tmp_path / "watched")
    assert (told[0].rule, told[0].layer, told[0].sublayer) == ("written", about["layer"], "feed_forward")
    runs.make(tmp_path, ("llama-restarts", "", 1.0, 0), [("llama-restarts", "creep", 1.5, 0)])
    forked = alarms.Recorded.read(tmp_path / "llama-restarts+creep+1.5+0.parquet")
    assert forked.calls == alone.calls
    assert forked.about["held"] == about["held"]


def test_an_alarm_is_in_a_spike_if_the_fixed_batchs_loss_lay_above_its_own_level(common):
    held = [4.0 - 0.01 * step for step in range(60)]  # of each second step
    spike = held[:40] + [loss + 0.5 for loss in held[40:44]] + held[44:]
    recorded = importlib.import_module("tools.calibration.alarms").Recorded
    found = [recorded(Path("run"), {"held": losses}).spiked(step) for losses in (held, spike) for step in (40, 84)]
    assert found == [False, False, False, True]


@pytest.fixture(scope="module")
def commonsense():
    return loaded("tools/data/commonsense_data.py")


@pytest.mark.parametrize(
    ("name", "query", "gold", "instruction", "answer"),
    [
        (
            "piqa",
            "Goal: When butter boils, you can\n A. Pour it onto a plate\n B. Pour it into a jar\nAnswer:",
            1,
            "Please choose the correct solution to the question: When butter boils, you can\n\n"
            "Solution1: Pour it onto a plate\n\nSolution2: Pour it into a jar\n\nAnswer format: solution1/solution2",
            "solution2",
        ),
        (
            "winogrande",
            "Fill in the blank: Ian ate Dennis's menudo because ___ despised eating intestine.\n A. Ian\n B. Dennis\n"
            "Answer:",
            1,
            "Please choose the correct answer to fill in the blank to complete the given sentence: Ian ate Dennis's "
            "menudo because _ despised eating intestine.\n\nOption1: Ian Option2: Dennis\n\nAnswer format: "
            "option1/option2",
            "option2",
        ),
        (
            "openbookqa",
            "Question: The sun is responsible for\n A. puppies\n B. children\n C. flowers\n D. plants\nAnswer:",
            3,
            "Please choose the correct answer to the question: The sun is responsible for\n\nAnswer1: puppies Answer2: "
            "children Answer3: flowers Answer4: plants\n\nAnswer format: answer1/answer2/answer3/answer4",
            "answer4",
        ),
        (
            "hellaswag",
            "Removing ice: Then, he writes. Then\nChoose the best continuation:\n A. , one.\n B. , two.\n C. , three."
            "\n D. , four.\nAnswer:",
            0,
            "Please choose the correct ending to complete the given sentence: Removing ice: Then, he writes. Then\n\n"
            "Ending1: , one. Ending2: , two. Ending3: , three. Ending4: , four.\n\nAnswer format: "
            "ending1/ending2/ending3/ending4",
            "ending1",
        ),
        (
            "boolq",
            "Persian -- Persian is a language.\nQuestion: do they speak the same language?\n A. yes\n B. no\nAnswer:",
            0,
            "Please answer the following question with true or false, question: do they speak the same language?\n\n"
            "Answer format: true/false",
            "true",
        ),
    ],
)
def test_a_question_is_worded_as_llm_adapters_words_it(commonsense, name, query, gold, instruction, answer):
    row = commonsense.example(name, query, gold)
    said = {"input": "", "output": f"the correct answer is {answer}", "benchmark": name}
    assert row == {"instruction": instruction, **said}


SENTENCE = "It is a truth universally acknowledged, that a single man in possession of a good fortune, must be in want."


@pytest.fixture(scope="module")
def ladder():
    return loaded("tools/data/ladder_text.py")


def test_hard_wrapped_lines_become_paragraphs(ladder):
    assert list(ladder.paragraphs_of("one\n two\n\t\nthree\n\n\n")) == ["one two", "three"]


def test_a_long_paragraph_stands_once_and_a_short_one_as_often_as_it_was_written(ladder):
    assert list(ladder.distinct(["Enter.", SENTENCE, "Enter.", SENTENCE])) == ["Enter.", SENTENCE, "Enter."]


@pytest.mark.parametrize(
    ("paragraph", "prose"),
    [(SENTENCE, True), ("Too short to be prose.", False), ("0x7f 12 34 " * 20, False), ("é" * 20 + SENTENCE, False)],
)
def test_tables_code_and_foreign_text_are_no_prose(ladder, paragraph, prose):
    assert ladder.is_prose(paragraph) is prose


def test_the_innermost_blocks_of_a_page_are_its_paragraphs(ladder, tmp_path):
    pytest.importorskip("lxml")
    (tmp_path / "deb-manual").mkdir()
    body = "<nav><p>menu</p></nav><li><p>inner</p></li><pre>code</pre><div class='para'>own</div>"
    (tmp_path / "deb-manual" / "page.html").write_text(f"<html><body>{body}</body></html>")
    assert list(ladder.pages("manual", "", ladder.Packages(tmp_path))) == ["inner", "own"]
