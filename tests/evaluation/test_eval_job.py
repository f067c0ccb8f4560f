"""`lamina eval`, and `--eval-tasks` of a training: scores, tables, pages; resumed, refused, interrupted."""

import json
import os
import re
import shutil

import pandas as pd
import pytest
import yaml
from evaluation.conftest import saved_model
from safetensors.torch import load_file, save_file
from training.test_distributed import torchrun
from training.tiny_runs import records, result, settings, write_corpus
from transformers import GenerationMixin

import lamina
from lamina.cli import main
from lamina.data.tokenizers import load_tokenizer
from lamina.errors import UserError
from lamina.evaluation import job
from lamina.evaluation.candidates import candidates_of
from lamina.jobs.environment import environment
from lamina.jobs.folder import has_result
from lamina.jobs.kinds import Kind, kind_of
from lamina.jobs.seals import write_with_seal
from lamina.reports import report
from lamina.reports.pages.evaluation import _bars, headline
from lamina.studies.evaluated import runs_of
from lamina.training.pretrain import pretrain

pytest.importorskip("lm_eval")


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("the norm sits before the layer and after it, between every layer of a deep model.\n" * 8)
    return path


@pytest.fixture
def quiz(data_dir):
    """The settings of an evaluation on one task."""
    return {"tasks": "quiz", "data_dir": str(data_dir), "run_code": True, "bar": False}


def write_study(folder, rows, kind):
    """What candidates are found by."""
    pd.DataFrame(rows).to_csv(folder / "results.csv", index=False)
    (folder / "study.yaml").write_text("placements: keel\n")
    (folder / "environment.json").write_text(json.dumps(environment(0, kind)))


def test_two_models_on_a_task_and_a_text(model, data_dir, text, tmp_path, capsys):
    other = saved_model(tmp_path / "pre_ln", "pre_ln")
    out = tmp_path / "out"
    argv = ["eval", str(model), str(other), "--tasks", "quiz,quiz@2", "--data-dir", str(data_dir), "--run-code"]
    assert main([*argv, "--limit", "8", "--corpus", str(text), "--output", str(out)]) == 0
    printed = capsys.readouterr()
    assert "loglikelihood" not in printed.err  # the progress bar of the harness
    assert "| model | ppl | quiz | quiz@2 | Avg. |" in printed.out
    assert kind_of(out) == Kind.EVALUATION
    assert result(out)["status"] == "finished"
    rows = pd.read_csv(out / "results.csv")
    assert set(rows["task"]) == {"quiz", "perplexity"}
    assert set(rows["metric"]) >= {"acc", "token_perplexity", "word_perplexity", "byte_perplexity"}
    assert set(rows.loc[rows["task"] == "quiz", "items"]) == {8}
    assert set(rows.loc[rows["task"] == "quiz", "num_fewshot"]) == {0, 2}
    items = pd.read_parquet(out / "items/keel/quiz.parquet")
    assert len(items) == 8
    accuracy = items["metrics"].map(lambda each: json.loads(each)["acc"]).mean()
    numbers = rows[(rows["model"] == "keel") & (rows["metric"] == "acc") & (rows["num_fewshot"] == 0)]
    assert numbers["value"].tolist() == [pytest.approx(accuracy)]
    assert f"{100 * accuracy:.2f}" in (out / "table.md").read_text()
    assert r"\begin{tabular}{lrrrr}" in (out / "table.tex").read_text()
    page = (out / "report.html").read_text()
    (out / "seal.json").unlink()  # with the digests, Lamina rejects every change of a table
    write_with_seal(out, "result.json", result(out), ())
    for column in ("model", "task", "metric", "filter", "value", "stderr", "items", "num_fewshot", "chance"):
        rows.rename(columns={column: "renamed"}).to_csv(out / "results.csv", index=False)
        with pytest.raises(UserError, match=rf"results.csv has no column {column}"):
            report(out)
    rows.to_csv(out / "results.csv", index=False)
    title = re.findall(r"<title>(.*)</title>", page)[0]
    best = r"\w+ scores highest on average \([\d.]+ %, guessing 25.0 %\), but no difference is significant"
    assert re.fullmatch(best + r"|No model beats random guessing on average \(\w+ [\d.]+ %, guessing 25.0 %\)", title)
    assert "guessing</td>" in page
    assert "pre_ln" in page
    assert main(["report", str(out)]) == 0
    (out / "result.json").write_text((out / "result.json").read_text()[:-20])
    assert main(["report", str(out)]) == 2
    assert "result.json" in capsys.readouterr().err


