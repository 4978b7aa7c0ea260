"""From an observation to features: what is scaled, what is an image, which layers read it.

Guarantees: scale, axes and layers of each leaf are decided once, when the network is built, from
its dtype, shape and bounds alone; what leaves here is float32.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from algorithms.contract import Leaf, ObservationSpec

NetworkKind = Literal["auto", "mlp", "small_cnn", "nature_cnn"]

SMALLEST_IMAGE_SIDE = 8
"""Pixels; smaller matrices are read as plain numbers."""
NATURE_SIDE = 60
"""Pixels; "auto" reads images with both sides at least this long by the Nature CNN."""
LARGEST_CODE = 65_535
"""Integers with larger bounds than this are counts, not codes: their bounds give no scale."""
LARGEST_ONE_HOT = 1_024
"""Choices; a scalar integer with more is read as a number."""


def divisor(leaf: Leaf) -> float:
    """What a leaf's values are divided by before the first layer.

    Integers: the larger of their bounds' magnitudes, so uint8 pixels 0..255 become 0..1, and uint8
    zeros and ones stay; uint8 without bounds 255. Floats stay as they are, but for images with
    bounds beyond 1, such as float pixels 0..255.
    """
    kind = np.dtype(leaf.dtype).kind
    largest = max(abs(leaf.low), abs(leaf.high))
    if kind == "b":
        return 1.0
    if kind == "f" and (image_axes(leaf) is None or largest <= 1.0):
        return 1.0
    if 0 < largest <= LARGEST_CODE:
        return float(largest)
    return 255.0 if np.dtype(leaf.dtype) == np.uint8 else 1.0


@dataclass(frozen=True)
class ImageAxes:
    """An image leaf's sizes, and where its channels are: None (grey), first or last."""

    channels: int
    height: int
    width: int
    at: Literal["none", "first", "last"]


def image_axes(leaf: Leaf) -> ImageAxes | None:
    """How a leaf is an image: (H, W), (H, W, C) or (C, H, W) with sides of at least 8; else None.

    The channels are the shortest axis; the last one where first and last are equally short.
    """
    if len(leaf.shape) == 2:
        axes = ImageAxes(1, leaf.shape[0], leaf.shape[1], "none")
    elif len(leaf.shape) == 3 and leaf.shape[0] < leaf.shape[2]:
        axes = ImageAxes(leaf.shape[0], leaf.shape[1], leaf.shape[2], "first")
    elif len(leaf.shape) == 3:
        axes = ImageAxes(leaf.shape[2], leaf.shape[0], leaf.shape[1], "last")
    else:
        return None
    return axes if min(axes.height, axes.width) >= SMALLEST_IMAGE_SIDE else None


def one_hot_choices(leaf: Leaf) -> int:
    """Choices of a leaf that is one code (a Discrete observation), or 0: it is then a number."""
    coded = np.dtype(leaf.dtype).kind in "iu" and leaf.shape == ()
    choices = leaf.high - leaf.low + 1
    return int(choices) if coded and choices <= LARGEST_ONE_HOT else 0


class Encoder(nn.Module):
    """Reads an observation: images through a CNN, everything else flattened, then joined."""

    def __init__(self, observations: ObservationSpec, kind: NetworkKind = "auto") -> None:
        """Raises ValueError, one line, where no leaf is an image that the CNN asked for can read.

        `kind` "mlp" flattens images too; "auto" takes the Nature CNN for images of 60x60 or more
        and the small one below.
        """
        super().__init__()
        readers = [_reader(leaf, observations.stack, kind) for leaf in observations.leaves]
        self.readers = nn.ModuleList(readers)
        self.names = [leaf.name for leaf in observations.leaves]
        self.features = sum(int(reader.features) for reader in readers)
        """Width of the output."""
        if kind in ("small_cnn", "nature_cnn") and not any(
            isinstance(reader, ImageReader) for reader in self.readers
        ):
            shapes = ", ".join(f"{leaf.name} {leaf.shape}" for leaf in observations.leaves)
            raise ValueError(
                f"network = {kind!r}: no observation leaf is an image of at least "
                f"{SMALLEST_IMAGE_SIDE}x{SMALLEST_IMAGE_SIDE} ({shapes}); use 'mlp' or 'auto'"
            )

    def forward(self, observation: Mapping[str, Tensor]) -> Tensor:
        """Leaves (B, stack, *shape) to (B, features) float32."""
        read = [
            reader(observation[name]) for name, reader in zip(self.names, self.readers, strict=True)
        ]
        return read[0] if len(read) == 1 else torch.cat(read, dim=1)


