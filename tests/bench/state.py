"""All of a model and of the random streams that an analysis must leave alone."""

import random

import numpy as np
import torch


def state(model):
    """Return values that are equal if nothing has changed, bit for bit."""
    tensors = {name: value.tolist() for name, value in model.state_dict().items()}
    gradients = {name: None if p.grad is None else p.grad.tolist() for name, p in model.named_parameters()}
    needed = {name: p.requires_grad for name, p in model.named_parameters()}
    modes = {name: module.training for name, module in model.named_modules()}
    streams = torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()
    return tensors, gradients, needed, modes, streams
