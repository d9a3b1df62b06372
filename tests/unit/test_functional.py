"""The maths: identities with BatchNorm, gradients, extreme inputs, errors."""

import pytest
import torch
import torch.nn.functional as F

import ttnorm
from ttnorm import functional

SHAPES = [(8, 3), (8, 3, 5), (8, 3, 5, 4), (8, 3, 2, 5, 4)]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
LAYOUTS = [
    (shape, last) for shape in SHAPES for last in (False, True) if not last or len(shape) > 3
]


def batch(shape, channels_last=False, dtype=torch.float32):
    x = (2 + 3 * torch.randn(shape, dtype=torch.float64)).to(dtype)
    return x.contiguous(memory_format=CHANNELS_LAST[x.dim()]) if channels_last else x


def parameters(dtype=torch.float32, channels=3):
    dtype = torch.float64 if dtype == torch.float64 else torch.float32
    mean, weight, bias = torch.randn(3, channels, dtype=dtype)
    return mean, torch.rand(channels, dtype=dtype) + 0.5, weight, bias


class TestIdentities:
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize(("shape", "channels_last"), LAYOUTS)
    def test_alpha_zero_is_eval_mode_batchnorm_exactly(self, shape, channels_last, dtype):
        x, params = batch(shape, channels_last, dtype), parameters(dtype)
        expected = F.batch_norm(x, *params, training=False)
        for group_size in (None, 3):
            y = functional.test_time_norm(x, *params, torch.zeros(3), group_size=group_size)
            if group_size is None:
                assert torch.equal(y, expected)
            else:
                torch.testing.assert_close(y, expected)

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize(("shape", "channels_last"), LAYOUTS)
    def test_alpha_one_is_train_mode_batchnorm(self, shape, channels_last, dtype):
        x, params = batch(shape, channels_last, dtype), parameters(dtype)
        y = functional.test_time_norm(x, *params, torch.ones(3))
        expected = F.batch_norm(x, None, None, *params[2:], training=True)
        torch.testing.assert_close(y, expected)
        assert y.stride() == expected.stride() == x.stride()

    def test_moments_are_those_of_the_mixture(self):
        """Eq. 2 is the law of total variance: check it on samples drawn with probability alpha."""
        source, target = torch.randn(3000).double() * 2 + 5, torch.randn(1000).double() - 1
        source_moments = functional.batch_moments(source[:, None])
        target_moments = functional.batch_moments(target[:, None])
        alpha = torch.tensor([0.25], dtype=torch.float64)  # 1,000 of 4,000
        mean, var = functional.mix_moments(alpha, *source_moments, *target_moments)
        pooled = torch.cat((source, target))
        torch.testing.assert_close(mean.squeeze(), pooled.mean())
        torch.testing.assert_close(var.squeeze(), pooled.var(correction=0))

    def test_cross_term_off_leaves_out_the_distance_of_means(self):
        zero, one = torch.zeros(1), torch.ones(1)
        _, var = functional.mix_moments(0.5 * one, zero, one, 10 * one, one, cross_term=False)
        assert var.item() == 1

    def test_scalar_alpha_is_broadcast(self):
        x, params = batch((8, 3, 5)), parameters()
        expected = functional.test_time_norm(x, *params, torch.full((3,), 0.3))
        assert torch.equal(functional.test_time_norm(x, *params, torch.tensor(0.3)), expected)


