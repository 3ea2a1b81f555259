"""
The tests: `python -m pytest`. They run offline on a CPU in under two minutes.

In file order: GeoNorm's mathematics, the norm modes, the model, sampling, data, options, training runs.
Mathematics is checked in float64 against formulas written out here, never against the code under test.
"""

import ast
import errno
import gzip
import hashlib
import io
import json
import math
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
from concurrent.futures import Future
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import geogpt
import prepare_data
import train
from geogpt import GEO_DECAYS, GPT, NORM_MODES, GPTConfig, context_start, exp_map
from prepare_data import (
    BPETokenizer,
    ByteTokenizer,
    CharTokenizer,
    TokenStream,
    UserError,
    load_tokens,
    prepare,
    read_meta,
    tokenizer_from_spec,
)

MODES = list(NORM_MODES)


def randn(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def on_sphere(*shape, seed=0, dtype=torch.float64):
    """Random vectors of RMS 1 over the last axis."""
    x = randn(*shape, seed=seed, dtype=dtype)
    return x / x.square().mean(-1, keepdim=True).sqrt()


def angle(x, y):
    """Angle between vectors over the last axis, exact for small and large ones alike."""
    u, v = x / x.norm(dim=-1, keepdim=True), y / y.norm(dim=-1, keepdim=True)
    return 2 * torch.atan2((u - v).norm(dim=-1), (u + v).norm(dim=-1))


def tangent(x, g):
    """P_x g, rho and t = |P_x g| / |x|, written out once more."""
    rho = (x * g).sum(-1, keepdim=True) / (x * x).sum(-1, keepdim=True)
    p = g - rho * x
    return p, rho.squeeze(-1), p.norm(dim=-1) / x.norm(dim=-1)


# ----------------------------------------------------------------------------------------------------------------------
# GeoNorm's step


def test_exp_map_by_hand():
    # On the circle of radius 5: tangent step of length 5 * 0.3 from (5, 0) turns by 0.3; the radial 7 does not matter.
    x, g = torch.tensor([[5.0, 0.0]], dtype=torch.float64), torch.tensor([[7.0, 1.5]], dtype=torch.float64)
    expected = torch.tensor([[5 * math.cos(0.3), 5 * math.sin(0.3)]], dtype=torch.float64)
    torch.testing.assert_close(exp_map(x, g), expected, rtol=0, atol=1e-10)
    half = torch.tensor([[5 * math.cos(0.15), 5 * math.sin(0.15)]], dtype=torch.float64)
    torch.testing.assert_close(exp_map(x, g, eta=0.5), half, rtol=0, atol=1e-10)


@pytest.mark.parametrize("eta", [0.1, 1.0, 2.5])
@pytest.mark.parametrize("max_angle", [0.0, math.pi / 4, math.pi])
def test_exp_map_keeps_the_length_and_turns_by_the_clamped_angle(eta, max_angle):
    x, g = on_sphere(50, 16), 0.7 * randn(50, 16, seed=1)
    y = exp_map(x, g, eta, max_angle)
    torch.testing.assert_close(y.norm(dim=-1), x.norm(dim=-1), rtol=1e-11, atol=0)
    th = eta * tangent(x, g)[2]
    if max_angle:
        th = th.clamp(max=max_angle)
    assert max_angle != math.pi / 4 or eta < 1 or (th == max_angle).any()  # the clamp is really met
    folded = torch.pi - (th % (2 * torch.pi) - torch.pi).abs()  # an angle between vectors is at most pi
    torch.testing.assert_close(angle(x, y), folded, rtol=1e-9, atol=1e-9)


def test_exp_map_stays_for_no_update_and_for_a_radial_one():
    x = on_sphere(20, 16)
    # the 1e-12 under the root turns x by an angle of 1e-6, of which the cosine is 1 - 5e-13
    torch.testing.assert_close(exp_map(x, torch.zeros_like(x)), x, rtol=1e-12, atol=0)
    for factor in (3.0, -0.5, 1e-3):
        torch.testing.assert_close(exp_map(x, factor * x), x, rtol=0, atol=1e-7)


def test_exp_map_is_the_tangent_step_to_first_order():
    x, g = on_sphere(20, 16), randn(20, 16, seed=1)
    errors = [(exp_map(x, s * g, 0.5) - (x + 0.5 * tangent(x, s * g)[0])).norm() for s in (1e-2, 5e-3)]
    assert 3.9 < errors[0] / errors[1] < 4.1  # halving g quarters the error: it is O(t^2)


def test_post_norm_without_gain_turns_by_atan2():
    """Post-Norm is the projection retraction: same great circle, another angle."""
    x, g = on_sphere(50, 16), randn(50, 16, seed=1)
    y = (x + g) / (x + g).square().mean(-1, keepdim=True).sqrt()
    p, rho, t = tangent(x, g)
    torch.testing.assert_close(angle(x, y), torch.atan2(t, 1 + rho), rtol=1e-10, atol=1e-10)
    th = torch.atan2(t, 1 + rho)
    # stepping by exactly that angle lands on the same point
    torch.testing.assert_close(exp_map(x, p * (th / t)[:, None], max_angle=0), y, rtol=1e-9, atol=1e-9)


def test_exp_map_gradient():
    x, g = randn(3, 6), 0.3 * randn(3, 6, seed=1)
    assert torch.autograd.gradcheck(lambda x, g: exp_map(x, g, 0.7), (x.requires_grad_(), g.requires_grad_()))
    far = (3 * randn(3, 6, seed=2)).requires_grad_()  # at the clamp
    assert torch.autograd.gradcheck(lambda x, g: exp_map(x, g, 0.7), (x, far))


def test_norm_and_its_gradient():
    """RMSNorm's closed-form gradient against finite differences, and both against torch's in fp32."""
    norm = geogpt.RMSNorm(6).double()
    norm.weight.data = 1 + 0.3 * randn(6)
    assert torch.autograd.gradcheck(
        lambda x, w: geogpt.RMSNormFunction.apply(x, w), (randn(2, 3, 6).requires_grad_(), norm.weight)
    )
    torch.testing.assert_close(norm(randn(4, 6)), rms_norm64(randn(4, 6), norm.weight))
    norm = norm.float()
    for scale in (1.0, 1e-3, 1e-12, 1e12):  # eps rules where the input is small
        x, h = scale * randn(4, 6, dtype=torch.float32), randn(4, 6, seed=1, dtype=torch.float32)
        x.requires_grad_()
        grads = [
            torch.autograd.grad(f(), (x, norm.weight), h)
            for f in (lambda: norm(x), lambda: nn.functional.rms_norm(x, (6,), norm.weight, 1e-6))
        ]
        torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-6 / scale)


def test_log_map_recovers_the_step():
    x, g = on_sphere(50, 16), randn(50, 16, seed=1)
    eta = 0.6
    y = exp_map(x, g, eta, max_angle=0)
    th = angle(x, y)[:, None]
    assert th.max() < math.pi
    torch.testing.assert_close(th / th.sin() * (y - th.cos() * x), eta * tangent(x, g)[0], rtol=1e-8, atol=1e-9)


def test_exp_map_turns_with_the_coordinates():
    x, g = on_sphere(20, 16), randn(20, 16, seed=1)
    rotation = torch.linalg.qr(randn(16, 16, seed=2)).Q
    torch.testing.assert_close(exp_map(x @ rotation, g @ rotation), exp_map(x, g) @ rotation, rtol=1e-10, atol=1e-10)


def test_exp_map_length_in_fp32():
    """| |x'|/|x| - 1 | < 1e-5 for |rho| <= 10, whatever the tangent part, and over 200 steps in a row without drift."""
    for width in (16, 128, 768):
        x = on_sphere(400, width, dtype=torch.float32)
        for rho in (-10.0, -1.0, 0.0, 3.0, 10.0):
            for size in (1e-4, 1e-2, 0.1, 1.0, 30.0):
                g = rho * x + size * tangent(x, randn(400, width, seed=1, dtype=torch.float32))[0]
                ratio = exp_map(x, g).double().norm(dim=-1) / x.double().norm(dim=-1)
                assert (ratio - 1).abs().max() < 1e-5, (width, rho, size)
    y = x
    for step in range(200):
        y = exp_map(y, randn(400, width, seed=step, dtype=torch.float32), 0.3)
    assert (y.double().norm(dim=-1) / x.double().norm(dim=-1) - 1).abs().max() < 2e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("max_angle", [0.0, math.pi / 4])
def test_exp_map_is_finite_everywhere(dtype, max_angle):
    base = on_sphere(30, 64, dtype=torch.float32)
    other = randn(30, 64, seed=1, dtype=torch.float32)
    for name, update in {
        "zero": 0 * other,
        "parallel": 2.5 * base,
        "opposite": -base,
        "tiny": 1e-20 * other,
        "denormal": 1e-42 * other,
        "huge": 1e15 * other / other.abs().max(),
    }.items():
        for x in (base, base.to(dtype)):  # the stream is fp32 under autocast; a bf16 model has both in bf16
            x, g = (t.detach().clone().requires_grad_() for t in (x, update.to(dtype)))
            y = exp_map(x, g, 0.5, max_angle)
            assert y.dtype == x.dtype and y.isfinite().all(), name
            y.backward(other.to(y.dtype))
            assert x.grad.isfinite().all() and g.grad.isfinite().all(), name
    x = torch.zeros(1, 64, requires_grad=True)  # what dropout on a narrow embedding can leave
    y = exp_map(x, other[:1])
    y.sum().backward()
    assert y.isfinite().all() and x.grad.isfinite().all()


def test_geo_decays_by_hand():
    table = {
        "none": [1, 1, 1, 1],
        "sqrt": [1, 0.5**0.5, 3**-0.5, 0.5],
        "linear": [1, 0.75, 0.5, 0.25],
        "harmonic": [1, 0.5, 1 / 3, 0.25],
    }
    assert table.keys() == GEO_DECAYS.keys()
    for decay, expected in table.items():
        model = GPT(GPTConfig(11, 8, 4, 2, 16, norm_mode="geo", geo_decay=decay, geo_alpha=2.0))
        for sublayer in ("attn", "mlp"):
            assert [getattr(block, sublayer).eta for block in model.blocks] == pytest.approx([2 * e for e in expected])


# ----------------------------------------------------------------------------------------------------------------------
# Norm modes


def tiny(norm_mode, n_layer=4, seed=0, **kw):
    """A small model in float64 with gains away from 1, so that a norm in the wrong place shows."""
    torch.manual_seed(seed)
    model = GPT(
        GPTConfig(
            **dict(dict(vocab_size=11, block_size=8, n_layer=n_layer, n_head=2, n_embd=16, norm_mode=norm_mode), **kw)
        )
    )
    for i, p in enumerate(model.parameters()):
        if p.dim() == 1:
            p.data = 1 + 0.3 * randn(*p.shape, seed=100 + i).float()
    return model.double()


def ids(*shape, vocab=11, seed=0):
    return torch.randint(vocab, shape, generator=torch.Generator().manual_seed(seed))


def rms_norm64(x, gain=1.0, eps=1e-6):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * gain


