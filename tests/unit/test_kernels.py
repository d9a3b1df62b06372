"""The Triton kernels, run on the CPU by Triton's interpreter, against float64.

On a GPU tests/unit/test_cuda.py runs them for real; here they are small, and cut into many slabs.
"""

import copy
import os
import subprocess
import sys

import pytest
import torch

import ttnorm
from ttnorm import cutting, functional, kernels, operators
from ttnorm.fuse import NormRelu
from ttnorm.pooling import FARTHEST, cell_moments, in_units, shares

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="test_cuda.py runs them for real")


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch):
    """So that small tensors have many of them."""
    for name, size in {
        "TILE": 32,
        "ACROSS": 8,
        "MAP_ACROSS": 8,
        "PART": 128,
        "MOST_SLABS": 8,
    }.items():
        monkeypatch.setattr(cutting, name, size)
    monkeypatch.setattr(cutting, "cut", cutting.Cut)  # what was cut before is remembered


SHAPES = [(5, 3, 4, 5), (7, 6), (4, 5, 9), (3, 4, 2, 3, 3), (9, 20, 3, 3), (3, 2, 16, 32)]


def problem(shape, channels_last=False, dtype=torch.float32, seed=0):
    g = torch.Generator().manual_seed(seed)
    x = (2 * torch.randn(shape, generator=g) + 1).to(dtype)
    if channels_last:
        formats = {4: torch.channels_last, 5: torch.channels_last_3d}
        x = x.contiguous(memory_format=formats[x.dim()])
    channels = shape[1]
    weight, bias, mean = torch.randn(3, channels, generator=g)
    var, alpha = torch.rand(2, channels, generator=g)
    alpha[0], alpha[-1] = 0, 1
    return x, weight, bias, alpha, mean, var + 0.5


def exact(x, weight, bias, alpha, mean, var, group_size, cross_term, seed):
    """The output and the gradients of x, weight, bias and alpha, in float64."""
    leaves = [None if t is None else t.double().requires_grad_() for t in (x, weight, bias, alpha)]
    y = functional.test_time_norm(
        leaves[0], mean.double(), var.double(), *leaves[1:], 1e-5, group_size, cross_term
    )
    y.backward(seed.double())
    return [y, *(None if t is None else t.grad for t in leaves)]


def close(found, expected, tolerance=1e-5):
    scale = expected.abs().max().clamp(min=1)
    assert found.shape == expected.shape
    assert ((found - expected).abs().max() / scale).item() < tolerance


# channels last, and what a program does at once: slabs, whole channels, or both passes over them
SLABS = {"WHOLE": 0, "AGAIN": 0}
WHOLE = {"WHOLE": 2048}
AGAIN = {"WHOLE": 0, "AGAIN": 2048, "PROGRAMS": 1}
WAYS = [(False, SLABS), (False, WHOLE), (False, AGAIN), (True, SLABS)]
LAYOUTS = [(shape, *way) for shape in SHAPES for way in WAYS if len(shape) > 3 or not way[0]]


@pytest.mark.parametrize(("shape", "channels_last", "way"), LAYOUTS)
@pytest.mark.parametrize("group_size", [None, 1, 2])
def test_forward_and_backward(shape, group_size, channels_last, way, monkeypatch):
    for name, size in way.items():
        monkeypatch.setattr(cutting, name, size)
    x, *rest = problem(shape, channels_last)
    weight, _, alpha, mean, var = rest
    seed = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    expected = exact(x, *rest, group_size, True, seed)
    y, *moments = kernels.forward(x, *rest, 1e-5, group_size, True)
    grads = kernels.backward(seed, x, weight, alpha, mean, var, *moments, 1e-5, group_size, True)
    assert y.stride() == x.stride()
    for found, wanted in zip((y, *grads), expected, strict=True):
        close(found, wanted)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("channels_last", [False, True])
def test_half_precision_is_computed_in_float32(dtype, channels_last):
    x, *rest = problem((5, 3, 4, 5), channels_last, dtype)
    y, mean, _ = kernels.forward(x, *rest, 1e-5, 2, True)
    expected = exact(x, *rest, 2, True, torch.ones(x.shape))[0]
    assert y.dtype == dtype
    assert mean.dtype == torch.float32
    # rounded once, at the end: a neighbour of the exact value (the interpreter cuts bfloat16 off)
    step = torch.finfo(dtype).eps * expected.abs().clamp(min=1e-2)
    assert ((y.double() - expected).abs() <= step).all()


