"""`lamina reward`, `lamina dpo` and `lamina rlhf` on a tiny model."""

import contextlib
import functools
import itertools
import json
import math
import shutil
import signal
import time
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from accelerate import Accelerator
from lab.posttraining.tiny import common, preferences, write_reward, write_rows
from training.tiny_runs import records
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from lamina import diagnose
from lamina.errors import UserError
from lamina.jobs.kinds import Kind
from lamina.lab.posttraining import page
from lamina.lab.posttraining.pairs import dpo, reward
from lamina.lab.posttraining.rewards import _number, in_time, make_rewards
from lamina.lab.posttraining.rlhf import PolicyTrainer, ReMaxTrainer, reward_gain, rlhf, write_held_out
from lamina.lab.posttraining.settings import RlhfSettings
from lamina.reports import report
from lamina.reports.terminal import run_ended
from lamina.training.monitor.writers import read_rows

ALGORITHMS = ["remax", pytest.param("rloo", marks=pytest.mark.slow), "grpo"]


@pytest.fixture(scope="module")
def judge(base, pairs, tmp_path_factory):
    """A reward model's folder and result."""
    folder = tmp_path_factory.mktemp("judge") / "run"
    given = common(base, pairs, folder)
    return folder, reward({**given, "steps": 20, "learning_rate": 1e-2}, bar=False)


@pytest.fixture
def policy(base, pairs, judge, tmp_path):
    """Train a policy in ``tmp_path / name``; gives the folder and the result."""

    def run(name="run", resume=False, **changed):
        given = common(base, pairs, tmp_path / name)
        given |= {"reward_model": str(judge[0]), "max_answer": 6, "eval_steps": 2}
        given = {"output": given["output"]} if resume else given
        given = {key: value for key, value in {**given, **changed}.items() if value is not ...}
        return tmp_path / name, rlhf(given, resume=resume, bar=False)

    return run


def test_an_evaluation_of_pairs_is_a_mean_over_pairs_whatever_the_batches(base, pairs, tmp_path):
    rows = preferences(6)  # two batches, of four pairs and of two
    rows = [row | ({"margin": 0.5 * number} if number else {}) for number, row in enumerate(rows)]
    held_out = write_rows(tmp_path / "held_out.jsonl", rows)
    result = reward({**common(base, pairs, tmp_path / "run"), "eval_data": str(held_out)}, bar=False)
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "run" / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run" / "model")

    def score(row, name):
        inputs = tokenizer(row["prompt"] + row[name] + tokenizer.eos_token, return_tensors="pt")
        return float(model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits)

    margins = [score(row, "chosen") - score(row, "rejected") for row in rows]
    assert result["eval_margin"] == pytest.approx(sum(margins) / 6, abs=1e-5)
    assert result["eval_accuracy"] == pytest.approx(sum(margin > 0 for margin in margins) / 6)
    losses = [math.log1p(math.exp(row.get("margin", 0.0) - margin)) for row, margin in zip(rows, margins, strict=True)]
    assert result["eval_loss"] == pytest.approx(sum(losses) / 6, abs=1e-5)
    write_rows(held_out, [rows[0] | {"margin": "wide"}])
    with pytest.raises(UserError, match=r"row 1: .*: the field 'margin' must be a number, not 'wide'"):
        reward({**common(base, pairs, tmp_path / "other"), "eval_data": str(held_out)}, bar=False)