def attention64(x, sublayer, n_head):
    """Causal attention with rotary positions, token by token and head by head: (T, C) -> (T, C)."""
    T, C = x.shape
    hs = C // n_head
    q, k, v = (x @ w.T for w in (sublayer.matrices()[name].detach() for name in "qkv"))

    def turn(vector, position):  # complex numbers z_i = a_i + i b_i over neighbouring pairs, times e^(i p theta_i)
        z = torch.complex(vector[0::2], vector[1::2])
        theta = 10000.0 ** (-2 * torch.arange(hs // 2, dtype=torch.float64) / hs)
        z = z * torch.polar(torch.ones_like(theta), position * theta)
        return torch.stack((z.real, z.imag), 1).flatten()

    y = torch.zeros_like(x)
    for h in range(n_head):
        part = slice(h * hs, (h + 1) * hs)
        for t in range(T):
            scores = torch.stack([turn(q[t, part], t) @ turn(k[s, part], s) for s in range(t + 1)]) / math.sqrt(hs)
            y[t, part] = scores.softmax(0) @ v[: t + 1, part]
    return y @ sublayer.matrices()["out"].detach().T


def mlp64(x, sublayer):
    h = x @ sublayer.matrices()["fc"].detach().T
    h = h * 0.5 * (1 + torch.erf(h / math.sqrt(2)))
    return h @ sublayer.matrices()["proj"].detach().T


def exp64(x, g, eta, max_angle):
    """The exponential map as the textbook has it: through the unit tangent."""
    p, _, t = tangent(x, g)
    th = (eta * t).clamp(max=max_angle)[:, None]
    return th.cos() * x + th.sin() * x.norm(dim=-1, keepdim=True) * p / p.norm(dim=-1, keepdim=True)


def update64(mode, residual, x, F, k, L):
    """One residual update, transcribed from the papers. F: function of (T, C)."""
    gain = {name: module.weight.detach() for name, module in residual.named_children() if name != "F"}
    if mode == "pre":
        return x + F(rms_norm64(x, gain["N"]))
    if mode == "post":
        return rms_norm64(x + F(x), gain["N"])
    if mode == "peri":
        return x + rms_norm64(F(rms_norm64(x, gain["N_in"])), gain["N_out"])
    if mode == "geo":
        return exp64(x, F(x), 1.0 / k, math.pi / 4)
    if mode == "deepnorm":
        return rms_norm64((2 * L) ** (1 / 4) * x + F(x), gain["N"])
    if mode == "sandwich":
        return x + rms_norm64(F(rms_norm64(x, gain["N_in"])), gain["N_out"])
    if mode == "reorder":
        return x + rms_norm64(F(x), gain["N"])
    if mode == "lns":
        return x + F(rms_norm64(x, gain["N"]) / k**0.5)
    if mode == "mix":
        return rms_norm64(x + F(x), gain["N"]) if k <= L // 4 else x + F(rms_norm64(x, gain["N"]))
    if mode == "keel":
        return rms_norm64(2 * L * x + F(rms_norm64(x, gain["N_in"])), gain["N_out"])
    if mode == "orthogonal":
        return x + tangent(x, F(rms_norm64(x, gain["N"])))[0]
    raise AssertionError(f"no transcription of norm_mode {mode}")


def stream64(model, mode, tokens):
    """The whole model in float64 formulas up to the head: (T,) -> (T, C)."""
    x = rms_norm64(model.wte.weight.detach()[tokens], eps=0)
    for k, block in enumerate(model.blocks, 1):
        L = len(model.blocks)
        x = update64(mode, block.attn, x, lambda z: attention64(z, block.attn.F, 2), k, L)
        x = update64(mode, block.mlp, x, lambda z: mlp64(z, block.mlp.F), k, L)
    final = model.final_norm
    return rms_norm64(x, final.weight.detach()) if isinstance(final, geogpt.RMSNorm) else x


@pytest.mark.parametrize("n_layer", [4, 9])  # constants depend on depth
@pytest.mark.parametrize("mode", MODES)
def test_model_equals_its_formulas(mode, n_layer):
    model, tokens = tiny(mode, n_layer), ids(1, 8)
    # 1e-6 because the rotary tables are made in fp32
    torch.testing.assert_close(
        model.features(tokens)[0].detach(), stream64(model, mode, tokens[0]), rtol=1e-6, atol=1e-6
    )


@pytest.mark.parametrize("mode", MODES)
def test_documented_norms_and_no_others(mode):
    per_sublayer = {"geo": 0, "peri": 2, "sandwich": 2, "keel": 2}.get(mode, 1)
    final = {"post": 0, "deepnorm": 0, "keel": 0}.get(mode, 1)
    model = tiny(mode)
    norms = [module for module in model.modules() if isinstance(module, (geogpt.RMSNorm, nn.RMSNorm, nn.LayerNorm))]
    assert len(norms) == 4 * 2 * per_sublayer + final
    assert sum(p.numel() for p in model.parameters() if p.dim() == 1) == 16 * len(norms)


@pytest.mark.parametrize("mode", MODES)
def test_zero_out_projections_leave_what_the_formula_says(mode):
    model, tokens = tiny(mode), ids(2, 8)
    for residual in model.residuals().values():
        matrices = residual.F.matrices()
        matrices["out" if "out" in matrices else "proj"].data.zero_()
    x = rms_norm64(model.wte.weight[tokens], eps=0)
    for k, residual in enumerate(model.residuals().values()):  # post and its kin still normalise x, each time anew
        if mode in ("post", "deepnorm", "keel") or (mode == "mix" and k < 2):
            gain = residual.N_out if mode == "keel" else residual.N
            factor = {"deepnorm": 8**0.25, "keel": 8}.get(mode, 1)
            x = rms_norm64(factor * x, gain.weight)
    if mode not in ("post", "deepnorm", "keel"):
        x = rms_norm64(x, model.final_norm.weight)
    torch.testing.assert_close(model.features(tokens), x, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("mode", MODES)
def test_no_token_sees_the_future(mode):
    model, tokens = tiny(mode), ids(3, 8)
    changed = tokens.clone()
    changed[:, 5:] = (changed[:, 5:] + 1) % 11
    before, after = model(tokens)[0], model(changed)[0]
    assert torch.equal(before[:, :5], after[:, :5])
    assert (before[:, 5:] != after[:, 5:]).any(-1).all()


@pytest.mark.parametrize("mode", MODES)
def test_compiles_to_one_graph(mode):
    torch._dynamo.reset()
    model, tokens = tiny(mode, dropout=0.0), ids(2, 8)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(tokens, tokens)[1], model(tokens, tokens)[1])


@pytest.mark.parametrize("mode", MODES)
def test_every_parameter_learns(mode):
    model = tiny(mode)
    model(ids(4, 8), ids(4, 8, seed=1))[1].backward()
    for name, p in model.named_parameters():
        rows = p.grad.abs().sum(-1) if p.dim() == 1 else p.grad.abs().sum()
        assert rows.isfinite().all() and (rows > 0).all(), name


@pytest.mark.parametrize("mode", MODES)
def test_loss_at_the_start(mode):
    torch.manual_seed(0)
    x, y = ids(8, 64, vocab=256), ids(8, 64, vocab=256, seed=1)
    tied = GPT(GPTConfig(256, 64, 4, 4, 128, norm_mode=mode))
    assert abs(tied(x, y)[1].item() - math.log(256)) < 0.1
    untied = GPT(GPTConfig(256, 64, 4, 4, 128, norm_mode=mode, tie_weights=False)).double()
    assert untied(x, y)[1].item() == pytest.approx(math.log(256), rel=1e-6)


@pytest.mark.parametrize("mode", MODES)
def test_stream_stays_fp32_under_bf16_autocast(mode):
    model, seen = tiny(mode).float(), []
    for residual in model.residuals().values():
        residual.register_forward_hook(lambda module, inputs, out: seen.extend((inputs[0].dtype, out.dtype)))
    with torch.autocast("cpu", torch.bfloat16):
        _, loss = model(ids(2, 8), ids(2, 8, seed=1))
    loss.backward()
    assert set(seen) == {torch.float32} and loss.dtype == torch.float32
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_geo_stream_never_leaves_the_sphere():
    torch.manual_seed(0)
    model = GPT(GPTConfig(11, 8, 12, 2, 32, norm_mode="geo", geo_decay="none"))
    lengths = []
    for residual in model.residuals().values():
        residual.register_forward_hook(lambda module, inputs, out: lengths.append(out.square().mean(-1).sqrt()))
    model(ids(4, 8))
    assert (torch.stack(lengths) - 1).abs().max() < 2e-5 and len(lengths) == 24


@pytest.mark.parametrize("L", [4, 9])
def test_initial_weights(L):
    """The draws are the same for every mode; the constants are those of the papers, on the right matrices."""
    models = {}
    for mode in MODES:
        torch.manual_seed(3)
        models[mode] = GPT(GPTConfig(1000, 8, L, 2, 64, norm_mode=mode, tie_weights=False))
    gpt2 = {"out": (2 * L) ** -0.5, "proj": (2 * L) ** -0.5}
    deep = dict.fromkeys(("v", "out", "fc", "proj"), (8 * L) ** -0.25)
    scales = {"pre": gpt2, "sandwich": gpt2, "orthogonal": gpt2, "mix": gpt2, "deepnorm": deep}
    for mode, model in models.items():
        assert torch.equal(model.wte.weight, models["geo"].wte.weight)
        for name, residual in model.residuals().items():
            post_part = mode == "mix" and int(name.split(".")[0]) <= L // 4
            for matrix, weight in residual.F.matrices().items():
                plain = models["geo"].residuals()[name].F.matrices()[matrix]
                torch.testing.assert_close(
                    weight, plain * (1.0 if post_part else scales.get(mode, {}).get(matrix, 1.0))
                )
    geo = models["geo"]
    assert geo.wte.weight.std().item() == pytest.approx(0.02, rel=0.02)
    for matrix, fan_in in {"q": 64, "k": 64, "v": 64, "out": 64, "fc": 64, "proj": 256}.items():
        draws = torch.cat(
            [r.F.matrices()[matrix].flatten() for r in geo.residuals().values() if matrix in r.F.matrices()]
        )
        assert draws.std().item() == pytest.approx(fan_in**-0.5, rel=0.05), matrix
    assert not geo.lm_head.weight.any()


def test_entry_norm_off_is_the_papers_form():
    model, tokens = tiny("pre", entry_norm=False), ids(1, 8)
    for residual in model.residuals().values():
        residual.F.matrices().get("out", residual.F.matrices().get("proj")).data.zero_()
    expected = rms_norm64(model.wte.weight[tokens], model.final_norm.weight)
    torch.testing.assert_close(model.features(tokens), expected, rtol=1e-9, atol=1e-9)
    with pytest.raises(ValueError, match="entry_norm False does not go with norm_mode geo"):
        tiny("geo", entry_norm=False)


@pytest.mark.parametrize(
    "wrong, message",
    [
        (dict(n_embd=15), "n_embd 15 is not divisible by n_head 2"),
        (dict(n_embd=10), "odd head size 5"),
        (dict(norm_mode="peristaltic"), "'peristaltic'"),
        (dict(geo_decay="cubic"), "'cubic'"),
        (dict(dropout=1.0), "dropout is 1.0"),
        (dict(n_layer=0), "n_layer is 0"),
        (dict(block_size=-1), "block_size is -1"),
        (dict(geo_max_angle=4.0), "geo_max_angle is 4.0"),
        (dict(norm_mode="mix", n_layer=3), "mix needs n_layer 4"),
        (dict(geo_alpha=0.0), "geo_alpha is 0.0"),
        (dict(geo_alpha=math.nan), "geo_alpha is nan"),
    ],
)
def test_config_refuses(wrong, message):
    with pytest.raises(ValueError, match=message):
        tiny(**{"norm_mode": "geo", **wrong})


# ----------------------------------------------------------------------------------------------------------------------
# The model's other parts


def test_rotary_positions_depend_on_distance_alone():
    attention = geogpt.Attention(GPTConfig(11, 64, 1, 2, 16)).double()
    q, k = randn(1, 1, 1, 8), randn(1, 1, 1, 8, seed=1)
    products = [(attention.rotate(q, i) * attention.rotate(k, j)).sum().item() for i, j in ((7, 3), (40, 36), (4, 0))]
    assert products[1:] == pytest.approx([products[0]] * 2, rel=1e-5)
    assert (attention.rotate(q, 9) * attention.rotate(k, 3)).sum().item() != pytest.approx(products[0], rel=1e-3)


def test_counts_by_hand():
    tied, untied = (
        GPT(GPTConfig(100, 32, 3, 2, 16, norm_mode="pre", tie_weights=tie, vocab_multiple=64)) for tie in (True, False)
    )
    blocks = 3 * (12 * 16 * 16 + 2 * 16)  # 4 C^2 for attention, 8 C^2 for the MLP, two gains
    assert tied.num_params() == 128 * 16 + blocks + 16
    assert untied.num_params() == tied.num_params() + 128 * 16
    expected = 6 * (128 * 16 + blocks + 16) + 12 * 3 * 16 * 32  # the head multiplies, the embedding is looked up
    assert tied.flops_per_token() == untied.flops_per_token() == expected


def test_loss_ignores_minus_one_and_is_a_mean():
    model, x, y = tiny("pre"), ids(2, 8), ids(2, 8, seed=1)
    y[0, 3:] = -1
    logits, loss = model(x, y)
    expected = [-logits[b, t].log_softmax(-1)[y[b, t]] for b in range(2) for t in range(8) if y[b, t] >= 0]
    assert len(expected) == 11 and loss.item() == pytest.approx(torch.stack(expected).mean().item(), rel=1e-6)
    with pytest.raises(ValueError, match="9 tokens do not fit into block_size 8"):
        model(ids(1, 9))


@pytest.mark.parametrize("tie", [True, False])
def test_optimizer_groups(tie):
    model = GPT(GPTConfig(11, 8, 2, 2, 16, norm_mode="peri", tie_weights=tie))
    names = {id(p): name for name, p in model.named_parameters()}

    def groups(optimizers):
        return [
            (type(o).__name__, group["weight_decay"], {names[id(p)] for p in group["params"]})
            for o in optimizers
            for group in o.param_groups
        ]

    gains = {n for n, p in model.named_parameters() if p.dim() == 1}
    hidden = {n for n, p in model.named_parameters() if p.dim() == 2 and n.startswith("blocks.")}
    outer = {"wte.weight"} | (set() if tie else {"lm_head.weight"})
    assert len(gains) == 9 and len(hidden) == 8
    assert groups(model.configure_optimizer(1e-3, 0.2)) == [("AdamW", 0.2, hidden | outer), ("AdamW", 0.0, gains)]
    assert groups(model.configure_optimizer(1e-3, 0.2, optimizer="muon")) == [
        ("AdamW", 0.2, outer),
        ("AdamW", 0.0, gains),
        ("Muon", 0.2, hidden),
    ]


def test_dropout_acts_only_in_training():
    model = tiny("geo", dropout=0.5)
    x = ids(2, 8)
    torch.manual_seed(0)
    first = model(x)[0]
    assert not torch.equal(first, model(x)[0])
    torch.manual_seed(0)
    assert torch.equal(first, model(x)[0])
    model.eval()
    assert torch.equal(model(x)[0], model(x)[0])


@pytest.mark.parametrize("mode", MODES)
def test_probe_reads_what_is_there_and_changes_nothing(mode):
    model, x, y = tiny(mode, dropout=0.3), ids(2, 8), ids(2, 8, seed=1)
    torch.manual_seed(5)
    random_state, weights = torch.get_rng_state(), {k: v.clone() for k, v in model.state_dict().items()}
    rows = model.probe(x, y)
    assert torch.equal(torch.get_rng_state(), random_state) and model.training
    assert all(torch.equal(v, weights[k]) for k, v in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    # the same numbers, from the stream walked through by hand
    model.eval()
    model(x, y)[1].backward()
    stream = torch.nn.functional.rms_norm(model.wte(x), (16,), eps=1e-12)
    for row, (name, residual) in zip(rows, model.residuals().items(), strict=True):
        seen = []
        handle = residual.F.register_forward_hook(lambda F, inputs, out: seen.append(out))
        after = residual(stream)
        handle.remove()
        update = seen[0]
        turned = angle(stream, after)
        expected = {
            "rms": after.square().mean().sqrt(),
            "max": after.abs().max(),
            "F_rms": update.square().mean().sqrt(),
            "cos": ((stream * update).sum(-1) / stream.norm(dim=-1) / update.norm(dim=-1)).mean(),
            "angle": turned.mean(),
            "clamped": (turned > math.pi / 4 - 1e-4).double().mean() if mode == "geo" else 0.0,
            "grad_norm": torch.cat([p.grad.flatten() for p in residual.F.parameters()]).norm(),
        }
        assert row.pop("name") == name
        assert row == pytest.approx(
            {key: float(torch.as_tensor(value).detach()) for key, value in expected.items()}, rel=1e-6
        )
        stream = after


# ----------------------------------------------------------------------------------------------------------------------
# Sampling


def test_context_start_by_hand():
    # a block of 8: from 0 while the text fits, then in half blocks, each as late as it can be
    expected = {1: 0, 8: 0, 9: 4, 12: 4, 13: 8, 16: 8, 17: 12, 100: 92}
    assert {n: context_start(n, 8) for n in expected} == expected
    for B in range(1, 12):
        for n in range(1, 60):
            assert 1 <= n - context_start(n, B) <= B


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("prompt_length, block_size", [(1, 8), (20, 8), (3, 7)])
def test_generate_equals_forward_on_its_context(mode, prompt_length, block_size, monkeypatch):
    """The cache is exact: at every length up to 4 blocks the logits are those of forward on the context alone."""
    model, logits = tiny(mode, block_size=block_size), []
    sample_token = geogpt.sample_token
    monkeypatch.setattr(geogpt, "sample_token", lambda *args: logits.append(args[0]) or sample_token(*args))
    out = model.generate(ids(2, prompt_length), 4 * block_size - prompt_length + 1)
    assert len(logits) == 4 * block_size - prompt_length + 1
    with torch.no_grad():
        for n, ours in enumerate(logits, prompt_length):
            start = 0 if n <= block_size else block_size // 2 * math.ceil((n - block_size) / (block_size // 2))
            torch.testing.assert_close(ours, model(out[:, start:n])[0][:, -1], rtol=1e-10, atol=1e-10)


def test_generate_options():
    model, prompt = tiny("geo", vocab_multiple=64), ids(3, 4)
    model.lm_head.weight.data[11:] = 100.0  # padding that shouts is still never sampled
    greedy = model.generate(prompt, 30, temperature=0)
    for same in (dict(top_k=1), dict(top_p=0.0), dict(top_p=1e-9), dict(temperature=1e-9)):
        assert torch.equal(model.generate(prompt, 30, **same), greedy), same
    torch.manual_seed(1)
    free = model.generate(prompt, 30)
    assert free.max() < 11 and torch.equal(free[:, :4], prompt) and not torch.equal(free, greedy)
    for same in (dict(top_k=0), dict(top_k=11), dict(top_k=10**6), dict(top_p=1.0)):
        assert torch.equal(model.generate(prompt, 30, **same), free), same
    seeded = [model.generate(prompt, 30, generator=torch.Generator().manual_seed(seed)) for seed in (7, 7, 8)]
    assert torch.equal(seeded[0], seeded[1]) and not torch.equal(seeded[0], seeded[2])
    assert torch.equal(model.generate(prompt, 0), prompt)
    for wrong in (
        dict(temperature=-1.0),
        dict(top_k=-1),
        dict(top_p=1.1),
        dict(top_p=math.nan),
        dict(temperature=math.nan),
    ):
        with pytest.raises(ValueError):
            model.generate(prompt, 1, **wrong)
    with pytest.raises(ValueError, match="at least one token"):
        model.generate(prompt[:, :0], 1)


def test_generate_leaves_mode_and_random_state():
    model = tiny("geo", dropout=0.5).train()
    torch.manual_seed(3)
    before = torch.get_rng_state()
    first = model.generate(ids(1, 4), 20)
    assert torch.equal(torch.get_rng_state(), before) and model.training
    assert all(block.attn.F.cache is None for block in model.blocks)
    model.eval()
    assert torch.equal(model.generate(ids(1, 4), 20), first) and not model.training  # no dropout while sampling


def test_top_k_and_top_p_by_hand():
    """Probabilities 0.4 0.3 0.2 0.1: which tokens can come out, over many draws."""
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log().expand(4000, 4)
    generator = torch.Generator().manual_seed(0)

    def shares(**kw):
        options = dict(dict(temperature=1.0, top_k=0, top_p=1.0), **kw)
        return geogpt.sample_token(logits, generator=generator, **options).flatten().bincount(minlength=4) / 4000

    for options, expected in [
        ({}, [0.4, 0.3, 0.2, 0.1]),
        (dict(top_k=2), [4 / 7, 3 / 7, 0, 0]),
        (dict(top_p=0.5), [4 / 7, 3 / 7, 0, 0]),
        (dict(top_p=0.75), [4 / 9, 3 / 9, 2 / 9, 0]),
        (dict(top_k=3, top_p=0.7), [4 / 7, 3 / 7, 0, 0]),
        (dict(temperature=0.5), [16 / 30, 9 / 30, 4 / 30, 1 / 30]),
    ]:
        drawn = shares(**options)
        assert drawn.tolist() == pytest.approx(expected, abs=0.035), options
        assert (drawn[torch.tensor(expected) == 0] == 0).all(), options


# ======================================================================================================================
# Data

GPT2_FILES = ("6c7ea1a7e38e3a7f062df639a5b80947f075ffe6", "6d1cbeee0f20b3d9449abfede4726ed8212e3aee")
needs_gpt2 = pytest.mark.skipif(
    not all((Path(os.environ.get("TIKTOKEN_CACHE_DIR") or "/nowhere") / name).is_file() for name in GPT2_FILES),
    reason="TIKTOKEN_CACHE_DIR names no folder with the tables of gpt2",
)
EVERY_PLANE = "a\r\nb\tc\0\ufeff é ß \u2028 漢字，かな。\U0001f600\U00010000\U0010ffff  \n\n"


@pytest.fixture(autouse=True)
def data_root(tmp_path, monkeypatch):
    monkeypatch.setattr(prepare_data, "DATA_ROOT", tmp_path / "data")
    return tmp_path / "data"


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def decoded(folder):
    """(train text, val text) of a prepared folder."""
    tokenizer = tokenizer_from_spec(read_meta(folder)["tokenizer"])
    streams = [load_tokens(folder, split) for split in ("train", "val")]
    return tuple(tokenizer.decode(s.windows(np.array([0]), len(s))[0]) if len(s) else "" for s in streams)


def ids_of(folder, split):
    stream = load_tokens(folder, split)
    return stream.windows(np.array([0]), len(stream))[0].tolist()


def leftovers(folder):
    return sorted(path.name for path in folder.iterdir() if path.name.startswith(".")) if folder.exists() else []


# ----------------------------------------------------------------------------------------------------------------------
# Tokenizers


@pytest.mark.parametrize(
    "make",
    [
        lambda: CharTokenizer("".join(sorted(set(EVERY_PLANE)))),
        ByteTokenizer,
        pytest.param(lambda: BPETokenizer("gpt2"), marks=needs_gpt2),
    ],
    ids=["char", "byte", "gpt2"],
)
def test_data_tokenizer_round_trip_and_spec(make):
    tokenizer = make()
    ids = np.asarray(tokenizer.encode(EVERY_PLANE))
    assert tokenizer.decode(ids) == tokenizer.decode(ids.tolist()) == EVERY_PLANE
    assert ids.min() >= 0 and ids.max() < tokenizer.vocab_size
    assert len(tokenizer.encode("")) == 0 and tokenizer.decode([]) == ""
    again = tokenizer_from_spec(json.loads(json.dumps(tokenizer.spec())))
    assert np.array_equal(again.encode(EVERY_PLANE), ids) and again.spec() == tokenizer.spec()
    assert (again.name, again.vocab_size) == (tokenizer.name, tokenizer.vocab_size)


def test_data_char_names_the_first_unseen_character():
    with pytest.raises(UserError, match=r"'é' \(U\+00E9\).* 3 characters"):
        CharTokenizer("abc").encode("abcéd😀")
    with pytest.raises(UserError, match=r"U\+1F600"):
        CharTokenizer("abc").encode("😀")
    with pytest.raises(UserError, match=r"U\+0062"):
        CharTokenizer("ac").encode("b")  # a gap inside the table, not beyond it
    with pytest.raises(UserError, match=r"U\+DCC3"):
        CharTokenizer("abc").encode("\udcc3")  # what an undecodable command line byte becomes


def test_data_bytes_that_are_no_text_become_replacement_characters():
    assert ByteTokenizer().decode([0xC3, 0x28, 0xFF]) == "\ufffd(\ufffd"


@pytest.mark.parametrize(
    "spec",
    [
        None,
        [],
        "char",
        {},
        {"name": "char"},
        {"name": "char", "alphabet": ""},
        {"name": 3},
        {"name": "char", "alphabet": "aa"},
        {"name": "char", "alphabet": ["a"]},
        {"name": "gpt2"},
        {"name": "gpt2", "vocab_size": -1},
        {"name": "gpt9", "vocab_size": 5},
    ],
)
def test_data_nonsense_is_no_tokenizer(spec):
    with pytest.raises(UserError):
        tokenizer_from_spec(spec)


@needs_gpt2
def test_data_gpt2_known_ids_and_special_text_is_text():
    tokenizer = BPETokenizer("gpt2")
    assert list(tokenizer.encode("hello world")) == [31373, 995]
    assert list(tokenizer.encode("<|endoftext|>")) == [27, 91, 437, 1659, 5239, 91, 29]
    assert tokenizer.decode([50256]) == "<|endoftext|>" and tokenizer.decode([250]) == "\ufffd"


@needs_gpt2
@pytest.mark.parametrize("pattern", ["gpt2", "cl100k_base", "o200k_base"])
def test_data_safe_cuts_keep_the_tokens_of_the_whole(pattern, monkeypatch):
    """gpt2's merges under each family's own splitting pattern: the other tables are not at hand offline."""
    import tiktoken
    from tiktoken_ext import openai_public

    gpt2 = tiktoken.get_encoding("gpt2")
    monkeypatch.setattr(openai_public, "load_tiktoken_bpe", lambda *args, **kwargs: gpt2._mergeable_ranks)
    ranks = gpt2._mergeable_ranks | {b" " * n: 50255 + n for n in range(2, 9)}  # as the later tables: blanks merge
    pat_str = gpt2._pat_str if pattern == "gpt2" else getattr(openai_public, pattern)()["pat_str"]
    encoding = tiktoken.Encoding(
        pattern, pat_str=pat_str, mergeable_ranks=ranks, special_tokens={"<|endoftext|>": 60000}
    )
    draw, cuts = random.Random(1), 0
    parts = [
        " ",
        "  ",
        "\n",
        "\r\n",
        "\t",
        "\u3000",
        "\x1c",
        "a",
        "Word",
        "don't",
        "'s",
        "é",
        "e\u0301",
        "漢字",
        "12345",
        "½",
        ".",
        "...",
        ",",
        "。",
        "(",
        ")/",
        "_",
        "-",
        "/",
        "😀",
        "<|endoftext|>",
    ]
    for _ in range(400):
        text = "".join(draw.choices(parts, k=12))
        whole = encoding.encode_ordinary(text)
        for found in prepare_data.SAFE_CUT.finditer(text):
            at, cuts = found.end(), cuts + 1
            assert encoding.encode_ordinary(text[:at]) + encoding.encode_ordinary(text[at:]) == whole, (text, at)
    assert cuts > 500


def test_data_recut_bounds_every_piece_and_loses_nothing(monkeypatch):
    monkeypatch.setattr(prepare_data, "PIECE", 8)
    for text in (" " * 100, "a" * 101, "one two three four five six seven", "漢字。" * 20, "x", "\n" * 17):
        for step in (1, 7, 50, 1000):
            pieces = list(prepare_data.recut(text[i : i + step] for i in range(0, len(text), step)))
            assert "".join(pieces) == text and max(map(len, pieces)) <= 16
    assert list(prepare_data.recut(["one two three four five six seven"])) == [
        "one two three",
        " four five six seven"[:10],
        " six seven",
    ]
    assert list(prepare_data.recut([])) == []


@needs_gpt2
def test_data_bpe_survives_blanks_long_lines_and_emoji_at_a_seam(tmp_path):
    text = " " * 1_000_000 + "x" * 300_000 + "y" * 9 + "😀" + "\n" * 200_000 + "the end"
    write(tmp_path / "hard.txt", text)
    assert "".join(decoded(prepare(tmp_path / "hard.txt", "gpt2"))) == text
    assert BPETokenizer("gpt2").decode(BPETokenizer("gpt2").encode(text)) == text


@needs_gpt2
def test_data_bpe_tokens_are_tiktokens_own(tmp_path):
    import tiktoken

    draw = random.Random(2)
    text = "".join(
        draw.choices(
            ["the ", "cat's ", "sat, ", "on\n", "  mats;\r\n", "1234 ", "漢字。", "é", "<|endoftext|>"], k=120_000
        )
    )
    folder = prepare(write(tmp_path / "one.txt", text), "gpt2")
    cut = len(text) * 9 // 10
    gpt2 = tiktoken.get_encoding("gpt2")
    assert ids_of(folder, "train") == gpt2.encode_ordinary(text[:cut])
    assert ids_of(folder, "val") == gpt2.encode_ordinary(text[cut:])


@needs_gpt2
def test_data_bpe_documents_end_in_the_end_of_text_token(tmp_path):
    lines = [json.dumps({"text": f"number {i} <|endoftext|>"}) for i in range(30)]
    folder = prepare(write(tmp_path / "many.jsonl", "\n".join(lines)), "gpt2")
    train, val = ids_of(folder, "train"), ids_of(folder, "val")
    assert train.count(50256) + val.count(50256) == 30 and train[-1] == val[-1] == 50256
    assert decoded(folder)[1].split("<|endoftext|><|endoftext|>")[:-1] == ["number 6 ", "number 29 "]


# ----------------------------------------------------------------------------------------------------------------------
# From texts to tokens


@pytest.mark.parametrize("tokenizer", ["char", "byte"])
def test_data_one_text_round_trips_and_is_cut_by_characters(tmp_path, tokenizer):
    text = EVERY_PLANE * 37 + "end"
    folder = prepare(write(tmp_path / "book.txt", "\ufeff" + text), tokenizer)
    cut = (len(text) + 1) * 9 // 10
    assert decoded(folder) == (("\ufeff" + text)[:cut], ("\ufeff" + text)[cut:])
    meta = read_meta(folder)
    assert (
        meta["dtype"] == "uint16" and meta["source"]["sha256"] == hashlib.sha256(("\ufeff" + text).encode()).hexdigest()
    )
    raw = np.fromfile(folder / "train.bin", "<u2")  # as nanoGPT would read it
    assert len(raw) == meta["train"]["train.bin"] and raw[:2].tolist() == ids_of(folder, "train")[:2]


def test_data_split_of_a_text_is_nanogpts(tmp_path):
    folder = prepare(write(tmp_path / "a.txt", ("ab" * 557_697)[:1_115_394]))  # as long as tiny Shakespeare
    meta = read_meta(folder)
    assert (meta["train"], meta["val"]) == ({"train.bin": 1_003_854}, {"val.bin": 111_540})


def test_data_few_documents_are_one_text_with_blank_lines(tmp_path):
    write(tmp_path / "t" / "b.md", "second\n")
    write(tmp_path / "t" / "a" / "z.txt", "first")
    write(tmp_path / "t" / "c.txt", "")
    write(tmp_path / "t" / ".git" / "x.txt", "hidden")
    write(tmp_path / "t" / "d.bin.json", "other")
    train, val = decoded(prepare(tmp_path / "t"))
    assert (train, val) == ("first\n\nsecon", "d\n\n")  # 12 characters of documents, the first 10 of them to train


def test_data_many_documents_are_dealt_out_by_the_hash_of_their_index(tmp_path):
    lines = "".join(json.dumps({"text": f"<{i}>"}) + "\n\n" for i in range(100))
    folder = prepare(write(tmp_path / "many.jsonl", '{"text": ""}\n' + lines), "byte")
    train, val = decoded(folder)
    chosen = [6, 29, 37, 40, 48, 81, 82, 88, 94]  # crc32 of the digits is a multiple of 10
    assert val == "".join(f"<{i}>\n\n" for i in chosen)
    assert train == "".join(f"<{i}>\n\n" for i in range(100) if i not in chosen)


def test_data_gz_jsonl_bom_and_upper_case_endings(tmp_path):
    (tmp_path / "t").mkdir()
    with gzip.open(tmp_path / "t" / "A.TXT.GZ", "wb") as file:
        file.write("gé\r\n".encode())
    with gzip.open(tmp_path / "t" / "b.jsonl.gz", "wb") as file:
        file.write("\ufeff".encode() + json.dumps({"text": "😀\u2028x", "n": 1}).encode() + b"\r\n")
    assert "".join(decoded(prepare(tmp_path / "t"))) == "gé\r\n\n😀\u2028x\n\n"


@pytest.mark.parametrize("text", ["x", "😀", "\0", "\n"])
def test_data_a_file_of_one_character(tmp_path, text):
    folder = prepare(write(tmp_path / "one.txt", text))
    assert decoded(folder) == ("", text) and len(load_tokens(folder, "train")) == 0


def test_data_python_is_ascii_and_large_and_never_needs_the_net(capsys):
    folder = prepare("python")
    meta = read_meta(folder)
    tokens = sum(meta["train"].values()) + sum(meta["val"].values())
    assert 7e6 < tokens < 11e6 and meta["vocab_size"] <= 100 and 0.05 < sum(meta["val"].values()) / tokens < 0.15
    assert folder == prepare_data.DATA_ROOT / "python-char" and set(meta["tokenizer"]["alphabet"]) <= set(
        map(chr, range(128))
    )
    assert prepare() == folder and capsys.readouterr().out.splitlines()[-1] == f"{folder} is ready: nothing to do"


def test_data_char_and_byte_import_no_tiktoken_and_nothing_heavy(tmp_path):
    write(tmp_path / "a.txt", "some text")
    code = (
        f"import sys; sys.path.insert(0, {str(Path(prepare_data.__file__).parent)!r}); import prepare_data as p\n"
        f"for t in 'char', 'byte': p.prepare({str(tmp_path / 'a.txt')!r}, t, root={str(tmp_path / 'data')!r})\n"
        "assert not {'tiktoken', 'torch'} & set(sys.modules), 'imported'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


# ----------------------------------------------------------------------------------------------------------------------
# Folders: never another's, never half of one


def test_data_twice_is_a_no_op_and_a_change_is_noticed(tmp_path, capsys):
    book = write(tmp_path / "b.txt", "first version")
    stat, folder = book.stat(), prepare(book)
    before = (folder / "train.bin").stat().st_mtime_ns, os.stat(folder / "train.bin").st_ino
    capsys.readouterr()
    assert prepare(str(book)) == folder and capsys.readouterr().out == f"{folder} is ready: nothing to do\n"
    os.utime(book)  # another time, the same content
    assert prepare(book) == folder and "nothing to do" in capsys.readouterr().out
    assert before == ((folder / "train.bin").stat().st_mtime_ns, os.stat(folder / "train.bin").st_ino)
    book.write_text("other version")  # as long as the first, and made to look as old
    os.utime(book, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert prepare(book) == folder and "".join(decoded(folder)) == "other version"
    assert f"was prepared from an earlier state of {book}; preparing it again" in capsys.readouterr().out
    assert leftovers(folder.parent) == []


def test_data_a_source_that_is_gone_is_not_needed(tmp_path, capsys):
    book = write(tmp_path / "b.txt", "some text")
    folder = prepare(book)
    book.unlink()
    assert (
        prepare(book) == folder and f"{book} is gone; using the tokens that were made of it" in capsys.readouterr().out
    )
    with pytest.raises(UserError, match="no data set or file"):
        prepare(book, "byte")


def test_data_folders_are_never_confused(tmp_path):
    one, two = write(tmp_path / "1" / "b.txt", "abc"), write(tmp_path / "2" / "b.txt", "abc")
    folders = [
        prepare(one),
        prepare(two),
        prepare(one, "byte"),
        prepare(one, CharTokenizer("abcd")),
        prepare(one, CharTokenizer("dcba")),
        prepare(tmp_path / "1"),
    ]
    assert len(set(folders)) == 6
    assert [read_meta(f)["vocab_size"] for f in folders] == [3, 3, 256, 4, 4, 3]
    assert decoded(folders[4]) == ("ab", "c")


def test_data_a_given_alphabet_and_the_texts_own_in_one_out_dir(tmp_path, capsys):
    book, out = write(tmp_path / "b.txt", "abc"), tmp_path / "out"
    for tokenizer, size in (
        (CharTokenizer("abcd"), 4),
        ("char", 3),
        ("byte", 256),
        (CharTokenizer("abc"), 3),
        ("char", 3),
    ):
        assert prepare(book, tokenizer, out) == out and read_meta(out)["vocab_size"] == size
        assert "nothing to do" not in capsys.readouterr().out
    write(tmp_path / "c.txt", "abc")
    prepare(tmp_path / "c.txt", "char", out)
    assert "another source" in capsys.readouterr().out


def test_data_a_given_alphabet_must_hold_every_character(tmp_path):
    with pytest.raises(UserError, match=r"2 characters that are not among the 3 .*'d' \(U\+0064\), 'é' \(U\+00E9\)"):
        prepare(write(tmp_path / "b.txt", "abcéd"), CharTokenizer("abc"))
    assert leftovers(prepare_data.DATA_ROOT) == []


@pytest.mark.parametrize(
    "damage",
    [
        lambda f: (f / "train.bin").unlink(),
        lambda f: os.truncate(f / "val.bin", 1),
        lambda f: (f / "meta.json").write_text("{"),
        lambda f: (f / "meta.json").write_text("[]"),
    ],
)
def test_data_a_damaged_folder_is_prepared_again(tmp_path, damage, capsys):
    book = write(tmp_path / "b.txt", "some text, long enough")
    damage(prepare(book))
    assert "".join(decoded(prepare(book))) == "some text, long enough"
    assert "is damaged" in capsys.readouterr().out


def test_data_out_never_replaces_what_is_not_ours(tmp_path):
    book = write(tmp_path / "b.txt", "some text")
    mine = write(tmp_path / "home" / "letter.txt", "dear")
    with pytest.raises(UserError, match="holds other files; give --out"):
        prepare(book, out_dir=mine.parent)
    with pytest.raises(UserError, match="is a file"):
        prepare(book, out_dir=mine)
    assert mine.read_text() == "dear"
    (tmp_path / "empty").mkdir()
    assert "".join(decoded(prepare(book, out_dir=tmp_path / "empty"))) == "some text"
    write(tmp_path / "empty" / "notes.md", "mine")
    book.write_text("changed")
    with pytest.raises(UserError, match="holds other files"):
        prepare(book, out_dir=tmp_path / "empty")


CHILD = """
import os, signal, sys
sys.path.insert(0, {here!a})
import prepare_data
from pathlib import Path
prepare_data.DATA_ROOT = Path(sys.argv.pop())
write_meta = prepare_data.write_meta
def stopped(*args):
    {fault}
    write_meta(*args)
prepare_data.write_meta = stopped
sys.exit(prepare_data.main(sys.argv[1:]))
"""


def child(root, book, fault):
    code = CHILD.format(here=str(Path(prepare_data.__file__).parent), fault=fault)
    env = os.environ | {
        "LC_ALL": "C",
        "PYTHONUTF8": "0",
        "PYTHONCOERCECLOCALE": "0",
        "PYTHONIOENCODING": "ascii:strict",
    }
    return subprocess.Popen(
        [sys.executable, "-c", code, str(book), str(root)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env
    )


@pytest.mark.parametrize(
    "name, code, line",
    [
        ("SIGINT", 130, b"error: stopped; run the same command again to go on\n"),
        ("SIGTERM", 143, b"error: stopped; run the same command again to go on\n"),
        ("SIGKILL", -9, b""),
    ],
)
def test_data_interrupted_it_never_looks_finished(tmp_path, data_root, name, code, line):
    book = write(tmp_path / "b.txt", "some text")
    process = child(data_root, book, f"os.kill(os.getpid(), signal.{name})")
    _, err = process.communicate(timeout=20)
    assert (process.returncode, err) == (code, line)
    assert all(path.startswith(".") for path in os.listdir(data_root)) and (leftovers(data_root) == []) == (
        name != "SIGKILL"
    )
    assert "".join(decoded(prepare(book))) == "some text" and leftovers(data_root) == []


def test_data_two_at_once_do_the_work_once(tmp_path):
    book, data_root = write(tmp_path / "bü.txt", "söme text"), tmp_path / "dätä"  # nothing that LC_ALL=C could show
    fault = "import time; time.sleep(0.05)"  # both are there before the first one is done, or nearly
    outputs = [p.communicate(timeout=20) + (p.returncode,) for p in [child(data_root, book, fault) for _ in range(2)]]
    assert [code for _, _, code in outputs] == [0, 0] and [err for _, err, _ in outputs] == [b"", b""]
    said = b"".join(out for out, _, _ in outputs)
    assert said.count(b"prepared ") == 1 and said.count(b"nothing to do") == 1
    assert "".join(decoded(prepare(book, root=data_root))) == "söme text" and leftovers(data_root) == []


def test_data_a_full_disk_is_one_line_and_leaves_nothing(tmp_path, data_root, monkeypatch, capsys):
    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(prepare_data, "write_meta", full)
    assert prepare_data.main([str(write(tmp_path / "b.txt", "some text"))]) == 1
    assert (
        capsys.readouterr().err
        == f"error: No space left on device: {data_root}; free some space and run the same command again\n"
    )
    assert os.listdir(data_root) == []


# ----------------------------------------------------------------------------------------------------------------------
# What bad input gets


def lone_gz(content):
    buffer = io.BytesIO()
    with gzip.GzipFile(fileobj=buffer, mode="wb") as file:
        file.write(content)
    return buffer.getvalue()


BAD_FILES = [  # file name, content, what the line must say
    ("a.txt", b"", "is empty"),
    ("a.txt", b"abc\xff", "byte 0xff at offset 3"),
    ("a.txt", b"ab\xc3", "byte 0xc3 at offset 2"),  # a character cut off by the end
    ("a.txt", b"a" * (2**20 - 1) + "é".encode() + b"\x80", "byte 0x80 at offset 1048577"),  # behind a seam of reading
    ("a.txt", "text".encode("utf-16"), "offset 0; it looks like UTF-16"),
    ("a.txt.gz", b"no gzip at all", "is no whole .gz file"),
    ("a.txt.gz", lone_gz(os.urandom(5000).hex().encode())[:2000], "is no whole .gz file"),
    ("a.txt.gz", lone_gz(b""), "holds no text"),
    ("a.jsonl", b'{"text": "x"}\n{"text": ', "line 2 is not JSON"),
    ("a.jsonl", b"[" * 100_000, "line 1 is not JSON"),
    ("a.jsonl", b'{"text": "x"}\n\n{"body": "x"}', 'line 3 is no object with a string "text"'),
    ("a.jsonl", b'{"text": 5}', 'line 1 is no object with a string "text"'),
    ("a.jsonl", b'["text"]', 'line 1 is no object with a string "text"'),
    ("a.jsonl", b'{"text": "\\ud83d"}', "U+D83D"),
    ("a.jsonl", b'{"text": "x"}\n{"text": "\xff"}', "byte 0xff at offset 24"),
    ("a.jsonl", b'{"text": ""}', "holds no text"),
    ("a.pdf", b"text", ".txt, .md, .py, .jsonl, each also .gz"),
    ("a/b.pdf", b"text", "holds no file that ends in .txt, .md, .py, .jsonl, each also .gz"),
    ("a/train.bin", b"\0\0", "holds no val.bin"),
    ("a/meta.pkl", b"", "pickle"),
]
BAD_OPTIONS = [
    (["shakespear"], "no data set or file 'shakespear'; did you mean 'shakespeare'?"),
    ([""], "no data set or file ''"),
    (["a\0b"], "cannot be a path"),
    (["--out", "a\0b"], "cannot be a path"),
    (["a\ud800b"], "cannot be a path"),
    (["x" * 300], "name too long"),
    (["--tokenizer", "chr"], "no tokenizer 'chr'; did you mean 'char'?"),
    (["--tokenizer", "gpt-2"], "no tokenizer 'gpt-2'; did you mean 'gpt2'?"),
    (["--tokenizr", "char"], "'--tokenizr'; did you mean '--tokenizer'?"),
    (["python", "shakespeare"], "second data set 'shakespeare'"),
    (["--shards", "2"], "--shards 2 belongs to the data set fineweb"),
    (["fineweb", "--shards", "0"], "--shards 0 is out of range; fineweb has 1 to 103"),
    (["fineweb", "--shards", "104"], "--shards 104 is out of range"),
    (["fineweb", "--shards", "two"], "invalid int value: 'two'"),
    (["fineweb", "--tokenizer", "char"], "fineweb comes in GPT-2 tokens"),
    (["books", "--limit", "-1"], "--limit -1 is out of range"),
    (["arxiv", "--limit", "5"], "--limit 5 belongs to the data set books"),
]


def says_one_line(capsys, argv, text, code=2):
    assert prepare_data.main([str(word) for word in argv]) == code
    out, err = capsys.readouterr()
    assert err.startswith("error: ") and err.count("\n") == 1 and text in err, err


@pytest.mark.parametrize("name, content, text", BAD_FILES, ids=[f"{n}-{t[:20]}" for n, _, t in BAD_FILES])
def test_data_bad_files_get_one_line(tmp_path, data_root, capsys, name, content, text):
    path = write(tmp_path / "in" / name, content)
    if name == "a/meta.pkl":
        write(path.parent / "train.bin", b"\0\0")
    says_one_line(capsys, [path if "/" not in name else path.parent], text)
    assert not data_root.exists() or os.listdir(data_root) == []


@pytest.mark.parametrize(
    "argv, text",
    BAD_OPTIONS,
    ids=[" ".join(argv)[:30].encode("ascii", "replace").decode().replace("\0", "0") for argv, _ in BAD_OPTIONS],
)
def test_data_bad_options_get_one_line(tmp_path, data_root, capsys, monkeypatch, argv, text):
    monkeypatch.chdir(tmp_path)
    says_one_line(capsys, argv, text)
    assert not data_root.exists()


def test_data_bpe_without_its_tables_says_what_is_missing(tmp_path, data_root, capsys, monkeypatch):
    import tiktoken

    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: exec("raise ConnectionError('no net')"))
    says_one_line(capsys, [write(tmp_path / "a.txt", "x"), "--tokenizer", "gpt2"], "vocab.bpe and encoder.json", code=1)
    says_one_line(capsys, [tmp_path / "a.txt", "--tokenizer", "o200k_base"], "TIKTOKEN_CACHE_DIR", code=1)
    assert os.listdir(data_root) == []


# ----------------------------------------------------------------------------------------------------------------------
# Token files


def shard(count, version=1, promised=None, first=0):
    header = np.zeros(256, "<i4")
    header[:3] = 20240520, version, count if promised is None else promised
    return header.tobytes() + np.arange(first, first + count, dtype="<u2").tobytes()


def test_data_raw_nanogpt_files_are_gpt2_and_stay_as_they_are(tmp_path):
    write(tmp_path / "owt" / "train.bin", np.arange(300, dtype="<u2").tobytes())
    write(tmp_path / "owt" / "val.bin", np.array([50256], "<u2").tobytes())
    folder = prepare(tmp_path / "owt")
    assert folder == tmp_path / "owt" and sorted(os.listdir(folder)) == ["train.bin", "val.bin"]
    assert read_meta(folder)["tokenizer"] == {"name": "gpt2", "vocab_size": 50257} and read_meta(folder)["source"] == {}
    assert ids_of(folder, "train") == list(range(300)) and ids_of(folder, "val") == [50256]
    with pytest.raises(UserError, match="leave --out out"):
        prepare(folder, out_dir=tmp_path / "out")
    for tokenizer in ("char", CharTokenizer("ab")):
        with pytest.raises(UserError, match="not of the tokenizer char, but of gpt2"):
            prepare(folder, tokenizer)


def test_data_shards_are_one_stream_told_by_their_first_bytes(tmp_path):
    for i, (count, first) in enumerate([(100, 0), (0, 100), (3, 100), (200, 103)], start=1):
        write(tmp_path / "fw" / f"fineweb_train_{i:06d}.bin", shard(count, first=first))
    write(tmp_path / "fw" / "fineweb_val_000000.bin", np.arange(7, dtype="<u2").tobytes())
    stream = load_tokens(prepare(tmp_path / "fw", "gpt2"), "train")
    assert len(stream) == 303 and len(load_tokens(tmp_path / "fw", "val")) == 7
    starts = np.array([0, 95, 99, 100, 98, 102, 103, 293, 5])
    windows = stream.windows(starts, 10)
    assert windows.dtype == np.int64 and np.array_equal(windows, starts[:, None] + np.arange(10))
    assert np.array_equal(stream.windows(np.array([0]), 303), np.arange(303)[None])
    assert stream.windows(np.array([], int), 10).shape == (0, 10)


@pytest.mark.parametrize(
    "arrays", [[np.arange(10, dtype="<u2")], [np.arange(4, dtype="<u4"), np.arange(4, 10, dtype="<u4")]]
)
def test_data_windows_stay_within_the_stream(arrays):
    stream = TokenStream(arrays)
    assert np.array_equal(stream.windows(np.array([5, 0, 3]), 5), [[5, 6, 7, 8, 9], [0, 1, 2, 3, 4], [3, 4, 5, 6, 7]])
    for start in (-1, 6, 100):
        with pytest.raises(IndexError):
            stream.windows(np.array([0, start]), 5)
    with pytest.raises(IndexError):
        stream.windows(np.array([0]), 11)


@pytest.mark.parametrize(
    "content, text",
    [
        (b"\0\0\0", "3 bytes"),
        (np.array([50257], "<u2").tobytes(), "holds the id 50257, but its tokenizer has only 50257 ids"),
        (shard(5)[:-2], "1,032 bytes, which are not the 5 tokens"),
        (shard(5) + b"\0\0", "not the 5 tokens"),
        (shard(5, version=2), "not of version 1"),
        (shard(5)[:100], "not of version 1"),
        (shard(5, promised=-3), "not the -3 tokens"),
    ],
)
def test_data_broken_token_files_are_refused(tmp_path, content, text):
    write(tmp_path / "f" / "train.bin", content)
    write(tmp_path / "f" / "val.bin", b"\0\0")
    with pytest.raises(UserError) as caught:
        load_tokens(tmp_path / "f", "train")
    assert text in str(caught.value) and "train.bin" in str(caught.value)


def test_data_token_files_that_shrink_vanish_or_grow_after_preparation(tmp_path):
    folder = prepare(write(tmp_path / "b.txt", "some text, long enough"))
    content = (folder / "train.bin").read_bytes()
    for changed in (content[:-2], content[:-1], content + b"\0\0", b"", content[:-2] + b"\xff\0", None):
        write(folder / "train.bin", changed) if changed is not None else (folder / "train.bin").unlink()
        with pytest.raises(UserError, match="train.bin"):
            load_tokens(folder, "train")
        assert len(load_tokens(folder, "val")) == 3
    with pytest.raises(UserError, match="holds no train.bin"):
        load_tokens(tmp_path / "nowhere", "train")


@pytest.mark.parametrize(
    "change",
    [
        {"vocab_size": 3},
        {"dtype": "int16"},
        {"tokenizer": None},
        {"train": {"../val.bin": 3}},
        {"train": None},
        {"val": {"val.bin": "3"}},
    ],
)
def test_data_a_meta_json_that_lies_is_refused(tmp_path, change):
    folder = prepare(write(tmp_path / "b.txt", "some text, long enough"))
    write(folder.parent / "val.bin", (folder / "val.bin").read_bytes())
    meta = json.loads((folder / "meta.json").read_text())
    (folder / "meta.json").write_text(json.dumps(meta | change))
    with pytest.raises(UserError):
        load_tokens(folder, "train")


# ----------------------------------------------------------------------------------------------------------------------
# Downloads, from a server that misbehaves


class Server(BaseHTTPRequestHandler):
    """Serves `content` at any path; what precedes the first - of the path says how. Notes all requests."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def do_GET(self):
        content, asked = self.server.content, self.headers.get("Range")
        how = self.path.strip("/").split("-")[0]
        first = self.server.seen.get(self.path, 0) == 0
        self.server.seen[self.path] = self.server.seen.get(self.path, 0) + 1
        self.server.requests.append((self.path, asked))
        if how.isdigit() and (first or int(how) < 500):
            return self.reply(int(how), b"", {})
        if how == "redirect":
            return self.reply(302, b"", {"Location": "/plain-behind", "X-Linked-ETag": f'"{self.server.linked}"'})
        start = int(asked[6:-1]) if asked and how != "whole" else 0
        if start >= len(content) > 0:
            return self.reply(416, b"", {"Content-Range": f"bytes */{len(content)}"})
        status, headers = 200, {}
        if start:
            status, headers = 206, {"Content-Range": f"bytes {start}-{len(content) - 1}/{len(content)}"}
        if how == "elsewhere" and start:
            start += 1
            headers = {"Content-Range": f"bytes {start}-{len(content) - 1}/{len(content)}"}
        body = content[start:]
        if how == "cut":  # always half of what is left, down to a few bytes
            return self.reply(status, body[: max(len(body) // 2, 400)], headers, length=len(body))
        if how == "stall" and first:
            return self.reply(status, body[:100], headers, length=len(body), wait=True)
        if how == "long":
            return self.reply(status, body, headers, length=len(body) + 50)
        if how == "short" and first:
            return self.reply(status, body[:200], headers, length=200)
        if how == "nolength":
            return self.reply(status, body, headers, length=None)
        if how == "chunked":
            headers["Transfer-Encoding"] = "chunked"
            return self.reply(status, b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body), headers, length=None)
        self.reply(status, body, headers)

    def reply(self, status, body, headers, length=0, wait=False):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if length is not None:
            self.send_header("Content-Length", str(length or len(body)))
        self.end_headers()
        self.wfile.write(body)
        if wait:
            self.server.wake.wait(5)
        self.close_connection = True


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(prepare_data, "BACKOFF", 0.0)
    monkeypatch.setattr(prepare_data, "TIMEOUT", 0.2)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    server.content = bytes(range(256)) * 20
    server.linked = hashlib.sha256(server.content).hexdigest()
    server.requests, server.seen, server.wake = [], {}, threading.Event()
    server.url = f"http://127.0.0.1:{server.server_port}/"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    yield server
    server.wake.set()
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    "how", ["plain", "cut", "stall", "500", "503", "whole", "redirect", "chunked", "elsewhere", "long", "short"]
)
def test_data_downloads_arrive_whole_whatever_the_server_does(tmp_path, server, how):
    path, known = tmp_path / "d" / "file.bin", how in ("plain", "short", "chunked")
    half = how in ("whole", "elsewhere")
    if half:
        write(path.with_name("file.bin.part"), server.content[:1000])
    size, sha256 = (len(server.content), server.linked) if known else (None, None)
    assert prepare_data.download(f"{server.url}{how}-x", path, size, sha256) == path
    assert path.read_bytes() == server.content and os.listdir(path.parent) == ["file.bin"]
    count = len(server.requests)
    prepare_data.download(f"{server.url}{how}-x", path, size, sha256)
    assert len(server.requests) == count  # what is there is not asked for again


def test_data_downloads_go_on_where_they_stopped(tmp_path, server):
    path = tmp_path / "file.bin"
    write(path.with_name("file.bin.part"), server.content[:3000])
    prepare_data.download(f"{server.url}plain-x", path)
    assert server.requests == [("/plain-x", "bytes=3000-")] and path.read_bytes() == server.content
    path.rename(path.with_name("file.bin.part"))  # killed between the last byte and the rename
    prepare_data.download(f"{server.url}plain-x", path)
    assert server.requests[1:] == [("/plain-x", "bytes=5120-")] and path.read_bytes() == server.content
    write(path.with_name("file.bin.part"), server.content + b"too much")
    path.unlink()
    prepare_data.download(f"{server.url}plain-x", path)
    assert path.read_bytes() == server.content


def test_data_a_known_file_that_was_spoilt_is_downloaded_again(tmp_path, server):
    for spoilt in (server.content[:-1], server.content[:-1] + b"x"):
        write(tmp_path / "file.bin", spoilt)
        prepare_data.download(f"{server.url}plain-x", tmp_path / "file.bin", len(server.content), server.linked)
        assert (tmp_path / "file.bin").read_bytes() == server.content


def test_data_a_cut_line_is_not_started_over(tmp_path, server):
    prepare_data.download(f"{server.url}cut-x", tmp_path / "file.bin")
    starts = [int(asked[6:-1]) for _, asked in server.requests[1:]]
    assert starts == [2560, 3840, 4480, 4880]


def test_data_downloads_give_up_soon_without_a_network(tmp_path, monkeypatch):
    tries = []

    def fetch(*args):
        tries.append(args)
        raise urllib.error.URLError(socket.gaierror(-2, "Name or service not known"))

    monkeypatch.setattr(prepare_data, "fetch", fetch)
    monkeypatch.setattr(prepare_data, "BACKOFF", 0.0)
    with pytest.raises(UserError, match="is there a network") as e:
        prepare_data.download("http://nowhere.invalid/x", tmp_path / "x")
    assert len(tries) == 3 and e.value.code == 1 and not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    "how, sha256, text, requests",
    [
        ("404", None, "the server answers 404", 1),
        ("403", None, "the server answers 403", 1),
        ("plain", "0" * 64, "not " + "0" * 64, 2),
        ("nolength", None, "does not say how long", 4),
    ],
)
def test_data_downloads_that_fail_say_so_and_look_unfinished(
    tmp_path, server, monkeypatch, how, sha256, text, requests
):
    monkeypatch.setattr(prepare_data, "RETRIES", 3)
    with pytest.raises(UserError, match="cannot be downloaded: .*" + text) as caught:
        prepare_data.download(f"{server.url}{how}-x", tmp_path / "file.bin", None, sha256)
    assert caught.value.code == 1 and not (tmp_path / "file.bin").exists() and len(server.requests) == requests
    assert os.listdir(tmp_path) == []


def test_data_a_hash_that_the_server_states_counts(tmp_path, server):
    server.linked = "0" * 64
    with pytest.raises(UserError, match="sha256"):
        prepare_data.download(f"{server.url}redirect-x", tmp_path / "file.bin")


def test_data_an_unreachable_server_and_a_full_disk(tmp_path, server, monkeypatch):
    monkeypatch.setattr(prepare_data, "RETRIES", 2)
    with pytest.raises(UserError, match="cannot be downloaded: .*refused"):
        prepare_data.download("http://127.0.0.1:1/x", tmp_path / "file.bin")

    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(prepare_data, "fetch", full)
    with pytest.raises(OSError, match="No space"):  # not retried; prepare() tells it in one line
        prepare_data.download(f"{server.url}plain-x", tmp_path / "file.bin")


def test_data_shakespeare_arxiv_and_books_from_a_server(tmp_path, server, monkeypatch, capsys):
    def point(name, url, known):
        row = replace(prepare_data.DATASETS[name], url=url, known=known, tokenizer="char")
        monkeypatch.setitem(prepare_data.DATASETS, name, row)

    server.content = b"To be, or not to be"
    point(
        "shakespeare", f"{server.url}plain-/input.txt", {"input.txt": (19, hashlib.sha256(server.content).hexdigest())}
    )
    folder = prepare("shakespeare")
    assert decoded(folder) == ("To be, or not to ", "be") and folder.name == "shakespeare-char"
    count = len(server.requests)
    (prepare_data.DATA_ROOT / "downloads" / "tinyshakespeare.txt").unlink()
    assert prepare("shakespeare") == folder and len(server.requests) == count  # the tokens are all it takes
    server.content = b'{"text": "a paper", "meta": {}}\n{"text": "another"}\n'
    point("arxiv", f"{server.url}plain-/arxiv_sample.jsonl", {})
    assert "".join(decoded(prepare("arxiv"))) == "a paper\n\nanother\n\n"
    server.content = b"train/12.txt\ntrain/345.txt\n"  # the list, and each book too
    monkeypatch.setattr(prepare_data, "BOOK_LIST", f"{server.url}plain-list")
    point("books", f"{server.url}plain-/", {})
    folder = prepare("books", limit=1)
    assert "".join(decoded(folder)).count("train/345.txt") == 2 and read_meta(folder)["source"]["limit"] == 1
    assert [path for path, _ in server.requests[-3:]] == ["/plain-list", "/plain-/12.txt", "/plain-/345.txt"]
    capsys.readouterr()
    prepare("books", limit=2)
    assert "with other options; preparing it again" in capsys.readouterr().out
    prepare("books")  # as train.py asks, which knows of no limit
    assert (
        capsys.readouterr().out == f"{folder} is ready: nothing to do\n" and read_meta(folder)["source"]["limit"] == 2
    )


def test_data_fineweb_shards_are_used_as_they_are(tmp_path, server, monkeypatch, capsys):
    server.content = shard(40)
    server.linked = hashlib.sha256(server.content).hexdigest()
    monkeypatch.setitem(
        prepare_data.DATASETS,
        "fineweb",
        replace(prepare_data.DATASETS["fineweb"], url=f"{server.url}redirect-/", known={}),
    )
    folder = prepare("fineweb")
    names = ["fineweb_train_000001.bin", "fineweb_val_000000.bin", "meta.json"]
    assert sorted(os.listdir(folder)) == names and folder == prepare_data.DATA_ROOT / "fineweb-gpt2"
    assert (folder / names[0]).read_bytes() == server.content and len(load_tokens(folder, "train")) == 40
    count = len(server.requests)
    capsys.readouterr()
    assert prepare("fineweb", "gpt2") == folder and capsys.readouterr().out == f"{folder} is ready: nothing to do\n"
    prepare("fineweb", shards=3)
    asked = [path for path, _ in server.requests[count:] if "redirect" in path]
    assert asked == ["/redirect-/fineweb_train_000002.bin", "/redirect-/fineweb_train_000003.bin"]
    assert len(load_tokens(folder, "train")) == 120
    assert len(load_tokens(prepare("fineweb"), "train")) == 120  # as train.py asks, which knows of no number
    assert len(load_tokens(prepare("fineweb", shards=1), "train")) == 40
    os.truncate(folder / names[0], 1030)
    assert len(load_tokens(prepare("fineweb"), "train")) == 40  # mended


# ----------------------------------------------------------------------------------------------------------------------
# Options


def options(**given):
    return train.resolve({"device": "cpu", **given})


def test_learning_rate_by_hand():
    o = options(learning_rate=1.0, min_lr=0.1, warmup_iters=4, max_iters=12)
    expected = {
        0: 0.25,
        1: 0.5,
        3: 1.0,
        4: 1.0,
        6: 0.1 + 0.9 * (1 + math.cos(math.pi / 4)) / 2,
        8: 0.55,
        12: 0.1,
        99: 0.1,
    }
    assert {step: train.get_lr(step, o) for step in expected} == pytest.approx(expected)
    long_warmup = options(learning_rate=1.0, warmup_iters=1000, max_iters=10)  # clamped to the run
    assert [train.get_lr(step, long_warmup) for step in (0, 9, 10)] == pytest.approx([0.1, 1.0, 0.1])
    assert train.get_lr(
        500, options(learning_rate=1.0, min_lr=0.1, warmup_iters=0, max_iters=9, lr_decay_iters=1000)
    ) == pytest.approx(0.55)  # the cosine need not end with the run


def test_presets_give_way_to_what_is_given():
    small = options(size="small", n_layer=3)
    assert (small.n_layer, small.n_head, small.n_embd, small.block_size, small.batch_size) == (3, 6, 384, 256, 64)
    assert options().size == "baby" and options(learning_rate=5e-3).min_lr == pytest.approx(5e-4)
    assert options(max_iters=77).lr_decay_iters == 77
    for size, preset in train.SIZES.items():
        assert all(getattr(options(size=size), name) == value for name, value in preset.items())


def test_command_line_values():
    def given(*argv):
        return train.parse_args(list(argv))

    assert given() == ("train", {}) and given("sample") == ("sample", {})
    assert given("--max_iters=1e3", "--learning_rate", "1", "--seed", "0") == (
        "train",
        {"max_iters": 1000, "learning_rate": 1.0, "seed": 0},
    )
    assert given("--resume", "--tie_weights", "no", "--compile=auto", "--data", "a b.txt")[1] == {
        "resume": True,
        "tie_weights": False,
        "compile": None,
        "data": "a b.txt",
    }
    assert given("sample", "--prompt", "-1 and more", "--temperature", "-0")[1] == {
        "prompt": "-1 and more",
        "temperature": 0.0,
    }
    assert given("--prompt=--dashes")[1] == {"prompt": "--dashes"}


def wrong_values(f):
    """Values that option f must refuse, each with what the message must hold besides the option's name."""
    meta = f.metadata
    if meta["choices"]:
        return [
            ("nonsense", "none of"),
            (meta["choices"][0] + "x", f"did you mean '{meta['choices'][0]}'"),
            ("", "none of"),
        ]
    if f.type is bool:
        return [("maybe", "True or False"), ("2", "True or False")]
    if f.type is str:
        return []
    wrong = [
        ("abc", "number"),
        ("", "number"),
        ("1,2", "number"),
        ("nan", ""),
        ("inf", ""),
        ("1e40", "out of range"),
        (f"{meta['low'] - 1}", "out of range"),
        (f"{-(10**30)}", "out of range"),
        (f"{10**30}", "out of range"),
    ]
    return wrong + ([("1.5", "whole number")] if f.type is int else [])


@pytest.mark.parametrize("f", train.fields(train.Options), ids=lambda f: f.name)
def test_every_option_refuses_what_it_cannot_use(f, capsys):
    """Walks the dataclass: a new option cannot escape it."""
    command = next(name for name, names in train.COMMAND_OPTIONS.items() if f.name in names)
    assert f.type in (int, float, str, bool) and f.metadata["help"]
    if f.type in (int, float):
        assert f.metadata["low"] is not None and f.metadata["high"] is not None
    for text, words in wrong_values(f):
        assert train.main([command, f"--{f.name}={text}"]) == 2
        captured = capsys.readouterr()
        assert captured.out == "" and captured.err.count("\n") == 1, text
        assert f"--{f.name}" in captured.err and words in captured.err, text
    misspelt = f"--{f.name[:-1]}"
    assert train.main([command, misspelt, "1"]) == 2
    assert f"no option {misspelt}" in capsys.readouterr().err


@pytest.mark.parametrize(
    "argv, words",
    [
        (["--learning_rat", "1"], "did you mean '--learning_rate'"),
        (["trian"], "did you mean 'train'"),
        (["--max_iters"], "expected one argument"),
        (["--n_embd", "130", "--n_head", "4"], "n_embd 130 is not divisible by n_head 4"),
        (["--n_embd", "36", "--n_head", "4"], "odd head size 9"),
        (["--entry_norm", "False"], "entry_norm False does not go with norm_mode geo"),
        (["--device", "cuda"], "no such device"),
        (["--device", "gpu"], "none of cpu, cuda, mps"),
        (["--device", "cpu:1"], "no such device"),
        (["--device", "cuda:x"], "no such device"),
        (["sample", "--max_iters", "5"], "belongs to train"),
        (["stray"], "no command 'stray'"),
        (["--seed", "1", "stray", "2"], "stray"),
        (["--resume"], "no checkpoint"),
        (["--resume", "--overwrite"], "does not go with"),
        (["--init_from", "nowhere.pt"], "no checkpoint nowhere.pt"),
        (["sample"], "no checkpoint"),
        (["--data", "nowhere.txt"], "nowhere.txt"),
        (["--data", "shakespear"], "did you mean 'shakespeare'"),
        (["--tokenizer", "chr"], "did you mean 'char'"),
        (["--block_size", "100000"], "--block_size 100000"),
        (["--max_iters", "--resume"], "max_iters"),
    ],
)
def test_bad_command_lines_end_in_one_line(argv, words, book, capsys, monkeypatch):
    if torch.cuda.is_available() and "cuda" in argv:
        pytest.skip("this machine has one")
    monkeypatch.setattr("sys.argv", ["train.py"])
    command = argv if argv[0] == "sample" or "--data" in argv or "--init_from" in argv else [*argv, "--data", str(book)]
    assert train.main(command) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ") and captured.err.count("\n") == 1 and words in captured.err
    assert not Path("out").exists()


# ----------------------------------------------------------------------------------------------------------------------
# Training runs


@pytest.fixture
def book(tmp_path, monkeypatch):
    """A small text, in a temporary folder that is the current one."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    path = tmp_path / "book.txt"
    path.write_text(" ".join("".join(rng.choice(list("abcde"), 3)) for _ in range(900)) + "\n", encoding="utf-8")
    return path


SMALL = [
    "--n_layer=4",
    "--n_head=2",
    "--n_embd=16",
    "--block_size=8",
    "--batch_size=4",
    "--max_iters=6",
    "--eval_interval=2",
    "--eval_iters=2",
    "--log_interval=2",
    "--warmup_iters=2",
    "--learning_rate=1e-2",
    "--device=cpu",
    "--max_new_tokens=5",
]


def run_main(book, *argv, code=0):
    assert train.main([f"--data={book}", *SMALL, *argv]) == code


def checkpoint(folder, name="last.pt"):
    return torch.load(Path(folder) / name, weights_only=True)


def differences(a, b, path=""):
    """Where two checkpoints differ, bit for bit; what may differ (names of folders) is left out."""
    if isinstance(a, dict):
        keys = (a.keys() | b.keys()) - {"out_dir", "resume", "versions"}
        return [d for key in keys for d in differences(a.get(key), b.get(key), f"{path}/{key}")]
    if isinstance(a, (list, tuple)):
        return [d for i, (x, y) in enumerate(zip(a, b, strict=True)) for d in differences(x, y, f"{path}/{i}")]
    same = torch.equal(a, b) if torch.is_tensor(a) else a == b
    return [] if same else [path]


def log_rows(folder):
    """log.csv without its one column that is a time."""
    return [line.rsplit(",", 1)[0] for line in (Path(folder) / "log.csv").read_text().splitlines()]


CHANGES = [(f"--norm_mode={mode}",) for mode in MODES] + [
    ("--optimizer=muon",),
    ("--optimizer=muon", "--dtype=float16"),
    ("--dtype=bfloat16",),
    ("--dtype=float16",),
]


@pytest.mark.parametrize("change", CHANGES, ids=" ".join)
def test_resume_is_exact(change, book):
    """Stopped by a signal at an odd step, or ended and prolonged: both equal the unbroken run, bit for bit."""
    change = ("--dropout=0.2", "--gradient_accumulation_steps=2", *change)
    run_main(book, *change, "--out_dir=whole")
    run_main(book, *change, "--out_dir=again")
    assert differences(checkpoint("whole"), checkpoint("again")) == []

    run_main(book, *change, "--out_dir=short", "--max_iters=3", "--lr_decay_iters=6")
    assert checkpoint("short")["step"] == 3
    assert train.main(["--resume", "--out_dir=short", "--max_iters=6"]) == 0
    assert differences(checkpoint("whole"), checkpoint("short")) == []
    assert log_rows("short") == log_rows("whole")

    update = train.Run.update

    def interrupted(run):
        if run.step == 4:
            os.kill(os.getpid(), signal.SIGTERM)
        update(run)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train.Run, "update", interrupted)
        run_main(book, *change, "--out_dir=stopped", code=143)
    assert checkpoint("stopped")["step"] == 5
    assert train.main(["--resume", "--out_dir=stopped"]) == 0
    assert differences(checkpoint("whole"), checkpoint("stopped")) == []
    assert log_rows("stopped") == log_rows("whole")


def test_exactly_max_iters_updates(book, monkeypatch):
    steps, update = [], train.Run.update
    monkeypatch.setattr(train.Run, "update", lambda run: steps.append(run.step) or update(run))
    run_main(book, "--max_iters=5", "--eval_interval=2")
    assert steps == [0, 1, 2, 3, 4] and checkpoint("out")["step"] == 5
    rows = [row.split(",") for row in log_rows("out")[1:]]
    assert [int(row[0]) for row in rows if row[2]] == [0, 2, 4, 5]  # evaluated when due, and at the end
    run_main(book, "--max_iters=0", "--out_dir=none")
    assert checkpoint("none")["step"] == 0 and len(steps) == 5


def test_looking_more_often_changes_nothing(book):
    run_main(book, "--dropout=0.3", "--out_dir=a")
    run_main(
        book,
        "--dropout=0.3",
        "--out_dir=b",
        "--eval_interval=1",
        "--eval_iters=0",
        "--log_interval=1",
        "--sample_interval=1",
    )
    a, b = checkpoint("a"), checkpoint("b")
    assert differences([a["model"], a["optimizers"]], [b["model"], b["optimizers"]]) == []


def test_accumulation_equals_the_big_batch(book):
    run_main(book, "--out_dir=big", "--batch_size=8")
    run_main(book, "--out_dir=split", "--batch_size=2", "--gradient_accumulation_steps=4")
    big, split = checkpoint("big")["model"], checkpoint("split")["model"]
    assert all((big[name] - split[name]).abs().max() < 2e-5 for name in big)


def fresh_run(book, **given):
    """A Run at step 0 on the small text."""
    small = dict(n_layer=4, n_head=2, n_embd=16, block_size=8, batch_size=4, device="cpu", data=str(book))
    return train.start_run({**small, **given})


def test_batches_are_a_function_of_seed_and_step(book):
    run = fresh_run(book)
    o, stream = run.o, run.tokens["train"]
    everything = stream.windows(np.array([0]), len(stream))[0]
    x, y = train.get_batch(stream, 3, o)
    assert x.dtype == torch.int64 and torch.equal(x[:, 1:], y[:, :-1])
    texts = {tuple(everything[i : i + 9]) for i in range(len(everything) - 8)}
    assert all((*a.tolist(), b[-1].item()) in texts for a, b in zip(x, y))
    assert torch.equal(train.get_batch(stream, 3, o)[0], x)
    assert not torch.equal(train.get_batch(stream, 4, o)[0], x)
    o.batch_size, o.gradient_accumulation_steps = 1, 4
    assert torch.equal(train.get_batch(stream, 3, o)[0], x)
    o.seed += 1
    assert not torch.equal(train.get_batch(stream, 3, o)[0], x)


@pytest.mark.parametrize("length", [9, 10])
def test_every_start_is_drawn(length):
    """In a text of exactly a window there is one place to start, in one that is a token longer there are two."""

    class Stream:
        def __len__(self):
            return length

        def windows(self, starts, size):
            assert (starts >= 0).all() and (starts + size <= length).all()
            self.starts = set(starts.tolist())
            return np.zeros((len(starts), size), dtype=np.int64)

    stream = Stream()
    train.get_batch(stream, 0, options(block_size=8, batch_size=64))
    assert stream.starts == set(range(length - 8))


def test_whole_evaluation_predicts_each_token_once(book):
    run = fresh_run(book, eval_iters=0)
    stream = run.tokens["val"]
    everything = stream.windows(np.array([0]), len(stream))[0]
    windows = list(train.eval_batches(stream, run.o))
    assert sum((window[:, 1:].flatten().tolist() for window in windows), []) == everything[1:].tolist()
    assert (len(stream) - 1) % 8 and len(windows) > 2  # a short last window was among them
    # the mean is one over tokens, not over batches
    losses = [(run.model(w[:, :-1], w[:, 1:])[1].item(), w[:, 1:].numel()) for w in windows]
    assert run.estimate_loss() == pytest.approx(sum(a * n for a, n in losses) / sum(n for _, n in losses), rel=1e-6)


def test_same_start_and_batches_for_every_mode(book):
    """Fairness: under one seed all modes see the same batches and start from the same draws, up to their scale."""
    runs = {mode: fresh_run(book, norm_mode=mode) for mode in MODES}
    geo = runs["geo"]
    for run in runs.values():
        assert torch.equal(
            train.get_batch(run.tokens["train"], 5, run.o)[0], train.get_batch(geo.tokens["train"], 5, geo.o)[0]
        )
        for name, residual in run.model.residuals().items():
            plain = geo.model.residuals()[name].F.matrices()
            for matrix, weight in residual.F.matrices().items():
                torch.testing.assert_close(weight, plain[matrix] * residual.init_scale(matrix))


def test_a_run_is_never_destroyed(book, capsys):
    run_main(book)
    before = {path.name: path.read_bytes() for path in Path("out").iterdir()}
    run_main(book, code=2)
    assert "--resume" in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in Path("out").iterdir()} == before
    run_main(book, "--overwrite", "--norm_mode=pre")
    assert checkpoint("out")["model_config"]["norm_mode"] == "pre"
    with train.lock(Path("out")):
        run_main(book, "--overwrite", code=2)
        assert "another run" in capsys.readouterr().err


@pytest.mark.parametrize(
    "change, word",
    [
        ("--norm_mode=pre", "norm_mode"),
        ("--learning_rate=0.5", "learning_rate"),
        ("--n_layer=3", "n_layer"),
        ("--batch_size=2", "batch_size"),
        ("--seed=2", "seed"),
        ("--lr_decay_iters=9", "lr_decay_iters"),
        ("--dropout=0.5", "dropout"),
        ("--optimizer=muon", "optimizer"),
        ("--size=small", "size"),
    ],
)
def test_resume_refuses_what_would_make_another_run(change, word, book, capsys):
    run_main(book)
    before = Path("out/last.pt").read_bytes()
    assert train.main(["--resume", change]) == 2
    assert f"--{word}" in capsys.readouterr().err
    assert Path("out/last.pt").read_bytes() == before


def test_resume_refuses_other_data(book, capsys):
    run_main(book)
    text = book.read_text()
    book.write_text(text + "abc " * 50)
    assert train.main(["--resume"]) == 2
    assert "has changed since out/last.pt was saved" in capsys.readouterr().err
    book.write_text(text.replace("a", "b", 1))  # as long as it was
    assert train.main(["--resume"]) == 2
    assert "has changed since" in capsys.readouterr().err
    book.write_text(text)
    assert train.main(["--resume"]) == 0


@pytest.mark.parametrize("poison, word", [("weight", "loss of step 3"), ("gradient", "gradient of step 3")])
def test_not_finite_stops_the_run(poison, word, book, capsys, monkeypatch):
    update, clip = train.Run.update, torch.nn.utils.clip_grad_norm_

    def poisoned(run):
        if run.step == 3 and poison == "weight":
            run.model.wte.weight.data.fill_(math.nan)
        update(run)

    def poisoned_clip(parameters, limit):
        parameters = list(parameters)
        if Path("out/last.pt").exists() and len(calls := poisoned_clip.calls) == 3:
            parameters[0].grad.fill_(math.inf)
        calls.append(1)
        return clip(parameters, limit)

    poisoned_clip.calls = []
    monkeypatch.setattr(train.Run, "update", poisoned)
    if poison == "gradient":
        monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", poisoned_clip)
    run_main(book, code=1)
    err = capsys.readouterr().err
    assert word in err and err.count("\n") == 1
    saved = checkpoint("out")
    assert saved["step"] == 2 and all(value.isfinite().all() for value in saved["model"].values())


def test_weights_that_overflow_in_the_last_update_are_not_saved(book, capsys, monkeypatch):
    update = train.Run.update

    def overflowing(run):
        update(run)
        if run.step == 4:  # loss and gradient of this step were finite
            run.model.wte.weight.data.fill_(math.inf)

    monkeypatch.setattr(train.Run, "update", overflowing)
    run_main(book, code=1)
    assert "validation loss after 4 steps is not finite" in capsys.readouterr().err
    assert checkpoint("out")["step"] == 2


class FullDisk(io.BytesIO):
    """A file on a disk with room for 1000 bytes."""

    def write(self, data):
        if self.tell() + len(data) > 1000:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(data)


def test_a_full_disk_leaves_the_last_good_checkpoint(book, capsys, monkeypatch):
    save = torch.save
    monkeypatch.setattr(
        torch, "save", lambda content, file: save(content, FullDisk() if content["step"] == 4 else file)
    )
    run_main(book, code=1)
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "No space left on device" in err and "out/best.pt" in err
    assert checkpoint("out")["step"] == 2 and not list(Path("out").glob("*.tmp"))


def test_kill_9_while_writing(book):
    """The process dies in the middle of writing a checkpoint: the one before is whole, and the run goes on from it."""
    script = (
        "import os, signal, sys, torch, train, prepare_data\n"
        f"prepare_data.DATA_ROOT = train.Path({str(book.parent / 'data')!r})\n"
        "save = torch.save\n"
        "def dying(content, file):\n"
        "    if content['step'] == 4:\n"
        "        file.write(b'half'); file.flush(); os.kill(os.getpid(), signal.SIGKILL)\n"
        "    save(content, file)\n"
        "torch.save = dying\n"
        "train.main(sys.argv[1:])\n"
    )
    killed = subprocess.run(
        [sys.executable, "-c", script, f"--data={book}", *SMALL],
        capture_output=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(Path(train.__file__).parent)},
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
    assert checkpoint("out")["step"] == 2
    assert train.main(["--resume"]) == 0
    run_main(book, "--out_dir=whole")
    assert differences(checkpoint("whole"), checkpoint("out")) == [] and log_rows("whole") == log_rows("out")


def test_sample_needs_nothing_but_the_checkpoint(book, tmp_path, capsys, monkeypatch):
    run_main(book)
    shutil.rmtree(tmp_path / "data")
    book.unlink()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    speak = ["sample", f"--out_dir={tmp_path / 'out'}", "--max_new_tokens=40", "--num_samples=1"]
    texts = []
    (tmp_path / "prompt.txt").write_text("abc de", encoding="utf-8")
    for prompt in ("abc de", f"FILE:{tmp_path / 'prompt.txt'}", "abc de", "", "a", "abcd " * 20):
        capsys.readouterr()
        assert train.main([*speak, f"--prompt={prompt}"]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] == texts[2] and texts[0].startswith("abc de") and len(texts[0]) == 6 + 40 + 1
    assert texts[3].startswith("\n") and texts[5].startswith("abcd " * 20)
    assert train.main([*speak, "--prompt=abc", "--seed=1", "--num_samples=2"]) == 0
    both = capsys.readouterr().out
    assert train.main([*speak, "--prompt=abc", "--seed=1"]) == 0
    assert both.startswith(capsys.readouterr().out)
    assert train.main([*speak, "--prompt=aX"]) == 2
    assert "'X'" in capsys.readouterr().err


def test_prompts_under_an_ascii_locale():
    """With LC_ALL=C and PYTHONUTF8=0 an argument's bytes beyond ASCII arrive as surrogates."""
    tokenizer = ByteTokenizer()
    assert train.prompt_ids(tokenizer, "\udcc3\udca9").tolist() == [[0xC3, 0xA9]]  # é
    assert train.prompt_ids(tokenizer, "é").tolist() == [[0xC3, 0xA9]]
    for broken in ("\udcc3", "\ud800"):
        with pytest.raises(UserError, match="no UTF-8"):
            train.prompt_ids(tokenizer, broken)


def test_best_is_the_lowest_not_the_latest(book, capsys):
    losses = iter([5.0, 3.0, 4.0, 2.0, 6.0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train.Run, "estimate_loss", lambda run: next(losses))
        run_main(book, "--max_iters=4", "--eval_interval=1")
    assert checkpoint("out", "best.pt")["step"] == 3 and checkpoint("out")["step"] == 4
    assert checkpoint("out")["best_val"] == 2.0


@pytest.mark.parametrize(
    "damage, words",
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-2000]), "cannot be read"),
        (lambda path: path.write_bytes(b""), "cannot be read"),
        (lambda path: path.write_text("hello"), "cannot be read"),
        (lambda path: torch.save({"model": {}}, path), "cannot be read"),
        (lambda path: torch.save([1, 2], path), "cannot be read"),
        (
            lambda path: torch.save(
                {**torch.load(path), "model_config": {"vocab_size": 6, "n_embd": 32, "n_head": 2}}, path
            ),
            "damaged or of another model",
        ),
        (
            lambda path: torch.save({**torch.load(path), "model_config": {"width": 6}}, path),
            "damaged or of another model",
        ),
        (lambda path: torch.save({**torch.load(path), "tokenizer": {"name": "runes"}}, path), ""),
    ],
)
def test_damaged_checkpoints(damage, words, book, capsys):
    run_main(book)
    for name in ("best.pt", "last.pt"):
        damage(Path("out") / name)
    for argv in (["sample"], ["--resume"], ["--init_from=out/best.pt", "--out_dir=new", f"--data={book}"]):
        capsys.readouterr()
        assert train.main(argv) == 2
        err = capsys.readouterr().err
        assert err.count("\n") == 1 and words in err
    assert not Path("new").exists()


@pytest.mark.parametrize(
    "key, value",
    [
        ("optimizers", []),
        ("optimizers", [{}]),
        ("optimizers", None),
        ("pending", [1]),
        ("best_val", "low"),
        ("scaler", 3),
        ("step", "two"),
        ("step", 1.5),
        ("options", {}),
        ("data", None),
        ("tokenizer", []),
        ("model_config", 5),
        ("options.max_iters", "many"),
        ("options.learning_rate", None),
        ("options.beta2", 7),
        ("options.device", "gpu"),
        ("options.prompt", 5),
        ("options.seed", -1),
        ("options.new", 1),
    ],
)
def test_a_resume_checks_what_it_reads(key, value, book, capsys):
    run_main(book)
    saved = checkpoint("out")
    outer, _, inner = key.partition(".")
    if inner:
        saved[outer][inner] = value
    else:
        saved[outer] = value
    torch.save(saved, "out/last.pt")
    capsys.readouterr()
    code = train.main(["--resume", "--eval_only"])
    err = capsys.readouterr().err
    if key in ("scaler", "options.prompt"):  # not used without float16; any value is a text
        assert code in (0, 2)
    else:
        assert code == 2 and err.count("\n") == 1 and ("out/last.pt" in err or key == "options.device")


def test_weights_that_are_not_finite_are_refused(book, capsys):
    run_main(book)
    saved = checkpoint("out", "best.pt")
    saved["model"]["wte.weight"][0, 0] = math.nan
    torch.save(saved, "out/best.pt")
    assert train.main(["sample"]) == 2
    assert "not finite" in capsys.readouterr().err


def test_a_resume_notices_other_tokens_of_the_same_number(book, tmp_path, capsys):
    shutil.copytree(prepare_data.prepare(str(book), "char"), tmp_path / "tokens")
    assert train.main([*SMALL, "--data=tokens"]) == 0
    path = tmp_path / "tokens" / "train.bin"
    path.write_bytes(path.read_bytes()[100:] + path.read_bytes()[:100])
    assert train.main(["--resume"]) == 2
    assert "has changed" in capsys.readouterr().err


def test_a_bad_prompt_is_told_before_the_training(book, capsys):
    for prompt in ("X", "FILE:nowhere.txt"):
        run_main(book, f"--prompt={prompt}", code=2)
        assert capsys.readouterr().err.count("\n") == 1 and not Path("out").exists()


def test_names_of_data_sets_win_over_folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "python").mkdir()
    assert options(data="python").data == "python"
    (tmp_path / "texts").mkdir()
    assert options(data="texts").data == str(tmp_path / "texts")


def test_fine_tuning_keeps_the_tokenizer(book, tmp_path, capsys):
    run_main(book, "--norm_mode=peri")
    other = tmp_path / "other.txt"
    other.write_text("ab ba " * 200, encoding="utf-8")  # its own alphabet would be smaller
    tune = [
        "--init_from=out/best.pt",
        f"--data={other}",
        "--out_dir=tuned",
        "--max_iters=4",
        "--eval_interval=4",
        "--max_new_tokens=3",
    ]
    assert train.main([*tune, "--learning_rate=0", "--min_lr=0", "--weight_decay=0"]) == 0
    start, tuned = checkpoint("out", "best.pt"), checkpoint("tuned")
    assert tuned["tokenizer"] == start["tokenizer"] and tuned["options"]["norm_mode"] == "peri"
    assert differences(start["model"], tuned["model"]) == []  # at rate 0 the weights are the checkpoint's
    assert train.main(["--resume", "--out_dir=tuned", "--max_iters=6"]) == 0
    for change, words in (("--norm_mode=geo", "contradicts"), ("--tokenizer=byte", "keeps")):
        assert train.main([*tune, change, "--out_dir=third"]) == 2
        assert words in capsys.readouterr().err
    other.write_text("abXba " * 200, encoding="utf-8")
    assert train.main([*tune, "--overwrite"]) == 2
    assert "'X'" in capsys.readouterr().err


# ----------------------------------------------------------------------------------------------------------------------
# compare and probe


def result(variant, learning_rate, seed, val_loss, tokens_per_s=100.0):
    return {
        "variant": variant,
        "learning_rate": learning_rate,
        "seed": seed,
        "parameters": 10,
        "start_loss": 4.0,
        "val_loss": val_loss,
        "tokens_per_s": tokens_per_s,
    }


def test_statistics_by_hand():
    rows = [
        result("pre", 1e-3, 1, 2.0),
        result("pre", 1e-3, 2, 2.2),
        result("pre", 1e-3, 3, 2.4),
        result("pre", 9e-3, 1, 1.0),
        result("pre", 9e-3, 2, 4.0),
        result("geo", 1e-3, 1, 1.9, 50),
        result("geo", 1e-3, 2, 2.0, 50),
        result("geo", 1e-3, 3, 2.4, 50),
        result("geo", 9e-3, 1, math.nan),
        result("post", 1e-3, 1, 5.0),
    ]
    pre, geo, post = train.summarise(rows)
    # at 9e-3 pre's mean would be lower, but one of its runs ended no lower than it began
    assert (pre["learning_rate"], pre["diverged"], pre["runs"], pre["all_diverged"], pre["all_runs"]) == (
        1e-3,
        0,
        3,
        1,
        5,
    )
    assert (pre["mean"], pre["sd"]) == pytest.approx((2.2, 0.2))
    assert (geo["mean"], geo["sd"]) == pytest.approx((2.1, math.sqrt((0.04 + 0.01 + 0.09) / 2)))
    # differences -0.1, -0.2, 0.0: mean -0.1, standard deviation 0.1, standard error 0.1 / sqrt(3)
    assert (geo["diff"], geo["diff_se"]) == pytest.approx((-0.1, 0.1 / math.sqrt(3)))
    assert geo["speed"] == pytest.approx(0.5) and (geo["all_diverged"], geo["all_runs"]) == (1, 4)
    assert (post["diverged"], post["runs"]) == (1, 1) and math.isnan(post["mean"])
    assert train.table([pre, geo, post]).splitlines()[2:] == [
        "| pre | 0.001 (0.001, 0.009) | 10 | 2.2000 ± 0.2000 | - | 1.00 | 0/3; 1/5 at all rates |",
        "| geo | 0.001 (0.001, 0.009) | 10 | 2.1000 ± 0.2646 | -0.1000 ± 0.0577 | 0.50 | 0/3; 1/4 at all rates |",
        "| post | 0.001 (0.001) | 10 | - | - | 1.00 | 1/1; 1/1 at all rates |",
    ]
    (single,) = train.summarise([result("pre", 1e-3, 1, 2.0)])
    assert train.plus_minus(single["mean"], single["sd"]) == "2.0000"


def test_plan_of_a_compare():
    runs = train.plan(
        {"norm_mode": ["pre", "geo"], "geo_decay": ["none", "sqrt"], "learning_rate": [1e-3, 2e-3], "seed": [1, 2]}
    )
    variants = ["pre", "geo none", "geo sqrt"]  # geo's options make no variants of pre
    assert set(runs) == {(v, lr, seed) for v in variants for lr in (1e-3, 2e-3) for seed in (1, 2)}
    assert list(dict.fromkeys(v for v, _, _ in runs)) == variants
    assert list(train.plan({"norm_mode": ["pre"], "n_layer": [2, 3], "seed": [5]})) == [
        ("n_layer=2", 3e-3, 5),
        ("n_layer=3", 3e-3, 5),
    ]
    without = train.plan({"norm_mode": ["pre", "geo"], "entry_norm": [True, False]})
    assert [v for v, _, _ in without] == ["pre entry_norm=True", "pre entry_norm=False", "geo entry_norm=True"]
    with pytest.raises(train.UserError, match="entry_norm False"):
        train.plan({"norm_mode": ["geo"], "entry_norm": [False]})
    # every run has a folder of its own
    keys = [
        (variant, rate, seed)
        for variant in ("pre", "geo")
        for rate in (0.001, 0.0010000001)
        for seed in (1234567, 1234568)
    ]
    assert len({train.run_folder(Path("out"), key) for key in keys}) == 8


COMPARE = [
    "compare",
    "--norm_mode=pre,geo",
    "--seed=1,2",
    "--n_layer=2",
    "--n_head=2",
    "--n_embd=16",
    "--block_size=8",
    "--batch_size=4",
    "--max_iters=4",
    "--eval_interval=2",
    "--eval_iters=2",
    "--warmup_iters=1",
    "--device=cpu",
]


def results_without_time(folder):
    return [row.rsplit(",", 1)[0] for row in (Path(folder) / "results.csv").read_text().splitlines()]


def test_an_interrupted_compare_equals_an_unbroken_one(book, capsys):
    command = [*COMPARE, f"--data={book}"]
    assert train.main([*command, "--out_dir=whole"]) == 0
    out = capsys.readouterr().out
    assert (Path("whole") / "table.md").read_text() in out and "| geo |" in out
    pictures = {"loss.png", "rms.png", "grad_norm.png", "angle.png"}
    assert pictures <= {path.name for path in Path("whole").iterdir()}

    update, count = train.Run.update, []

    def interrupted(run):
        count.append(run.step)
        if len(count) == 7:  # in the second run, after its third update
            os.kill(os.getpid(), signal.SIGINT)
        update(run)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train.Run, "update", interrupted)
        assert train.main([*command, "--out_dir=broken"]) == 130
        assert "the same command goes on" in capsys.readouterr().err
        assert len(results_without_time("broken")) == 2
        assert train.main([*command, "--out_dir=broken"]) == 0
    assert len(count) == 16  # 4 runs of 4 updates, none made twice
    assert results_without_time("broken") == results_without_time("whole")
    for run in ("pre-lr0.003-seed1", "pre-lr0.003-seed2", "geo-lr0.003-seed1", "geo-lr0.003-seed2"):
        whole, broken = (Path(folder) / "runs" / run for folder in ("whole", "broken"))
        assert differences(checkpoint(whole), checkpoint(broken)) == [] and log_rows(whole) == log_rows(broken)
        for name in ("probe-start.json", "probe-end.json"):
            assert (whole / name).read_text() == (broken / name).read_text()
    assert train.main([*command, "--out_dir=broken", "--max_iters=5"]) == 2
    assert "holds another compare" in capsys.readouterr().err


