"""BN's statistics as averages over many batches, in place of what training leaves: mostly those of the last few."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from recnets.layers import CRC
from recnets.training.precision import computing
from recnets.training.session import Session


def with_new_statistics(model: nn.Module, batches: Iterable[Tensor], momentum: float | None = None) -> nn.Module:
    """A copy in evaluation mode whose running statistics are from these inputs: averages, or what a momentum leaves.

    Gradients stay on, though nobody asks for any: so the network runs by the kernels that it was trained by.
    """
    model = copy.deepcopy(model).train()
    for norm in model.modules():
        if isinstance(norm, nn.modules.batchnorm._BatchNorm):
            norm.reset_running_stats()
            norm.momentum = momentum
    for inputs in batches:
        model(inputs)
    return model.eval()


def averaged_accuracy(session: Session, batches: int) -> float | None:
    """Percent of the test images that are right with averages over so many batches of training images.

    None where they are not defined: a norm that all steps of a layer share moves with each step.
    """
    if any(isinstance(m, CRC) and m.nonlinearity == "shared_bn_relu" for m in session.judged.modules()):
        return None
    recipe, processes, loader = session.recipe, session.processes, session.loader
    order = torch.channels_last if recipe.channels_last else torch.contiguous_format
    inputs = (
        loader.normalise(batch.images).contiguous(memory_format=order)
        for batch in itertools.islice(loader.epoch(recipe.epochs), batches)
        if batch.global_size >= 2 * processes.world  # a norm of vectors needs two
    )
    with computing(recipe.precision, session.device):
        model = with_new_statistics(session.judged, inputs)
    processes.copy_from_main(list(model.buffers()))
    return session.test(model).accuracy