def test_a_killed_evaluation_resumes_with_what_is_missing(model, quiz, text, tmp_path, monkeypatch):
    out = tmp_path / "out"
    given = {**quiz, "models": [str(model)], "corpus": str(text), "output": str(out)}
    score = job.Evaluation._score
    asked = []

    def interrupted(self, network, tokenizer, candidate, column):
        asked.append(column.unit)
        if column.unit == "quiz" and asked.count("quiz") == 1:
            raise KeyboardInterrupt
        return score(self, network, tokenizer, candidate, column)

    monkeypatch.setattr(job.Evaluation, "_score", interrupted)
    with pytest.raises(KeyboardInterrupt):
        lamina.evaluate(**given)
    assert result(out)["status"] == "interrupted"
    assert (out / "report.html").is_file()
    with pytest.raises(UserError, match="is not empty"):
        lamina.evaluate(**given)
    assert lamina.evaluate(output=str(out), resume=True, bar=False)["status"] == "finished"
    assert asked == ["perplexity", "quiz", "quiz"]
    assert lamina.evaluate(output=str(out), tasks="quiz,quiz@1", resume=True, bar=False)["status"] == "finished"
    assert asked[3:] == ["quiz@1"]
    with pytest.raises(UserError, match=r"limit: 3 differs from the evaluation's None"):
        lamina.evaluate(output=str(out), limit=3, resume=True, bar=False)


def test_what_a_killed_evaluation_had_half_written_is_deleted(text, tmp_path):
    given = {"models": [str(saved_model(tmp_path / "one"))], "corpus": str(text), "output": str(tmp_path / "out")}
    lamina.evaluate(**given, bar=False)
    half = [tmp_path / "out" / name for name in ("scores/one/.perplexity.json.123", "items/one/.q.parquet.123")]
    for path in half:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{")
    lamina.evaluate(**given, resume=True, bar=False)
    assert not any(path.exists() for path in half)


def test_the_arms_of_two_studies_are_not_one_line(tmp_path):
    row = {"placement": "keel", "learning_rate": 1e-3, "seed": 0, "status": "finished"}
    for name, widths in (("a", [16]), ("b", [16, 32])):
        rows = [{**row, "trial": f"keel-{width}", "hidden_size": width} for width in widths]
        for one in rows:
            (tmp_path / name / "trials" / one["trial"] / "model").mkdir(parents=True)
        write_study(tmp_path / name, rows, Kind.TRANSFER)
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    assert [one.arm for one in candidates_of([a], runs_of)] == ["keel"]
    both = ["keel of width 16", "keel of width 32"]
    assert [one.arm for one in candidates_of([b], runs_of)] == both
    assert [one.arm for one in candidates_of([a, b], runs_of)] == [f"{a}: keel", *(f"{b}: {arm}" for arm in both)]


def test_a_study_of_a_store_says_where_its_runs_are(tmp_path):
    write_study(tmp_path, [{"key": "0123", "placement": "keel"}], Kind.COMPARE)
    with pytest.raises(UserError, match=r"in a store.*results.csv, such as STORE/0123"):
        runs_of(str(tmp_path))


def test_finished_scores_are_a_result(tmp_path):
    assert not has_result(tmp_path)
    (tmp_path / "scores" / "000-a").mkdir(parents=True)
    (tmp_path / "scores" / "000-a" / "quiz.json").write_text("{}")
    assert has_result(tmp_path), "--overwrite then deletes the old content"


def test_a_study_s_seeds_are_one_line_and_its_diverged_runs_are_counted(tmp_path, text):
    study = tmp_path / "study"
    rows = []
    for seed, status in ((0, "finished"), (1, "finished"), (2, "diverged")):
        rows.append(
            {"trial": f"keel-{seed}", "placement": "keel", "learning_rate": 1e-3, "seed": seed, "status": status}
        )
        if status == "finished":
            saved_model(study / f"trials/keel-{seed}/model", "keel")
    rows.append({**rows[0], "trial": "post-0", "placement": "post_ln", "status": "stuck"})
    write_study(study, rows, Kind.COMPARE)
    found = lamina.evaluate(models=str(study), corpus=str(text), output=str(tmp_path / "out"), bar=False)
    values = [unit["scores"][0]["value"] for unit in found["units"]]
    assert len(values) == 2
    keel, post = found["table"]["lines"]
    assert keel["mean"][0] == pytest.approx(sum(values) / 2)
    assert keel["std"][0] == pytest.approx(abs(values[0] - values[1]) / 2**0.5)
    assert (keel["runs"], keel["left_out"]) == (2, {"diverged": 1})
    assert (post["runs"], post["left_out"]) == (0, {"stuck": 1})
    table = (tmp_path / "out/table.md").read_text()
    assert "keel (1 of 3 runs diverged)" in table
    assert "| post\\_ln (1 of 1 runs stuck) | failed |" in table


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"tasks": "quizz"}, "unknown task 'quizz'; did you mean 'quiz'"),
        ({"models": "{model},no/such/model"}, "models: .*no/such/model"),
        ({"data_dir": "no-such"}, "data_dir: 'no-such' is not a folder"),
        ({"window": 999, "corpus": "embedded", "tasks": ""}, "window: 999 is longer than the model's context"),
        ({"generation": {"temprature": 1}}, "unknown generation argument 'temprature'; did you mean 'temperature'"),
        ({"generation": {"temperature": 1}}, "generation.temperature: this argument has no effect, because no task"),
    ],
)
def test_bad_input_is_one_line_before_anything_is_evaluated(model, quiz, tmp_path, given, says):
    base = {**quiz, "models": str(model), "output": str(tmp_path / "out")}
    given = given | ({"models": given["models"].format(model=model)} if "models" in given else {})
    with pytest.raises(UserError, match=says) as raised:
        lamina.evaluate(**{**base, **given})
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "out").exists()


