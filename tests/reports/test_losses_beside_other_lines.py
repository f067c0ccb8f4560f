# ruff: noqa: E501  (lines as trainers print them)
"""A log's losses are told apart from the lines beside them: means, evaluations, settings, and other processes."""

import math

import pytest

import lamina
from lamina.reports.histories import read_history
from lamina.training.monitor.writers import LOSS, NORM

NAN = math.nan


def times(text, count=3, **more):
    """The text for each epoch or record 1 to 3, with a falling loss."""
    return "".join(text.format(n=n, s=10 * n, loss=3 - n / 4, **more) for n in range(1, count + 1))


FALLS = [2.75, 2.5, 2.25]
BY_TEN, BY_EPOCH = [10, 20, 30], [1, 2, 3]
BAR = "Epoch {n}: 100%|#####| 10/10 [00:42<00:00,  6.22it/s, loss={loss}]\n"
LOGS = {  # a log, its losses, and their steps (None: records are counted)
    "a mean that is NaN below a bar": (times(BAR + "Training time: 42.79 seconds\nMean Training loss : nan\nmean MSE : 7.0 mean focal : 2.0\n"), [NAN] * 3, BY_TEN),
    "the end of a bar that is NaN below an evaluation": (
        "train:   1%| | 1/200 [01:24<4:40, 84.60s/it, loss=11]\ntrain: 100%|#| 200/200 [01:45<02023-11-06 - INFO :: validation loss: nan\nFinished.s, loss=nan]\n",
        [11.0, NAN],
        [1, 200],
    ),
    "an evaluation's loss that is NaN": (times("step {s} loss {loss}\nEvaluating...\nloss: nan\n"), FALLS, BY_TEN),
    "an evaluation's loss that is NaN beside a bar": (times(BAR.replace("Epoch {n}", "train") + "INFO :: validation loss: nan\n"), FALLS, None),
    "a mean of the epoch beside a bar": (times(BAR + "Epoch {n} mean loss: 3.5\n"), FALLS, BY_TEN),
    "a sentence beside a bar": (
        "".join(f"Steps: 2%|#| {n}/82400 [31:29<30:59,  1.38s/it, loss=nan, lr=1e-5]{'Warning: loss is NaN, skipping this step' + chr(10)}" + "Warning: loss is NaN, skipping this step\n" * 4 for n in (1, 2, 3)),
        [NAN] * 3,
        BY_EPOCH,
    ),
    "a bar of the validation": (
        times("----- Epoch 0{n} / 23 -----\n[====] 100% Training | (Batch 5759/5759)\nValidating dev chunk = 1 / 1\n[===-] 100% Validating | (Batch 47/47))\n----- Summary epoch 0{n} / 23\nTraining on ['train']\nLoss = {loss} | err = 0.5\n-----\nValidating on dev\nLoss = 1.5 | err = 0.4\n-----\nLearning rate on architecture1 = 0.001\n"),
        FALLS,
        None,
    ),
    "settings in braces": ('conf: {"distfn": "poincare", "dim": 10, "lr": 1, "negs": 50}\n' + times('log: {{"epoch": {n}, "loss": {loss}, "elapsed": 116.0}}\n'), FALLS, BY_EPOCH),
    "settings in braces without epochs": ("config: {'lr': 0.001, 'batch_size': 32, 'epochs': 3}\n" + times("{{'train_loss': {loss}, 'val_loss': 2.5}}\n"), FALLS, None),
    "settings of argparse": ("Namespace(lr=0.001, batch_size=32, steps=1000, weight_decay=0.1)\n" + times("step {n} loss {loss}\n"), FALLS, BY_EPOCH),
    "three processes, one after another": (times("".join(f"[rank{r}]: step {{s}} loss {{loss}}{r}\n" for r in range(3))), FALLS, BY_TEN),
    "three processes, each with all steps": ("".join(times(f"[default{r}]:step {{s}} loss {{loss}}{r}\n") for r in range(3)), FALLS, BY_TEN),
    "three processes without steps": (times("".join(f"[2023-07-25] [INFO] [Rank {r}] loss: {{loss}}{r}\n" for r in range(3))), FALLS, None),
    "DeepSpeed's three processes": (
        times("".join(f"[INFO] [log_dist] [Rank {r}] step={{s}}, skipped=0, lr=[1e-05], mom=[[0.9, 0.95]]\nrank {r} steps: {{s}} loss: {{loss}}{r} iter time (s): 0.512\n" for r in range(3))),
        FALLS,
        BY_TEN,
    ),
    "the last of three processes alone prints losses": (times("[rank0]: step {s} lr 0.1\n[rank2]: step {s} loss {loss}\n"), FALLS, BY_TEN),
    "one process of three has a loss that is NaN": (times("[rank0]: step {s} loss {loss}\n[rank1]: step {s} loss nan\n"), [NAN] * 3, BY_TEN),
    "a part's LM loss before the loss": (times("Epoch [1/75], Step [{s}/464], LM Loss: 1.5, Loss: {loss}, Disc Loss: 3.5, Dur Loss: 0.5, CE Loss: 0.1, F0 Loss: 1.5\n"), FALLS, BY_TEN),
    "an evaluation's results first": ("***** Eval results *****\n  eval_loss = 2.5\n  perplexity = 12.1\n" + times("{{'loss': {loss}, 'learning_rate': 1e-05, 'epoch': 0.{n}}}\n"), FALLS, None),
    "an evaluation's bare loss first": ("Evaluation results:\nloss: 2.5\naccuracy: 0.5\n" + times("step {n}: loss {loss}, lr 0.001\n"), FALLS, BY_EPOCH),
    "an evaluation's names first": ("eval/loss : 10.5\neval/wer : 0.9\n" + times("--- epoch {n} ---\ntrain/loss     : {loss}\neval/loss      : 10.5\n"), FALLS, BY_EPOCH),
    "steps between a loss and its name": ("Epoch: 0\n" + times("Train loss {n} {loss} Grad Norm 1.000000 5.71s/it\n") + "Validation loss 3: 37.5\n", FALLS, BY_EPOCH),
    "a table that has lost its first line": ("| approxkl | 6.6e-16 |\n| n_updates | 13 |\n| policy_loss | -2.5 |\n| fps | 16 |\n", [-2.5], [13]),
    "fairseq's updates of an epoch": (times('INFO | train | {{"epoch": {n}, "train_loss": "{loss}", "train_num_updates": "{s}"}}\n'), FALLS, BY_TEN),
}  # fmt: skip


