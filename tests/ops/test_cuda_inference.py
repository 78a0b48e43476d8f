"""A Recurrent module in evaluation by one CUDA kernel: plans anywhere, results and use in a network on a GPU."""

import copy

import pytest
import torch
from torch import nn

from recnets import Recurrent, create_model, list_models
from recnets.deploy import squeeze
from recnets.ops.cuda import inference, inference_plan, plan
from recnets.ops.cuda.inference_plan import Module
from recnets.ops.cuda.plan import Layer, cdiv

MULTIPROCESSORS = 132
# N, H, W, s_in, s_out, d, c_out, pool, kernel_x, kernel_h
SHAPES = [
    (3, 32, 32, 8, 32, 10, 80, False, 3, 3),  # rows of an image a block
    (70, 32, 32, 8, 32, 10, 160, True, 3, 3),
    (1, 16, 16, 16, 64, 10, 320, True, 3, 3),
    (70, 8, 8, 32, 128, 10, 320, False, 3, 3),  # channels split over the blocks of a cluster
    (2, 32, 32, 24, 96, 3, 480, True, 3, 3),  # a cluster of 16
    (70, 8, 8, 24, 96, 30, 720, False, 3, 3),
    (301, 8, 8, 8, 32, 15, 120, False, 3, 3),  # several images a block, the last group not full
    (3, 13, 9, 12, 48, 3, 36, True, 3, 3),  # nothing is a power of two
    (3, 10, 24, 8, 32, 3, 44, False, 3, 3),
    (3, 16, 16, 16, 64, 1, 64, False, 3, 3),  # one step
    (1, 64, 64, 4, 16, 3, 40, True, 3, 3),
    (3, 12, 12, 8, 32, 3, 40, True, 1, 3),
    (3, 12, 12, 8, 32, 3, 40, False, 3, 1),
]
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
NAMES = [name for name in list_models("recnet_*") if "." not in name]


@pytest.mark.parametrize("n", [1, 64, 1024])
@pytest.mark.parametrize("name", NAMES)
def test_every_named_model_has_plans_that_fit(name, n):
    modules = [m for m in create_model(name).modules() if isinstance(m, Recurrent)]
    for i, (m, size) in enumerate(zip(modules, [32, 32, 16, 16, 8, 8], strict=True)):
        crc, c_out = m.crc, m.transition.c_out
        module = Module(Layer(n, size, size, crc.d, crc.s_in, crc.s_out, 3, 3), c_out, i in (1, 3))
        found = inference_plan.inference(module, MULTIPROCESSORS)
        assert found is not None
        assert found.shared <= plan.SHARED
        splits = crc.s_out // found.nb
        assert found.cluster == splits * cdiv(size, found.rows)
        assert found.last.wn * found.last.nt * 8 * splits >= c_out
        assert found.conv.wn * found.conv.nt * 8 == found.nb
        assert found.last.warps <= found.conv.warps <= 8


@pytest.mark.parametrize(
    "layer", [Layer(2, 8, 8, 2, 8, 24, 3, 3), Layer(2, 8, 8, 2, 8, 32, 5, 3), Layer(2, 8, 80, 2, 8, 32, 3, 3)]
)
def test_there_is_no_plan_where_there_is_no_kernel(layer):
    assert inference_plan.inference(Module(layer, 80, False), MULTIPROCESSORS) is None


def test_a_small_device_has_plans_too():
    module = Module(Layer(2, 32, 32, 3, 24, 96, 3, 3), 480, True)
    assert inference_plan.inference(module, 16) is not None


def test_a_tensor_on_the_cpu_is_not_for_this_kernel():
    x = torch.zeros(1, 8, 8, 16, dtype=torch.bfloat16)
    assert not inference.supports(x, Module(Layer(1, 8, 8, 2, 8, 32, 3, 3), 80, False))


def randomise(module: nn.Module, gain: float = 1.0) -> nn.Module:
    """Norms as after training, weights about `gain`; a few weights are negative."""
    for norm in module.modules():
        if isinstance(norm, nn.BatchNorm2d):
            nn.init.uniform_(norm.weight, 0.5 * gain, 1.5 * gain)
            norm.weight.data[::7] *= -1
            nn.init.normal_(norm.bias, std=0.2)
            assert norm.running_mean is not None
            assert norm.running_var is not None
            nn.init.normal_(norm.running_mean, std=0.2)
            nn.init.uniform_(norm.running_var, 0.5, 1.5)
    return module


def module_and_input(shape, dtype, device="cuda") -> tuple[Recurrent, torch.Tensor]:
    """Of a shape as in SHAPES; x (N, d·s_in, H, W), channels-last."""
    n, h, w, s_in, s_out, d, c_out, _, kernel_x, kernel_h = shape
    module = randomise(Recurrent(s_in, s_out, c_out, d, kernel_x=kernel_x, kernel_h=kernel_h)).to(device).eval()
    assert isinstance(module, Recurrent)
    for p in module.parameters():
        p.data = p.data.to(dtype).float()  # so that only computing rounds, not the parameters
    return module, torch.randn(n, h, w, d * s_in, device=device).to(dtype).permute(0, 3, 1, 2)


