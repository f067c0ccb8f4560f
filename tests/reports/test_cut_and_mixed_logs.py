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
    "BigDL, with the samples of an epoch beside the iteration": (
        "INFO  DistriOptimizer$:295 - [Epoch 64 736512/1281167][Iteration 45457][Wall Clock 197331.8s] Train 1792 in 4.38seconds. Throughput is 408.4 records/second. Loss is 1.2645824. Current learning rate is 0.046284.\n"
        "INFO  DistriOptimizer$:295 - [Epoch 64 738304/1281167][Iteration 45458][Wall Clock 197336.2s] Train 1792 in 4.49seconds. Throughput is 398.6 records/second. Loss is Infinity. Current learning rate is 0.046282.\n",
        {45457: 1.2645824, 45458: math.inf},
    ),
    "PaddleDetection, with names and values in quotes": (
        "2020-12-22 08:01:34,034-INFO: iter: 620, lr: 0.013559, 'loss_cls': '0.539213', 'loss': '1.024392', eta: 8:56:30, batch_cost: 0.32392 sec\n"
        "2020-12-22 08:01:41,942-INFO: iter: 640, lr: 0.013964, 'loss_cls': '0.807732', 'loss': '1.377929', eta: 10:49:24, batch_cost: 0.39215 sec\n",
        {620: 1.024392, 640: 1.377929},
    ),
    "NeMo's bars in one line": (
        "Epoch 0:   3%|3| 565/20101 [2:12:19<76:15:08, 14.05s/it, loss=nan, reduced_train_loss=3.910, gradient_norm=1.010, Epoch 0:   3%|3| 566/20101 [2:12:32<76:14:33, 14.05s/it, loss=nan, reduced_train_loss=4.000, gradient_norm=1.010\n",
        {565: 3.91, 566: 4.0},
    ),
    "Keras, from the end of an epoch on": (
        "3425/3425 [==============================] - 861s 251ms/step - loss: 2.8501 - val_loss: 2.8839\n"
        "Epoch 9/50\n3424/3425 [============================>.] - ETA: 0s - loss: 2.8159\n",
        {8 * 3425: 2.8501, 8 * 3425 + 3424: 2.8159},
    ),
    "GDR-Net, with a norm that is not measured": (
        "eta: 15:06:27 iter: 50699/102400[49.5%] lr: 1.0000e-04  total_grad_norm: N/A total_loss: 1.3978e+01 (1.5329e+01)  loss_mask: 1.5607e-02\n"
        "eta: 15:12:08 iter: 50799/102400[49.6%] lr: 1.0000e-04  total_grad_norm: N/A total_loss: 1.4628e+01 (1.5328e+01)  loss_mask: 1.5910e-02\n",
        {50699: 13.978, 50799: 14.628},
    ),
    "LLaMA2-Accessory's closs": (
        "[03:24:35.668475] Epoch: [0]  [1490/1504]  lr: 0.000026  closs: 1.0779 (1.1312)  grad_norm: 0.4995 (1.1826)\n"
        "[03:25:21.899546] Epoch: [0]  [1500/1504]  lr: 0.000026  closs: 1.0741 (1.1309)  grad_norm: 0.4995 (1.1826)\n",
        {1490: 1.0779, 1500: 1.0741},
    ),
    "LightGBM's logloss": (
        "[LightGBM] [Info] Iteration:17, training binary_logloss : 0.423602\n[LightGBM] [Info] Iteration:17, valid_1 binary_logloss : 0.448656\n"
        "[LightGBM] [Info] Iteration:18, training binary_logloss : 0.404427\n[LightGBM] [Info] Iteration:18, valid_1 binary_logloss : 0.414532\n",
        {17: 0.423602, 18: 0.404427},
    ),
    "mxnet's epochs": (
        "Epoch[4] Batch [680-700]\tSpeed: 6.13 samples/sec\tLoss=8.638573\nEpoch[4] Batch [700-720]\tSpeed: 6.21 samples/sec\tLoss=8.566004\n"
        "Epoch[4] Train-Loss=8.566004\nEpoch[4] Validation-Loss=87.491226\n"
        "Epoch[5] Batch [0-20]\tSpeed: 4.22 samples/sec\tLoss=8.725228\nEpoch[5] Batch [20-40]\tSpeed: 4.99 samples/sec\tLoss=8.592930\n",
        {680: 8.638573, 700: 8.566004, 701: 8.725228, 721: 8.59293},
    ),
    "pytorch-kaldi's ep": (
        "ep=22 tr=['train_clean_100'] loss=0.671 err=0.214 valid=dev_clean loss=0.693 err=0.212 lr_architecture1=6.25e-06\n"
        "ep=23 tr=['train_clean_100'] loss=nan err=0.218 valid=dev_clean loss=nan err=0.911 lr_architecture1=3.125e-06\n",
        {22: 0.671, 23: NAN},
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


@pytest.mark.parametrize(("names", "opposed"), [(("d_loss", "g_loss"), True), (("d_loss", "x_loss"), False)])
def test_losses_of_a_generator_and_a_discriminator_rise_in_healthy_trainings(tmp_path, names, opposed):
    path = tmp_path / "gan.log"
    losses = [1.2 + 0.01 * (step % 3) + 2 * (step > 60) for step in range(100)]
    line = f"Epoch:[ 0/25] [{{}}/20018] time: 9.3, {names[0]}: {{:.8f}}, {names[1]}: 0.00077718\n"
    path.write_text("".join(line.format(step, loss) for step, loss in enumerate(losses)))
    said = lamina.diagnose(path).sentences
    assert ("The loss rose at step 61 of 99." in said) != opposed
    assert any("judges only whether their losses are finite" in text for text in said) == opposed
    path.write_text("".join(line.format(step, NAN if step > 60 else loss) for step, loss in enumerate(losses)))
    assert "The loss is not finite from step 61 of 99 on." in lamina.diagnose(path).sentences


def test_lines_of_lamina_watch_hold_no_series(tmp_path):
    lines = [f"step {step} loss {3 - step / 100:.2f} grad_norm 1.0 lr 1e-3" for step in range(60)]
    told = "lamina.watch: step 31, layer 3 (feed-forward): something changed its weights by 93% of their norm"
    lines[31:31] = [
        told,
        f"2026-01-01 10:00:00 WARNING {told}",
        "lamina.watch: step 32, the model: the loss went from 2 to 5",
    ]
    (tmp_path / "train.log").write_text("\n".join(lines))
    assert "not used" not in str(read_history(tmp_path / "train.log"))


@pytest.mark.parametrize("lags", [[0, 1, 2, 2, 3], [1, 1, 1, 1, 0, 3, 5]])
def test_records_beside_a_bar_that_lags_are_at_multiples_of_a_constant(tmp_path, lags):
    shown = {at: at - lags[at // 5 % len(lags)] for at in range(5, 165, 5)}
    lines = [
        f"  6%|6  | {bar}/160 [00:00<00:04, 30.26it/s]\r{{'loss': '{5 - at / 100:.3f}', 'grad_norm': '1.3'}}\n"
        for at, bar in shown.items()
    ]
    path = tmp_path / "train.log"
    path.write_text("\n".join(lines))
    assert [*read_history(path).values(LOSS)] == [*range(5, 165, 5)]
    path.write_text("\n".join([lines[0].replace(f"{shown[5]}/160", "1/160"), *lines]))  # logging_first_step
    assert [*read_history(path).values(LOSS)] == [1, *range(5, 165, 5)]
    exact = [line.replace(f"{bar}/160", f"{at + 2}/160") for line, (at, bar) in zip(lines, shown.items(), strict=True)]
    assert "stands still" not in str(read_history(path))
    path.write_text("\n".join([*exact, *exact[-1:], exact[-1].replace("1.3", "1.4")]))
    assert "the progress bar stands still, so Lamina skips 2 records" in str(read_history(path))
    path.write_text("\n".join(exact))
    assert [*read_history(path).values(LOSS)] == [*range(7, 167, 5)]