def test_a_reward_model_orders_held_out_pairs(judge):
    folder, result = judge
    assert result["status"] == "finished"
    assert result["eval_accuracy"] == 1.0
    model = AutoModelForSequenceClassification.from_pretrained(folder / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    assert model.config.num_labels == 1
    texts = [f"mno?{answer}mno{tokenizer.eos_token}" for answer in (" a", " z")]
    inputs = tokenizer(texts, return_tensors="pt", padding=True, return_token_type_ids=False)
    better, worse = model(**inputs).logits[:, 0].tolist()
    assert better > worse
    assert "fraction of pairs in which the better answer has the higher score" in report(folder).read_text()


def test_the_score_is_read_at_the_last_token_though_it_also_pads(judge):
    """Byte tokenizers pad with the token that ends a text."""
    model = AutoModelForSequenceClassification.from_pretrained(judge[0] / "model").eval()
    ids = torch.tensor([[5, 6, 7, 256, 256, 256], [5, 6, 7, 8, 9, 256]])
    mask = torch.tensor([[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1]])
    states = model.model(input_ids=ids, attention_mask=mask).last_hidden_state
    expected = torch.stack([model.score(states[0, 3]), model.score(states[1, 5])])
    torch.testing.assert_close(model(input_ids=ids, attention_mask=mask).logits, expected)


def test_dpo_prefers_the_better_answers(base, pairs, tmp_path):
    result = dpo({**common(base, pairs, tmp_path / "run"), "learning_rate": 1e-2, "steps": 6}, bar=False)
    assert (result["status"], result["eval_rewards_accuracies"] > 0.9) == ("finished", True)


@pytest.mark.parametrize(("algorithm", "prompts", "answers"), [("remax", 3, 1), ("rloo", 2, 3)])
def test_any_number_of_prompts_and_answers_makes_a_batch(policy, algorithm, prompts, answers):
    changed = {"num_generations": answers} if answers > 1 else {}
    _, result = policy(algorithm=algorithm, batch_size=prompts, steps=1, **changed)
    assert result["status"] == "finished"


def test_another_reward_is_named_and_leaves_no_folder(policy, judge, tmp_path, monkeypatch):
    low = write_reward(tmp_path, "-float(len(answer))")
    changed = {"reward_model": ..., "reward_function": low}
    with pytest.raises(UserError, match="reward_function"):
        policy("none", **{**changed, "reward_function": low.replace(":own", ":high")})
    assert not (tmp_path / "none").exists()
    assert policy("run", pause_step=2, **changed)[1]["status"] == "interrupted"
    write_reward(tmp_path, "float(len(answer))")
    with pytest.raises(UserError, match=r"^reward_function: .* has changed since the run"):
        policy("run", resume=True)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_steps_recorded_loss_is_the_one_whose_gradient_is_taken(policy, algorithm, monkeypatch):
    shares, backward = [], Accelerator.backward

    def seen(self, loss, **kwargs):
        shares.append(loss.item())
        backward(self, loss, **kwargs)

    monkeypatch.setattr(Accelerator, "backward", seen)
    folder, _ = policy(algorithm=algorithm, batch_size=2, gradient_accumulation=2, learning_rate=0.03, beta=0.1)
    losses = {row[0]: row[6] for row in read_rows(folder, ["step_loss"])}
    assert losses == pytest.approx({s: sum(shares[2 * s - 2 : 2 * s]) for s in (1, 2, 3, 4)}, rel=1e-5, abs=1e-9)
    assert {r["step"]: r["loss"] for r in records(folder) if "loss" in r} == pytest.approx(losses, rel=1e-5, abs=1e-9)
    assert algorithm == "rloo" or max(map(abs, losses.values())) > 1e-4  # its first pass over answers has a loss of 0


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_policy_is_recorded_and_evaluated_against_the_model_that_it_started_from(policy, algorithm):
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        whole, result = policy("whole", algorithm=algorithm, beta=0.1)
    assert not [str(one.message) for one in warned if "gradient_checkpointing" in str(one.message)]
    assert result["status"] == "finished"
    assert {"reward_gain", "reward_gain_low", "reward_gain_high", "eval_reward", "eval_kl", "eval_length"} <= set(
        result
    )
    trained = [r for r in records(whole) if "loss" in r]
    assert any(r["grad_norm"] > 0 for r in trained)
    assert abs(trained[0]["kl"]) < 1e-6 < abs(trained[-1]["kl"]), "to the model that it started from"
    evaluated = [r for r in records(whole) if "eval_reward" in r]
    assert [r["step"] for r in evaluated] == [0, 2, 4]
    assert evaluated[0]["eval_kl"] == pytest.approx(0.0, abs=1e-5)
    assert evaluated[-1]["eval_kl"] != evaluated[0]["eval_kl"]
    page = report(whole).read_text()
    assert "To judge a policy" in page
    assert "held-out loss" not in page
    assert "Reward against KL" in page
    assert "Length of the answers" in page


def test_remax_compares_a_sampled_with_a_greedy_answer(policy, monkeypatch):
    """Recorded from a run: the advantages are r(sampled) - r(greedy), and only the sampled answers are trained on."""
    kind, seen, trained = ReMaxTrainer, [], []
    generate, loss = kind._generate_single_turn, kind._compute_loss

    def generated(self, prompts, *others):
        answers = generate(self, prompts, *others)
        if self.model.training:
            seen.append((self, list(prompts), answers))
        return answers

    def computed(self, model, inputs):
        trained.append(inputs)
        return loss(self, model, inputs)

    monkeypatch.setattr(kind, "_generate_single_turn", generated)
    monkeypatch.setattr(kind, "_compute_loss", computed)
    policy(steps=1, learning_rate=1e-9, reward_clip=0.01)
    trainer, prompts, answers = seen[0]
    assert prompts[0::2] == prompts[1::2]
    model, given = trainer.bare_model().eval(), {"do_sample": False, "max_new_tokens": 6, "pad_token_id": 256}
    for prompt, answer in zip(prompts[1::2], answers[1::2], strict=True):
        ids = torch.tensor([prompt])
        whole = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **given)
        assert whole[0].tolist() == [*prompt, *answer]
    rows = [{"prompt_ids": prompt} for prompt in prompts]
    parts = trainer.rewards.parts(rows, answers, [""] * len(rows))
    clipped = [max(-0.01, min(0.01, r)) for r in trainer.rewards.total(parts)]
    expected = sorted(s - g for s, g in zip(clipped[0::2], clipped[1::2], strict=True))
    assert sorted(trained[0]["advantages"].tolist()) == pytest.approx(expected, abs=1e-6)
    kept = sorted(ids[: int(m.sum())].tolist() for ids, m in
                  zip(trained[0]["completion_ids"], trained[0]["completion_mask"], strict=True))  # fmt: skip
    assert kept == sorted(answers[0::2])


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_equal_rewards_of_all_answers_are_an_alarm_of_the_run(policy, tmp_path, algorithm):
    own = {"reward_model": ..., "reward_function": write_reward(tmp_path, "1.0")}
    few = {"steps": 24, "logging_steps": 4, "max_answer": 2, "eval_steps": 24}
    folder, result = policy(**own, **few, algorithm=algorithm)
    assert result["status"] == "finished"
    (alarm,) = map(json.loads, (folder / "alarms.jsonl").read_text().splitlines())
    assert (alarm["rule"], alarm["metric"], alarm["step"]) == ("equal", "equal_rewards", 1)
    assert diagnose(folder).sentences[0].startswith("Cause: equal rewards within each group from step 1.")