def test_a_diverged_run_is_a_row(book, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # as if it were not installed
    update = train.Run.update

    def poisoned(run):
        if run.o.norm_mode == "pre" and run.o.seed == 1 and run.step == 2:
            run.model.wte.weight.data.fill_(math.nan)
        update(run)

    monkeypatch.setattr(train.Run, "update", poisoned)
    assert train.main([*COMPARE, f"--data={book}"]) == 0
    rows = results_without_time("out")
    assert [row.endswith(",nan") for row in rows[1:]] == [True, False, False, False]
    out = capsys.readouterr().out
    assert "| 1/2 |" in out and out.count("they need matplotlib") == 1
    assert train.main([*COMPARE, f"--data={book}"]) == 0  # a diverged run is done, too
    assert results_without_time("out") == rows


def test_compare_replaces_only_what_is_its_own(book, capsys):
    stranger = Path("out/runs/tensorboard/events")
    stranger.parent.mkdir(parents=True)
    stranger.write_text("not ours")
    command = [*COMPARE, f"--data={book}", "--norm_mode=geo", "--seed=1"]
    assert train.main([*command, "--overwrite"]) == 0 and stranger.exists()
    run = Path("out/runs/geo-lr0.003-seed1")
    # killed between the first best.pt and the first last.pt: the run begins again
    (run / "last.pt").unlink()
    Path("out/results.csv").unlink()
    assert train.main(command) == 0 and checkpoint(run)["step"] == 4
    for name, content in (
        ("compare.json", b"{"),
        ("results.csv", b"variant,seed\ngeo,1\n"),
        ("results.csv", b"\xff\n1\n"),
    ):
        kept = Path("out", name).read_bytes()
        Path("out", name).write_bytes(content)
        capsys.readouterr()
        assert train.main(command) == 2
        err = capsys.readouterr().err
        assert err.count("\n") == 1 and f"out/{name} is damaged" in err
        Path("out", name).write_bytes(kept)
    for wrong in (
        "--data=nowhere.txt",
        "--block_size=8,100000",
        "--device=cpu,gpu",
        "--seed=1,,2",
        "--norm_mode=geo,",
        "--overwrite=True,False",
    ):
        assert train.main([*command, wrong, "--out_dir=new"]) == 2 and not Path("new").exists(), wrong


def test_pictures_show_every_point(tmp_path, monkeypatch):
    """Panels share an axis: no curve of either may run out of it, and a constant one is no magnified rounding."""
    plt = pytest.importorskip("matplotlib.pyplot")
    monkeypatch.setattr(plt, "close", lambda figure: None)

    def rows(*sizes):
        return [{"rms": size, "grad_norm": size, "angle": size} for size in sizes]

    train.draw_depth(
        plt, tmp_path, {"start": {"geo": rows(1.0, 1.0 + 1e-7)}, "end": {"geo": rows(1.0, 1.0), "pre": rows(2.0, 9.0)}}
    )
    figures = [plt.figure(number) for number in plt.get_fignums()]
    monkeypatch.undo()
    assert len(figures) == 3
    for figure in figures:
        for axes in figure.axes:
            low, high = axes.get_ylim()
            assert all(low < y < high for line in axes.lines for y in line.get_ydata())
    low, high = figures[0].axes[0].get_ylim()
    assert low <= 0.8 and high > 9
    plt.close("all")


def test_probe_command(book, capsys):
    run_main(book)
    before = Path("out/last.pt").read_bytes()
    capsys.readouterr()
    assert train.main(["probe", "--out_dir=out"]) == 0
    out = capsys.readouterr().out
    assert Path("out/last.pt").read_bytes() == before
    assert {"probe-rms.png", "probe-grad_norm.png", "probe-angle.png", "probe.csv"} <= {
        p.name for p in Path("out").iterdir()
    }
    run = train.start_run({"resume": True, "out_dir": "out"})
    window = next(train.eval_batches(run.tokens["val"], run.o))
    rows = run.model.probe(window[:, :-1], window[:, 1:])
    lines = [line.split() for line in out.splitlines() if line.strip()[:2] in ("1.", "2.", "3.", "4.")]
    assert lines == [[f"{v:.4g}" if isinstance(v, float) else v for v in row.values()] for row in rows]
    assert train.main(["probe", "--norm_mode=peri", f"--data={book}", "--block_size=8", "--device=cpu"]) == 0
    assert "peri, before training" in capsys.readouterr().out and Path("out-probe-peri/probe.csv").exists()


def test_bench_measures_every_mode_against_pre(book, capsys):
    small = [
        "--n_layer=4",
        "--n_head=2",
        "--n_embd=16",
        "--block_size=8",
        "--batch_size=2",
        "--device=cpu",
        "--max_iters=3",
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "peak_mb", lambda given: 1.5)  # a process of its own for each mode takes long
        patch.setattr(train, "ProcessPoolExecutor", InProcess)
        assert train.main(["bench", *small]) == 0
    header, *rows = (line.split(",") for line in Path("out/bench.csv").read_text().splitlines())
    assert header == ["norm_mode", "compile", "ms_per_step", "tokens_per_s", "ratio", "peak_mb"]
    assert [row[:2] for row in rows] == [[mode, "False"] for mode in MODES] and rows[MODES.index("pre")][4] == "1.000"
    for row in rows:  # 2 x 8 tokens a step
        assert float(row[3]) == pytest.approx(16e3 / float(row[2]), rel=0.01) and row[5] == "1.5"
    assert train.process_peak() > 10e6
    # where the step goes: shares of one whole, and 6 FLOPs per weight and 12 L C T for attention on each token
    header, *parts = (line.split(",") for line in Path("out/bench_parts.csv").read_text().splitlines())
    assert header[2:6] == ["data", "forward", "backward", "optimizer"] and len(parts) == len(rows)
    for part, row in zip(parts, rows, strict=True):
        assert sum(map(float, part[2:6])) == pytest.approx(1.0, abs=0.003) and float(part[7]) > 0
    pre = 65 * 16 + 4 * (12 * 16 * 16 + 2 * 16) + 16  # embedding and head in one, blocks with two gains, final gain
    flops = (6 * pre + 12 * 4 * 16 * 8) * float(rows[MODES.index("pre")][3])
    assert float(parts[MODES.index("pre")][6]) == pytest.approx(flops / 1e9, abs=0.051)


def test_bench_profile_leaves_a_trace(capsys):
    small = "--n_layer=1 --n_head=2 --n_embd=16 --block_size=8 --batch_size=2 --device=cpu --max_iters=1".split()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "peak_mb", lambda given: 1.5)
        patch.setattr(train, "ProcessPoolExecutor", InProcess)
        assert train.main(["bench", "--norm_mode=geo", "--profile", *small]) == 0
    table = capsys.readouterr().out.partition("ten dearest operations")[2].splitlines()[1:]
    assert len(table) == 10
    events = json.loads(Path("out/trace-geo.json").read_text())["traceEvents"]
    # three steps, each with four products forward and eight backward in the block, and one and two at the head
    assert sum(event["name"] == "aten::mm" for event in events) == 3 * 15


