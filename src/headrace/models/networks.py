"""Layers, and encoders from observations to features by the kind of the space."""

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeAlias

import torch
from torch import Tensor, nn

from headrace.errors import ConfigError
from headrace.spec import Space

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "tanh": torch.tanh,
    "relu": torch.relu,
    "elu": nn.functional.elu,
    "silu": nn.functional.silu,
}


def autocast(device: torch.device, *, on: bool) -> contextlib.AbstractContextManager[None]:
    """Return a context in which products are computed in bf16, if `on`."""
    return torch.autocast(device.type, torch.bfloat16) if on else contextlib.nullcontext()


NORM_EPS = 1e-5
"""Added to the variance in layer normalization."""


def linear(num_in: int, num_out: int, gain: float) -> nn.Linear:
    """Make a linear layer: orthogonal weights (Saxe et al. 2014, arXiv:1312.6120), zero bias."""
    layer = nn.Linear(num_in, num_out)
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


def conv(num_in: int, num_out: int, kernel: int, *, stride: int = 1, padding: int = 0) -> nn.Conv2d:
    """Make a convolution with orthogonal weights, gain sqrt 2, and zero bias."""
    layer = nn.Conv2d(num_in, num_out, kernel, stride, padding)
    nn.init.orthogonal_(layer.weight, math.sqrt(2))
    nn.init.zeros_(layer.bias)  # type: ignore[arg-type]
    return layer


class Mlp(nn.Module):
    """Hidden layers only: `[..., num_in]` to `[..., hidden_sizes[-1]]`.

    Args:
        make: makes a layer (inputs, outputs); default: with orthogonal weights of gain sqrt 2.
        layer_norm: normalize the sums of each layer.
    """

    def __init__(
        self,
        num_in: int,
        hidden_sizes: tuple[int, ...],
        activation: str,
        *,
        make: Callable[[int, int], nn.Linear] | None = None,
        layer_norm: bool = False,
    ) -> None:
        super().__init__()
        make = make or partial(linear, gain=math.sqrt(2))
        pairs = itertools.pairwise((num_in, *hidden_sizes))
        self.layers = nn.ModuleList(make(*pair) for pair in pairs)
        self.norms = nn.ModuleList(
            nn.LayerNorm(size, NORM_EPS) for size in hidden_sizes if layer_norm
        )
        # A function, not a module: a module's call takes longer than a small tensor's tanh.
        self._activation = ACTIVATIONS[activation]

    def forward(self, features: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            features = layer(features)
            if self.norms:
                features = self.norms[i](features)
            features = self._activation(features)
        return features


ImageNet = Literal["auto", "nature", "impala", "small"]
_LEAST_SIDE = {"nature": 36, "impala": 8, "small": 1}  # pixels


@dataclass(frozen=True)
class ImageLayout:
    """The layout of an image: `channels` of all stacked frames, and the `order` of its dimensions.

    In that order they are (stack and channels, height, width).
    """

    channels: int
    height: int
    width: int
    order: tuple[int, ...]


def image_layout(space: Space) -> ImageLayout | None:
    """Return the image layout of a space; None for anything but uint8 of 2 to 4 dimensions.

    Two are height and width. Of three, the channels (or stacked frames) are the last, or the first
    if that is smaller. Of four, the first is a stack of such images.
    """
    if space.kind != "box" or space.dtype != "uint8" or len(space.shape) not in (2, 3, 4):
        return None
    first = 1 if len(space.shape) == 4 else 0  # the dimension where an image begins
    shape = space.shape[first:]
    height, channel = (1, 0) if len(shape) == 3 and shape[0] < shape[2] else (0, 2)
    at = tuple(first + d for d in (height, height + 1, channel)[: len(shape)])
    channels = space.shape[at[2]] if len(shape) == 3 else 1
    stack = tuple(range(first))
    return ImageLayout(
        channels=channels * (space.shape[0] if stack else 1),
        height=space.shape[at[0]],
        width=space.shape[at[1]],
        order=(*stack, *at[2:], *at[:2]),
    )


class FlatEncoder(nn.Module):
    """`[..., *space.shape]` to one vector of floats `[..., num_features]`; choices are one-hot."""

    def __init__(self, space: Space) -> None:
        super().__init__()
        self._space, self.kind, self.num_features = space, space.kind, space.flat_size

    def forward(self, obs: Tensor) -> Tensor:
        num_dims = len(self._space.shape)
        components = obs.flatten(-num_dims) if num_dims else obs.unsqueeze(-1)
        if self.kind in ("box", "multi_binary"):
            return components.float()
        hot = [
            nn.functional.one_hot(components[..., i] - first, choices)
            for i, (choices, first) in enumerate(
                zip(self._space.nvec, self._space.start, strict=True)
            )
        ]
        return torch.cat(hot, -1).float()


class ImageEncoder(nn.Module):
    """A convolutional network over a uint8 image (or a float one, once it is normalized).

    Maps `[..., *space.shape]` to `[..., num_features]`. Pixels are divided by 255. Memory is laid
    out channels-last, in which convolutions on CPUs run faster.

    Args:
        net: `nature` (Mnih et al. 2015, doi:10.1038/nature14236), `impala` (the residual network of
            Espeholt et al. 2018, arXiv:1802.01561, figure 3), `small` (two 3×3 convolutions without
            stride), or `auto`: `nature` from 36×36 on, `small` below 16×16, `impala` between.
        layer_norm: normalize the sums of each layer, but for those inside of residual blocks.
    """

    def __init__(self, space: Space, net: ImageNet, *, layer_norm: bool = False) -> None:
        super().__init__()
        layout = image_layout(space)
        assert layout is not None, space
        self._layout, self._num_dims = layout, len(space.shape)
        side = min(layout.height, layout.width)
        if net == "auto":
            net = "nature" if side >= 36 else "impala" if side >= 16 else "small"
        if side < _LEAST_SIDE[net]:
            raise ConfigError(
                f"image_net={net!r} needs images with sides of {_LEAST_SIDE[net]} pixels or more; "
                f"these have {layout.height} and {layout.width}. Use auto."
            )
        make = {"nature": _nature, "impala": _impala, "small": _small}[net]
        convolutions, width = make(layout.channels)
        with torch.no_grad():
            image = torch.zeros(1, layout.channels, layout.height, layout.width)
            flat = math.prod(convolutions(image).shape)
        self.num_features: int = width
        layers = [*convolutions, nn.Flatten(), linear(flat, width, math.sqrt(2)), nn.ReLU()]
        self.net = nn.Sequential(*(_with_norms(layers) if layer_norm else layers))
        self.net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, obs: Tensor) -> Tensor:
        batch = obs.shape[: obs.dim() - self._num_dims]
        rows = obs.reshape(-1, *obs.shape[obs.dim() - self._num_dims :])
        images = rows.permute(0, *(d + 1 for d in self._layout.order)).reshape(
            rows.shape[0], self._layout.channels, self._layout.height, self._layout.width
        )
        if obs.dtype == torch.uint8:
            # channels-last before float: a quarter of the bytes to move
            images = images.contiguous(memory_format=torch.channels_last)
            if torch.is_autocast_enabled(images.device.type):
                return self._of_bf16(images).reshape(*batch, self.num_features)
            images = images.float().div_(255)
        features: Tensor = self.net(images.to(next(self.net.parameters()).dtype))
        return features.reshape(*batch, self.num_features)

    def _of_bf16(self, pixels: Tensor) -> Tensor:
        """Compute `net(pixels / 255)` in bf16, which holds 0 to 255 exactly, but not the quotients.

        So the first weights are divided: there are fewer of them than pixels.
        """
        first, *rest = self.net
        assert isinstance(first, nn.Conv2d)
        out: Tensor = first._conv_forward(pixels.bfloat16(), first.weight / 255, first.bias)
        for layer in rest:
            out = layer(out)
        return out