def test_only_remax_clips_rewards_by_default(policy, tmp_path, caplog):
    chosen = [RlhfSettings(algorithm=name) for name in ("remax", "rloo", "grpo")]
    assert [(one.reward_clip, one.beta) for one in chosen] == [(5.0, 0.1), (0.0, 0.05), (0.0, 0.0)]
    assert RlhfSettings(algorithm="grpo", reward_clip=2, beta=0.3).to_dict()["reward_clip"] == 2.0
    far = {"reward_model": ..., "reward_function": write_reward(tmp_path, "100.0 + len(answer)"), "algorithm": "grpo"}
    folder, _ = policy("free", **far, steps=1)
    (record,) = [r for r in records(folder) if "loss" in r]
    assert record["reward"] > 100.0
    assert "clipped_rewards" not in record
    assert "reward_clip" not in caplog.text
    folder, _ = policy("clipped", **far, steps=3, reward_clip=5.0)
    assert [r["clipped_rewards"] for r in records(folder) if "loss" in r] == [1.0] * 3
    assert caplog.text.count("reward_clip: at step 1, Lamina clips 100% of the rewards to ±5") == 1


def test_a_verifiable_reward_is_learned(policy, tmp_path):
    """Answers are rewarded for bytes below "@", a quarter of what the model says at first; no reward model judges."""
    low = write_reward(tmp_path, "sum(c < '@' for c in answer) + 0 * len(row['chosen'])")
    changes = {"reward_model": ..., "reward_function": low, "learning_rate": 3e-2, "beta": 0.0}
    _, result = policy(steps=12, batch_size=8, **changes)
    assert result["reward_gain"] > 0.5
    assert result["eval_kl"] > 0.1, "without a penalty the KL is measured all the same"


