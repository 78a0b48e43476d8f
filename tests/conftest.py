"""What every test starts from, and the specification in the form that the tests of layers compare with."""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when the kernels are first imported

from recnets.layers import CRC, Recurrent
from recnets.ops import naive

POISONED = ("ops", "layers")


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _poisoned(request):
    """In the tests of operators and layers torch.empty holds NaN, so that an element nobody wrote shows."""
    if request.path.parent.name not in POISONED or request.node.get_closest_marker("gpu"):
        yield
        return
    before = torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = before


@pytest.fixture(scope="session")
def in_two_processes() -> Callable[[Path, Path], list[Any]]:
    """`in_two_processes(worker, folder)`: `python worker RANK 2 folder` for both ranks, and what they leave there."""

    def run(worker: Path, folder: Path) -> list[Any]:
        processes = [
            subprocess.Popen(
                [sys.executable, str(worker), str(rank), "2", str(folder)],
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(2)
        ]
        try:
            for process in processes:
                output, _ = process.communicate(timeout=240)
                assert process.returncode == 0, output
        finally:
            for process in processes:
                process.kill()
                process.wait()
        return [torch.load(folder / f"result{rank}.pt") for rank in range(2)]

    return run


@pytest.fixture(scope="session")
def load_script() -> Callable[[str], Any]:
    """`load_script("publish_weights")`: that file of scripts/ as a module of its own."""

    def load(name: str) -> Any:
        path = Path(__file__).parents[1] / "scripts" / f"{name}.py"
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load


@dataclass
class Spec:
    """A layer's parameters and buffers as plain tensors of their own, run by `recnets.ops.naive`."""

    layer: nn.Module
    tensors: dict[str, Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self.tensors = {
            name: tensor.detach().clone().requires_grad_(tensor.is_floating_point() and "running" not in name)
            for name, tensor in self.layer.state_dict().items()
        }

    def norm(self, prefix: str) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
        names = ("running_mean", "running_var", "weight", "bias")
        if f"{prefix}norm.weight" not in self.tensors:
            return None
        mean, var, gamma, beta = (self.tensors[f"{prefix}norm.{name}"] for name in names)
        return mean, var, gamma, beta

    def __call__(self, x: Tensor) -> Tensor:
        if isinstance(self.layer, CRC):
            return self.crc(x, self.layer, "")
        assert isinstance(self.layer, Recurrent)
        z = naive.conv(self.crc(x, self.layer.crc, "crc."), self.tensors["transition.conv.weight"])
        norm = self.norm("transition.")
        assert norm is not None
        return torch.relu(naive.batch_norm(z, *norm, training=self.layer.training, momentum=0.1, eps=1e-5))

    def crc(self, x: Tensor, layer: CRC, prefix: str) -> Tensor:
        return naive.crc(
            x,
            self.tensors[f"{prefix}weight_x"],
            self.tensors[f"{prefix}weight_h"],
            self.tensors.get(f"{prefix}bias"),
            self.norm(prefix),
            d=layer.d,
            nonlinearity=layer.nonlinearity,
            recurrent=layer.recurrent,
            padding_mode=layer.padding_mode,
            training=layer.training,
        )

    def compare_tensors(self, tolerance: float = 1e-10) -> None:
        """Parameters, running statistics and, where there are any, gradients are those of the layer."""
        parameters = dict(self.layer.named_parameters())
        for name, own in self.layer.state_dict().items():
            if name.endswith("num_batches_tracked"):
                continue
            expected = self.tensors[name]
            torch.testing.assert_close(own, expected.detach(), rtol=tolerance, atol=tolerance, msg=f"value of {name}")
            if expected.grad is not None:
                close(parameters[name].grad, expected.grad, f"gradient of {name}", tolerance)


def close(actual: Tensor | None, expected: Tensor, what: str, tolerance: float = 1e-10) -> None:
    """Largest error at most `tolerance` of the largest value (or of 1)."""
    assert actual is not None, f"{what} is missing"
    assert actual.shape == expected.shape, f"{what} has shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    error = (actual - expected).abs().max().item()
    bound = tolerance * max(1.0, expected.abs().max().item())
    assert error <= bound, f"{what} is off by {error:.3g}, allowed {bound:.3g}"


def randomised(layer: nn.Module) -> nn.Module:
    """The layer in float64 with no parameter or statistic at its starting value, so that each one matters."""
    layer.double()
    with torch.no_grad():
        for name, tensor in layer.state_dict().items():
            if name.endswith("running_var"):
                tensor.uniform_(0.5, 2.0)
            elif name.endswith(("running_mean", "bias")):
                tensor.normal_(0.0, 0.5)
            elif "norm.weight" in name:
                tensor.uniform_(0.5, 1.5)
    return layer


def _compare(layer: nn.Module, x: Tensor) -> None:
    spec = Spec(layer)
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    out, expected = layer(ours), spec(theirs)
    close(out, expected, "output")
    probe = torch.randn_like(expected)
    (out * probe).sum().backward()
    (expected * probe).sum().backward()
    close(ours.grad, theirs.grad, "gradient of the input")
    spec.compare_tensors()
    assert torch.equal(ours.detach(), x), "the input was written to"
    with torch.no_grad():
        again = x.clone()
        close(layer(again), spec(again), "output without gradients")
        assert torch.equal(again, x), "the input was written to"
    spec.compare_tensors()


@pytest.fixture
def make_spec() -> Callable[[nn.Module], Spec]:
    """A layer's parameters in the hands of the naive loop: `spec = make_spec(layer); spec(x)`."""
    return Spec


@pytest.fixture
def randomise() -> Callable[[nn.Module], nn.Module]:
    return randomised


@pytest.fixture
def compare() -> Callable[[nn.Module, Tensor], None]:
    """`compare(layer, x)`: output with and without gradients, every gradient and the running statistics."""
    return _compare


@pytest.fixture
def assert_near() -> Callable[..., None]:
    return close
