"""The Channel-wise Recurrent Convolutional layer (Section 2.1 of the paper)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from recnets.layers.norm import norm_of
from recnets.ops import dispatch, parallel
from recnets.ops.norm import Norm
from recnets.ops.torch import Recurrence
from recnets.utils import choose, positive_int

NONLINEARITIES = ("relu", "shared_bn_relu", "separate_bn_relu", "linear")
PADDING_MODES = ("zeros", "circular", "reflect", "replicate")
SMALLEST_MAP = {"circular": 0, "reflect": 1}
"""A map needs so many pixels more than a kernel's radius: it wraps once, and its border is not mirrored."""


def check_input(x: Tensor, channels: int, what: str, weight: Tensor | None = None) -> None:
    """A clear error for an input that is not (N, channels, H, W) in floating point with at least one pixel.

    With `weight`, also for one of another type than that.
    """
    if not isinstance(x, Tensor):
        raise TypeError(f"{what} expects a Tensor, got {type(x).__name__}")
    if x.dim() != 4:
        raise ValueError(f"{what} expects (N, {channels}, H, W), got a tensor of shape {tuple(x.shape)}")
    if x.shape[1] != channels:
        raise ValueError(f"{what} expects {channels} channels, got {x.shape[1]} (shape {tuple(x.shape)})")
    if min(x.shape[2:]) < 1:
        raise ValueError(f"{what} expects at least one pixel, got a tensor of shape {tuple(x.shape)}")
    if not x.is_floating_point():
        raise TypeError(f"{what} expects floating point values, got {x.dtype}; scale and normalise pictures first")
    if weight is not None:
        check_dtype(x, weight, what)


def check_dtype(x: Tensor, weight: Tensor, what: str) -> None:
    """A clear error where a convolution of x would refuse the type of its weights.

    Autocast makes them one, and so do the kernels on a GPU, but for float64.
    """
    if x.dtype == weight.dtype or (not x.is_meta and torch.is_autocast_enabled(x.device.type)):
        return
    if x.device.type == "cpu" or torch.float64 in (x.dtype, weight.dtype):
        raise TypeError(f"{what} has weights of {weight.dtype} and expects such an input, got {x.dtype}; convert one")