def reward_of(folder, code, **row):
    """The reward of an answer by the function ``own`` of this code; the answer is a field of the row, too."""
    (folder / "own.py").write_text(code)
    row = {"prompt": "p", "answer": "a", **row}
    rewards = make_rewards(RlhfSettings(reward_function=f"{folder / 'own.py'}:own"), None)
    asked = {"prompt": row["prompt"], "text": "rendered", "row": json.dumps(row)}
    return rewards.total(rewards.parts([asked], [[5, 6]], [row["answer"]]))[0]


@pytest.mark.parametrize("number", ["np.float32(0.5)", "np.int64(1)", "np.bool_(1)", "torch.tensor(0.5)"])
def test_a_reward_may_be_a_number_of_numpy_or_torch(tmp_path, number):
    code = f"import numpy as np, torch\ndef own(prompt, answer, row):\n    return {number}\n"
    assert reward_of(tmp_path, code) == (0.5 if "0.5" in number else 1.0)


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        ("None", "returned a NoneType"),
        ("10**5000", "returned a int"),
        ("float('nan')", "returned nan"),
        ("'1'", "returned a str"),
        ("1 / 0", "raised ZeroDivisionError"),
    ],
)
def test_a_reward_that_is_no_number_is_one_line(tmp_path, returned, said):
    with pytest.raises(UserError, match=f"^reward_function:? '.*own' {said}") as error:
        reward_of(tmp_path, f"def own(prompt, answer, row):\n    return {returned}\n")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("arguments", ["answer", "answer, prompt", "answer, prompt, row", "completions", "*, prompt"])
def test_a_reward_function_that_lamina_cannot_call_is_named_before_the_run(tmp_path, arguments):
    (tmp_path / "wrong.py").write_text(f"def own({arguments}):\n    return 1.0\n")
    settings = RlhfSettings.from_dict({"reward_function": f"{tmp_path / 'wrong.py'}:own"})
    with pytest.raises(UserError, match=r"has the arguments \(.*\(prompt, answer, row\)"):
        make_rewards(settings, None)


def test_a_missing_key_lists_the_rows_columns(tmp_path):
    with pytest.raises(UserError, match=r"raised KeyError: 'wrod'\. The row has the columns "):
        reward_of(tmp_path, "def own(prompt, answer, row):\n    return row['wrod']\n")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"reward_model": ..., "data": "no-such.jsonl"}, "reward_model: none is given"),  # before the data are read
        ({"reward_model": "no-such"}, "reward_model: 'no-such': no such folder"),
        ({"reward_model": ..., "reward_function": "f.py:f"}, "reward_function: 'f.py': no such file"),
        ({"algorithm": "grpo", "trl": {"use_vllm": True}}, "trl: ImportError: vLLM is not"),
        ({"max_answer": 512}, "max_answer: 512 leaves no room for a prompt in 512 tokens"),
        ({"max_answer": 510}, "row 1: the prompt has 4 tokens and the answer can have 510, but the context has room"),
    ],
)
def test_what_does_not_fit_the_model_is_one_line(policy, changed, message):
    with pytest.raises(UserError) as error:
        policy(**changed)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def change_config(folder, **changed):
    """Change the sizes of a model's backbone where it says them."""
    config = json.loads((folder / "config.json").read_text())
    config.update(changed)
    config["backbone_config"].update(changed)
    (folder / "config.json").write_text(json.dumps(config))


def more_tokens(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["<more>"])
    tokenizer.save_pretrained(folder)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda f: (f / "config.json").write_text("{"), "config.json is not JSON"),
        (lambda f: (f / "model.safetensors").unlink(), "has no weights"),
        (lambda f: [p.unlink() for p in f.glob("token*")], "reward_model: tokenizer: .* could not be loaded"),
        (lambda f: change_config(f, max_position_embeddings=64), r"reads at most 64 tokens.*Set --sequence-length 64"),
        (more_tokens, "has a different vocabulary from the model"),
    ],
)
def test_a_reward_model_that_cannot_judge_is_one_line(policy, judge, base, tmp_path, spoil, message):
    shutil.copytree(judge[0] / "model", tmp_path / "judge", ignore=shutil.ignore_patterns("manifest.json"))
    shutil.copytree(base, tmp_path / "base")
    spoil(tmp_path / "judge")
    with pytest.raises(UserError, match=message) as error:
        policy(reward_model=str(tmp_path / "judge"))
    assert "\n" not in str(error.value)


