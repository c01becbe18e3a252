"""What holds for all tests."""

import random
import signal

import numpy as np
import pytest
import torch
from hypothesis import settings

settings.register_profile("flatmtl", deadline=None)  # a busy machine is no fault
settings.load_profile("flatmtl")

# A job that a shell has put into the background ignores Ctrl-C, and so would the commands that are stopped by it here.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def one_seed():
    """A test that draws numbers without a seed draws the same ones each time, whatever ran before it."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