def test_a_diverged_run_alone_has_nothing_to_evaluate(tmp_path, text):
    run = tmp_path / "run"
    run.mkdir()
    (run / "result.json").write_text(json.dumps({"status": "diverged"}))
    with pytest.raises(UserError, match=r"none of the 1 runs has a model to evaluate \(diverged"):
        lamina.evaluate(models=str(run), corpus=str(text), output=str(tmp_path / "out"), bar=False)


@pytest.mark.parametrize("changed", ["model", "text", pytest.param("data", marks=pytest.mark.slow)])
def test_a_score_is_computed_again_once_what_it_rests_on_has_changed(data_dir, quiz, text, tmp_path, changed):
    place = saved_model(tmp_path / "one")
    given = {**quiz, "models": str(place), "corpus": str(text), "limit": 4}
    before = lamina.evaluate(**given, output=str(tmp_path / "out"))["units"]
    if changed == "model":
        shutil.rmtree(place)
        saved_model(place, "pre_ln")
    elif changed == "text":
        text.write_text("a deep model of norms.\n" * 9)
    else:
        file = data_dir / "toy/quiz/default/test.jsonl"
        file.write_text("".join(reversed(file.read_text().splitlines(keepends=True))))
    after = lamina.evaluate(output=str(tmp_path / "out"), resume=True, bar=False)["units"]
    again = {new["unit"] for old, new in zip(before, after, strict=True) if old != new}
    assert again == {"model": {"perplexity", "quiz"}, "text": {"perplexity"}, "data": {"quiz"}}[changed]
    fresh = lamina.evaluate(**given, output=str(tmp_path / "new"))["units"]
    assert [unit["scores"] for unit in after] == [unit["scores"] for unit in fresh]