class TestGradients:
    @pytest.mark.parametrize("cross_term", [True, False])
    @pytest.mark.parametrize("group_size", [None, 1, 3])
    @pytest.mark.parametrize(("shape", "channels_last"), LAYOUTS)
    def test_gradcheck(self, shape, channels_last, group_size, cross_term):
        shape = (4, *(min(size, 3) for size in shape[1:]))
        x = batch(shape, channels_last, torch.float64)
        mean, var, weight, bias = parameters(torch.float64)
        # not 1: a lone sample then has no variance at all, which no finite difference survives
        alpha = torch.tensor([0.0, 0.4, 0.9], dtype=torch.float64)

        def fn(x, weight, bias, alpha):
            return functional.test_time_norm(
                x, mean, var, weight, bias, alpha, group_size=group_size, cross_term=cross_term
            )

        inputs = [t.requires_grad_() for t in (x, weight, bias, alpha)]
        assert torch.autograd.gradcheck(fn, inputs)

    @pytest.mark.parametrize("group_size", [None, 3])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_low_precision_gradients_follow_float64(self, dtype, group_size):
        x, (mean, var, weight, bias) = batch((8, 3, 5, 4), dtype=dtype), parameters()
        seed = torch.randn(x.shape).to(dtype)

        def gradients(to):
            inputs = [t.to(to[i > 0]).requires_grad_() for i, t in enumerate((x, weight, bias))]
            alpha = torch.full((3,), 0.4, dtype=to[1], requires_grad=True)
            y = functional.test_time_norm(
                inputs[0], mean.to(to[1]), var.to(to[1]), *inputs[1:], alpha, group_size=group_size
            )
            y.backward(seed.to(to[0]))
            return [t.grad.double() for t in (*inputs, alpha)]

        double = gradients((torch.float64, torch.float64))
        for got, expected in zip(gradients((dtype, torch.float32)), double, strict=True):
            assert (got - expected).norm() <= 2 * torch.finfo(dtype).eps * expected.norm() + 1e-6

    def test_without_affine_parameters(self):
        mean, var, _, _ = parameters(torch.float64)
        x = batch((4, 3, 2), dtype=torch.float64).requires_grad_()
        alpha = torch.full((3,), 0.4, dtype=torch.float64, requires_grad=True)
        assert torch.autograd.gradcheck(
            lambda x, a: functional.test_time_norm(x, mean, var, None, None, a), (x, alpha)
        )

    def test_backward_keeps_the_input_and_no_other_tensor_of_its_size(self):
        x, (mean, var, weight, bias) = batch((8, 3, 5, 4)).requires_grad_(), parameters()
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
            functional.test_time_norm(x, mean, var, weight, bias, torch.full((3,), 0.4))
        large = [t for t in saved if t.numel() >= x.numel()]
        assert len(large) == 1
        assert large[0].data_ptr() == x.data_ptr()
        assert all(t.numel() <= 3 for t in saved if t is not large[0])

    def test_in_place_relu_may_follow(self):
        for group_size in (None, 2):
            x = batch((4, 3, 5, 5)).requires_grad_()
            y = functional.test_time_norm(x, *parameters(), torch.rand(3), group_size=group_size)
            y.relu_().sum().backward()
            assert x.grad.isfinite().all()

    def test_second_derivatives_are_refused_not_wrong(self):
        x = batch((4, 3)).requires_grad_()
        y = functional.test_time_norm(x, *parameters(), torch.rand(3))
        (grad,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            grad.sum().backward()

    def test_gradcheck_at_alpha_one(self):
        mean, var, weight, bias = parameters(torch.float64)
        x = batch((6, 3, 4), dtype=torch.float64).requires_grad_()
        alpha = torch.ones(3, dtype=torch.float64, requires_grad=True)
        for size in (None, 2, 4):
            assert torch.autograd.gradcheck(
                lambda x, a: functional.test_time_norm(x, mean, var, weight, bias, a, 1e-5, size),  # noqa: B023
                (x, alpha),
            )


class TestExtremes:
    @pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
    @pytest.mark.parametrize("group_size", [None, 1, 3])
    def test_constant_channels_stay_finite(self, alpha, group_size):
        x = torch.full((6, 3, 4, 4), 7.0, requires_grad=True)
        y = functional.test_time_norm(
            x, *parameters(), torch.full((3,), alpha), group_size=group_size
        )
        y.square().sum().backward()
        assert y.isfinite().all()
        assert x.grad.isfinite().all()

    @pytest.mark.parametrize("shape", [(1, 3), (1, 3, 1, 1)])
    def test_one_value_per_channel_has_no_variance(self, shape):
        """Where train-mode BatchNorm refuses; with alpha = 1 nothing but the bias is left."""
        x, (mean, var, weight, bias) = batch(shape), parameters()
        y = functional.test_time_norm(x, mean, var, weight, bias, torch.ones(3))
        # the scale is 1 / sqrt(eps) = 316, and so much larger is a rounding error of x
        torch.testing.assert_close(
            y.flatten(), bias, rtol=0, atol=316 * 1.2e-7 * x.abs().max().item()
        )
        y = functional.test_time_norm(x, mean, var, weight, bias, torch.full((3,), 0.5))
        assert y.isfinite().all()

    @pytest.mark.parametrize("group_size", [None, 2])
    def test_float16_values_of_1e4_do_not_overflow(self, group_size):
        x = (1e4 * torch.randn(6, 3, 8, 8)).to(torch.float16).clamp(-6e4, 6e4)
        y = functional.test_time_norm(
            x, *parameters(), torch.full((3,), 0.5), group_size=group_size
        )
        assert y.isfinite().all()

    @pytest.mark.parametrize("shape", [(0, 3), (0, 3, 4, 4)])
    @pytest.mark.parametrize("group_size", [None, 2])
    def test_empty_batch_gives_an_empty_batch(self, shape, group_size):
        x = torch.zeros(shape, requires_grad=True)
        y = functional.test_time_norm(x, *parameters(), torch.rand(3), group_size=group_size)
        assert y.shape == shape
        y.sum().backward()

    @pytest.mark.parametrize("bad", [float("nan"), float("inf")])
    @pytest.mark.parametrize("channels_last", [False, True])
    def test_a_broken_sample_stays_in_its_group(self, bad, channels_last):
        x = batch((7, 3, 4, 4), channels_last)
        clean = functional.test_time_norm(x, *parameters(), torch.full((3,), 0.5), group_size=2)
        torch.manual_seed(0)
        x = batch((7, 3, 4, 4), channels_last)
        x[2, 1, 0, 0] = bad
        y = functional.test_time_norm(x, *parameters(), torch.full((3,), 0.5), group_size=2)
        others = [0, 1, 4, 5, 6]
        assert torch.equal(y[others], clean[others])
        assert y[2:4, 1].isnan().any()

    def test_a_broken_sample_does_not_reach_channels_that_ignore_the_batch(self):
        x, params = batch((4, 3, 2, 2)), parameters()
        x[0] = float("nan")
        for group_size in (None, 2):
            leaf = x.clone().requires_grad_()
            y = functional.test_time_norm(leaf, *params, torch.zeros(3), group_size=group_size)
            y[1:].sum().backward()
            assert y[1:].isfinite().all()
            assert leaf.grad[1:].isfinite().all()

    def test_distant_mean_does_not_cancel(self):
        """A naive E[x^2] - E[x]^2 in float32 has no correct digit here."""
        x = 1e4 + torch.randn(64, 3, 8, 8)
        for group_size in (None, 16):
            _, var = functional.batch_moments(x, group_size)
            assert ((var - 1).abs() < 0.2).all()


class TestErrors:
    def test_integers(self):
        with pytest.raises(TypeError, match=r"torch\.int64, expected a floating point"):
            functional.test_time_norm(torch.ones(2, 3).long(), *parameters(), torch.rand(3))

    @pytest.mark.parametrize("shape", [(3,), (1, 3, 1, 1, 1, 1)])
    def test_dimensions(self, shape):
        with pytest.raises(ValueError, match="expected 2 to 5"):
            functional.test_time_norm(torch.ones(shape), *parameters(), torch.rand(3))

    def test_channels(self):
        with pytest.raises(ValueError, match=r"running_mean has shape \(3,\), expected \(4,\)"):
            functional.test_time_norm(torch.ones(2, 4), *parameters(), torch.rand(4))

    def test_alpha_shape(self):
        with pytest.raises(ValueError, match=r"alpha has shape \(4,\), expected \(3,\)"):
            functional.test_time_norm(torch.ones(2, 3), *parameters(), torch.rand(4))

    def test_an_empty_batch_on_one_of_many_ranks(self):
        with pytest.raises(ValueError, match="the other ranks would wait"):
            functional.test_time_norm(
                torch.ones(0, 3), *parameters(), torch.rand(3), process_group=object()
            )

    def test_group_size(self):
        with pytest.raises(ValueError, match="group_size is 0, expected at least 1"):
            functional.test_time_norm(torch.ones(2, 3), *parameters(), torch.rand(3), group_size=0)


def test_autocast_gives_the_input_s_dtype_and_float32_moments():
    x, params = batch((8, 3, 5, 5), dtype=torch.bfloat16), parameters()
    alpha = torch.full((3,), 0.4, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = functional.test_time_norm(x, *params, alpha)
    y.sum().backward()
    assert y.dtype == torch.bfloat16
    assert alpha.grad.dtype == torch.float32
    assert functional.batch_moments(x)[0].dtype == torch.float32


def test_half_precision_parameters_are_computed_with_in_float32():
    x, params = batch((8, 3, 5, 5), dtype=torch.float16), parameters()
    halves = [p.half() for p in params]
    y = functional.test_time_norm(x, *halves, torch.full((3,), 0.4, dtype=torch.float16))
    expected = functional.test_time_norm(x, *(h.float() for h in halves), torch.full((3,), 0.4))
    torch.testing.assert_close(y, expected, rtol=2e-3, atol=2e-3)


def test_torch_func_derives_the_same_gradients(small_network):
    model, x = ttnorm.convert_(small_network.double(), 0.4), torch.rand(5, 3, 12, 12).double()
    weights = dict(model.named_parameters())

    def loss(weights, x):
        return torch.func.functional_call(model, weights, (x,)).square().sum()

    expected = torch.autograd.grad(loss(weights, x), list(weights.values()))
    detached = {name: weight.detach() for name, weight in weights.items()}
    actual = torch.func.grad(loss)(detached, x)
    for name, gradient in zip(weights, expected, strict=True):
        torch.testing.assert_close(actual[name], gradient)
    each = torch.func.vmap(torch.func.grad(loss), (None, 0))(detached, x[:, None])
    single = torch.func.grad(loss)(detached, x[3:4])
    torch.testing.assert_close(each["3.weight"][3], single["3.weight"])


def test_an_ensemble_under_vmap_has_the_gradients_of_its_networks():
    layers = [(torch.nn.Conv2d(2, 3, 1), torch.nn.BatchNorm2d(3)) for _ in range(2)]
    networks = [ttnorm.convert_(torch.nn.Sequential(*pair).eval(), 0.5) for pair in layers]
    x = torch.randn(5, 2, 4, 4)
    parameters, buffers = torch.func.stack_module_state(networks)

    def call(parameters, buffers):
        return torch.func.functional_call(networks[0], (parameters, buffers), x)

    y = torch.vmap(call)(parameters, buffers)
    torch.testing.assert_close(y, torch.stack([network(x) for network in networks]))
    (grad,) = torch.autograd.grad(y.square().sum(), parameters["0.weight"])
    for network, ours in zip(networks, grad, strict=True):
        (theirs,) = torch.autograd.grad(network(x).square().sum(), network[0].weight)
        torch.testing.assert_close(ours, theirs)
