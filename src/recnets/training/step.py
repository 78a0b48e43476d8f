"""One training step: normalise, forward, loss, backward, update; eager or replayed as a CUDA graph.

Nothing here waits for the device. Loss and hits are summed there, and the first step with a loss that is not
finite is remembered there; the loop reads both at intervals.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from recnets.training.ema import WeightAverage
from recnets.training.mix import mix_images
from recnets.training.objective import Objective
from recnets.training.precision import Precision, autocast

WARM_UP_STEPS = 3  # before a capture: lazy initialisation, autotuning and compilation happen there


class Meter:
    """Sums over the steps of an epoch, on the device: loss, hits, images; and the first bad step."""

    def __init__(self, device: torch.device) -> None:
        wide = torch.float32 if device.type == "mps" else torch.float64
        self.loss = torch.zeros((), dtype=wide, device=device)
        self.hits = torch.zeros((), dtype=torch.int64, device=device)
        self.images = torch.zeros((), dtype=torch.int64, device=device)
        self.steps = torch.zeros((), dtype=torch.int64, device=device)
        self.first_bad = torch.full((), -1, dtype=torch.int64, device=device)

    def update(self, loss: Tensor, logits: Tensor, labels: Tensor) -> None:
        bad = (self.first_bad < 0) & ~torch.isfinite(loss)
        self.first_bad.copy_(torch.where(bad, self.steps, self.first_bad))
        self.loss += loss.to(self.loss.dtype) * len(labels)
        self.hits += (logits.argmax(1) == labels).sum()
        self.images += len(labels)
        self.steps += 1

    def tensors(self) -> list[Tensor]:
        return [self.loss, self.hits, self.images, self.steps, self.first_bad]

    def reset(self) -> None:
        for tensor in self.tensors():
            tensor.zero_()
        self.first_bad.fill_(-1)


@dataclass
class _Captured:
    """A recorded step and the buffers it reads."""

    graph: torch.cuda.CUDAGraph
    images: Tensor
    labels: Tensor
    mask: Tensor | None
    share: Tensor | None


class TrainStep:
    """Runs steps on uint8 batches.

    Args:
        model: the plain module (what is saved).
        forward: what is called for logits: `model`, or it compiled or wrapped for several processes.
        normalise: uint8 (n, C, H, W) -> float32.
        precision: in fp16 the loss is scaled, and a step whose gradients overflow is left out.
        world: processes whose gradients are averaged after each backward pass.
        graph: record one CUDA graph for every batch size, and replay it.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.SGD,
        objective: Objective,
        normalise: Callable[[Tensor], Tensor],
        *,
        forward: Callable[[Tensor], Tensor] | None = None,
        device: torch.device,
        precision: Precision = "fp32",
        channels_last: bool = False,
        average: WeightAverage | None = None,
        world: int = 1,
        graph: bool = False,
    ) -> None:
        self.model, self.optimizer, self.objective, self.normalise = model, optimizer, objective, normalise
        self.forward = forward if forward is not None else model
        self.device, self.precision, self.channels_last = device, precision, channels_last
        self.average, self.world, self.graph = average, world, graph
        self.meter = Meter(device)
        # Gradients of fp16 would vanish below 6e-8; what overflows is a step that is not made, and a smaller scale.
        self.scaler = torch.amp.GradScaler(device.type, enabled=precision == "fp16")
        self.scaler.scale(torch.zeros((), device=device))  # its tensors are made now: a recorded step changes them
        self._captured: dict[tuple[int, int], _Captured] = {}
        self._pool: Any = None
        start_momentum(optimizer)

    def set_lr(self, value: float) -> None:
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(value)  # in place: a recorded graph reads this tensor
            else:
                group["lr"] = value

    def __call__(
        self,
        images: Tensor,
        labels: Tensor,
        global_size: int,
        mask: Tensor | None = None,
        share: Tensor | None = None,
    ) -> None:
        """images uint8 (n, C, H, W) and labels (n,) are this process's part of `global_size` images.

        mask (H, W) and share () mix the batch, see `recnets.training.mix`.
        """
        if not self.graph:
            self._step(images, labels, global_size, mask, share)
            return
        key = (len(labels), global_size)
        captured = self._captured.get(key)
        if captured is None:
            captured = self._captured[key] = self._capture(images, labels, global_size, mask, share)
        captured.images.copy_(images)
        captured.labels.copy_(labels)
        if captured.mask is not None and mask is not None:
            captured.mask.copy_(mask)
        if captured.share is not None and share is not None:
            captured.share.copy_(share)
        captured.graph.replay()

    def _step(
        self, images: Tensor, labels: Tensor, global_size: int, mask: Tensor | None, share: Tensor | None
    ) -> None:
        inputs = self.normalise(images)
        if mask is not None:
            inputs = mix_images(inputs, mask)
        if self.channels_last:
            inputs = inputs.contiguous(memory_format=torch.channels_last)
        with autocast(self.precision, self.device):
            logits = self.forward(inputs)
            loss = self.objective(logits, labels, inputs, share)
        # Gradients are averaged over processes; this weight makes the average that of the global batch, however
        # its images are shared out.
        self.scaler.scale(loss * (len(labels) * self.world / global_size)).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        if self.average is not None:
            self.average.update()
        self.meter.update(loss.detach(), logits.detach(), labels)

    def _capture(
        self, images: Tensor, labels: Tensor, global_size: int, mask: Tensor | None, share: Tensor | None
    ) -> _Captured:
        """Record a step. Afterwards every tensor and random state is as before: no step has been made."""
        statics = [None if t is None else t.clone() for t in (images, labels, mask, share)]
        static_images, static_labels, static_mask, static_share = statics
        assert static_images is not None
        assert static_labels is not None
        arguments = (static_images, static_labels, global_size, static_mask, static_share)
        # Graphs never run at the same time and keep nothing between replays, so they share one pool of memory.
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        self.optimizer.zero_grad(set_to_none=True)
        scale = self.scaler.state_dict()
        with preserved(self.mutable_tensors(), self.device):
            side = torch.cuda.Stream(self.device)
            side.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(side):
                for _ in range(WARM_UP_STEPS):
                    self._step(*arguments)
            torch.cuda.current_stream(self.device).wait_stream(side)
            torch.cuda.synchronize(self.device)
        self.scaler.load_state_dict(scale)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            self._step(*arguments)
        return _Captured(graph, static_images, static_labels, static_mask, static_share)

    def mutable_tensors(self) -> list[Tensor]:
        """Every tensor that a step changes in place."""
        tensors = [*self.model.state_dict().values(), *momentum_buffers(self.optimizer)]
        if self.average is not None:
            tensors += self.average.tensors()
        return [t.detach() for t in tensors] + self.meter.tensors()


