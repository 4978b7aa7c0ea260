"""Where the learner computes.

Guarantees: a device that was asked for and is not there is an error, never replaced silently.
"""

from typing import Literal

import torch

from pipeline.configuration_codec import ConfigurationError


def choose_device(asked: Literal["auto", "cpu", "cuda"]) -> torch.device:
    """The device for `learner.device`. Raises ConfigurationError."""
    there = torch.cuda.is_available()
    if asked == "cuda" and not there:
        raise ConfigurationError(
            "learner.device = 'cuda': torch sees no GPU here; use 'auto' or 'cpu', or install a "
            "torch with CUDA"
        )
    return torch.device("cuda" if there and asked != "cpu" else "cpu")


def describe_device(device: torch.device) -> str:
    """For people: "cpu", or the GPU's name and memory."""
    if device.type != "cuda":
        return str(device)
    properties = torch.cuda.get_device_properties(device)
    return f"cuda ({properties.name}, {properties.total_memory >> 30} GiB)"
