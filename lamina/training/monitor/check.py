"""`lamina.check` finds mistakes in a training setup before the first step."""

from __future__ import annotations

import inspect
from collections.abc import Sequence

import torch
from torch import nn

from lamina.errors import UserError
from lamina.training.monitor.first_pass import LossOf, arguments_of, first_pass
from lamina.training.monitor.flat_parameters import FlatParameters
from lamina.training.monitor.followed import batch_of, follow
from lamina.training.monitor.mistakes import BeforeTraining, Mistakes, findings
from lamina.training.monitor.stream_measures import in_half
from lamina.training.monitor.training_hooks import bare, called, stepping


def check(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    *,
    batch: object = None,
    loss: LossOf | None = None,
    scaler: object = None,
) -> Mistakes:
    """Look for mistakes in a training setup before the first step.

    >>> lamina.check(model, optimizer, batch=batch)

    Call this just before training, with the final model and optimizer. Gradients, buffers and random states stay
    unchanged.

    Args:
        model: the model to train.
        optimizer: the model's optimizer, or a list of optimizers.
        batch: a batch on the model's device: a tensor, or the model's arguments in a tuple or mapping. With a batch,
            Lamina also checks the first loss, labels, masks and each layer's gradient.
        loss: a function that takes the model and the batch and returns a scalar loss (default: the loss in the model's
            output).
        scaler: the GradScaler of float16 training, if there is one.

    Raises:
        UserError: the model is not a torch.nn.Module, the optimizer is not a torch optimizer, or the model does not run
            on the batch.
    """
    if not isinstance(model, nn.Module):
        raise UserError(f"model: a {type(model).__name__}. Pass a torch.nn.Module.")
    if FlatParameters(model):
        raise UserError("model: FSDP1 hides the model's weights. Pass the model before FSDP1 wraps it.")
    given = [] if optimizer is None else list(optimizer) if isinstance(optimizer, Sequence) else [optimizer]
    optimizers, model_itself = [stepping(each) for each in given], bare(model)
    args, kwargs = arguments_of(model_itself, batch) if batch is not None else ((), {})
    inner, arguments = called(model_itself, args, kwargs)
    device = next((p.device for p in model_itself.parameters()), torch.device("cpu"))
    unchecked = ["optimizers. Pass optimizer= for this check"] if not given else []
    setup = BeforeTraining(
        model=model_itself, optimizers=optimizers, batch=batch_of(arguments), half=in_half(device.type)
    )
    if not arguments and isinstance(batch, tuple | list):  # a batch for ``loss``
        tensors = [value for value in batch if isinstance(value, torch.Tensor)]
        setup.batch = dict(zip(("inputs", "labels"), tensors[:1] + tensors[1:][-1:], strict=False))
        setup.batch |= {f"input {at}": value for at, value in enumerate(tensors[1:-1], 1)}
    setup.recording = torch.is_grad_enabled()
    setup.scaler = scaler is not None and bool(getattr(scaler, "is_enabled", lambda: True)())
    setup.scaler_is_off = scaler is not None and not setup.scaler
    first = next(iter(inspect.signature(model_itself.forward).parameters), "input_ids")
    made_up = {str(getattr(model_itself, "main_input_name", first)): torch.arange(1, 9, device=device)[None]}
    setup.structure = follow(inner, arguments or made_up).structure
    unchecked += _tried(setup, batch, loss)
    found = findings(setup)
    return Mistakes(found, [*unchecked, *(f"{name}: {error}" for name, error in setup.failed.items())])


def _tried(setup: BeforeTraining, batch: object, loss: LossOf | None) -> list[str]:
    """If there is a batch, run the model on the batch. Return the checks that were not possible."""
    if batch is None:
        return ["first loss, labels, masks and gradients. Pass batch= for these checks"]
    model = setup.model
    try:
        setup.trial = first_pass(model, batch, loss, setup.unregistered.values(), setup.blocks)
        setup.half = setup.half or (setup.trial is not None and setup.trial.half)
    except UserError as error:
        if not findings(setup):
            raise
        return [f"first loss and gradients: {error}"]
    unchecked = []
    differs = [
        getattr(m, "p", 0) > 0 if isinstance(m, nn.Dropout) else hasattr(m, "running_mean") for m in model.modules()
    ]
    if not model.training and any(differs):
        unchecked.append("dropout and batch norms: the model is in eval mode. Call model.train() before you train")
    if setup.trial is None:
        unchecked.append(
            "first loss and gradients: the model returns no loss. Pass loss=, a function that computes the loss from "
            "the model and the batch"
        )
    return unchecked
