"""fp16's loss scaler: an overflow is counted and survived, many in a row end the run. Torch's scaler, on the CPU."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from training.tiny_runs import SMALL, flags

from lamina.cli import main
from lamina.modeling.processes import Processes
from lamina.training.monitor.guard import Diverged, DivergenceGuard
from lamina.training.monitor.writers import StepSeries
from lamina.training.trainer import CheckpointedTrainer, MonitoredTrainer

PATIENCE = 3


class Base:
    """What Trainer does in a step, as far as the scaler and the norm go."""

    def _clip_grad_norm(self, model):
        self.accelerator.scaler.unscale_(self.optimizer)
        return nn.utils.clip_grad_norm_(model.parameters(), 1.0)


class Norms:
    def __init__(self, model):
        self.model = model

    def squares(self):
        return torch.stack([p.grad.square().sum() for p in self.model.parameters()])

    def rows(self, step, squares):
        return [(step, i, "attention", "all", 0, "gradient_norm", s.sqrt().item()) for i, s in enumerate(squares)]


class Scaled(MonitoredTrainer, Base):
    def __init__(self):
        self.model = nn.Linear(3, 1, bias=False)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.guard = DivergenceGuard(margin=1.0, patience=PATIENCE)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        self.accelerator = SimpleNamespace(scaler=scaler, optimizer_step_was_skipped=False, unwrap_model=lambda m: m)
        self.state, self.args = SimpleNamespace(global_step=0), SimpleNamespace(logging_steps=1)
        self.processes = Processes()
        self.gradient_norms, self.series = Norms(self.model), StepSeries(self.processes)

    def step(self, x):
        scaler = self.accelerator.scaler
        self.optimizer.zero_grad()
        scaler.scale(self.model(x).sum()).backward()
        self._clip_grad_norm(self.model)
        before = scaler.get_scale()
        scaler.step(self.optimizer)
        scaler.update()
        self.accelerator.optimizer_step_was_skipped = scaler.get_scale() < before  # as accelerate tells it
        self.count_overflow()
        self.state.global_step += 1


def test_an_overflow_is_counted_and_leaves_the_weights_and_the_run_alone():
    trainer = Scaled()
    before = trainer.model.weight.detach().clone()
    trainer.step(torch.tensor([[torch.inf, 1.0, 1.0]]))
    assert torch.equal(trainer.model.weight, before)
    assert (trainer.overflows, trainer.accelerator.scaler.get_scale()) == (1, 512.0)
    trainer.step(torch.ones(1, 3))
    assert not torch.equal(trainer.model.weight, before)
    assert (trainer.overflows, trainer.overflows_in_a_row) == (1, 0)


def test_the_layers_norms_are_those_of_the_loss_that_is_not_scaled():
    trainer = Scaled()
    trainer.step(torch.tensor([[3.0, 4.0, 0.0]]))
    assert trainer.layer_rows[0][-1] == pytest.approx(5.0)


def test_overflows_without_end_are_a_divergence():
    trainer = Scaled()
    for _ in range(PATIENCE):
        trainer.step(torch.full((1, 3), torch.inf))
    assert trainer.overflows == PATIENCE
    with pytest.raises(Diverged):
        trainer.step(torch.full((1, 3), torch.inf))


class Resumed(CheckpointedTrainer, Scaled):
    processes, _tr_loss, _globalstep_last_logged = Processes(), 0.0, 0


def test_a_checkpoint_has_the_overflows_and_an_older_one_none():
    trainer, resumed = Resumed(), Resumed()
    for x in (torch.inf, 1.0, torch.inf, torch.inf):
        trainer.step(torch.full((1, 3), x))
    state = {**trainer.state_dict(), **trainer.guard.state_dict()}
    resumed.load_state_dict(state)
    assert (resumed.overflows, resumed.overflows_in_a_row) == (3, 2)
    del state["overflows"]
    resumed.load_state_dict(state)
    assert (resumed.overflows, resumed.overflows_in_a_row) == (0, 0)


def test_fp16_on_the_cpu_is_refused_since_it_would_be_fp32_without_a_word(corpus, tmp_path, capsys):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert main(["pretrain", *flags(**SMALL, corpus=corpus, output=tmp_path / "run", precision="fp16")]) == 2
    assert "precision: 'fp16' needs a GPU" in capsys.readouterr().err
