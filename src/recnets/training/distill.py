"""Distillation from a trained teacher (Hinton et al. 2015)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from recnets.data import DataSet
from recnets.errors import RecNetsError
from recnets.models.weights import load_weights


def distillation_loss(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """T² · KL(softmax(teacher / T) ‖ softmax(student / T)), mean over the batch; both (n, K)."""
    log_p = functional.log_softmax(student / temperature, dim=1)
    log_q = functional.log_softmax(teacher / temperature, dim=1)
    return temperature**2 * functional.kl_div(log_p, log_q, reduction="batchmean", log_target=True)


def load_teacher(source: str, data: DataSet, device: torch.device) -> nn.Module:
    """The teacher, frozen and in eval mode; refused where its classes or its input are not the student's."""
    model, metadata = load_weights(source)
    classes = metadata.get("classes")
    if classes is not None and list(classes) != data.classes:
        raise RecNetsError(
            f"teacher {source}: it knows {len(classes)} classes of {metadata.get('dataset', 'another data set')}, "
            f"not the {data.num_classes} of {data.name}"
        )
    normalisation = metadata.get("normalisation") or {}
    for name, ours in (("mean", data.mean), ("std", data.std)):
        theirs = normalisation.get(name)
        if theirs is not None and (
            len(theirs) != len(ours) or any(abs(a - b) > 1e-4 for a, b in zip(theirs, ours, strict=True))
        ):
            raise RecNetsError(
                f"teacher {source}: it was trained with {name} {theirs} and would see images with {list(ours)}; "
                "take a teacher of the same data set"
            )
    return model.to(device).requires_grad_(False).eval()