@pytest.mark.parametrize("without", [("weight",), ("bias",), ("weight", "bias")])
@pytest.mark.parametrize("cross_term", [True, False])
def test_without_weight_or_bias_or_cross_term(without, cross_term):
    x, weight, bias, *rest = problem((6, 4, 5))
    weight = None if "weight" in without else weight
    bias = None if "bias" in without else bias
    alpha, mean, var = rest
    seed = torch.randn(x.shape)
    expected = exact(x, weight, bias, *rest, None, cross_term, seed)
    y, *moments = kernels.forward(x, weight, bias, *rest, 1e-5, None, cross_term)
    grads = kernels.backward(seed, x, weight, alpha, mean, var, *moments, 1e-5, None, cross_term)
    for found, wanted in zip((y, *grads), expected, strict=True):
        if wanted is not None:
            close(found, wanted)


@pytest.mark.parametrize("channels_last", [False, True])
def test_moments_of_values_far_from_zero_keep_their_digits(channels_last):
    x, *_ = problem((16, 3, 8, 8), channels_last)
    x = x + 1e4
    mean, var = kernels.moments(x)
    expected_var, expected_mean = torch.var_mean(x.double(), (0, 2, 3), correction=0)
    assert torch.allclose(mean.double(), expected_mean, rtol=1e-6)
    assert torch.allclose(var.double(), expected_var, rtol=1e-3)


@pytest.mark.parametrize("channels_last", [False, True])
def test_a_broken_sample_stays_in_its_group_and_out_of_channels_that_ignore_the_batch(
    channels_last,
):
    x, weight, bias, alpha, mean, var = problem((6, 3, 4, 4), channels_last)
    x[2, :, 1, 1] = float("nan")
    y, *moments = kernels.forward(x, weight, bias, alpha, mean, var, 1e-5, 2, True)
    assert y[[0, 1, 4, 5]].isfinite().all()
    assert y[3, 0].isfinite().all()  # alpha is 0 in this channel
    assert not y[3, 1].isfinite().any()
    seed = torch.ones(x.shape)
    grad, *_ = kernels.backward(seed, x, weight, alpha, mean, var, *moments, 1e-5, 2, True)
    assert grad[[0, 1, 4, 5]].isfinite().all()
    assert grad[2, 0].isfinite().all()


@pytest.mark.parametrize("channels_last", [False, True])
def test_given_moments_are_used_instead_of_the_batch_s(channels_last):
    x, weight, bias, alpha, mean, var = problem((6, 3, 4, 4), channels_last)
    given = torch.randn(3), torch.rand(3) + 0.5
    y, *_ = kernels.forward(x, weight, bias, alpha, mean, var, 1e-5, None, True, given=given)
    mixed = functional.mix_moments(alpha, mean, var, *given)
    close(y, functional.normalise(x, *mixed, weight, bias))


@pytest.mark.parametrize(("channels_last", "way"), WAYS)
@pytest.mark.parametrize("with_residual", [False, True])
def test_relu_and_residual_in_the_same_pass(channels_last, way, with_residual, monkeypatch):
    for name, size in way.items():
        monkeypatch.setattr(cutting, name, size)
    x, *rest = problem((5, 3, 4, 5), channels_last)
    residual = torch.randn(x.shape) if with_residual else None
    found, *_ = kernels.forward(x, *rest, 1e-5, 2, True, residual=residual, relu=True)
    expected, *_ = kernels.forward(x, *rest, 1e-5, 2, True)
    expected = expected if residual is None else expected + residual
    assert torch.allclose(found, expected.relu(), atol=1e-6)
    assert 0.2 < (found == 0).float().mean() < 0.8


def test_a_layout_that_is_neither_is_copied():
    x, *rest = problem((4, 6, 5, 3))
    strange = x.transpose(2, 3)
    y, *_ = kernels.forward(strange, *rest, 1e-5, None, True)
    close(y, functional.test_time_norm(strange.contiguous(), rest[3], rest[4], *rest[:3]))