class CRC(nn.Module):
    """CRC(s_in, s_out, d): a recurrent network over d segments of the channels.

    x (N, d·s_in, H, W) -> (N, d·s_out, H, W), the hidden states h_0 … h_{d-1} concatenated, where
    h_i = σ_i(x_i ⊛ W_x + h_{i-1} ⊛ W_h) and h_{-1} = 0.

    Args:
        s_in: channels of an input segment.
        s_out: channels of a hidden state.
        d: number of segments, the steps of the recurrence.
        kernel_x: size of W_x, odd.
        kernel_h: size of W_h, odd.
        nonlinearity: "relu" (Eq. 2, with bias), "shared_bn_relu" (one BN for all steps), "separate_bn_relu" (Eq. 3,
            a BN a step, no bias) or "linear" (Eq. 4: no activation inside the recursion, bias at every step, BN and
            ReLU on the concatenated output).
        recurrent: False is the grouped control of Table 1d with the same parameters,
            h_i = σ_i((x_i ⊛ W_x) ⊛ W_h).
        padding_mode: "zeros" (the paper), "circular", "reflect" or "replicate".
        backend: "auto", "torch" or "triton"; see `recnets.ops.dispatch`.

    Attributes:
        weight_x: (s_out, s_in, kx, kx). weight_h: (s_out, s_out, kh, kh). bias: (s_out) or None.
        norm: BatchNorm2d(d·s_out), whose i-th slice of s_out channels belongs to step i; BatchNorm2d(s_out) for
            "shared_bn_relu"; None for "relu".
    """

    def __init__(
        self,
        s_in: int,
        s_out: int,
        d: int,
        *,
        kernel_x: int = 3,
        kernel_h: int = 3,
        nonlinearity: str = "separate_bn_relu",
        recurrent: bool = True,
        padding_mode: str = "zeros",
        backend: str = "auto",
    ) -> None:
        super().__init__()
        self.s_in = positive_int(s_in, "s_in")
        self.s_out = positive_int(s_out, "s_out")
        self.d = positive_int(d, "d")
        for what, size in (("kernel_x", kernel_x), ("kernel_h", kernel_h)):
            if positive_int(size, what) % 2 == 0:
                raise ValueError(f"{what} must be odd, so that the map keeps its size, got {size}")
        self.nonlinearity = choose(nonlinearity, NONLINEARITIES, "nonlinearity")
        if not isinstance(recurrent, bool):
            raise TypeError(f"recurrent must be True or False, got {recurrent!r}")
        self.recurrent = recurrent
        self.padding_mode = choose(padding_mode, PADDING_MODES, "padding_mode")
        self.backend = choose(backend, dispatch.BACKENDS, "backend")
        dispatch.check_request(self.backend, self.recurrence, kernel_x, kernel_h, s_in, s_out)

        # In channels-last order, as the maps of the fast paths are: else every step would rearrange them anew.
        order = torch.channels_last
        self.weight_x = nn.Parameter(torch.empty(s_out, s_in, kernel_x, kernel_x, memory_format=order))
        self.weight_h = nn.Parameter(torch.empty(s_out, s_out, kernel_h, kernel_h, memory_format=order))
        has_bias = nonlinearity in ("relu", "linear")
        self.bias = nn.Parameter(torch.empty(s_out)) if has_bias else None
        self.norm = None if nonlinearity == "relu" else nn.BatchNorm2d(self._norm_channels())
        self.reset_parameters()

    def _norm_channels(self) -> int:
        return self.s_out if self.nonlinearity == "shared_bn_relu" else self.d * self.s_out

    def reset_parameters(self) -> None:
        """He initialisation of both kernels by their own fan-in; the paper does not name one.

        Without a norm to hold its scale, the recurrence would grow by what W_h adds at each step, so there W_h
        starts at half that gain.
        """
        nn.init.kaiming_normal_(self.weight_x, nonlinearity="relu")
        nn.init.kaiming_normal_(self.weight_h, nonlinearity="relu")
        if self.nonlinearity in ("relu", "linear") and self.recurrent:
            with torch.no_grad():
                self.weight_h.mul_(0.5)
        if self.bias is not None:
            nn.init.zeros_(self.bias)
        if self.norm is not None:
            self.norm.reset_parameters()

    @property
    def recurrence(self) -> Recurrence:
        """The layer's settings as the ops take them."""
        return Recurrence(self.d, self.nonlinearity, self.recurrent, self.padding_mode)

    def step_norm(self) -> Norm | None:
        """The norm for one forward pass (call it once a pass: it counts batches)."""
        if self.norm is None:
            return None
        return norm_of(self.norm, calls=self.d if self.nonlinearity == "shared_bn_relu" else 1)

    def check(self, x: Tensor, what: str, apart: bool = False) -> None:
        """A clear error, in the name of `what`, for an input that the layer cannot take."""
        # The kernels cast what they read, and say themselves what they do not take.
        channels = self.s_in if apart else self.d * self.s_in
        check_input(x, channels, what, None if self.backend == "triton" else self.weight_x)
        if apart and x.shape[0] % self.d:
            raise ValueError(f"{what} expects the maps of {self.d} steps, got {x.shape[0]} maps")
        if self.padding_mode not in SMALLEST_MAP:
            return
        weights = (self.weight_x,) if self.recurrent and self.d == 1 else (self.weight_x, self.weight_h)
        kernel = max(weight.shape[-1] for weight in weights)
        smallest = kernel // 2 + SMALLEST_MAP[self.padding_mode]
        if min(x.shape[2:]) < smallest:
            raise ValueError(
                f"{what} with padding_mode={self.padding_mode!r} and a {kernel}×{kernel} kernel needs maps of at least "
                f"{smallest}×{smallest} pixels, got {x.shape[2]}×{x.shape[3]}"
            )

    def forward(self, x: Tensor, apart: bool = False) -> Tensor:
        """`apart`: x is (d·N, s_in, H, W), as the norm before it may leave it for this layer."""
        self.check(x, str(self), apart)
        return dispatch.crc(
            x,
            self.weight_x,
            self.weight_h,
            self.bias,
            self.step_norm(),
            self.recurrence,
            backend=self.backend,
            apart=apart,
        )

    def parallel_kernels(self) -> tuple[list[Tensor], list[Tensor]]:
        """Eq. 5 for the linear recursion: (kernels, biases), d of each.

        kernels[m] = W_x ⊛ W_h^{⊛m}, (s_out, s_in, kx + m(kh-1), …); biases[i] = Σ_{j<=i} b ⊛ W_h^{⊛j}, (s_out).
        """
        if self.nonlinearity != "linear" or not self.recurrent or self.bias is None:
            raise ValueError(
                "the parallel form (Eq. 5) exists for nonlinearity='linear' with recurrent=True, "
                f"this layer has nonlinearity={self.nonlinearity!r}, recurrent={self.recurrent}"
            )
        return (
            parallel.compose_kernels(self.weight_x, self.weight_h, self.d),
            parallel.compose_biases(self.bias, self.weight_h, self.d),
        )

    def forward_parallel(self, x: Tensor) -> Tensor:
        """The same layer evaluated by Eq. 5, without a recursion.

        Exact on the whole map with padding_mode="circular". With "zeros" it is exact only at least
        `recnets.ops.parallel.border(kernel_h, d)` pixels from the edge: 'same' zero padding drops, at each
        step, what a composed kernel would still see outside the image. In training mode the BN statistics are
        taken over the whole map, so there it is exact with circular padding only.
        """
        kernels, biases = self.parallel_kernels()
        check_input(x, self.d * self.s_in, str(self), self.weight_x)
        norm = self.step_norm()
        assert norm is not None
        return torch.relu(norm.apply(parallel.linear_recursion_parallel(x, kernels, biases, self.padding_mode)))

    def __str__(self) -> str:
        return f"CRC({self.s_in}, {self.s_out}, {self.d})"

    def extra_repr(self) -> str:
        kernels = f"kernel_x={self.weight_x.shape[-1]}, kernel_h={self.weight_h.shape[-1]}"
        text = f"{self.s_in}, {self.s_out}, {self.d}, {kernels}, nonlinearity={self.nonlinearity!r}"
        for name, default in (("recurrent", True), ("padding_mode", "zeros"), ("backend", "auto")):
            value = getattr(self, name)
            text += "" if value == default else f", {name}={value!r}"
        return text