@pytest.mark.parametrize("damage", ["cut", "deleted", "edited"])
def test_damaged_items_are_made_again(model, quiz, tmp_path, damage):
    out = tmp_path / "out"
    before = lamina.evaluate(**quiz, models=str(model), output=str(out))["units"][0]["scores"]
    (file,) = out.glob("items/*/quiz.parquet")
    if damage == "deleted":
        file.unlink()
    elif damage == "edited":
        (scores,) = out.glob("scores/*/quiz.json")
        record = json.loads(scores.read_text())
        record["scores"][0]["value"] = 0.123
        scores.write_text(json.dumps(record))
    else:
        file.write_bytes(file.read_bytes()[:100])
    assert lamina.evaluate(output=str(out), resume=True, bar=False)["units"][0]["scores"] == before
    assert len(pd.read_parquet(file)) == 20


def without_readout(folder):
    weights = load_file(folder / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def with_scores(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["LaminaForSequenceClassification"]}))


def without(pattern):
    return lambda folder: [file.unlink() for file in folder.glob(pattern)]


def cut_short(folder):
    os.truncate(folder / "model.safetensors", 1000)


unspoiled = without("no-such-file")


@pytest.mark.parametrize(
    ("spoil", "given", "says"),
    [
        (cut_short, {}, "models: .*: model.safetensors is cut short or altered"),
        (without("tokenizer*"), {}, r"tokenizer: .* holds no tokenizer"),
        (with_scores, {}, "LaminaForSequenceClassification, which returns scores"),
        (unspoiled, {"tokenizer": "no/such/tokenizer"}, "tokenizer: .*no/such/tokenizer"),
        (unspoiled, {"chat_template": True}, "chat_template: the tokenizer of .* has no chat template"),
        (unspoiled, {"corpus": "{folder}/rows.jsonl"}, "text"),
        (unspoiled, {"corpus": "{folder}/rows.jsonl:0.9,embedded:0.1"}, "is a mix"),
    ],
)
def test_what_a_model_or_text_lacks_is_said_before_the_folder_is_touched(model, quiz, tmp_path, spoil, given, says):
    place, out = tmp_path / "model", tmp_path / "out"
    shutil.copytree(model, place, ignore=shutil.ignore_patterns("manifest.json"))
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n')
    spoil(place)
    given = {name: value.format(folder=tmp_path) if name == "corpus" else value for name, value in given.items()}
    with pytest.raises(UserError, match=says):
        lamina.evaluate(**{**quiz, "models": str(place), "output": str(out), **given})
    assert not out.exists()


@pytest.mark.parametrize(
    ("vocab_size", "spoil", "says"),
    [
        (257, without_readout, "Lamina drew random weights for tensors that the checkpoint lacks: lm_head.weight"),
        (200, unspoiled, r"tokenizer: the tokenizer has 257 tokens, but the model .* has embeddings for only 200"),
    ],
)
def test_weights_that_do_not_fit_are_refused(text, tmp_path, vocab_size, spoil, says):
    place = saved_model(tmp_path / "one", vocab_size=vocab_size)
    (place / "manifest.json").unlink(missing_ok=True)
    spoil(place)
    with pytest.raises(UserError, match=says):
        lamina.evaluate(models=str(place), corpus=str(text), output=str(tmp_path / "out"), bar=False)


def test_a_model_of_256_bytes_is_read_as_probe_and_prune_read_it(quiz, text, tmp_path, capsys):
    place = saved_model(tmp_path / "one", vocab_size=256)
    for file in place.glob("tokenizer*"):
        file.unlink()
    argv = ["eval", str(place), "--tokenizer", "bytes", "--corpus", str(text), "--output", str(tmp_path / "out")]
    assert main(argv) == 0
    (unit,) = result(tmp_path / "out")["units"]
    assert f"{len(text.read_bytes()) - 1:,} tokens" in unit["notes"][0]
    said = "the model's vocabulary of 256 lacks the end-of-text token 256, so Lamina adds no such token to the text"
    assert said in unit["notes"][1]
    with pytest.raises(
        UserError,
        match=r"for only 256\. Tasks need the token <\|endoftext\|>, which the model lacks\. Leave out --tasks",
    ):
        lamina.evaluate(**quiz, models=str(place), tokenizer="bytes", output=str(tmp_path / "quiz"))


