"""The hand-written derivatives against autograd on the definitions."""

import pytest
import torch

from dspark.drafters import fused
from dspark.drafters.attention import _attend
from dspark.drafters.backbone import rotate


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32).requires_grad_()


def plain_norm(x, weight, eps):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def check(ours, theirs, inputs):
    assert torch.allclose(ours, theirs, atol=1e-5)
    upstream = torch.randn(ours.shape, generator=torch.Generator().manual_seed(9))
    found = torch.autograd.grad(ours, inputs, upstream)
    expected = torch.autograd.grad(theirs, inputs, upstream)
    for one, two in zip(found, expected, strict=True):
        assert torch.allclose(one, two, atol=1e-5)


@pytest.mark.parametrize("chunk", [16, 1 << 17])
def test_rms_norm(monkeypatch, chunk):
    monkeypatch.setattr(fused, "CHUNK", chunk)
    x, weight = random(3, 5, 8), random(8, seed=1)
    check(fused.rms_norm(x, weight, 1e-5, torch.float32), plain_norm(x, weight, 1e-5), [x, weight])


@pytest.mark.parametrize("chunk", [16, 1 << 17])
def test_norm_and_rotation(monkeypatch, chunk):
    monkeypatch.setattr(fused, "CHUNK", chunk)
    x, weight = random(3, 5, 2, 8), random(8, seed=1)
    angles = random(3, 5, 4, seed=2).detach()
    cos, sin = angles.cos(), angles.sin()
    plain = rotate(plain_norm(x, weight, 1e-5).transpose(1, 2), cos.unsqueeze(1), sin.unsqueeze(1))
    check(fused.norm_rotate(x, weight, 1e-5, cos, sin), plain, [x, weight])


def test_attention():
    """Two kv heads, three blocks of four queries; the first block of the second row sees no context."""
    queries, keys, values = random(2, 2, 3, 4, 8), random(2, 2, 7, 8, seed=1), random(2, 2, 7, 8, seed=2)
    block_keys, block_values = random(2, 2, 3, 2, 8, seed=3), random(2, 2, 3, 2, 8, seed=4)
    visible = torch.arange(7) < torch.tensor([[1, 4, 7], [0, 2, 5]])[..., None]
    inputs = [queries, keys, values, block_keys, block_values]
    check(fused.attend(*inputs, ~visible), _attend(*inputs, visible), inputs)


def test_the_drafter_trains_on_the_function_that_it_infers_with(make_drafter):
    drafter = make_drafter()
    features, ids = random(2, 6, 64).detach(), torch.tensor([[8], [31]])
    arguments = (
        torch.arange(6).expand(2, 6),
        torch.arange(4, 8).expand(2, 1, 4),
        (torch.arange(6) < 4).expand(2, 1, 6),
    )
    inferred = drafter.block_hidden(drafter.block_inputs(ids), drafter.project(features), *arguments)
    drafter.requires_grad_(True)
    trained = drafter.block_hidden(drafter.block_inputs(ids), drafter.project(features), *arguments)
    assert trained.requires_grad
    assert torch.allclose(trained, inferred, atol=1e-5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rough = drafter.block_hidden(drafter.block_inputs(ids), drafter.project(features), *arguments)
    assert rough.dtype == torch.float32
    assert 0 < (rough - trained).norm() < 0.05 * trained.norm()
