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
    "Caffe's, with the net's outputs below the loss": (
        "I0712 12:10:30.403271  3123 solver.cpp:404]     Test net output #1: loss = 2.48997 (* 1 = 2.48997 loss)\n"
        "I0712 12:10:37.058244  3123 solver.cpp:228] Iteration 0, loss = 2.46876\nI0712 12:10:37.058405  3123 sgd_solver.cpp:106] Iteration 0, lr = 0.01\n"
        "I0712 12:18:40.334496  3123 solver.cpp:228] Iteration 100, loss = -nan\nI0712 12:18:40.334661  3123 solver.cpp:244]     Train net output #0: loss = -nan (* 1 = -nan loss)\n",
        {0: 2.46876, 100: NAN},
    ),
    "darknet": (
        "Region 23 Avg IOU: -nan, Class: -nan, Obj: -nan, No Obj: 0.555418, .5R: -nan, .75R: -nan,  count: 0\n\n"
        " 2: 519.797913, 519.720886 avg loss, 0.000000 rate, 2.054143 seconds, 128 images\nLoaded: 6.946068 seconds\n",
        {2: 519.720886},
    ),
    "steps behind a tab": (
        "Iteration: \t 0\nNumTimesteps: \t 32549\nLoss:     \t 0.125\nMaxRew: \t -199.9\n-----------------\nIteration: \t 1\nNumTimesteps: \t 32898\nLoss:     \t 0.25\n",
        {0: 0.125, 1: 0.25},
    ),
    "DGL-KE": (
        "".join(
            f"[proc 0][Train]({n}/40000) average pos_loss: 0.973\n[proc 0][Train]({n}/40000) average loss: {n / 8000}\n[proc 0][Train] 1000 steps take 11.7 seconds\n"
            for n in (1000, 2000)
        ),
        {1000: 0.125, 2000: 0.25},
    ),
    "an epoch and a step in brackets": (
        "[1/25][1000/3183] Loss: 20.5\n[1/25][2000/3183] Loss: 18.5\n[2/25][1000/3183] Loss: 16.5\n",
        {1000: 20.5, 2000: 18.5, 4183: 16.5},
    ),
    "WeNet, with the validation's losses": (
        "DEBUG TRAIN Batch 4/203700 loss 12.5 loss_att 10.921429 lr 0.00032621 rank 0\nDEBUG TRAIN Batch 4/203800 loss inf loss_att 18.615641 lr 0.00032619 rank 2\n"
        "DEBUG CV Batch 4/0 loss 28.517015 loss_att 24.142754 history loss 27.957858 rank 2\n",
        {203700: 12.5, 203800: math.inf},
    ),
    "SELFRec": (
        "training: 3 batch 50 batch_loss: 0.5 rec_loss: 0.4\nEvaluating the model...\ntraining: 4 batch 50 batch_loss: 0.25 rec_loss: 0.2\n",
        {3: 0.5, 4: 0.25},
    ),
    "Time-Series-Library, with the losses of epochs": (
        "".join(
            f"\titers: 100, epoch: {e} | loss: {e}.5\n\tspeed: 0.3345s/iter; left time: 267.9004s\n\titers: 200, epoch: {e} | loss: {e}.25\n"
            f"Epoch: {e}, Steps: 225 | Train Loss: 0.1493344 Vali Loss: 0.1429051\nUpdating learning rate to 5e-05\n"
            for e in (1, 2)
        ),
        {100: 1.5, 200: 1.25, 300: 2.5, 400: 2.25},
    ),
    "rsl_rl, with a total of steps below the iteration": (
        "".join(
            f"      Learning iteration {n}/10     \n\n     Total steps: {n}512\n  Mean value loss: 19.6685\n Mean surrogate loss: 0.{n}\n   Mean entropy loss: 1.3\n     Mean reward: -4.08\n"
            for n in (1, 2, 3)
        ),
        {1: 0.1, 2: 0.2, 3: 0.3},
    ),
    "LitGPT, whose optimizer steps once in 16 iterations": (
        "iter 14 step 0: loss 1.8052, train time: 1410.43ms\niter 15 step 1: loss 2.0308, train time: 1489.61ms (optimizer.step)\niter 16 step 1: loss nan, train time: 1405.01ms\n",
        {14: 1.8052, 15: 2.0308, 16: NAN},
    ),
    "lines whose ends a paste has lost": (
        "05-04 14:36:03.238 [epoch 0], [iter 736 / 744], [train main loss 0.5], [lr 0.009967] 05-04 14:36:05.153 [epoch 0], [iter 737 / 744], [train main loss 0.25], [lr 0.009967]\n",
        {736: 0.5, 737: 0.25},
    ),
    "spaCy": (
        "E    #       LOSS TOK2VEC  LOSS NER  ENTS_F  SCORE \n---  ------  ------------  --------  ------  ------\n"
        "  0       0          0.00     40.00    9.57    0.10\n  0     200         35.70   2163.45   83.16    0.83\n  1     400         11.09   1182.04   88.91    0.89\n",
        {200: 2163.45, 400: 1182.04},
    ),
    "a bar that begins with the loss's name": (
        "train loss:  82%|#### | 606000/737924 [00:25<00:05, 24700.60ex/s, cont=nan, loss=nan]\ntrain loss:  83%|#### | 612000/737924 [00:25<00:05, 24246.24ex/s, cont=0.1, loss=0.5]\n",
        {606000: NAN, 612000: 0.5},
    ),
    "Dreamer, with the model's loss beside the actor's": (
        "[5000] model_grad_norm 1.5 / image_loss 11650.7 / reward_loss 1.2 / model_loss 5864.5 / value_loss 6.4 / actor_loss -6.9\n"
        "[6000] model_grad_norm 4.5 / image_loss 30411.1 / reward_loss 3.8 / model_loss inf / value_loss 6.3 / actor_loss -14.7\n",
        {5000: 5864.5, 6000: math.inf},
    ),
    "ESPnet's JSON, cut within a record": (
        '    {\n        "main/loss": 58.5,\n        "epoch": 1,\n        "iteration": 8900\n    },\n    {\n        "main/loss": 59.5,\n        "epoch": 1,\n        "iteration": 9000\n    }\n'
        '\nHERE IS THE BUG:\n\n    {\n        "main/loss_ctc": -1.06e+35,\n        "main/loss": -3.19e+34,\n        "m',
        {8900: 58.5, 9000: 59.5},
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
