"""The average of the weights follows the model that is trained."""

import torch
from torch import nn

from lamina.training.optimization.optimizer import WeightAverage


def test_the_average_is_on_the_trained_model_s_device_without_a_step():
    trained = nn.Linear(2, 2)
    average = WeightAverage(trained, 0.9)
    nn.Module.to(trained, "meta")  # as Trainer moves it to a GPU
    assert {parameter.device.type for parameter in average.model.parameters()} == {"meta"}


def test_a_read_average_follows_the_trained_model(tmp_path):
    trained = nn.Linear(2, 2)
    average = WeightAverage(trained, 0.9)
    average.write(tmp_path)
    before = trained.weight.detach().clone()
    nn.init.zeros_(trained.weight)
    average.read(tmp_path)
    assert torch.equal(average.model.weight, before)
    assert next(average.model.parameters()).device == trained.weight.device
