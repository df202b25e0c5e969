"""The random generators that a forward may use: their states, and how to keep them."""

import pickle
import random
from contextlib import AbstractContextManager

import numpy as np
import torch


def kept_generators(inputs: tuple[torch.Tensor, ...]) -> AbstractContextManager[None]:
    """Return a context after which the random generators are as before."""
    return torch.random.fork_rng({tensor.device for tensor in inputs if tensor.is_cuda})


def generator_states() -> bytes:
    """Return the states of the generators that a forward may use."""
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    tensors = [state.numpy(force=True) for state in (torch.get_rng_state(), *devices)]
    # As bytes: tuples that contain arrays cannot be compared by ==.
    return pickle.dumps([tensors, random.getstate(), np.random.get_state()])
