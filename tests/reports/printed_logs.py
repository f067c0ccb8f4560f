# ruff: noqa: E501  (lines as trainers print them)
"""Logs as trainers print them, a format for each; {s} is the step, {l} the loss, {g} the gradient norm, {r} the rate.

Another programmer's trainer prints in one of these ways or in a sibling of it, so no test of another file has them.
"""

from __future__ import annotations

"""Steps in an epoch, for forms that start anew in each."""

LOGS = {
    "Megatron-DeepSpeed with ezpz": "[2024-06-01 10:00:00][I][megatron/training_log:661] iteration={s:8d}/  250000 | consumed_samples={s:12d} | "
    "consumed_tokens=  8389 | elapsed_time_per_iteration_ms=4247.9 | learning_rate={r:.6g} | global_batch_size=    8 | lm loss={l:.6E} | "
    "loss_scale=1.0 | grad_norm={g:.3f} | actual_seqlen= 4096 | number_of_skipped_iterations=  0 | number_of_nan_iterations=  0 |",
    "GPT-NeoX": "[2023-06-03 00:08:34] samples/sec: 31.880 | iteration {s:8d}/  320000 | elapsed time per iteration (ms): 502.0 | learning rate: {r:.3E} | "
    "approx flops per GPU: 43.2TFLOPS | lm_loss: {l:.6E} | grad_norm: {g:.6E} | loss scale: 4096.0 | number of skipped iterations:   0 | number of nan iterations:   0 |",
    "nanotron": "01/02/2025 10:00:00 [INFO|DP=0|PP=0|TP=0|ip-10]: iteration: {s} / 5000 | consumed_tokens: {s}.02M | time_per_iteration_ms: 1.2K | "
    "tokens_per_sec: 100K | tokens_per_sec_per_gpu: 12.5K | global_batch_size: 1.02K | lm_loss: {l:.4f} | lr: {r:.3g} | model_tflops_per_gpu: 310 | grad_norm: {g:.4f}",
    "mmengine (xtuner)": "2024/05/07 11:17:20 - mmengine - INFO - Iter(train) [{s:4d}/2046]  lr: {r:.4e}  eta: 1:41:54  time: 3.0030  data_time: 0.0241  memory: 13995  loss: {l:.4f}  grad_norm: {g:.4f}",
    "mmcv": "2023-05-16 15:59:36,050 - mmdet - INFO - Iter [{s}/18000]\tlr: {r:.3e}, eta: 1:13:05, time: 0.244, data_time: 0.007, memory: 7041, "
    "loss_rpn_cls: 0.2213, acc: 92.1133, loss: {l:.4f}, grad_norm: {g:.4f}",
    "mmengine by epoch": "08/03 22:09:24 - mmengine - INFO - Epoch(train)  [{e1}][{i:4d}/100]  lr: {r:.4e}  eta: 0:39:15  time: 0.0578  data_time: 0.0017  memory: 2389  "
    "grad_norm: {g:.4f}  loss: {l:.4f}  loss_rpn_cls: 0.1000",
    "detectron2": "[09/02 02:40:01 d2.utils.events]:  eta: 5:20:00  iter: {s}  total_loss: {l:.4g}  loss_cls: 1.3  loss_box_reg: 0.2  time: 0.5512  last_time: 0.55  data_time: 0.03  lr: {r:.5g}  max_mem: 3000M",
    "torchvision's references": "[07:15:39.400163] Epoch: [{e0}]  [{i0:4d}/100]  eta: 0:01:00  lr: {r:.6f}  loss: {l:.4f} ({l:.4f})  grad_norm: {g:.4f} ({g:.4f})  time: 4.3713  data: 0.0001  max mem: 51710",
    "Swin": "[2022-01-01 10:00:00 swin_tiny] (main.py 226): INFO Train: [{e0}/300][{i0}/100]\teta 1:00:00 lr {r:.6f}\ttime 0.5 (0.5)\tloss {l:.4f} ({l:.4f})\tgrad_norm {g:.4f} ({g:.4f})\tmem 10000MB",
    "PyTorch's ImageNet example": "Epoch: [{e0}][{i0:5d}/100]\tTime  0.512 ( 0.600)\tData  0.010 ( 0.020)\tLoss {l:.4e} ({l:.4e})\tAcc@1   0.39 (  0.40)",
    "PyTorch's MNIST example": "Train Epoch: {e1} [{i0}/100 ({i0}%)]\tLoss: {l:.6f}",
    "PyTorch's language model": "| epoch {e1:3d} | {i:5d}/  100 batches | lr 0.00030 | ms/batch 10.00 | loss {l:5.2f} | ppl  2064.78",
    "Keras": "{keras}{i:3d}/100 [=======>......................] - ETA: 37s - loss: {l:.4f} - accuracy: 0.9260",
    "Keras 3": "{keras}\x1b[1m{i}/100\x1b[0m \x1b[32m━━━━━━━━━━\x1b[0m\x1b[37m━━━━━━━━━━\x1b[0m \x1b[1m3s\x1b[0m 12ms/step - accuracy: 0.1010 - loss: {l:.4f}",
    "Keras by epoch": "Epoch {s}/200\n423/423 - 192s - loss: {l:.4f} - acc: 0.6136 - val_loss: 9.3379 - val_acc: 0.5161 - 192s/epoch - 454ms/step",
    "fastai": "{fastai}{s:<10}{l:<12.6f}9.512000    0.800000  00:10",
    "InternEvo": "2024-11-24 02:35:28,531 INFO pipeline.py:770 in record_current_batch_training_metrics -- tflops=229.64 step={s} loss={l} real_tgs=719.84 tgs (tokens/gpu/second)=720.46 "
    "lr={r} loss_scale=16384.0 grad_norm={{'0_default': {g}, '1_fp32': 0.0}} micro_num=16 num_consumed_tokens=674234368 inf_nan_skip_batches=3",
    "MLX": "Iter {s}: Train loss {l:.3f}, Learning Rate {r:.3e}, It/sec 0.999, Tokens/sec 387.697, Trained Tokens 9699, Peak mem 8.104 GB",
    "MLX with validation": "Iter {s}: Val loss 9.086, Val took 17.177s\nIter {s}: Train loss {l:.3f}, It/sec 0.999, Tokens/sec 387.697, Trained Tokens 9699",
    "fairseq's old lines": "| epoch {s:03d} | loss {l:.3f} | nll_loss {l:.3f} | ppl 4.61 | wps 402818 | ups 0.6 | wpb 606079 | bsz 20493 | num_updates {s} | lr 0.0003 | gnorm {g:.3f} | clip 0% | oom 0 | loss_scale 1.000 | wall 8409\n"
    "| epoch {s:03d} | valid on 'valid' subset | valid_loss 9.28149 | valid_nll_loss 9.54953 | valid_ppl 5.85 | num_updates {s} | best 4.28149",
    "MiniLLM": "train | data_epochs  0/10 | inner iter: {i8:3d}/  8 | ppo epoch:  2/ 4 | global iter: {s:6d}/  5000| tot_loss: {l:.4f} | rl_loss: -0.0407 | reg_loss: 0.0021 | reward: 0.0000 | lr: {r:.4e} | scale: 128.00 | time: 1.874",
    "colossalai's bar": "[Epoch 0 / Train]:   0% {s}/788222 [28:47<810:51:33,  3.71s/it, loss={l:.4f}, lr={r:.2g}, throughput=0.29466 sample_per_sec, 2.4123 Tflops]",
    "Lightning's bar": "Epoch 0:   0%|          | {s}/40320 [00:10<1:30:00,  5.10it/s, v_num=0, reduced_train_loss={l:.3f}, global_step={s}.0, consumed_samples=128.0, grad_norm={g:.3f}]",
    "Lightning's rich bar": "Epoch 0/9  ━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━ {s}/1000 0:00:10 • 0:01:30 9.90it/s v_num: 0 train_loss: {l:.3f}",
    "AllenNLP's bar": "accuracy: 0.5000, batch_loss: {l:.4f}, loss: {l:.4f} ||:  10%|#         | {s}/1000 [00:10<01:30, 10.00it/s]",
    "trlx's bar": "[losses/total_loss: {l:.2f} | losses/policy_loss: {l:.2f} | losses/value_loss: 0.00]: 100%|██████████| {s}/128 [10:23<00:00,  4.87s/it]",
    "diffusers' bar": "\rSteps:  10%|█         | {s}/1000 [00:10<01:30,  9.90it/s, lr={r}, step_loss={l:.4f}]",
    "OpenRLHF's bar": "Train step of epoch 0:  10%|█         | {s}/1000 [00:10<01:30,  1.10it/s, gpt_loss={l:.3f}, loss_mean={l:.3f}, lr={r:.2e}]",
    "torchtune's bar": "1|{s}|Loss: {l}: 100%|██████████| {s}/2500 [00:10<00:00,  1.10it/s]",
    "torchtune's file": "Step {s} | loss:{l} lr:{r} tokens_per_second_per_gpu:512.3 grad_norm:{g}",
    "Levanter": "2024-06-01T10:00:00 - 0 - tqdm_loggable.tqdm_logging - tqdm_logging.py:145 - INFO :: Progress on:train {s}it/10.0kit rate:2.0it/s remaining:1:15:00 elapsed:08:20 postfix:loss={l:.3f}",
    "clu": "I0101 10:00:00.123456 140000000 logging_writer.py:48] [{s}] learning_rate={r}, loss={l:.5f}, steps_per_second=10.2",
    "transformers' Flax example": "Step... ({s} | Loss: {l:.4f}, Learning Rate: {r})",
    "EasyLM": "{{'accuracy': 0.1,\n 'gradient_norm': {g},\n 'learning_rate': {r},\n 'loss': {l},\n 'param_norm': 900.0,\n 'step': {s}}}\n",
    "numpy's numbers": "{{'loss': np.float64({l}), 'grad_norm': np.float32({g}), 'learning_rate': {r}, 'epoch': {f:.2f}}}",
    "slime": "(MegatronTrainRayActor pid=100) [2025-08-01 10:00:00] model.py:551 - step {s}: {{'train/loss': {l}, 'train/pg_loss': {l}, 'train/entropy_loss': 0.3, 'train/grad_norm': {g}, 'train/lr-pg_0': {r}}}",
    "NeMo-RL": "\n========================= Step {s}/1000 =========================\n▶ Training policy...\n\n📊 Training Results:\n  • Loss: {l:.4f}\n  • Grad Norm: {g:.4f}\n  • Avg Reward: 0.5000\n",
    "coqui TTS": "   --> TIME: 2023-01-01 10:00:00 -- STEP: {s}/1000 -- GLOBAL_STEP: {s}\n     | > loss: {l}  ({l})\n     | > grad_norm: {g}  ({g})\n     | > current_lr: {r} \n",
    "guided-diffusion": "-------------------------\n| grad_norm | {g:<9.3g} |\n| loss      | {l:<9.3g} |\n| step      | {s:<9} |\n-------------------------",
    "OpenNMT": "[2019-01-01 10:00:00,000 INFO] Step {s}/100000; acc:   4.54; ppl: 7364.74; xent: {l:.2f}; lr: 0.00030; 5000/5000 tok/s;     10 sec",
    "PaddleNLP": "[2024-01-01 10:00:00,123] [    INFO] - loss: {l:.8f}, learning_rate: {r:g}, global_step: {s}, current_memory_allocated: 10.5, interval_runtime: 1.2, ppl: 55000, progress_or_epoch: 0.01",
    "MindSpore": "epoch: 1 step: {s}, loss is {l}",
    "MindFormers": "2024-01-01 10:00:00,000 - mindformers[callback.py:314] - INFO - {{ Epoch:[  1/  2], step:[{s:5d}/ 1000], loss: {l:.3f}, per_step_time: 3000ms, lr: {r:g}, overflow cond: False, loss_scale: 65536.0 }}",
    "TensorFlow's estimator": "INFO:tensorflow:loss = {l:.6f}, step = {s} (10.123 sec)",
    "icefall": "2022-06-01 10:00:00,000 INFO [train.py:874] (0/8) Epoch 1, batch {s}, loss[loss={l:.4f}, simple_loss=0.9, pruned_loss=0.6, over 1000.00 frames. ], tot_loss[loss=9.6, simple_loss=0.8], batch size: 50, lr: {r:.2e}, grad_scale: 8.0",
    "DeepSpeed-Chat": "Epoch: 0 | Step: {s} | PPO Epoch: 1 | Actor Loss: {l:.4f} | Critic Loss: 0.2000 | Unsupervised Loss: 0.0",
    "minimind": "Epoch:[1/1]({s}/44160) loss:{l:.3f} lr:{r:.12f} epoch_Time:100.0min:",
    "build-nanogpt": "step {s:5d} | loss: {l:.6f} | lr {r:.4e} | norm: {g:.4f} | dt: 100.00ms | tok/sec: 100000.00",
    "picotron": "[rank 0] Step: {s:<5} | Loss: {l:6.4f} | Global batch size:   1.05M | Tokens/s:  100K | Tokens/s/GPU:  12K | Tokens:  10.5M/100M | MFU: 40.12% | Memory usage: 10.00GB",
    "prime-rl": "10:00:00 SUCCESS Step {s} | Time: 10.20s | Loss: {l:.4f} | Entropy: 0.3000 | Grad. Norm: {g:.4f} | LR: {r:.2e} | Throughput: 10000 tokens/s | MFU: 20.0% | Peak Mem.: 20.0 GiB",
    "minFM": "2025-08-23 06:19:36,454 - trainers.dit_trainer - INFO - Step {s:6d} | Loss: {l:.4f} | LR: {r:.2e} | GradNorm: {g:.2f} | TPS: 16.88K | Data: 0.007s",
    "lit-llama": "iter {s}: loss {l:.4f}, time: 123.45ms, speed: 1234 toks/s/device",
    "TinyLlama": "iter {s} step {s}: loss {l:.4f}, iter time: 300.00ms (optimizer.step) remaining time: 10.00 hours 0.10 days.",
    "DiT": "[2024-01-01 10:00:00] (step={s:07d}) Train Loss: {l:.4f}, Train Steps/Sec: 1.23",
    "fairseq2": "[Rank 0] 10:00:00 INFO fairseq2.metrics - Train Metrics (step {s}) - NLL Loss: {l:.5f} | Gradient Norm: {g:.4f} | Learning Rate: {r:.3g} | Elements per Second: 100,000",
    "meta lingua": "0: INFO    24-10-01 10:00:00 - step: {s}  acc: 0  loss: {l:7.4f}  grad: {g:.2e}  flops: 3.40e+14  wps: 1.20e+04  iter: 0.5  data: 0.001  lr: {r:.2e}  mem: 40%  pow: 600.0 W",
    "epochs alone": "epoch: {s} loss: {l}",
    "parameter-golf": "step:{s}/1770 train_loss:{l:.4f} train_time:{s}00ms step_avg:254.15ms",
    "Accelerate's ranks": "[default{i8}]:step: {s} | loss {l:.4f} | grad_norm {g:.4f}",
    "thousands": "step {s:,} of 2,000,000: loss {l:.4f}, grad norm {g:.4f}, tokens 1,048,576",
    "steps as floats": "step: {s}.0 - loss: {l:.4f} - grad_norm: {g:.4f}",
    "steps in E notation": "step={s:.2e} loss={l:.4f}",
    "a decimal comma": "Schritt step {s} loss: {comma} grad_norm: 1,25",
}  # fmt: skip