def test_a_reward_model_with_a_shorter_context_judges_shorter_sequences(policy, judge, tmp_path):
    shutil.copytree(judge[0] / "model", tmp_path / "judge", ignore=shutil.ignore_patterns("manifest.json"))
    change_config(tmp_path / "judge", max_position_embeddings=64)
    assert policy(reward_model=str(tmp_path / "judge"), sequence_length=64, steps=1)[1]["status"] == "finished"


REWARDS = """
import time

def length(prompt, answer, row):
    return float(len(answer))

def vowels(prompt, answer, row):
    return float(sum(c in "aeiou" for c in answer))

def slow(prompt, answer, row):
    while len(answer) % 2 == 0:
        try:
            time.sleep(30)
        except Exception:
            raise ValueError("swallowed") from None
    return 1.0
"""


def test_several_rewards_are_summed_by_their_weights_and_recorded_apart(policy, judge, tmp_path):
    file = tmp_path / "own.py"
    file.write_text(REWARDS)
    functions = f"{file}:length,{file}:vowels"
    folder, result = policy(reward_function=functions, reward_weights="2,0.5,-3", reward_clip=0.0, algorithm="rloo")
    lines = [json.loads(line) for line in (folder / "held_out.jsonl").read_text().splitlines()]
    for line in lines:
        parts = [line[f"reward_{name}"] for name in ("run", "length", "vowels")]
        assert line["reward"] == pytest.approx(2 * parts[0] + 0.5 * parts[1] - 3 * parts[2], abs=1e-5)
    last = [line["reward_length"] for line in lines if line["step"] == 4]
    assert result["eval_reward_length"] == pytest.approx(sum(last) / len(last))
    trained = next(r for r in records(folder) if "loss" in r)
    assert {"reward_run", "reward_length", "reward_vowels"} <= set(trained)
    report(folder)


def test_a_held_out_answer_ends_at_its_first_end_token(policy, monkeypatch, tmp_path):
    """A batch goes on until its longest answer has ended: the tokens after an end belong to no answer."""
    (tmp_path / "own.py").write_text(REWARDS)
    answers = {(65, 256, 66, 256): [65, 256], (256, 67, 68, 69): [256], (65, 66, 67, 68): [65, 66, 67, 68]}
    naive, measure = [], PolicyTrainer._held_out_answers

    def measured(self, rows):
        model, reference = self.bare_model(), self.ref_model
        drawn = list(itertools.islice(itertools.cycle(answers), len(rows)))
        fixed = torch.tensor(drawn)
        with monkeypatch.context() as patch:
            patch.setattr(model, "generate", lambda input_ids, **options: torch.cat([input_ids, fixed], 1))
            numbers = measure(self, rows)
        for row, answer, number in zip(rows, map(answers.get, drawn), numbers, strict=True):
            ids = torch.tensor([[*row["prompt_ids"], *answer]])
            ours, theirs = (m(input_ids=ids).logits[0, :-1].log_softmax(-1) for m in (model, reference))
            at = torch.arange(len(row["prompt_ids"]) - 1, ids.shape[1] - 1), torch.tensor(answer)
            naive.append((number, float((ours[at] - theirs[at]).sum()), len(answer), float(answer[-1] == 256)))
        return numbers

    monkeypatch.setattr(PolicyTrainer, "_held_out_answers", measured)
    policy(reward_model=..., reward_function=f"{tmp_path / 'own.py'}:length", steps=2)
    assert len({number["length"] for number, *_ in naive}) == 3
    assert max(abs(kl) for _, kl, *_ in naive) > 1e-3, "the policy has moved"
    for number, kl, length, ended in naive:
        assert number["kl"] == pytest.approx(kl, abs=1e-4)
        assert (number["length"], number["ended"]) == (length, ended)


OF_TRLS_FORM = """
def own(completions, solution, completion_ids, **rest):
    every = zip(completions, solution, completion_ids, strict=True)
    return [None if wanted == "" else len(set(text)) + len(wanted) / 10 + len(ids) / 100 for text, wanted, ids in every]
"""