@pytest.mark.parametrize("name", LOGS)
def test_the_losses_are_the_trainings(tmp_path, name):
    text, losses, steps = LOGS[name]
    (tmp_path / "train.log").write_text(text)
    read = read_history(tmp_path / "train.log").values(LOSS)
    assert list(read.values()) == pytest.approx(losses, nan_ok=True)
    assert steps in (None, list(read))


NNUNET = "2024-04-26 09:39:10.91: Epoch {} \n2024-04-26 09:39:10.92: Current learning rate: {} \nusing pin_memory on device 0\n2024-04-26 09:41:39.49: train_loss {} \n2024-04-26 09:41:39.50: val_loss 0.5 \n"
RATES = {
    "nnU-Net's only epoch": (NNUNET.format(0, 0.01, "nan"), {0: 0.01}),
    "nnU-Net's epochs": (NNUNET.format(4, 0.01, -0.5) + NNUNET.format(5, 0.005, -0.6), {4: 0.01, 5: 0.005}),
    "darknet's rate": (
        "\n 2: 9.5, 9.25 avg loss, 0.001300 rate, 0.94 seconds, 128 images, 88.5 hours left\n",
        {2: 0.0013},
    ),
}


@pytest.mark.parametrize("name", RATES)
def test_a_learning_rate_in_another_line_is_read(tmp_path, name):
    (tmp_path / "train.log").write_text(RATES[name][0])
    history = read_history(tmp_path / "train.log")
    assert history.values("learning_rate") == RATES[name][1] == dict.fromkeys(history.values(LOSS)) | RATES[name][1]


def test_a_gradient_norm_belongs_to_the_loss(tmp_path):
    line = "[{}] model_grad_norm {} / value_grad_norm 40.3 / actor_grad_norm 0.3 / image_loss 1.7 / model_loss {} / actor_loss -6.9\n"
    (tmp_path / "train.log").write_text(line.format(5000, 1.5, 58.5) + line.format(6000, 2.5, 57.5))
    history = read_history(tmp_path / "train.log")
    assert (history.values(LOSS), history.values(NORM)) == ({5000: 58.5, 6000: 57.5}, {5000: 1.5, 6000: 2.5})


def test_a_mean_that_is_not_finite_is_told(tmp_path):
    (tmp_path / "train.log").write_text(LOGS["a mean that is NaN below a bar"][0])
    assert "not finite from step 10" in " ".join(lamina.diagnose(tmp_path / "train.log").sentences)
