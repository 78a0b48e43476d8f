"""What a model costs: parameters, multiply-adds, receptive field, and the memory its tensors need at once."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from recnets.layers import CRC, Recurrent, TransitionBlock
from recnets.models.recnet import RecNet, Stem
from recnets.utils import image_sides


@dataclass(frozen=True)
class LayerProfile:
    """One row: a layer in the form of the paper's architecture table.

    `macs` is counted, `paper_macs` is the paper's cost formula (CRC layers only). `out_size` is None for vectors.
    """

    name: str
    layer: str
    out_channels: int
    out_size: tuple[int, int] | None
    parameters: int
    macs: int
    paper_macs: int | None = None


@dataclass(frozen=True)
class Profile:
    """What `profile` measures, for one picture.

    Attributes:
        image_size: height and width of the picture.
        parameters: trainable and not, buffers left out.
        macs: multiply-adds, half of what `torch.utils.flop_counter` counts.
        crc_macs: the part of `macs` in CRC layers.
        crc_macs_paper: the paper's formula for the same layers. It counts the W_h convolution d times where d-1
            happen, and adds two additions an output.
        receptive_field: side in pixels of the square that a position of the last map sees; None if not known.
        peak_concat: bytes of the largest sum of tensors alive in a forward pass, the picture included, parameters
            and buffers not, with every hidden state concatenated.
        peak_stream: the same in stream mode; equal for models without Recurrent modules.
        layers: a row a layer, in the order of the forward pass.
    """

    image_size: tuple[int, int]
    parameters: int
    macs: int
    crc_macs: int
    crc_macs_paper: int
    receptive_field: int | None
    peak_concat: int
    peak_stream: int
    layers: tuple[LayerProfile, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return asdict(self)


class LiveTensors(TorchDispatchMode):
    """Counts the bytes of the storages alive while it is on, and remembers the most (`peak`).

    Every storage an operator returns is held by a weak reference and counted once however many views it has.
    `ignored` (parameters, buffers) are not counted; `counted` (the input) are from the start. Temporary memory
    inside one operator is out of its sight.
    """

    def __init__(self, ignored: Iterator[Tensor], counted: tuple[Tensor, ...]) -> None:
        super().__init__()
        self._ignored = {StorageWeakRef(t.untyped_storage()) for t in ignored}
        self._alive: dict[StorageWeakRef, int] = {}
        self.peak = 0
        self._count(counted)

    def _count(self, tensors: Any) -> None:
        for tensor in tree_leaves(tensors):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                reference = StorageWeakRef(storage)
                if reference not in self._ignored:
                    self._alive[reference] = storage.nbytes()
        self._alive = {r: size for r, size in self._alive.items() if not r.expired()}
        self.peak = max(self.peak, sum(self._alive.values()))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self._count(out)
        return out


def peak_live_bytes(module: nn.Module, x: Tensor) -> int:
    """The largest sum of tensors alive in `module(x)`, the input included, parameters and buffers not."""
    with LiveTensors(_state(module), (x,)) as live:
        module(x)
    return live.peak


def _state(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def profile(model: nn.Module, image_size: int | tuple[int, int] = 32) -> Profile:
    """The cost of `model` on one picture of `image_size`, in evaluation; the model itself is left as it is.

    Works on a copy without storage, so it takes no memory and little time on any device. Multiply-adds and rows are
    those of concat mode; streaming does the same arithmetic.
    """
    model = getattr(model, "_orig_mod", model)  # what torch.compile wraps
    shadow, x = _shadow(model, image_size)
    with torch.no_grad():
        rows, macs = _rows(shadow, x)
        concat = peak_live_bytes(shadow, x)
        _set_mode(shadow, "stream")
        stream = peak_live_bytes(shadow, x)
    crc_rows = [row for row in rows if row.paper_macs is not None]
    return Profile(
        image_size=(x.shape[2], x.shape[3]),
        parameters=count_parameters(model),
        macs=macs,
        crc_macs=sum(row.macs for row in crc_rows),
        crc_macs_paper=sum(row.paper_macs or 0 for row in crc_rows),
        receptive_field=receptive_field(model),
        peak_concat=concat,
        peak_stream=stream,
        layers=tuple(rows),
    )


def count_parameters(model: nn.Module) -> int:
    """Parameters of a model, each counted once; buffers are none."""
    return sum(p.numel() for p in model.parameters())


def count_macs(model: nn.Module, image_size: int | tuple[int, int] = 32) -> int:
    """Multiply-adds of one picture alone, where the rest of a profile is not needed."""
    shadow, x = _shadow(model, image_size)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        shadow(x)
    return counter.get_total_flops() // 2


def check_image_size(model: nn.Module, image_size: int | tuple[int, int]) -> tuple[int, int]:
    """(height, width) if the model takes pictures of that size, else its own error."""
    shadow, x = _shadow(model, image_size)
    with torch.no_grad():
        shadow(x)
    return x.shape[2], x.shape[3]


def _shadow(model: nn.Module, image_size: int | tuple[int, int]) -> tuple[nn.Module, Tensor]:
    """A copy without storage, in evaluation and concat mode, and a picture for it."""
    height, width = image_sides(image_size)
    shadow = copy.deepcopy(model).to("meta").eval()
    _set_mode(shadow, "concat")
    for module in shadow.modules():  # kernels take no tensors without storage
        if hasattr(module, "backend"):
            setattr(module, "backend", "torch")  # noqa: B010 - mypy knows modules' own attributes only
    dtype = next((p.dtype for p in shadow.parameters()), torch.float32)
    channels = int(getattr(model, "in_channels", 3))
    return shadow, torch.empty(1, channels, height, width, device="meta", dtype=dtype)


def _set_mode(model: nn.Module, mode: str) -> None:
    for module in model.modules():
        if isinstance(module, Recurrent):
            module.mode = mode


def crc_cost(crc: CRC, height: int, width: int) -> int:
    """The paper's cost of a CRC layer, H·W·(C_in + C_out)·C_out·k²/d + 2·H·W·C_out, each kernel with its own k²."""
    kx, kh = crc.weight_x.shape[-1], crc.weight_h.shape[-1]
    convolutions = crc.d * crc.s_out * (crc.s_in * kx * kx + crc.s_out * kh * kh)
    return height * width * (convolutions + 2 * crc.d * crc.s_out)