class TestGeometry:
    @pytest.mark.parametrize("group_size", [None, 1, 7, 64])
    @pytest.mark.parametrize("shape", [(64, 256, 56, 56), (200, 32, 32, 32), (64, 24, 14, 14)])
    @pytest.mark.parametrize("channels_last", [False, True])
    def test_slabs_cover_a_group(self, shape, group_size, channels_last, monkeypatch):
        for name, value in {
            "TILE": 2048,
            "ACROSS": 64,
            "MAP_ACROSS": 256,
            "MOST_SLABS": 512,
        }.items():
            monkeypatch.setattr(cutting, name, value)
        x = torch.empty(shape, device="meta")
        if channels_last:
            x = x.contiguous(memory_format=torch.channels_last)
        _, g = kernels._geometry(x, group_size)
        assert 1 <= g.slabs <= 512
        assert (g.slabs - 1) * g.tile_units < g.units  # none is empty
        for tile in (g.reduce_tile, g.map_tile, g.merge_tile):
            sizes = [size for name, size in tile.items() if name.startswith("BLOCK")]
            assert sizes[0] * sizes[1] <= 4096
            assert all(size & (size - 1) == 0 for size in sizes)

    def test_a_long_sample_is_cut_into_parts(self, monkeypatch):
        monkeypatch.setattr(cutting, "PART", 16384)
        for pixels, parts in ((512 * 1024, 32), (224 * 224, 4), (112 * 112, 1), (333 * 333, 1)):
            _, g = kernels._geometry(torch.empty(1, 2, pixels, device="meta"), None)
            assert g.parts == parts
            assert g.part_across * g.vector * parts == pixels
            assert g.units == parts

    def test_what_is_side_by_side_is_divided_by_its_vector(self):
        for shape, vector in (((2, 3, 14, 14), 4), ((2, 3, 32, 32), 16), ((2, 3, 7, 7), 1)):
            _, g = kernels._geometry(torch.empty(shape), None)
            assert (g.vector, g.across * g.vector) == (vector, shape[2] * shape[3])


class TestOperators:
    @pytest.fixture(autouse=True)
    def _on_the_cpu(self, monkeypatch):
        monkeypatch.setattr(kernels, "usable", lambda x: x.dtype == torch.float32)

    def test_a_fused_network_uses_them_too(self):
        norm = ttnorm.convert_(torch.nn.Sequential(torch.nn.BatchNorm2d(3)), 0.4)[0]
        x, residual = torch.randn(2, 6, 3, 4, 4)
        with torch.no_grad():
            expected = torch.relu(norm(x) + residual)
            assert torch.allclose(NormRelu(norm)(x, residual), expected, atol=1e-6)

    def layer(self, x, weight, bias, alpha, mean, var, group_size=None):
        return functional.test_time_norm(x, mean, var, weight, bias, alpha, group_size=group_size)

    @pytest.mark.parametrize("group_size", [None, 2])
    def test_eager_code_uses_the_kernels(self, group_size):
        x, *rest = problem((5, 3, 4, 5))
        seed = torch.randn(x.shape)
        leaves = [t.clone().requires_grad_() for t in (x, *rest[:3])]
        y = self.layer(*leaves, *rest[3:], group_size)
        y.backward(seed)
        expected = exact(x, *rest, group_size, True, seed)
        for found, wanted in zip((y, *(t.grad for t in leaves)), expected, strict=True):
            close(found, wanted)

    @pytest.mark.parametrize("group_size", [None, 2])
    @pytest.mark.parametrize("channels_last", [False, True])
    def test_compiled_it_is_one_operator_with_the_same_gradients(self, group_size, channels_last):
        x, *rest = problem((5, 3, 4, 5), channels_last)
        seed = torch.randn(x.shape)
        leaves = [t.clone().requires_grad_() for t in (x, *rest[:3])]
        compiled = torch.compile(self.layer, fullgraph=True, backend="aot_eager")
        y = compiled(*leaves, *rest[3:], group_size)
        y.backward(seed)
        assert y.stride() == x.stride()
        expected = exact(x, *rest, group_size, True, seed)
        for found, wanted in zip((y, *(t.grad for t in leaves)), expected, strict=True):
            close(found, wanted)

    @pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
    def test_the_operators_are_what_pytorch_expects(self):
        x, *rest = problem((5, 3, 4, 5))
        leaves = [t.clone().requires_grad_() for t in (x, *rest[:3])]
        torch.library.opcheck(operators.forward, (*leaves, *rest[3:], 1e-5, 2, True))