@on_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_against_plain_pytorch_in_float64(shape, dtype, rms):
    pool = shape[7]
    module, x = module_and_input(shape, dtype)
    held = [torch.full((2**power,), torch.nan, device="cuda") for power in range(8, 27)]
    del held  # NaN is in the memory that the output will get
    with torch.no_grad():
        with torch.autocast("cuda", dtype=dtype):
            out, again = module(x, pool=pool), module(x, pool=pool)
            assert module._fused(x, pool) is not None
        expected = copy.deepcopy(module).double()(x.double(), pool=pool)
    assert out.dtype == dtype
    assert out.shape == expected.shape
    assert torch.equal(out, again)
    assert rms(out, expected) < 1e-2


@on_gpu
@pytest.mark.gpu
def test_operator_is_registered_as_torch_expects():
    module = randomise(Recurrent(8, 32, 80, 3)).cuda().eval()
    x = torch.randn(2, 24, 8, 8, device="cuda", dtype=torch.bfloat16)
    norms = [
        (m.weight, m.bias, m.running_mean, m.running_var, m.eps) for m in (module.crc.norm, module.transition.norm)
    ]
    matrix = module.transition.conv.weight.flatten(1)
    arguments = (x, module.crc.weight_x, module.crc.weight_h, *norms[0], matrix, *norms[1], 3, False)
    arguments = tuple(a.detach() if isinstance(a, torch.Tensor) else a for a in arguments)
    torch.library.opcheck(inference.recurrent_eval, arguments, test_utils=("test_schema", "test_faketensor"))


def takes_the_kernel(model: nn.Module, x: torch.Tensor) -> bool:
    """Do all Recurrent modules of a network run by the kernel?"""
    modules = [module for module in model.modules() if isinstance(module, Recurrent)]
    taken: list[bool] = []
    with torch.no_grad(), torch.autocast("cuda", dtype=torch.bfloat16):
        hooks = [
            m.register_forward_pre_hook(lambda m, args: taken.append(m._fused(*args, False) is not None))
            for m in modules
        ]
        model(x)
    for hook in hooks:
        hook.remove()
    return len(taken) == len(modules) and all(taken)


@on_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("name", ["recnet_60_480", "recnet_60_1280", "recnet_120_2880"])
def test_a_network_gives_what_plain_pytorch_gives_also_in_a_graph(name, rms):
    fused = randomise(create_model(name)).cuda().eval()
    plain = create_model(name, backend="torch").cuda().eval()
    plain.load_state_dict(fused.state_dict())
    x = torch.randn(5, 3, 32, 32, device="cuda")
    assert takes_the_kernel(fused, x)
    with torch.no_grad(), torch.autocast("cuda", dtype=torch.bfloat16):
        expected, out = plain(x), fused(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = fused(x)
        x.copy_(torch.randn_like(x))
        graph.replay()
        changed = plain(x)
    assert rms(out, expected) < 3e-2
    assert rms(captured, changed) < 3e-2


@on_gpu
@pytest.mark.gpu
def test_nothing_as_wide_as_all_hidden_states_is_allocated():
    module = randomise(Recurrent(16, 64, 160, 10)).cuda().eval()
    x = torch.randn(64, 16, 16, 160, device="cuda", dtype=torch.bfloat16).permute(0, 3, 1, 2)
    with torch.no_grad(), torch.autocast("cuda", dtype=torch.bfloat16):
        assert module._fused(x, False) is not None
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        module(x)
    assert torch.cuda.max_memory_allocated() - before < 64 * 16 * 16 * 640 * 2  # d·s_out channels in half precision


@on_gpu
@pytest.mark.gpu
def test_training_and_hooks_do_not_take_it():
    model = create_model("recnet_60_480").cuda()
    x = torch.randn(2, 3, 32, 32, device="cuda")
    with torch.autocast("cuda", dtype=torch.bfloat16):
        model.train()(x).sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    shapes: list[torch.Size] = []
    model.stages[0].register_forward_hook(lambda _, __, out: shapes.append(out.shape))
    with torch.no_grad(), torch.autocast("cuda", dtype=torch.bfloat16):
        model.eval()(x)
    assert shapes == [torch.Size([2, 80, 32, 32])]  # not pooled


@on_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_model_in_half_precision_needs_no_autocast(dtype, rms):
    fused = randomise(create_model("recnet_60_480"), gain=0.6).cuda().eval()  # within fp16's range
    x = torch.randn(3, 3, 32, 32, device="cuda")
    with torch.no_grad():
        assert rms(copy.deepcopy(fused).to(dtype)(x.to(dtype)), fused(x)) < 3e-2


@on_gpu
@pytest.mark.gpu
def test_a_squeezed_model_streams(rms):
    model = randomise(create_model("recnet_60_480")).cuda().eval()
    for module in model.modules():
        if isinstance(module, Recurrent):
            assert module.crc.norm is not None
            module.crc.norm.weight.data[::5] = 0
    small = squeeze(model).cuda().eval()
    x = torch.randn(3, 3, 32, 32, device="cuda")
    with torch.no_grad():
        expected = small(x)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            assert rms(small(x), expected) < 3e-2


@on_gpu
@pytest.mark.gpu
def test_norms_in_training_are_counted_once():
    model = randomise(create_model("recnet_60_480")).cuda().eval()
    norms = [module.train() for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    with torch.no_grad(), torch.autocast("cuda", dtype=torch.bfloat16):
        model(torch.randn(2, 3, 32, 32, device="cuda"))
    assert all(norm.num_batches_tracked == 1 for norm in norms)
