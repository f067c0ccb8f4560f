# ruff: noqa: E501  (lines as trainers print them)
"""Public logs as people paste them: cut within a number, with two losses, and with steps where few trainers have them."""

import math

import pytest

import lamina
from lamina.reports.histories import read_history
from lamina.training.monitor.writers import LOSS

NAN = math.nan
PASTED = {  # a few lines of a public log, and the losses by step
    "ELECTRA": (
        "1290/2680 = 48.1%, SPS: 0.1, ELAP: 4:02:03, ETA: 4:20:49 - loss: 20.6141\n"
        "1300/2680 = 48.5%, SPS: 0.1, ELAP: 4:03:56, ETA: 4:18:57 - loss: 22.3914\n",
        {1290: 20.6141, 1300: 22.3914},
    ),
    "char-rnn": (
        "924/9500 (epoch 4.863), train_loss = 1.63392434, grad/param norm = 3.0235e-02, time/batch = 0.1694s\n"
        "925/9500 (epoch 4.868), train_loss = 1.61581607, grad/param norm = 2.8926e-02, time/batch = 0.1699s\n",
        {924: 1.63392434, 925: 1.61581607},
    ),
    "Megatron-LLM, cut in the last loss": (
        " iteration 124/ 250000 | learning rate: 9.300E-06 | lm loss: 2.559583E+00 | loss scale: 1.0 |\n"
        " iteration 125/ 250000 | learning rate: 9.375E-06 | lm loss: 2.477393E+00 | loss scale: 1.0 |\n"
        " iteration 126/ 250000 | learning rate: 9.450E-06 | lm loss: 2\n",
        {124: 2.559583, 125: 2.477393},
    ),
    "TRL's PPO, with a dictionary before the first bar": (
        "{'loss': 0.3290, 'reward': -2.0304, 'learning_rate': 5e-05}\n"
        "  0%|    | 1/13000 [00:10<36:34:36, 10.13s/it]{'loss': 0.31, 'reward': 5.7646, 'learning_rate': 5e-05}\n"
        "  0%|    | 2/13000 [00:28<54:33:11, 15.11s/it{'loss': 0.2527, 'reward': 1.2237, 'learning_rate': 5e-05}\n",
        {0: 0.329, 1: 0.31, 2: 0.2527},
    ),
    "Paddle's passes, which are epochs": (
        "Pass 0, batch 0, loss 9.21\nPass 0, batch 100, loss 9.22\nPass 0 end, spent: 50.6, speed: 831.37\n"
        "Pass 1, batch 0, loss 9.11\nPass 1, batch 100, loss 9.12\n",
        {0: 9.21, 100: 9.22, 101: 9.11, 201: 9.12},
    ),
    "fastai's table with names of two words": (
        "epoch train loss valid loss accuracy_thresh f2_opt\n0 nan 0.3 0.997788 0.000000\n1 0.2 0.3 0.99 0.0\n",
        {0: NAN, 1: 0.2},
    ),
    "Trainer's table": (
        "Step Training Loss Validation Loss\n500 1.25 1.5\n1000 1.125 1.25\n",
        {500: 1.25, 1000: 1.125},
    ),
    "YOLOv7": (
        "     Epoch   gpu_mem       box       obj       cls     total    labels  img_size\n"
        "     0/299      2.1G   0.07599    0.0377         0    0.1137       168       640:   3%|3| 1/38 [00:03<02:25,  3.92s/it]\r"
        "     0/299      2.1G   0.07632   0.03519         0    0.1115       119       640: 100%|#| 38/38 [00:04<01:06,  1.84s/it]\n"
        "     1/299      2.1G   0.07507   0.03517         0    0.1102       133       640: 100%|#| 38/38 [00:04<00:40,  1.15s/it]\n",
        {0: 0.1115, 1: 0.1102},
    ),
    "YOLOv5, which prints no total": (
        "     Epoch   gpu_mem       box       obj       cls    labels  img_size\n"
        "     0/99     2.1G    0.125      0.25      0.5       168       640: 100%|#| 38/38 [00:04<01:06,  1.84s/it]\n"
        "     1/99     2.1G    0.125      0.25     0.25       133       640: 100%|#| 38/38 [00:04<00:40,  1.15s/it]\n",
        {0: 0.875, 1: 0.625},
    ),
    "a loss of the training beside the validation's": (
        "train loss = 0.3392277657985687\nloss: 0.37952178716659546, Performance is better... saving the model\n"
        "train loss = 0.3034765124320984\nloss: 0.35377445816993713, Performance is better... saving the model\n",
        {1: 0.3392277657985687, 3: 0.3034765124320984},
    ),
}


@pytest.mark.parametrize("name", PASTED)
def test_a_pasted_log_is_read_at_its_steps(tmp_path, name):
    text, losses = PASTED[name]
    (tmp_path / "train.log").write_text(text)
    assert read_history(tmp_path / "train.log").values(LOSS) == pytest.approx(losses, nan_ok=True)


def test_a_last_line_that_is_whole_keeps_its_number(tmp_path):
    path = tmp_path / "train.log"
    for last in ("loss 2.25", "loss nan", "loss 2.2\nKilled"):
        path.write_text(f"step 1 loss 2.50 lr 0.1\nstep 2 loss 2.40 lr 0.1\nstep 3 {last}\n")
        assert list(read_history(path).values(LOSS)) == [1, 2, 3]


def test_the_metrics_file_of_mlflow_may_hold_one_record(tmp_path):
    (tmp_path / "loss").write_text("1664364007310 3.2727866172790527 0\n")
    assert read_history(tmp_path / "loss").values(LOSS) == {0: 3.2727866172790527}


def test_a_loss_that_is_finite_again_is_said_to_be(tmp_path):
    path = tmp_path / "train.log"
    path.write_text("step 50 loss 1.6\nstep 100 loss 1.0\nstep 150 loss nan\nstep 200 loss 1.1\n")
    assert "The loss is not finite at step 150 of 200, but finite at step 200." in lamina.diagnose(path).sentences
    path.write_text("step 50 loss 1.6\nstep 100 loss 1.0\nstep 150 loss nan\nstep 200 loss nan\n")
    assert "The loss is not finite from step 150 of 200 on." in lamina.diagnose(path).sentences


def test_a_loss_beside_the_loss_that_is_never_finite_is_named(tmp_path):
    path = tmp_path / "verl.log"
    path.write_text("step:1 - critic/vf_loss:nan - critic/lr:0.001 - actor/pg_loss:-0.013 - actor/grad_norm:9.819\n")
    assert "'critic/vf_loss' is not finite in any record" in str(read_history(path))
