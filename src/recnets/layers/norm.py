"""Batch normalisation modules as the layers use them, and their synchronised form."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from recnets.ops.norm import Norm


def norm_of(module: nn.BatchNorm1d | nn.BatchNorm2d, calls: int = 1) -> Norm:
    """The tensors and settings of a BN module for this forward pass, which applies it `calls` times.

    Counts the batches in training, as the module's own forward would.
    """
    tensors = (module.running_mean, module.running_var, module.weight, module.bias)
    if not module.training:
        return Norm(*tensors, batch_statistics=tensors[0] is None, momentum=0.0, eps=module.eps)
    momentum = module.momentum
    if module.num_batches_tracked is not None:
        module.num_batches_tracked.add_(calls)
        if momentum is None:  # torch's cumulative average
            if calls > 1:
                raise ValueError(
                    "momentum=None (the cumulative average, which swa_utils.update_bn sets) is not defined for a norm "
                    f"that is shared by {calls} steps of one pass; give it a momentum"
                )
            momentum = 1.0 / float(module.num_batches_tracked)
    group = None
    synchronised = isinstance(module, SyncBatchNorm1d | SyncBatchNorm2d | nn.SyncBatchNorm)
    if synchronised and dist.is_available() and dist.is_initialized():
        group = getattr(module, "process_group", None) or dist.group.WORLD
    momentum = 0.0 if momentum is None else momentum
    return Norm(*tensors, batch_statistics=True, momentum=momentum, eps=module.eps, group=group)


class SyncBatchNorm2d(nn.BatchNorm2d):
    """BN whose training statistics are those of the batches of all processes, on any device.

    `torch.nn.SyncBatchNorm` refuses CPU tensors and cannot normalise a single step of a CRC layer.
    """

    def forward(self, input: Tensor) -> Tensor:
        return norm_of(self).apply(input)


class SyncBatchNorm1d(nn.BatchNorm1d):
    """The same for (N, C) or (N, C, L), which the hidden classifier has."""

    def forward(self, input: Tensor) -> Tensor:
        return norm_of(self).apply(input.reshape(input.shape[0], input.shape[1], -1, 1)).reshape(input.shape)


def convert_sync_batchnorm(model: nn.Module) -> nn.Module:
    """Replace every `nn.BatchNorm1d` and `nn.BatchNorm2d` of `model`, CRC layers' included, by the synchronised one.

    In place, keeping the parameters and buffers themselves; returns the model (a new one if it is a norm itself).
    """

    def converted(module: nn.BatchNorm1d | nn.BatchNorm2d) -> nn.Module:
        settings: dict[str, Any] = {
            "eps": module.eps,
            "momentum": module.momentum,
            "affine": module.affine,
            "track_running_stats": module.track_running_stats,
        }
        kind = SyncBatchNorm2d if isinstance(module, nn.BatchNorm2d) else SyncBatchNorm1d
        new = kind(module.num_features, **settings).train(module.training)
        for name, parameter in module.named_parameters(recurse=False):
            setattr(new, name, parameter)
        for name, buffer in module.named_buffers(recurse=False):
            new.register_buffer(name, buffer)
        return new

    if isinstance(model, SyncBatchNorm1d | SyncBatchNorm2d):
        return model
    if isinstance(model, nn.BatchNorm1d | nn.BatchNorm2d):
        return converted(model)
    for name, child in model.named_children():
        setattr(model, name, convert_sync_batchnorm(child))
    return model
