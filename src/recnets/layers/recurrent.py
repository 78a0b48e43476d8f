"""The Recurrent module: a CRC layer and its Transition Block, run as one (Section 2.3)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.modules.module import _has_any_global_hook

from recnets.layers.crc import CRC
from recnets.layers.norm import norm_of
from recnets.layers.transition import TransitionBlock
from recnets.ops import dispatch
from recnets.ops import torch as plain
from recnets.ops.dispatch import Following
from recnets.ops.norm import Norm
from recnets.utils import choose

MODES = ("auto", "concat", "stream")
WIDEST = 2**25
"""Bytes: a CPU's allocator gives larger tensors back to the system at once, and each new one costs its page faults."""


def hooked(module: nn.Module) -> bool:
    """Does anyone look at what goes into or out of this module?"""
    return has_hooks(module) or bool(_has_any_global_hook())


def has_hooks(module: nn.Module) -> bool:
    """Does anyone look at this very module?"""
    own = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(len(hooks) > 0 for hooks in own)


class Recurrent(nn.Module):
    """Rec(s_in, s_out, c_out, d) = {CRC(s_in, s_out, d), TB(d·s_out, c_out)}; (N, d·s_in, H, W) -> (N, c_out, H, W).

    `mode` chooses how it is computed, never what:

    - "concat": the CRC layer's whole output, then the 1×1 convolution. Fastest to train on a GPU.
    - "stream": the paper's Computational Simplification, y = Σ_i h_i ⊛ A_i, one s_out-wide state alive at a time;
      without gradients nothing d·s_out wide is ever allocated. In half precision the running sum is kept in that
      precision, unless one kernel runs the whole module (on CUDA, in evaluation), which keeps it in fp32.
    - "auto" (default): streams whenever no gradient is needed (with backend="triton", where that kernel runs), and on a
      CPU in training too where the whole output would be large (`WIDEST`); never past a hook on the CRC layer or the
      transition.

    Called with `pool=True` it gives the 2×2 maxima of its output. `apart` and `following` are for maps that pass
    between such modules in training in the order of their kernels: see `dispatch.norm_relu`.
    """

    def __init__(self, s_in: int, s_out: int, c_out: int, d: int, *, mode: str = "auto", **crc_options: Any) -> None:
        super().__init__()
        self.mode = mode
        self.crc = CRC(s_in, s_out, d, **crc_options)
        self.transition = TransitionBlock(d * s_out, c_out, backend=self.crc.backend)

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "mode" in state:  # of a module pickled before the mode was checked
            state = {**state, "_mode": state["mode"]}
            del state["mode"]
        super().__setstate__(state)

    @property
    def mode(self) -> str:
        """How the module is computed; may be set at any time."""
        return self._mode

    @mode.setter
    def mode(self, value: str) -> None:
        self._mode = choose(value, MODES, "mode")

    def passes_segments(self) -> bool:
        """Are its parts those of this package, and all hidden states at hand, as `apart` and `following` need?"""
        own = type(self.crc) is CRC and type(self.transition) is TransitionBlock
        return own and self.mode != "stream" and self.crc.backend != "torch"

    def as_following(self) -> Following:
        """What a norm before this module needs to know of it."""
        return Following(self.crc.weight_x, self.crc.weight_h, self.crc.recurrence)

    def forward(self, x: Tensor, pool: bool = False, apart: bool = False, following: Following | None = None) -> Tensor:
        if apart or following is not None:
            return self.transition(self.crc(x, apart=apart), pool=pool, following=following)
        grad = self._needs_grad(x)
        # Hooks on all modules are for counting and profiling, which should see what runs without them.
        if self.mode == "auto" and any(has_hooks(m) for m in (self.crc, self.transition, *self.transition.children())):
            return self.transition(self.crc(x), pool=pool)
        if x.is_cuda and self.mode != "concat" and not grad and not self.training:
            fused = self._fused(x, pool)
            if fused is not None:
                return fused
        # An explicit backend="triton" never falls back, and the kernels give all hidden states.
        whole = (grad and not torch.jit.is_tracing()) or self.crc.backend == "triton"
        if self.mode == "concat" or (self.mode == "auto" and whole and not self._too_wide(x)):
            return self.transition(self.crc(x), pool=pool)
        out = self._stream(x)
        return F.max_pool2d(out, 2) if pool else out

    def _too_wide(self, x: Tensor) -> bool:
        """Is a CPU faster with one state after the other, and may the layer and the transition be passed by?"""
        if x.device.type != "cpu" or self.crc.backend == "triton" or torch.compiler.is_compiling():
            return False
        if any(hooked(module) for module in (self.crc, *self.transition.modules())):
            return False
        return x.numel() // self.crc.s_in * self.crc.s_out * x.element_size() > WIDEST

    def _needs_grad(self, x: Tensor) -> bool:
        if forward_ad._current_level >= 0:  # tangents pass through what no backward pass needs
            return True
        if torch.jit.is_tracing():  # what is traced runs with gradients and without, by one graph
            return True
        return torch.is_grad_enabled() and (x.requires_grad or any(p.requires_grad for p in self.parameters()))

    def _fused(self, x: Tensor, pool: bool) -> Tensor | None:
        """The whole module by one kernel, where there is one."""
        crc, conv = self.crc, self.transition.conv
        if (crc.norm is not None and crc.norm.training) or self.transition.norm.training:
            return None
        crc.check(x, f"Recurrent with {crc}")
        norms = crc.step_norm(), norm_of(self.transition.norm)
        return dispatch.recurrent_eval(
            x, crc.weight_x, crc.weight_h, crc.bias, norms[0], conv.weight.flatten(1), norms[1], crc.recurrence,
            backend=crc.backend, pool=pool,
        )  # fmt: skip

    def _stream(self, x: Tensor) -> Tensor:
        """y = Σ_i h_i ⊛ A_i, then BN and ReLU."""
        crc = self.crc
        crc.check(x, f"Recurrent with {crc}")
        norm, own = norm_of(self.transition.norm), crc.step_norm()
        in_place = not self._needs_grad(x)
        eager = in_place and not torch.compiler.is_compiling()  # a compiler plans its buffers itself
        if eager and not norm.batch_statistics and not (own is not None and own.batch_statistics):
            return self._infer(x, own, norm)
        total: Tensor | None = None
        for h, matrix in zip(self._steps(x, own, overwrite=eager), self._matrices(), strict=True):
            pixels, a_i = _pixels(h), matrix.to(h.dtype)
            if total is None:
                total = pixels @ a_i
            elif in_place:
                total.addmm_(pixels, a_i)
            else:
                total = torch.addmm(total, pixels, a_i)
            del h, pixels  # the next step need not keep them
        assert total is not None
        return norm.apply(_maps(total, x)).relu_()

    def _infer(self, x: Tensor, own: Norm | None, norm: Norm) -> Tensor:
        """The same in evaluation, with nothing as wide as the sum beside it."""
        n, _, height, width = x.shape
        total = x.new_empty(n * height * width, self.transition.c_out, dtype=dispatch.compute_dtype(x))
        beta = 0  # what is in it at first is not part of the sum
        # A picture at a time, keeping books for gradients that no one asked for is a good part of the work.
        with torch.inference_mode():
            scale, shift = norm.affine()
            for h, a_i in zip(self._steps(x, own, overwrite=True), self._matrices(), strict=True):
                total.addmm_(_pixels(h), a_i if a_i.dtype == h.dtype else a_i.to(h.dtype), beta=beta)
                beta = 1
                del h  # the next step need not keep it
            # Scaling the sum costs one pass, scaling the A_i would copy them all.
            torch.addcmul(shift, total, scale, out=total).relu_()
        return _maps(total, x)

    def _steps(self, x: Tensor, norm: Norm | None, *, overwrite: bool) -> Iterator[Tensor]:
        """h_0, h_1, …, each (N, s_out, H, W)."""
        crc = self.crc
        return plain.steps(x, crc.weight_x, crc.weight_h, crc.bias, norm, crc.recurrence, overwrite=overwrite)

    def _matrices(self) -> tuple[Tensor, ...]:
        """A_0, A_1, …, each (s_out, c_out)."""
        return self.transition.conv.weight.view(-1, self.crc.d, self.crc.s_out).permute(1, 2, 0).unbind(0)


def _pixels(h: Tensor) -> Tensor:
    """(N, C, H, W) in channels-last order as the rows of a matrix, (N·H·W, C), without a copy."""
    return h.permute(0, 2, 3, 1).reshape(-1, h.shape[1])


def _maps(rows: Tensor, like: Tensor) -> Tensor:
    """(N·H·W, C) as (N, C, H, W) in channels-last order."""
    return rows.unflatten(0, (like.shape[0], like.shape[2], like.shape[3])).permute(0, 3, 1, 2)
