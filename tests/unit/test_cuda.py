"""On a GPU the same numbers as in float64 on the CPU."""

import copy

import pytest
import torch
import torch.nn.functional as F

import ttnorm
from ttnorm import functional

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture(autouse=True)
def _exact_convolutions(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


@pytest.mark.parametrize("group_size", [None, 1, 3])
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_forward_and_backward(dtype, channels_last, group_size):
    torch.manual_seed(0)
    x = (1 + 2 * torch.randn(8, 16, 9, 7)).to(dtype)
    if channels_last:
        x = x.contiguous(memory_format=torch.channels_last)
    mean, weight, bias, seed = *torch.randn(3, 16), torch.randn(x.shape).to(dtype)
    var, alpha = torch.rand(16) + 0.5, torch.rand(16)

    def run(device, to, exact):
        inputs = [x.to(device, to)] + [t.to(device, exact) for t in (weight, bias, alpha)]
        inputs = [t.detach().requires_grad_() for t in inputs]
        y = functional.test_time_norm(
            inputs[0],
            mean.to(device, exact),
            var.to(device, exact),
            *inputs[1:],
            group_size=group_size,
        )
        y.backward(seed.to(device, to))
        return [y.detach(), *(t.grad for t in inputs)]

    precise = torch.float64 if dtype == torch.float64 else torch.float32
    eps = torch.finfo(dtype).eps
    reference = run("cpu", torch.float64, torch.float64)
    for got, expected in zip(run("cuda", dtype, precise), reference, strict=True):
        assert (got.cpu().double() - expected).norm() <= (4 * eps + 1e-6) * expected.norm()
    assert run("cuda", dtype, precise)[0].stride() == x.stride()


def test_alpha_zero_and_one_are_batchnorm():
    x, mean, var = torch.randn(8, 4, 5, 5).cuda(), torch.randn(4).cuda(), torch.rand(4).cuda() + 0.5
    zero = functional.test_time_norm(x, mean, var, None, None, torch.zeros(4).cuda())
    torch.testing.assert_close(zero, F.batch_norm(x, mean, var))
    one = functional.test_time_norm(x, mean, var, None, None, torch.ones(4).cuda())
    torch.testing.assert_close(one, F.batch_norm(x, None, None, training=True))


def test_prior_and_post_training(small_network):
    loader = [(torch.rand(16, 3, 12, 12), torch.randint(4, (16,))) for _ in range(4)]
    config = ttnorm.PostTrainConfig(epochs=3, lr=0.02)
    results = [
        ttnorm.post_train_(copy.deepcopy(small_network).to(device), loader, config)
        for device in ("cpu", "cuda")
    ]
    for name in ("1", "4"):
        torch.testing.assert_close(
            results[1].alpha[name].cpu(), results[0].alpha[name], rtol=0, atol=0.02
        )


def test_amp(small_network):
    loader = [(torch.rand(16, 3, 12, 12), torch.randint(4, (16,))) for _ in range(4)]
    for amp in ("bfloat16", "float16"):
        config = ttnorm.PostTrainConfig(epochs=1, amp=amp)
        result = ttnorm.post_train_(copy.deepcopy(small_network).cuda(), loader, config)
        assert all(a.isfinite().all() for a in result.alpha.values())