WRITTEN = {"task": "written", "dataset_path": "toy/quiz", "output_type": "generate_until"}
WRITTEN |= {"test_split": "test", "doc_to_text": "{{question}}", "doc_to_target": "{{choices[answer]}}"}
WRITTEN |= {"generation_kwargs": {"until": ["\n"], "max_gen_toks": 4, "do_sample": False}}
WRITTEN |= {"metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}]}


@pytest.fixture
def written(data_dir):
    """The folder with a task whose answers are written."""
    (data_dir / "tasks/written.yaml").write_text(yaml.safe_dump(WRITTEN))
    return data_dir


def test_answers_are_written_as_the_user_says_after_the_system_s_turn(written, tmp_path, monkeypatch):
    folder = saved_model(tmp_path / "talker")
    tokenizer = load_tokenizer("bytes")
    tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    tokenizer.save_pretrained(folder)
    asked = []
    generate = GenerationMixin.generate

    def seen(self, input_ids, **options):
        sampled = options.get("temperature"), options.get("do_sample")
        asked.append((tokenizer.decode(input_ids[0], skip_special_tokens=True), sampled))
        return generate(self, input_ids, **options)

    monkeypatch.setattr(GenerationMixin, "generate", seen)
    words = ["eval", str(folder), "--tasks", "written", "--data-dir", str(written), "--run-code"]
    words += ["--limit", "4", "--batch-size", "1"]
    assert main([*words, "--output", str(tmp_path / "plain")]) == 0
    more = ["--chat-template", "--system", "Be brief.", "--generation.temperature", "0.5"]
    more += ["--generation.max_gen_toks", "9"]  # a temperature samples, though the task says do_sample: False
    assert main([*words, *more, "--output", str(tmp_path / "told")]) == 0
    plain, told = (pd.read_parquet(tmp_path / name / "items/talker/written.parquet") for name in ("plain", "told"))
    assert plain["answer"].str.len().max() <= 4 < told["answer"].str.len().max()
    assert [sampled for _, sampled in asked[4:]] == [(0.5, True)] * 4
    assert all(text.startswith("<system>Be brief.<user>") for text, _ in asked[4:])
    assert not any("<system>" in text for text, _ in asked[:4])


def test_auto_takes_as_many_as_fit(model, quiz, text, tmp_path, monkeypatch):
    given = {**quiz, "models": str(model), "corpus": str(text), "limit": 6}
    plain = lamina.evaluate(**given, output=str(tmp_path / "plain"))
    tried = []
    perplexity = job.perplexity

    def small(*args, batch_size, **options):
        tried.append(batch_size)
        if batch_size > 3:
            raise RuntimeError("CUDA out of memory. Tried to allocate more than there is.")
        return perplexity(*args, batch_size=batch_size, **options)

    monkeypatch.setattr(job, "perplexity", small)
    fitted = lamina.evaluate(**given, output=str(tmp_path / "auto"), batch_size="auto")
    assert tried[0] == 8 > tried[-1]
    for one, other in zip(plain["units"], fitted["units"], strict=True):
        values = [[score["value"] for score in unit["scores"]] for unit in (one, other)]
        assert values[0] == pytest.approx(values[1], rel=1e-5)


@pytest.mark.slow
def test_two_processes_score_as_one_does_and_one_of_them_writes(model, written, text, tmp_path):
    """Of seven items neither process has as many as the other; batches of one are the same in both."""
    given = ["eval", model, "--tasks", "quiz,quiz@2,written", "--data-dir", written, "--run-code", "--limit", "7"]
    given = [*map(str, given), "--corpus", str(text), "--window", "64", "--batch-size", "1", "--device", "cpu"]
    assert main([*given, "--output", str(tmp_path / "one")]) == 0
    done = torchrun("-m", "lamina", *given, "--output", tmp_path / "two")
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.count("| model | ppl |") == 1
    one, two = (result(tmp_path / name) for name in ("one", "two"))
    for ours, theirs in zip(two["units"], one["units"], strict=True):
        assert ours["unit"] == theirs["unit"]
        assert ours["notes"] == theirs["notes"]
        for score, other in zip(ours["scores"], theirs["scores"], strict=True):
            assert score == other
    for path in (tmp_path / "one/items").rglob("*.parquet"):
        items = pd.read_parquet(tmp_path / "two" / path.relative_to(tmp_path / "one"))
        pd.testing.assert_frame_equal(items, pd.read_parquet(path))
    (written / "tasks/written.yaml").write_text(yaml.safe_dump({**WRITTEN, "generation_kwargs": {"max_gen_toks": 300}}))
    failed = torchrun("-m", "lamina", *given[:2], "--tasks", "written", *given[4:9], "--output", tmp_path / "three")
    assert failed.returncode != 0
    assert failed.stderr.count("lamina: tasks: written: ") == 1


def test_the_scores_are_the_saved_model_s_and_the_training_is_undisturbed(tmp_path, data_dir, quiz):
    corpus = write_corpus(tmp_path / "words.txt")
    given = {"steps": 4, "eval_steps": 2, "precision": "fp32", "compile": "off", "sequence_length": 128}
    tasks = {"eval_tasks": "quiz,quiz@1", "eval_data_dir": str(data_dir), "run_code": True, "eval_task_limit": 12}
    pretrain(settings(corpus, tmp_path / "plain", **given), bar=False)
    pretrain(settings(corpus, tmp_path / "scored", **given, **tasks), bar=False)
    plain, scored = result(tmp_path / "plain"), result(tmp_path / "scored")
    assert scored["eval_loss"] == plain["eval_loss"]
    assert "tasks" not in plain
    assert set(scored["tasks"]) == {"quiz", "quiz@1"}
    evaluated = [record for record in records(tmp_path / "scored") if "eval_loss" in record]
    assert [set(record["tasks"]) for record in evaluated] == [{"quiz", "quiz@1"}] * 2
    assert evaluated[-1]["tasks"] == scored["tasks"]
    assert "On tasks" in report(tmp_path / "scored").read_text()
    assert "On tasks" not in report(tmp_path / "plain").read_text()
    given = {**quiz, "models": str(tmp_path / "scored"), "tasks": "quiz,quiz@1", "limit": 12}
    found = lamina.evaluate(**given, output=str(tmp_path / "out"))
    values = {unit["unit"]: unit["scores"][0]["value"] for unit in found["units"]}
    assert scored["tasks"] == pytest.approx(values)


def test_an_unknown_task_is_refused_before_the_folder_is_touched(tmp_path, data_dir):
    scored = {"eval_tasks": "quizz", "eval_data_dir": str(data_dir), "run_code": True}
    run = settings(write_corpus(tmp_path / "words.txt"), tmp_path / "run", **scored)
    with pytest.raises(UserError, match=r"eval_tasks: unknown task 'quizz'; did you mean 'quiz'"):
        pretrain(run, bar=False)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("scores", "title"),
    [
        ((23.6, 24.3), "No model beats random guessing on average (keel 24.3 %, guessing 28.6 %)"),
        ((23.6, 31.0), "keel scores highest on average (31.0 %, guessing 28.6 %)"),
        ((28.6,), "No model beats random guessing on average (pre_ln 28.6 %, guessing 28.6 %)"),
        ((30.0,), "pre_ln scores 30.0 % on average, guessing 28.6 %"),
    ],
)
def test_the_title_says_whether_a_model_is_above_guessing(scores, title):
    lines = [{"arm": arm, "mean": [score]} for arm, score in zip(("pre_ln", "keel"), scores, strict=False)]
    assert headline({"lines": lines, "shares": [True], "headings": ["Avg."], "chance": [28.6]}, []) == title


def test_the_dashes_of_guessing_are_not_wider_than_their_columns_on_a_phone():
    headings = list("abcdefgh")
    line = {"arm": "keel", "mean": [50.0] * 8, "std": [None] * 8}
    printed = {"lines": [line], "shares": [True] * 8, "headings": headings, "chance": [25.0] * 8}
    (dashes,) = (trace for trace in _bars(printed, {"keel": "#000"}).data if trace.get("name") == "guessing")
    assert 1.4 * dashes["marker"]["size"] <= 255 / len(headings)  # a line-ew marker is 1.4 times its size