def test_functions_of_trls_form_are_asked_as_trl_asks(tmp_path):
    assert reward_of(tmp_path, OF_TRLS_FORM, answer="aab", solution="xyz") == 2.32
    assert reward_of(tmp_path, OF_TRLS_FORM, answer="aab", solution="") == 0.0
    with pytest.raises(UserError, match=r"^reward_function '.*own' raised TypeError: .*'solution'"):
        reward_of(tmp_path, OF_TRLS_FORM, answer="aab")
    theirs = "from trl.rewards import think_format_reward as own"
    turns = [{"role": "user", "content": "p"}]
    answers = {"<think>a</think>b": 1.0, "b": 0.0}
    assert {text: reward_of(tmp_path, theirs, prompt=turns, answer=text) for text in answers} == answers


def test_a_reward_function_that_takes_too_long_gives_nothing(policy, tmp_path, caplog):
    file = tmp_path / "own.py"
    file.write_text(REWARDS)
    given = {"reward_model": ..., "reward_function": f"{file}:slow", "reward_timeout": 0.05, "steps": 1}
    folder, result = policy(**given)
    assert result["status"] == "finished"
    rewards = {json.loads(line)["reward"] for line in (folder / "held_out.jsonl").read_text().splitlines()}
    assert rewards == {0.0, 1.0}
    assert "answers took more than 0.05 s, so these answers got the reward 0" in caplog.text


def test_the_alarm_that_another_library_has_set_stands_again():
    def mine(number, frame):
        raise AssertionError

    def endless():
        while True:
            with contextlib.suppress(TimeoutError):
                time.sleep(10)
            raise UserError("an error of its own")

    before = signal.signal(signal.SIGALRM, mine)
    try:
        assert [in_time(endless, seconds) for seconds in (1e-6, 0.02) for _ in range(9)] == [None] * 18
        assert in_time(lambda: 3.0, 60.0) == 3.0
        with pytest.raises(UserError):
            in_time(functools.partial(_number, "f.py:f", "no number"), 60.0)
        assert signal.getsignal(signal.SIGALRM) is mine
        assert signal.getitimer(signal.ITIMER_REAL)[0] == 0.0
    finally:
        signal.signal(signal.SIGALRM, before)
    settings = RlhfSettings(reward_function="f.py:f", reward_timeout=0.02)
    with ThreadPoolExecutor() as pool, pytest.raises(UserError, match="works only in a process's main thread"):
        pool.submit(make_rewards, settings, None).result()


def test_a_damaged_line_of_the_held_out_answers_is_named(tmp_path, caplog):
    path = tmp_path / "held_out.jsonl"
    path.write_text('{"step": 0, "prompt": 0, "reward": 1.0}\nbroken\n')
    write_held_out(path, 4, [{"prompt": 0, "reward": 2.0}])
    assert "line 2 of held_out.jsonl is not a record" in caplog.text
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [0, 4]


def test_a_gain_is_shown_with_its_interval(tmp_path):
    rewards = {0: [0.0, 1.0, 0.0, 1.0], 5: [1.0, 0.0, 1.0, 1.0], 9: [2.0, 3.0, 2.5, 4.0]}
    last = {"status": "finished"}

    def gained(*steps):
        lines = [{"step": s, "prompt": at, "reward": r} for s in steps for at, r in enumerate(rewards[s])]
        result = reward_gain(write_rows(tmp_path / "held_out.jsonl", lines))
        records = [{"step": s, "eval_reward": sum(rewards[s]) / 4} for s in steps]
        return run_ended(tmp_path, last | result, forms=page._TUNED), page._headline(Kind.RLHF, records, result)

    said, title = gained(0, 5)
    assert "gain +0.2500 (95 % interval: -1.2735 to +1.7735)" in said
    assert title.endswith("went from 0.5000 to 0.7500, but the 95 % interval of the gain includes 0")
    assert gained(0, 9)[1].endswith("went from 0.5000 to 2.8750")
    rewards[9] = [reward + 1.0 for reward in rewards[0]]
    assert "gain +1.0000 (95 % interval: +1.0000 to +1.0000)" in gained(0, 9)[0]


def test_a_kl_that_rounds_to_zero_has_no_sign(tmp_path):
    said = run_ended(tmp_path, {"status": "finished", "eval_kl": -1e-6}, forms=page._TUNED)
    assert said.splitlines()[0] == "finished: KL 0.000 nats"
