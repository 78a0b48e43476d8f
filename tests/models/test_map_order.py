"""The maps of a network that trains on a GPU stay in the order of the kernels, which copy any other."""

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode

from recnets import create_model
from recnets.ops import dispatch

pytestmark = pytest.mark.skipif(not dispatch.INTERPRETED, reason="the kernels are for the GPU that is there")


class Kernels(TorchDispatchMode):
    """The operators of ours that run, and the maps of `count` images that they are given: shapes and strides."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count
        self.names: set[str] = set()
        self.given: list[tuple[str, torch.Size, bool]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "recnets":
            self.names.add(func._opname)
            for arg in args:
                if isinstance(arg, torch.Tensor) and arg.dim() == 4 and len(arg) == self.count:
                    self.given.append((func._opname, arg.shape, arg.permute(0, 2, 3, 1).is_contiguous()))
        return func(*args, **(kwargs or {}))


def training_step(model: torch.nn.Module, images: torch.Tensor) -> Kernels:
    """What a step calls, of tensors without values."""
    tensors = {name: tensor.detach() for name, tensor in model.state_dict(keep_vars=True).items()}
    trained = dict(model.named_parameters())
    with FakeTensorMode() as mode:
        state = {name: mode.from_tensor(t).requires_grad_(name in trained) for name, t in tensors.items()}
        x, labels = mode.from_tensor(images), torch.empty(len(images), dtype=torch.long)
        with Kernels(len(images)) as kernels:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = F.cross_entropy(functional_call(model, state, (x,)), labels)
            loss.backward()
    return kernels


@pytest.mark.parametrize("head", ["linear", "hidden"])
def test_no_map_is_copied_on_its_way(head, monkeypatch):
    model = create_model("RecNet(4, 4, 8, 3, 2)", num_classes=10, head=head, backend="triton").train()
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda _: True), raising=False)
    kernels = training_step(model, torch.empty(5, 3, 16, 16).to(memory_format=torch.channels_last))
    assert {"crc", "crc_backward", "norm_relu_train_backward", "norm_relu_pool_train_backward"} <= kernels.names
    assert len(kernels.given) > 20
    assert not [(name, shape) for name, shape, in_order in kernels.given if not in_order]