def test_every_kernel_compiles_for_a_gpu():
    """Without one: down to the machine's code, in a process that does not interpret."""
    program = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from ttnorm import triton_backward, triton_forward, triton_stream

constants = dict(FINAL=False, AFFINE=True, CROSS_TERM=True, RESIDUAL=True,
                 RELU=True, INPUT=True, VEC=4, STAGES=3, BLOCK_K=2, BLOCK_N=4,
                 BLOCK_S=256, BLOCK_M=32, BLOCK_C=32, BLOCK_P=64, BLOCK_R=4,
                 FARTHEST=10.0)
HELPERS = ("mix", "mix_values", "units_of_group", "unit_in_rows", "units_of_slab", "merge_lanes",
           "moments_in_rows", "sums_in_rows", "group_gradients", "bounded")
data = ("x_ptr", "y_ptr", "grad_ptr", "out_ptr", "residual_ptr")
for module in (triton_forward, triton_backward, triton_stream):
    for name, kernel in vars(module).items():
        if not isinstance(kernel, triton.JITFunction) or name in HELPERS:
            continue
        types = {}
        for name in kernel.arg_names:
            of_pointer = "*bf16" if name in data else "*i64" if name == "group_ptr" else "*fp32"
            other = "fp32" if name == "eps" else "i32"
            types[name] = of_pointer if name.endswith("_ptr") else other
            if name in constants:
                types[name] = "constexpr"
        values = {name: constants[name] for name in kernel.arg_names if name in constants}
        source = ASTSource(kernel, signature=types, constexprs=values)
        compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32))
        print(kernel.__name__, len(compiled.asm["ptx"]))
"""
    command = [sys.executable, "-W", "ignore", "-c", program]
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert result.returncode == 0, result.stderr
    assert len(result.stdout.splitlines()) == 16


@pytest.mark.parametrize("cross_term", [True, False])
def test_frames_are_mixed_as_operations_do(cross_term):
    """Frames of three groups in any order, one of them broken, one that does not count."""
    samples, channels, number = 7, 5, 3
    frame_mean, frame_var = torch.randn(samples, channels), torch.rand(samples, channels)
    frame_mean[2, 1], frame_var[2, 3], frame_mean[5, 0] = torch.nan, torch.inf, 1e9
    group = torch.tensor([2, 0, 2, 1, 1, 0, 2])
    counts = torch.tensor([1.0, 1.0, 0.0, 0.0, 0.0, 1.0, 1.0])  # nothing is left of group 1
    # rows of a longer tensor, as those of one layer are
    mean, var, trust = (torch.rand(number, 12)[:, 4:9] for _ in range(3))
    trust[1], trust[:, 2] = 0, 0
    source_mean, unit = torch.randn(channels), torch.rand(channels) + 0.5
    found = kernels.mix_frames(
        frame_mean, frame_var, group, counts, mean, var, trust, source_mean, unit,
        farthest=FARTHEST, cross_term=cross_term,
    )  # fmt: skip
    share, _ = shares(group, counts, number)
    batch = cell_moments(share, group, *in_units(frame_mean, frame_var, source_mean, unit))
    batch = (source_mean + batch[0] * unit, batch[1] * unit.square())
    expected = functional.mix_moments(trust, mean, var, *batch, cross_term=cross_term)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs[group])


def test_a_stream_is_the_same_with_the_kernels(small_network, monkeypatch):
    networks = [
        ttnorm.stream_(ttnorm.convert_(copy.deepcopy(small_network), 0.4).eval(), memory="balanced")
        for _ in range(2)
    ]
    torch.manual_seed(0)
    for ids in (["a"], ["a", "b", "a"], ["b", "b", "c", "a"], ["a"]):
        x = torch.rand(max(len(ids), 3), 3, 12, 12)  # one id is for all frames
        outputs = []
        for network, usable in zip(networks, (False, True), strict=True):
            monkeypatch.setattr(kernels, "usable", lambda x, usable=usable: usable)
            with ttnorm.streams(network, ids), torch.no_grad():
                outputs.append(network(x))
        torch.testing.assert_close(*outputs)
