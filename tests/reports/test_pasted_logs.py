# ruff: noqa: E501  (lines as trainers print them)
"""What people paste: each kind of log that was once read wrongly is read as it is meant."""

import gzip
import json
import random
from itertools import accumulate

import pytest

from lamina.reports.diagnosis import gather
from lamina.reports.histories import import_history, read_history
from lamina.reports.histories.names import parameter_of, whole
from lamina.training.monitor.writers import LOSS, NORM

BAR = " {p}%|## | {p}/100 [00:10<01:30, 3.78s/it]"
DIVISION = "\n                 Class     Images  Instances      Box(P          R      mAP50  mAP50-95): 100%|##| 66/66 [00:34<00:00,  1.90it/s]\n                   all       1049       1186      0.929      0.872      0.933      0.543\n\n"
HEAD = "      Epoch    GPU_mem   box_loss   cls_loss   dfl_loss  Instances       Size\n"

PASTED = {
    "an evaluation's bar between two epochs": (
        "Training Epoch: 4/150, step 62/64 completed (loss: 0.25): 98%|##| 63/64 [04:00<00:00]\n"
        "Training Epoch: 4/150, step 63/64 completed (loss: 0.20): 100%|##| 64/64 [04:02<00:00]\n"
        "evaluating Epoch: 100%|##| 200/200 [01:53<00:00,  1.77it/s]\n eval_ppl=tensor(nan, device='cuda:0') eval_epoch_loss=tensor(nan, device='cuda:0')\n"
        "Epoch 4: train_perplexity=1.2, train_epoch_loss=0.3, epoch time 242.3s\n"
        "Training Epoch: 5/150, step 0/64 completed (loss: 0.18): 2%|#| 1/64 [00:03<04:00]\n",
        {254: 0.25, 255: 0.20, 256: 0.18},
    ),
    "a sum of losses, of which one is a cross-entropy": (
        "Epoch [1][100/62598]\tlr: 1.000e-03, loss_ce: 1.27, bbox_loss: 0.28, loss: 1.9, grad_norm: nan\n"
        "Epoch [1][200/62598]\tlr: 1.000e-03, loss_ce: 0.59, bbox_loss: 0.22, loss: 0.9, grad_norm: 3.9\n",
        {100: 1.9, 200: 0.9},
    ),
    "epochs before a loss": (
        "".join(f"2023 - CLTR - INFO - Training Epoch:[{n}/1500]\t loss={3 - n / 1000}\t lr=0.0001\t epoch_time=60.4\n" for n in (958, 959, 960)),
        {n: 3 - n / 1000 for n in (958, 959, 960)},
    ),
    "an epoch in brackets": ("Epoch... (39/116 | Loss: 0.25)\nEpoch... (40/116 | Loss: 0.125)\n", {39: 0.25, 40: 0.125}),
    "a step that three processes print": (
        "".join(f"I1002 21:43 14{n} logging_writer.py:35] [1000] steps_per_second=1.7{n}, train_loss=6.5252\n" for n in (6084, 6083, 6085)),
        {1000: 6.5252},
    ),
    "a number in bold": (
        BAR.format(p=5) + "\n{'loss': **4.75**, 'grad_norm': 3.06}\n" + BAR.format(p=6) + "\n{'loss': **4.5**, 'grad_norm': 3.0}\n",
        {5: 4.75, 6: 4.5},
    ),
    "a batch's number in an epoch": (
        "".join(f"epoch: {n // 8}, batch_id: {100 * (n % 8 + 1)}, AUC:0.93, loss:{3 - n / 100}, avg_batch_cost: 0.56 sec\n" for n in range(16))
        + "epoch: 1 done, epoch time: 280 s, loss:0.19\n",
        {100 * (n + 1): 3 - n / 100 for n in range(16)},
    ),
    "epochs and their steps beside sums": (
        "".join(f"- Train | Epoch {e} | {s}/573 | 1.45 it/sec | Loss {loss} | Grad 0.12\n" for e, s, loss in ((1, 143, 0.23), (1, 286, 0.21), (2, 143, 0.2)))
        + "- Train | Epoch 2 | Loss 0.2\n- Valid | Epoch 2 | 1/3 | 0.39 it/sec | Loss 0.14\n",
        {143: 0.23, 286: 0.21, 716: 0.2},
    ),
    "timm's epochs": (
        "".join(f"Train: {e} [{s:>4d}/1251 ( 4%)]  Loss: {loss} (6.9)  LR: 1.0e-03\n" for e, s, loss in ((0, 0, 6.9), (0, 1250, 6.5), (1, 0, 6.4), (1, 1250, 6.0))),
        {0: 6.9, 1250: 6.5, 1251: 6.4, 2501: 6.0},
    ),
    "a bar that is full where an epoch's loss is": (
        "".join(f" 50%|# | 784/1568 [00:12<00:12, 63.84it/s]\r100%|##| 1568/1568 [00:24<00:00, 63.84it/s]epoch {e:3d} | train_loss: {9 - e}.5 | test_loss: 0.0\n" for e in range(8)),
        {e: 9.5 - e for e in range(8)},
    ),
    "names in brackets": (
        "".join(f"INFO | train_epochs:256 - [R0] | E{n} iter[ 14/ 15] | [Loss] {n}.5 | [exp] ./exp/lion_B40 | [url] none | [time] 0.4m (~5h)\n" for n in range(5, 9)),
        {n - 4: n + 0.5 for n in range(5, 9)},
    ),
    "a loss beside the average of its cross-entropy": (
        "".join(f"07:48:23.57 train_step: 10000  step:{n}\n07:48:23.57 train_loss: {9 - n}.5  step:{n}\n07:48:23.57 train_ma_ce_loss: 0.1  step:{n}\n" for n in range(1, 6)),
        {n: 9.5 - n for n in range(1, 6)},
    ),
    "a dictionary that is cut": (
        "{'loss': 2.09, 'grad_norm': 6.08, 'learning_rate': 1e-05, 'global_step/max_steps': '1/2046'}\n{'loss': 2.08, 'token_acc': 0.52, 'global_step/max_steps': '2/2046', 'grad_norm': nan, 'learn",
        {1: 2.09, 2: 2.08},
    ),
    "a header above each row": (
        "".join(f"{HEAD}      {e}/55      9.95G    1.9    5.0    2.9    12    640:   1%|1| 1/787 [09:07<00:00]\r      {e}/55      9.95G    {loss}    5.0    2.9    12    640: 100%|##| 787/787 [09:07<00:00]{DIVISION}" for e, loss in ((21, 0.5), (22, 0.4))),
        {21: 8.4, 22: 8.3},
    ),
    "an evaluation that also has the loss's bare name": (
        "".join(f"INFO:tensorflow:loss = {9 - n}.5, step = {100 * n} (144.1 sec)\n" for n in range(5))
        + "INFO:tensorflow:Saving dict for global step 468: eval_accuracy = 0.85, eval_loss = 9.25, global_step = 468, loss = 9.25\n",
        {100 * n: 9.5 - n for n in range(5)},
    ),
    "the task's loss beside a shorter name": (
        "".join(f"INFO: Iters: {n}0/20000 || Lr: 0.019992 || Task Loss: {n}.5 || KD Loss: 1.6|| Cost Time: 0:00:20\n" for n in range(1, 6)),
        {10 * n: n + 0.5 for n in range(1, 6)},
    ),
    "a loss so far, whose steps restart in each epoch": (
        "".join(f"Epoch {e}, Step {s}, total used time {e}7.178 (s), avg loss so far is {9 - e - s / 1000}\n" + "Epoch 0, val loss is 0.04, val mse is 0.02.\n" * (s == 75) for e in range(3) for s in (25, 50, 75)),
        {75 * e + s: 9 - e - s / 1000 for e in range(3) for s in (25, 50, 75)},
    ),
    "a step beside a count in the epoch": (
        "".join(f"[R0] | E{n} iter[ 14/ 15] | [Loss] {9 - n}.5 | [step]    {15 * n + 14} | [time] 0.4m (~5h) |[best]\n" for n in range(5)),
        {15 * n + 14: 9.5 - n for n in range(5)},
    ),
    "tables with lengths and totals of steps": (
        "".join(f"{'-' * 39}\n| rollout/episode_steps   | {160 + n * 7 % 5}       |\n| rollout/episodes        | {12 * (n // 2)}        |\n| total/steps             | {2000 * n}      |\n| train/loss_actor        | {9 - n}.5      |\n{'-' * 39}\n\n" for n in range(1, 9)),
        {2000 * n: 9.5 - n for n in range(1, 9)},
    ),
    "epochs of which a resumed run repeats one": (
        "".join(f"Epoch {e}: Train Loss: {30 - e}.5\n" for e in (*range(20), 19, *range(20, 30))),
        {e: 30.5 - e for e in range(30)},
    ),
    "a loss in words, whose steps stand in a few other lines": (
        "adapter None not found; training from base model.\n\n" + "".join(f"grpo_loss is -0.{n} and kl is 0.1\n" + "[step 50] avg_loss=0.0015 acc=0.8900\n" * (n == 50) for n in range(10, 99)),
        {n - 9 + (n > 50): -float(f"0.{n}") for n in range(10, 99)},
    ),
    "a loss with its mean over processes": (
        "".join(f"[02:40:09.090134] Epoch: [0]  [{s}/460]  eta: 0:03:07  lr: 0.0001  predict_loss: [local: 0.{s} | reduced: 0.6919]  max mem: 9145\n" for s in (120, 140, 160)),
        {s: float(f"0.{s}") for s in (120, 140, 160)},
    ),
    "a line in which a bar has left its text": (
        "".join(f"Validation: |          | 0/? [00:00<?, ?it/s]\x1b[A[\x1b[37m12/09/24 14:03:31\x1b[0m] INFO   Epoch {e}: v_recons 4.5e-01  v_loss 4.5  loss {9 - e}.5\n" for e in range(5)),
        {e: 9.5 - e for e in range(5)},
    ),
    "losses that PaddleOCR marks": (
        "[2023/10/06 13:24:25] ppocr INFO: epoch: [1/500], global_step: 160, lr: 4e-05, CTCLoss: 3.5, SARLoss: 1.0, loss: 4.5, avg_reader_cost: 0.47 s\n"
        "[2023/10/06 13:24:33] ppocr INFO: epoch: [1/500], global_step: 170, lr: 4e-05, CTCLoss: nanxxx, SARLoss: 1.0, loss: nanxxx, avg_reader_cost: 0.25 s\n",
        {160: 4.5, 170: float("nan")},
    ),
    "a sentence above the log": (
        "The training converged until iteration 30 where the loss became infinity:\n"
        "INFO [Epoch 2 96/160][Iteration 20] Loss is 1.25. Current learning rate is 0.046.\n"
        "INFO [Epoch 2 128/160][Iteration 30] Loss is Infinity. Current learning rate is 0.045.\n"
        "INFO [Epoch 2 160/160][Iteration 40] Loss is 1.125. Current learning rate is 0.044.\n",
        {20: 1.25, 30: float("inf"), 40: 1.125},
    ),
    "an average cost beside the current cost": (
        "I0906 TrainerInternal.cpp:165] Batch=200 samples=25600 AvgCost=63.5 CurrentCost=63.5 Eval: error=0.89\n"
        "I0906 TrainerInternal.cpp:165] Batch=400 samples=51200 AvgCost=61.5 CurrentCost=59.5 Eval: error=0.85\n",
        {200: 63.5, 400: 59.5},
    ),
    "a cross-entropy in one word": (
        "INFO:root:Epoch[0] Batch [10]\tSpeed: 3.22 samples/sec\tCrossEntropy=4.25\tSmoothL1=0.81\n"
        "INFO:root:Epoch[0] Batch [20]\tSpeed: 3.21 samples/sec\tCrossEntropy=4.125\tSmoothL1=0.75\n",
        {10: 4.25, 20: 4.125},
    ),
    "a table with colons": ("ITER:       LOSS               SUM(SQUARES)\n1881:\t1.5\t3.8\n1882:\t1.25\t3.6\n", {1881: 1.5, 1882: 1.25}),
    "a table that begins with equal losses": ("Training the model...\nLOSS      P       R       F\n" + "184.5 0.5   1.0   0.6\n" * 3, dict.fromkeys((1, 2, 3), 184.5)),
    "epochs on lines above the losses": (
        "".join(f"2022-02-11 09:32:44.207069: {gap}poch:  {e}\n2022-02-11 09:34:49.625515: train loss : -0.{e}5\n2022-02-11 09:34:59.68: validation loss: -0.7\n" for e, gap in ((6, "\ne"), (7, "E"), (8, "\ne"))),
        {e: -float(f"0.{e}5") for e in (6, 7, 8)},
    ),
    "losses whose names begin with loss": (
        "".join(f"INFO:run:Train Epoch: {e} [1%]\nINFO:run:[{e}00, 9.9e-05]\nINFO:run:loss_fm=1{e}.5, loss_mel=21.5, loss_dur=1.5\n" for e in (2, 4)),
        {200: 35.5, 400: 37.5},
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", PASTED)
def test_a_pasted_log_has_its_steps_and_its_loss(tmp_path, kind):
    text, losses = PASTED[kind]
    path = tmp_path / "log.txt"
    path.write_text(text)
    assert read_history(path).values(LOSS) == pytest.approx(losses, nan_ok=True)


def test_a_progress_bar_that_stands_still_is_not_the_steps(tmp_path):
    path = tmp_path / "log.txt"
    records = "".join(f"{{'loss': {3 - n / 100}, 'grad_norm': 1.0}}\n" for n in range(20))
    path.write_text(BAR.format(p=10) + records + BAR.format(p=90) + records)
    assert read_history(path).steps == list(range(1, 41))


def test_an_average_over_the_epoch_so_far_is_read_at_the_epochs_end(tmp_path):
    draw, lines = random.Random(3), []
    for epoch in range(6):
        sums = accumulate(3 - 0.3 * epoch + draw.gauss(0, 1.0) for _ in range(100))
        lines += [f"epoch: {epoch} | iter: {100 * epoch + n} | loss: {s / n:.4f}" for n, s in enumerate(sums, start=1)]
    path = tmp_path / "log.txt"
    path.write_text("\n".join(lines))
    history = import_history(path, tmp_path / "read")
    assert history.steps == [*range(1, 101), *range(200, 601, 100)]
    assert "reads only each epoch's last loss, and skips 495" in str(history)
    evidence = gather(tmp_path / "read")
    assert (evidence.rose, evidence.alarms, evidence.epochs) == (None, (), {})


@pytest.mark.parametrize("rises", [False, True])
def test_single_batches_far_above_a_small_loss_are_no_rise(tmp_path, rises):
    draw = random.Random(5)
    losses = [draw.lognormvariate(-3 - n / 500, 1.6) + (n >= 2000) * rises for n in range(2500)]
    path = tmp_path / "h.jsonl"
    path.write_text("\n".join(json.dumps({"step": n, "loss": loss}) for n, loss in enumerate(losses)))
    import_history(path, tmp_path / "read")
    evidence = gather(tmp_path / "read")
    assert evidence.rose == (2000 if rises else None)
    assert bool(evidence.alarms) == rises


def test_a_table_that_sums_runs_up_is_no_history(tmp_path, refused):
    path = tmp_path / "runs.csv"
    path.write_text(
        "Name,State,run_name,lr,train/loss\n" + "".join(f"r{n},finished,r{n},0.001,1.{n}\n" for n in range(9))
    )
    assert "has at most 1 row for each of 9 runs" in refused("diagnose", path)


def test_a_log_that_begins_with_a_bracket_is_not_called_json(tmp_path, refused):
    path = tmp_path / "log.txt"
    path.write_text("[2017-10-18 18:14:31] training started\n[2017-10-18 18:14:32] nothing else\n")
    said = refused("diagnose", path)
    assert "Lamina finds no JSON" in said
    assert "JSONDecodeError" not in said


def test_a_gradients_mean_is_no_norm(tmp_path):
    assert parameter_of("grads/embedding_grad_l2_norm") == ("gradient_norm", "grads/embedding")
    for name in ("grads/embedding_grad_mean", "grads/embedding_grad_abs_mean", "grads/embedding_grad_l1_norm"):
        assert parameter_of(name) is None
    assert [whole(name) and whole(name).metric for name in ("Cost", "avg_batch_cost", "gNorm", "L.r.")] == [
        LOSS, None, NORM, "learning_rate",
    ]  # fmt: skip


def test_a_loss_that_is_always_0_is_said(tmp_path):
    path = tmp_path / "h.csv"
    path.write_text("step,loss,grad_norm\n" + "".join(f"{n},0.0,1.0\n" for n in range(9)))
    assert "'loss' is 0 in every record" in str(read_history(path))


@pytest.mark.parametrize(
    ("files", "other"),
    [
        (("new/checkpoint-20", "new/checkpoint-10", "old/checkpoint-10"), "old/checkpoint-10"),
        (("version_10", "version_9"), "version_9"),
    ],
)
def test_of_several_runs_in_a_folder_the_one_that_is_read_is_named(tmp_path, files, other):
    name = "metrics.csv" if "version" in other else "trainer_state.json"
    for loss, folder in enumerate(files, start=1):
        path = tmp_path / folder / name
        path.parent.mkdir(parents=True)
        rows = [{"step": n, "loss": loss} for n in range(3)]
        table = "step,loss\n" + "".join(f"{n},{loss}\n" for n in range(3))
        path.write_text(table if name.endswith("csv") else json.dumps({"log_history": rows}))
    history = read_history(tmp_path)
    assert history.values(LOSS)[0] == 1.0
    assert f"{files[0]}/{name}, 3 records" in str(history)
    assert f"the folder holds another run ({other}/{name})" in str(history)


def test_a_compressed_table_is_read_in_pieces_and_a_cut_one_is_refused(tmp_path, monkeypatch, refused):
    pytest.importorskip("pandas")
    monkeypatch.setattr("lamina.reports.histories.sources._LARGE", 10)
    text = "step,loss\n" + "".join(f"{n},{3 - n / 50}\n" for n in range(99))
    path = tmp_path / "run.csv.gz"
    path.write_bytes(gzip.compress(text.encode()))
    monkeypatch.setattr("lamina.reports.histories.sources._of_text", None)  # which takes twice as long
    assert read_history(path).values(LOSS) == pytest.approx({n: 3 - n / 50 for n in range(99)})
    path.write_bytes(path.read_bytes()[:-40])
    assert "is not readable" in refused("diagnose", path)


STOPPED = {  # the last line in which a trainer says why it stopped, and the step at which it did
    "Loss is nan, stopping training": 400,
    "FloatingPointError: Loss became infinite or NaN at iteration=399!": 399,
    "E0801 10:01:01 hooks.py:760] Model diverged with loss = NaN.": 400,
    "Batch 400: Invalid loss, terminating training": 400,
    "RuntimeError: the loss at step 399 is not finite": 399,
}


@pytest.mark.parametrize(("line", "step"), STOPPED.items())
def test_a_sentence_on_a_loss_that_is_not_finite_is_a_record(tmp_path, line, step):
    lines = [f"step {at} loss {5 - at / 100} lr 0.001\n" for at in range(0, 400, 20)]
    file = tmp_path / "train.log"
    file.write_text(
        "".join([*lines[:10], *["Loss in not finite. Skip this training step.\n"] * 3, *lines[10:], line, "\nbye\n"])
    )
    losses = read_history(file).values(LOSS)
    assert (len(losses), max(losses)) == (22, step)
    assert [at for at, loss in losses.items() if loss != loss] == [181, step]


@pytest.mark.parametrize("rows", [[["a", 1.0, 2.0]] * 3, [[None, 1.0, 2.0]] * 3])
def test_rows_of_three_without_a_time_are_refused_for_their_missing_names(tmp_path, rows, refused):
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    assert "numbers without names" in refused("diagnose", tmp_path / "rows.json")


def test_a_loss_that_is_infinite_in_a_file_without_names_is_read(tmp_path):
    (tmp_path / "loss.txt").write_text("inf\n" * 30)
    assert len(read_history(tmp_path / "loss.txt").values(LOSS)) == 30