class preserved:
    """Puts tensors and random states back, in place, on leaving."""

    def __init__(self, tensors: list[Tensor], device: torch.device) -> None:
        self.tensors, self.device = tensors, device

    def __enter__(self) -> None:
        self.saved = [tensor.clone() for tensor in self.tensors]
        self.cpu = torch.get_rng_state()
        self.cuda = torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else None

    @torch.no_grad()
    def __exit__(self, *exc: object) -> None:
        for tensor, saved in zip(self.tensors, self.saved, strict=True):
            tensor.copy_(saved)
        torch.set_rng_state(self.cpu)
        if self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda, self.device)


def make_optimizer(
    model: nn.Module,
    *,
    lr: float,
    momentum: float,
    nesterov: bool,
    dampening: float,
    weight_decay: float,
    decay: str,
    device: torch.device,
) -> torch.optim.SGD:
    """SGD; decay "weights" leaves biases and normalisation (fewer than two dimensions) out of the penalty."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [{"params": parameters, "weight_decay": weight_decay}]
    if decay == "weights":
        groups = [
            {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": weight_decay},
            {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
        ]
    on_cuda = device.type == "cuda"
    # One tensor for all groups, on the device: the rate can then change under a recorded graph.
    rate: float | Tensor = torch.tensor(lr, device=device) if on_cuda else lr
    return torch.optim.SGD(
        [group for group in groups if group["params"]],
        lr=rate,
        momentum=momentum,
        nesterov=nesterov,
        dampening=dampening,
        fused=device.type in ("cuda", "cpu"),
    )


def start_momentum(optimizer: torch.optim.SGD) -> None:
    """Momentum buffers of zeros where there are none, so that the first step is like every other.

    With dampening 0 this changes nothing: 0 · momentum + gradient is what torch starts with.
    """
    for group in optimizer.param_groups:
        if group["momentum"] == 0:
            continue
        for parameter in group["params"]:
            state = optimizer.state[parameter]
            if state.get("momentum_buffer") is None:
                state["momentum_buffer"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)


def momentum_buffers(optimizer: torch.optim.SGD) -> list[Tensor]:
    """The momentum of every parameter, in the order of the groups."""
    return [
        optimizer.state[parameter]["momentum_buffer"]
        for group in optimizer.param_groups
        if group["momentum"] != 0
        for parameter in group["params"]
    ]


def named_momentum(model: nn.Module, optimizer: torch.optim.SGD) -> list[tuple[str, Tensor]]:
    """The same with the parameters' names."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    parameters = [p for group in optimizer.param_groups if group["momentum"] != 0 for p in group["params"]]
    return [(names[p], buffer) for p, buffer in zip(parameters, momentum_buffers(optimizer), strict=True)]
