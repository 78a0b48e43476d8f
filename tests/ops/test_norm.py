"""Batch normalisation as data: slices of one set of parameters, and the affine form of evaluation."""

import pytest
import torch
from torch import nn

from recnets.layers.norm import norm_of
from recnets.models import create_model


def batch_norm(channels, **options):
    module = nn.BatchNorm2d(channels, **options).double()
    if module.affine:
        nn.init.uniform_(module.weight, 0.5, 1.5)
        nn.init.normal_(module.bias)
    if module.track_running_stats:
        module.running_mean.normal_()
        module.running_var.uniform_(0.5, 2.0)
    return module


@pytest.mark.parametrize("options", [{}, {"affine": False}, {"momentum": 0.3, "eps": 0.1}, {"momentum": None}], ids=str)
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
def test_is_the_module(options, training, assert_near):
    ours, theirs = batch_norm(3, **options), nn.BatchNorm2d(3, **options).double()
    theirs.load_state_dict(ours.state_dict())
    ours.train(training)
    theirs.train(training)
    for _ in range(3):
        z = torch.randn(2, 3, 4, 5, dtype=torch.float64)
        assert_near(norm_of(ours).apply(z), theirs(z), "output", 1e-12)
    for name, tensor in theirs.state_dict().items():
        assert torch.allclose(ours.state_dict()[name], tensor, atol=1e-12), name


def test_slices_are_views_of_the_statistics(assert_near):
    module, whole = batch_norm(6), batch_norm(6)
    whole.load_state_dict(module.state_dict())
    z = torch.randn(2, 6, 4, 5, dtype=torch.float64)
    norm = norm_of(module)
    parts = [norm.channels(i, i + 2).apply(z[:, i : i + 2]) for i in (0, 2, 4)]
    assert_near(torch.cat(parts, dim=1), whole(z), "output", 1e-12)
    for name, tensor in whole.state_dict().items():
        assert torch.allclose(module.state_dict()[name], tensor, atol=1e-12), name
    assert module.num_batches_tracked.item() == 1


@pytest.mark.parametrize("affine", [True, False])
def test_affine_form(affine, assert_near):
    module = batch_norm(3, affine=affine).eval()
    z = torch.randn(2, 3, 4, 5, dtype=torch.float64)
    scale, shift = norm_of(module).affine()
    assert_near(z * scale[:, None, None] + shift[:, None, None], module(z), "output", 1e-12)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.bfloat16, 1e-2)], ids=str)
def test_compiled_frozen_norms_have_gradients_in_the_order_of_their_input(dtype, bound, assert_near):
    """Those of F.batch_norm have not on CUDA, and a compiler that is told otherwise fails at run time."""
    torch._dynamo.reset()
    module, graphs = batch_norm(3).eval().to(dtype), []

    def backend(graph, _):
        graphs.append(str(graph.graph))
        return graph

    apply = torch.compile(lambda z: norm_of(module).apply(z), backend=backend, fullgraph=True)
    z = torch.randn(2, 3, 4, 5, dtype=dtype).to(memory_format=torch.channels_last)
    ours, theirs = z.clone().requires_grad_(), z.clone().requires_grad_()
    grad = torch.randn_like(z)
    out, expected = apply(ours), module(theirs)
    assert out.dtype == dtype
    assert_near(out, expected, "output", bound)
    out.backward(grad)
    expected.backward(grad)
    assert_near(ours.grad, theirs.grad, "gradient", bound)
    assert ours.grad.stride() == z.stride()
    assert "batch_norm" not in graphs[0]
    with torch.no_grad():
        apply(z)
    assert "batch_norm" in graphs[1]


def test_exported_networks_keep_their_norms():
    """For tools that fold them into the convolutions before them."""
    model = create_model("RecNet(4, 2, 2, 2, 2)").eval()
    program = torch.export.export(model, (torch.randn(2, 3, 8, 8),))
    norms = [node for node in program.graph.nodes if "batch_norm" in str(node.target)]
    assert len(norms) == 1 + 2 * (2 + 1) * 2  # the stem; in each stage two modules of two steps and a transition


def test_without_running_statistics_evaluation_uses_the_batch(assert_near):
    module = batch_norm(3, track_running_stats=False).eval()
    z = torch.randn(2, 3, 4, 5, dtype=torch.float64)
    norm = norm_of(module)
    assert norm.batch_statistics
    assert_near(norm.apply(z), module(z), "output", 1e-12)


def test_counts_what_it_is_told():
    module = batch_norm(3).train()
    norm_of(module, calls=4)
    assert module.num_batches_tracked.item() == 4
    norm_of(module.eval(), calls=4)
    assert module.num_batches_tracked.item() == 4