def _with_norms(layers: list[nn.Module]) -> Iterator[nn.Module]:
    for layer in layers:
        yield layer
        if isinstance(layer, nn.Conv2d):
            yield nn.GroupNorm(1, layer.out_channels)
        elif isinstance(layer, nn.Linear):
            yield nn.LayerNorm(layer.out_features, NORM_EPS)


def _nature(channels: int) -> tuple[nn.Sequential, int]:
    return nn.Sequential(
        conv(channels, 32, 8, stride=4), nn.ReLU(),
        conv(32, 64, 4, stride=2), nn.ReLU(),
        conv(64, 64, 3), nn.ReLU(),
    ), 512  # fmt: skip


def _impala(channels: int) -> tuple[nn.Sequential, int]:
    blocks: list[nn.Module] = []
    for size in (16, 32, 32):
        blocks += [
            conv(channels, size, 3, padding=1),
            nn.MaxPool2d(3, stride=2, padding=1),
            _Residual(size),
            _Residual(size),
        ]
        channels = size
    return nn.Sequential(*blocks, nn.ReLU()), 256


def _small(channels: int) -> tuple[nn.Sequential, int]:
    return nn.Sequential(
        conv(channels, 16, 3, padding=1), nn.ReLU(), conv(16, 32, 3, padding=1), nn.ReLU()
    ), 64


class _Residual(nn.Module):
    """A residual block: x + conv(relu(conv(relu(x)))), all of one size.

    It begins as x alone (the last weights are 0): else four blocks would make features so large
    that a tanh layer beside them no longer sees a vector (Zhang et al. 2019, arXiv:1901.09321).
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.ReLU(),
            conv(channels, channels, 3, padding=1),
            nn.ReLU(),
            conv(channels, channels, 3, padding=1),
        )
        nn.init.zeros_(self.body[-1].weight)  # type: ignore[arg-type]

    def forward(self, image: Tensor) -> Tensor:
        body: Tensor = self.body(image)
        return image + body


class DictEncoder(nn.Module):
    """An encoder for each part of a Dict or Tuple observation; features side by side."""

    def __init__(self, space: Space, image_net: ImageNet, *, layer_norm: bool = False) -> None:
        super().__init__()
        self._keys = [key for key, _ in space.parts]
        # By position: a key may hold characters that a module's name may not
        encoders: list[Encoder] = [
            encoder_for(part, image_net, layer_norm=layer_norm) for _, part in space.parts
        ]
        self.parts = nn.ModuleList(encoders)
        self.num_features: int = sum(encoder.num_features for encoder in encoders)

    def forward(self, obs: dict[str, Tensor]) -> Tensor:
        arrays = [obs[key] for key in self._keys]
        return torch.cat([part(a) for part, a in zip(self.parts, arrays, strict=True)], -1)


Encoder: TypeAlias = FlatEncoder | ImageEncoder | DictEncoder


def encoder_for(space: Space, image_net: ImageNet, *, layer_norm: bool = False) -> Encoder:
    """Return the encoder of an observation space; it maps to `[..., num_features]`."""
    if space.kind == "dict":
        return DictEncoder(space, image_net, layer_norm=layer_norm)
    if image_layout(space) is None:
        return FlatEncoder(space)
    return ImageEncoder(space, image_net, layer_norm=layer_norm)
