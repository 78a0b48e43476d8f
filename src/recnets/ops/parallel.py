"""Eq. 5: the linear recursion without a recursion, by composed kernels.

h_i = Σ_j x_j ⊛ (W_x ⊛ W_h^{⊛(i-j)}) + Σ_j b ⊛ W_h^{⊛j}. Composition is exact where a composed kernel sees what the
steps saw: everywhere with circular padding. With zero padding each step of the recursion drops what lies outside
the image, a composed kernel does not see that dropping, and the two agree only on the interior, at least
`border(kernel_h, d)` pixels from the edge.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def compose(first: Tensor, second: Tensor) -> Tensor:
    """The kernel of `second` after `first`: (C, A, k1, k1), (B, C, k2, k2) -> (B, A, k1+k2-1, k1+k2-1)."""
    flipped = second.flip(-1, -2)  # a chain of cross-correlations is one by the full convolution of the kernels
    return F.conv2d(first.transpose(0, 1), flipped, padding=second.shape[-1] - 1).transpose(0, 1)


def compose_kernels(weight_x: Tensor, weight_h: Tensor, d: int) -> list[Tensor]:
    """K_m = W_x ⊛ W_h^{⊛m} for m = 0..d-1, each (s_out, s_in, k_m, k_m) with k_m = kx + m·(kh - 1)."""
    kernels = [weight_x]
    for _ in range(d - 1):
        kernels.append(compose(kernels[-1], weight_h))
    return kernels


def compose_biases(bias: Tensor, weight_h: Tensor, d: int) -> list[Tensor]:
    """b_i = Σ_{j<=i} b ⊛ W_h^{⊛j} for i = 0..d-1, each (s_out): a constant map through W_h is a matrix product."""
    matrix = weight_h.sum(dim=(2, 3))
    biases = [bias]
    for _ in range(d - 1):
        biases.append(bias + matrix @ biases[-1])
    return biases


def border(kernel_h: int, d: int) -> int:
    """With zero padding the composed form is exact from this many pixels off the edge on.

    Only states outside the image are dropped, and one travels kernel_h // 2 pixels a step, d - 1 times at most; the
    size of W_x does not matter, both forms read zeros for x outside.
    """
    return (d - 1) * (kernel_h // 2)


def _pad(x: Tensor, radius: int, padding_mode: str) -> Tensor:
    """Padding by any radius; F.pad's circular mode refuses to wrap more than once."""
    if padding_mode == "zeros":
        return F.pad(x, (radius, radius, radius, radius))
    rows = torch.arange(-radius, x.shape[-2] + radius, device=x.device) % x.shape[-2]
    columns = torch.arange(-radius, x.shape[-1] + radius, device=x.device) % x.shape[-1]
    return x[..., rows, :][..., columns]


def linear_recursion_parallel(
    x: Tensor, kernels: list[Tensor], biases: list[Tensor], padding_mode: str = "zeros"
) -> Tensor:
    """All h_i of Eq. 5 before the output's BN and ReLU: (N, d·s_in, H, W) -> (N, d·s_out, H, W).

    d independent convolutions: K_m carries every x_j to h_{j+m} at once.
    """
    if padding_mode not in ("zeros", "circular"):
        raise ValueError(f"the parallel form needs padding_mode 'zeros' or 'circular', got {padding_mode!r}")
    d = len(kernels)
    n, _, height, width = x.shape
    s_out, s_in = kernels[0].shape[:2]
    segments = x.reshape(n, d, s_in, height, width)
    out = torch.stack(biases)[None, :, :, None, None].expand(n, d, s_out, height, width).clone()
    for m, kernel in enumerate(kernels):
        sources = segments[:, : d - m].reshape(n * (d - m), s_in, height, width)
        moved = F.conv2d(_pad(sources, kernel.shape[-1] // 2, padding_mode), kernel)
        out[:, m:] += moved.reshape(n, d - m, s_out, height, width)
    return out.reshape(n, d * s_out, height, width)
