"""The Recurrent module: a CRC layer and its Transition Block, run as one (Section 2.3)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recnets.layers.crc import CRC, check_input
from recnets.layers.norm import norm_of
from recnets.layers.transition import TransitionBlock
from recnets.ops import torch as plain
from recnets.utils import choose

MODES = ("auto", "concat", "stream")


class Recurrent(nn.Module):
    """Rec(s_in, s_out, c_out, d) = {CRC(s_in, s_out, d), TB(d·s_out, c_out)}; (N, d·s_in, H, W) -> (N, c_out, H, W).

    `mode` chooses how it is computed, never what:

    - "concat": the CRC layer's whole output, then the 1×1 convolution. Fastest to train.
    - "stream": the paper's Computational Simplification, y = Σ_i h_i ⊛ A_i, one s_out-wide state alive at a time;
      without gradients nothing d·s_out wide is ever allocated. In half precision the running sum is kept in that
      precision.
    - "auto" (default): streams whenever no gradient is needed (unless backend="triton" is asked for).

    Called with `pool=True` it gives the 2×2 maxima of its output.
    """

    def __init__(self, s_in: int, s_out: int, c_out: int, d: int, *, mode: str = "auto", **crc_options: Any) -> None:
        super().__init__()
        self.mode = choose(mode, MODES, "mode")
        self.crc = CRC(s_in, s_out, d, **crc_options)
        self.transition = TransitionBlock(d * s_out, c_out, backend=self.crc.backend)

    def forward(self, x: Tensor, pool: bool = False) -> Tensor:
        # An explicit backend="triton" never falls back, and the kernels give all hidden states.
        whole = self._needs_grad(x) or self.crc.backend == "triton"
        if self.mode == "concat" or (self.mode == "auto" and whole):
            return self.transition(self.crc(x), pool=pool)
        out = self._stream(x)
        return F.max_pool2d(out, 2) if pool else out

    def _needs_grad(self, x: Tensor) -> bool:
        return torch.is_grad_enabled() and (x.requires_grad or any(p.requires_grad for p in self.parameters()))

    def _stream(self, x: Tensor) -> Tensor:
        """y = Σ_i h_i ⊛ A_i, then BN and ReLU."""
        crc = self.crc
        check_input(x, crc.d * crc.s_in, f"Recurrent with {crc}")
        norm = norm_of(self.transition.norm)
        # A_0, A_1, …, each (s_out, c_out)
        matrices = self.transition.conv.weight.view(-1, crc.d, crc.s_out).permute(1, 2, 0).unbind(0)
        in_place = not self._needs_grad(x)
        total: Tensor | None = None
        hidden = plain.steps(
            *(x, crc.weight_x, crc.weight_h, crc.bias, crc.step_norm(), crc.recurrence),
            overwrite=in_place and not torch.compiler.is_compiling(),  # a compiler plans its buffers itself
        )
        for h, matrix in zip(hidden, matrices, strict=True):
            pixels = h.permute(0, 2, 3, 1).reshape(-1, crc.s_out)  # a view: h is in channels-last order
            a_i = matrix if matrix.dtype == h.dtype else matrix.to(h.dtype)
            if total is None:
                total = pixels @ a_i
            elif in_place:
                total.addmm_(pixels, a_i)
            else:
                total = torch.addmm(total, pixels, a_i)
            del h, pixels  # the next step need not keep them
        assert total is not None
        folded = in_place and not norm.batch_statistics
        if folded:  # scaling the sum costs one pass, scaling the A_i would copy them all
            scale, shift = norm.affine()
            torch.addcmul(shift, total, scale, out=total).relu_()
        y = total.unflatten(0, (x.shape[0], x.shape[2], x.shape[3])).permute(0, 3, 1, 2)
        return y if folded else norm.apply(y).relu_()