def receptive_field(model: nn.Module) -> int | None:
    """Side of the square of pixels that one position of a RecNet's last map depends on; None for other models."""
    if not isinstance(model, RecNet):
        return None
    field, stride = 3, 1  # the stem
    for i, stage in enumerate(model.stages):
        if i:  # 2×2 max pooling
            field += stride
            stride *= 2
        for crc in (m for m in stage.modules() if isinstance(m, CRC)):
            radius_x, radius_h = crc.weight_x.shape[-1] // 2, crc.weight_h.shape[-1] // 2
            # The first segment reaches the last state through d-1 convolutions with W_h; grouped, through one.
            field += 2 * stride * (radius_x + (crc.d - 1 if crc.recurrent else 1) * radius_h)
    return field


def _units(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The modules that make a row: containers are opened, and a Recurrent module is its two layers."""
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        if type(child) in (nn.Sequential, nn.ModuleList) or isinstance(child, Recurrent):
            yield from _units(child, f"{path}.")
        else:
            yield path, child


def _rows(model: nn.Module, x: Tensor) -> tuple[list[LayerProfile], int]:
    """One row a call of a unit, and the multiply-adds of the whole pass."""
    counter = FlopCounterMode(display=False)
    rows: list[LayerProfile] = []
    before: list[int] = []
    seen: set[nn.Module] = set()

    def enter(module: nn.Module, args: Any) -> None:
        before.append(counter.get_total_flops())

    def leave(path: str, module: nn.Module, out: Tensor) -> None:
        flops = counter.get_total_flops() - before.pop()
        parameters = 0 if module in seen else sum(p.numel() for p in module.parameters())
        seen.add(module)
        if isinstance(module, nn.Identity):
            return
        shape = out.shape
        size = (shape[2], shape[3]) if out.dim() == 4 else None
        cost = crc_cost(module, *size) if isinstance(module, CRC) and size else None
        rows.append(LayerProfile(path, _label(module), shape[1], size, parameters, flops // 2, cost))

    with contextlib.ExitStack() as stack:
        for path, unit in _units(model):
            first = unit.register_forward_pre_hook(enter)
            last = unit.register_forward_hook(lambda module, _, out, path=path: leave(path, module, out))
            stack.callback(first.remove)
            stack.callback(last.remove)
        with counter:
            model(x)
    if isinstance(model, RecNet):
        _insert_average_pooling(rows)
    return rows, counter.get_total_flops() // 2


def _insert_average_pooling(rows: list[LayerProfile]) -> None:
    """RecNet averages with a function, not a module; the paper's table gives it a row."""
    last = max(i for i, row in enumerate(rows) if row.out_size is not None)
    size = rows[last].out_size
    assert size is not None
    label = f"Average Pooling ({size[0]}×{size[1]})"
    rows.insert(last + 1, LayerProfile("", label, rows[last].out_channels, (1, 1), 0, 0))


def _label(module: nn.Module) -> str:
    """The layer as the paper's architecture table writes it, where it does."""
    match module:
        case Stem():
            return "CONV (3×3) + BN + ReLU"
        case CRC():
            return f"CRC ({module.s_in}, {module.s_out}, {module.d})"
        case TransitionBlock():
            return f"TB ({module.c_in}, {module.c_out})"
        case nn.MaxPool2d():
            return f"Max Pooling ({_square(module.kernel_size)})"
        case nn.AvgPool2d():
            return f"Average Pooling ({_square(module.kernel_size)})"
        case nn.Linear():
            return f"Linear ({module.in_features}, {module.out_features})"
        case nn.Conv2d():
            groups = f", {module.groups} groups" if module.groups > 1 else ""
            return f"CONV ({_square(module.kernel_size)}{groups})"
        case nn.BatchNorm1d() | nn.BatchNorm2d():
            return "BN"
    return type(module).__name__


def _square(size: int | tuple[int, ...]) -> str:
    height, width = (size, size) if isinstance(size, int) else size
    return f"{height}×{width}"