def test_timing_the_parts_changes_no_update(book):
    """An update that is timed part by part equals one that is not, bit for bit, and meets the parts in order."""
    given = {"data": str(book), "eval_only": True, "device": "cpu", "dropout": 0.1, "gradient_accumulation_steps": 2}
    given |= {"n_layer": 1, "n_embd": 16, "block_size": 8, "batch_size": 2}
    plain, watched = train.start_run(dict(given)), train.start_run(dict(given))
    plain.model.train(), watched.model.train()
    met = []
    plain.update()
    watched.update(met.append)
    assert met == ["data", "forward", "backward", "forward", "backward", "optimizer"]
    for p, q in zip(plain.model.parameters(), watched.model.parameters(), strict=True):
        assert torch.equal(p, q)


class InProcess:
    """Stands in for ProcessPoolExecutor: runs what is submitted at once, here."""

    def __init__(self, workers, mp_context):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        pass

    def submit(self, function, *args):
        future = Future()
        future.set_result(function(*args))
        return future


def test_readme_mode_runs_as_it_stands(book, capsys):
    """The README's "add your own mode": its code is run, and the mode trains, resumes and speaks."""
    readme = (Path(train.__file__).parent / "README.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(@norm_mode.*?)```", readme, flags=re.DOTALL)
    name = re.search(r'@norm_mode\("(\w+)"\)', code)[1]
    assert len(code.splitlines()) <= 10
    field = train.Options.__dataclass_fields__["norm_mode"]
    try:
        exec(compile(code, "README.md", "exec"), vars(geogpt))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(field, "metadata", {**field.metadata, "choices": tuple(NORM_MODES)})
            run_main(book, f"--norm_mode={name}", "--max_iters=2")
            assert train.main(["--resume", "--max_iters=4"]) == 0
            assert train.main(["sample", "--max_new_tokens=5"]) == 0
        assert checkpoint("out")["model_config"]["norm_mode"] == name
        block = tiny(name).blocks[0]
        x = on_sphere(8, 16)[None]
        F = block.mlp.F(rms_norm64(x, block.mlp.N_in.weight))
        torch.testing.assert_close(block.mlp(x), rms_norm64(x + 0.5 * F, block.mlp.N_out.weight))
    finally:
        NORM_MODES.pop(name, None)


def test_imports_run_one_way():
    """geogpt.py needs torch and the standard library alone; importing any file prints and changes nothing."""
    folder = Path(train.__file__).parent
    imported = {
        (node.module if isinstance(node, ast.ImportFrom) else alias.name).split(".")[0]
        for node in ast.walk(ast.parse((folder / "geogpt.py").read_text(encoding="utf-8")))
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for alias in node.names
    }
    assert imported <= {"torch", *sys.stdlib_module_names}