def _reader(leaf: Leaf, stack: int, kind: NetworkKind) -> "ImageReader | CodeReader | VectorReader":
    axes = image_axes(leaf) if kind != "mlp" else None
    if axes is not None:
        return ImageReader(leaf, axes, stack, kind)
    if one_hot_choices(leaf):
        return CodeReader(leaf, stack)
    return VectorReader(leaf, stack)


class VectorReader(nn.Module):
    """Numbers: (B, stack, *shape) to (B, stack * size)."""

    def __init__(self, leaf: Leaf, stack: int) -> None:
        super().__init__()
        self.features = stack * math.prod(leaf.shape)
        self._divisor = divisor(leaf)

    def forward(self, values: Tensor) -> Tensor:
        flat = values.reshape(values.shape[0], -1).float()
        return flat if self._divisor == 1.0 else flat / self._divisor


class CodeReader(nn.Module):
    """One code of several choices: (B, stack) to (B, stack * choices), one-hot."""

    def __init__(self, leaf: Leaf, stack: int) -> None:
        super().__init__()
        self._low = int(leaf.low)
        self._choices = one_hot_choices(leaf)
        self.features = stack * self._choices

    def forward(self, codes: Tensor) -> Tensor:
        hot = nn.functional.one_hot(codes.long() - self._low, self._choices)
        return hot.reshape(codes.shape[0], -1).float()


class ImageReader(nn.Module):
    """An image: (B, stack, *shape) to features; the stack becomes channels."""

    def __init__(self, leaf: Leaf, axes: ImageAxes, stack: int, kind: NetworkKind) -> None:
        super().__init__()
        self._axes = axes
        self._divisor = divisor(leaf)
        short = min(axes.height, axes.width)
        nature = kind == "nature_cnn" or (kind == "auto" and short >= NATURE_SIDE)
        self.layers = (nature_cnn if nature else small_cnn)(stack * axes.channels)
        height, width = (_side_after(self.layers, side) for side in (axes.height, axes.width))
        if min(height, width) < 1:
            raise ValueError(
                f"network = {kind!r}: observation {leaf.name!r} of shape {leaf.shape} is too small "
                "for it; use 'small_cnn' or 'auto'"
            )
        self.features = height * width * _channels_after(self.layers)

    def forward(self, pixels: Tensor) -> Tensor:
        axes = self._axes
        if axes.at == "last":
            pixels = pixels.permute(0, 1, 4, 2, 3)
        planes = pixels.reshape(pixels.shape[0], -1, axes.height, axes.width).float()
        if self._divisor != 1.0:
            planes = planes / self._divisor
        return self.layers(planes).flatten(1)


def small_cnn(channels: int) -> nn.Sequential:
    """Two layers for images of about 8 to 60 pixels; a 24x24 image becomes 32 planes of 5x5."""
    return nn.Sequential(
        nn.Conv2d(channels, 32, 3, stride=2),
        nn.ReLU(),
        nn.Conv2d(32, 32, 3, stride=2),
        nn.ReLU(),
    )


def nature_cnn(channels: int) -> nn.Sequential:
    """The three layers of Mnih 2015, for 84x84 images: 64 planes of 7x7."""
    return nn.Sequential(
        nn.Conv2d(channels, 32, 8, stride=4),
        nn.ReLU(),
        nn.Conv2d(32, 64, 4, stride=2),
        nn.ReLU(),
        nn.Conv2d(64, 64, 3, stride=1),
        nn.ReLU(),
    )


def _side_after(layers: nn.Sequential, side: int) -> int:
    for layer in layers:
        if isinstance(layer, nn.Conv2d):
            side = (side - layer.kernel_size[0]) // layer.stride[0] + 1
    return side


def _channels_after(layers: nn.Sequential) -> int:
    return [layer.out_channels for layer in layers if isinstance(layer, nn.Conv2d)][-1]


def mlp(inputs: int, hidden: Sequence[int], outputs: int | None = None) -> nn.Sequential:
    """Linear layers with ReLU between; the last ReLU too where there is no output layer."""
    layers: list[nn.Module] = []
    for width in hidden:
        layers += [nn.Linear(inputs, width), nn.ReLU()]
        inputs = width
    if outputs is not None:
        layers.append(nn.Linear(inputs, outputs))
    return nn.Sequential(*layers)
