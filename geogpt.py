"""
GeoGPT: a GPT whose residual update is a switch.

    from geogpt import GPT, GPTConfig
    model = GPT(GPTConfig(vocab_size=65, norm_mode="geo"))
    logits, loss = model(idx, targets)                # idx, targets: (B, T) token ids
    text_ids = model.generate(idx, max_new_tokens=100)

A Transformer is a *residual stream* x, one vector of width C per token, that 2L sublayers F (attention, MLP,
attention, MLP, ...) read and change in turn. How a change enters the stream is the whole subject of this file:

    pre    x <- x + F(N(x))                 GPT-2                      the stream grows
    post   x <- N(x + F(x))                 Vaswani et al. 2017        it is put back to RMS 1 (times a gain) each time
    peri   x <- x + N(F(N(x)))              Peri-LN, arXiv 2502.02732  it grows, by writes of RMS 1 (times a gain)
    geo    x <- exp_x(eta_k P_x F(x))       GeoNorm, arXiv 2601.22095  it stays on the sphere of radius sqrt(C)

N is an RMSNorm with a learnable gain. Each line is one class below, and its `forward` is that line.
Read in this order: project and exp_map, Residual and its subclasses, Attention and MLP, GPT.

What is certain about GeoNorm, and what is our reading. From the paper's abstract: sublayer outputs are taken as update
directions, the update is a geodesic one, and its step decays with depth as a learning rate does with time. From its
figures: the exponential map of the sphere, and the schedules sqrt, linear and harmonic. Our reading: the sublayers see
x itself, without an inner norm (x always has RMS 1, so there is nothing to normalise), while an entry norm puts x on
the sphere and a final norm gives the head a gain; k counts blocks; the step starts at alpha = 1; and the angle of one
step is clamped to pi/4, once, after the decay. Each is an option or one line.
"""
import math
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.functional import cross_entropy, gelu, rms_norm, scaled_dot_product_attention

NORM_EPS = 1e-6  # under the root of every RMSNorm


# ----------------------------------------------------------------------------------------------------------------------
# GeoNorm's step: the exponential map of the sphere

def dot(x, y):
    """Inner product <x,y> over the last axis, which is kept: (..., C), (..., C) -> (..., 1). No matmul: autocast would
    round that to bf16."""
    return (x * y).sum(-1, keepdim=True)


def squared_norm(x):
    """|x|^2 = <x,x> likewise: (..., C) -> (..., 1). torch's norm reads x once and writes no product down."""
    return torch.linalg.vector_norm(x, dim=-1, keepdim=True).square()


def project(x, g):
    """
    P_x g = g - rho x, rho = <x,g>/<x,x>: the part of g tangent to the sphere at x. x, g: (..., C) of one dtype. Returns
    (P_x g, rho, <x,x>), the last two (..., 1).
    """
    # r^2 is measured: with the constant C, rounding of |x| can grow from layer to layer. The clamp is for x = 0, which
    # dropout can leave of a narrow embedding.
    rr = squared_norm(x).clamp(min=1e-12)
    rho = dot(x, g) / rr
    return torch.addcmul(g, -rho, x), rho, rr


def exp_map(x, g, eta=1.0, max_angle=math.pi / 4):
    """
    Walk from x along the sphere |x| = const in the direction of g: x' = exp_x(eta P_x g)  (arXiv 2601.22095).

    Only the tangent part P_x g counts: the radial part, rho x with rho = <x,g>/<x,x>, would change |x|. The geodesic (a
    great circle) leaves x in the direction of P_x g, and a tangent step of length s turns x by s/|x|. With
    t = |P_x g|/|x|, the angle of a full step:

        x' = cos(th) x + sin(th)/t P_x g,    th = min(eta t, max_angle)

    x, g: (..., C); eta: step size, up to 1000; max_angle: radians, 0 turns the clamp off. Returns (..., C) in the dtype
    of x. |x'| = |x| up to 1e-5 in fp32 for |rho| <= 10. Value and gradient are finite for g = 0, for g parallel to x,
    and for any |g_i| up to 1e15.

    How it relates to its neighbours:
    - For small g, x' = x + eta P_x g up to O(t^2): Pre-Norm's addition without its radial part, which to first order
      is all that changes |x|. (The tangent part still lengthens a Pre-Norm stream, by t^2/2.)
    - Post-Norm without a gain, |x| (x + g)/|x + g|, moves along the same great circle, by the angle atan2(t, 1 + rho)
      in place of t. It is a retraction: a cheaper map that agrees with exp_x to first order.
    - A Pre-Norm stream is read through N, so only its direction counts. It grows: once the writes outweigh the
      embedding, write number j turns it by about j^(-1/2) when the writes are unrelated (|x| ~ sqrt(j)), or by 1/j when
      they share a direction (|x| ~ j) beside independent parts. Up to a constant (a block makes two writes) these are
      the sqrt and the harmonic schedule: geo has to be told what Pre-Norm does unasked.
    """
    return ExpMap.apply(x, g.to(x.dtype), eta, max_angle)  # under autocast F returns bf16; the stream stays fp32


class ExpMap(torch.autograd.Function):
    """
    exp_map, with its gradient in closed form: on a CPU autograd's own takes about twice as long.

    x' = a x + b p with p = P_x g, and a = cos th, b = sin th / t depend on t = |p|/|x| alone. Let h = dLoss/dx'. The
    loss feels p directly and through t: q = dLoss/dp = b h + c p. P_x is symmetric, so g gets P_x q = q - k x. And x
    gets a h, -c t^2 x for the |x| in t, and, since p = g - rho x, -rho P_x q - k p.
    """

    @staticmethod
    def forward(ctx, x, g, eta, max_angle):
        p, rho, rr = project(x, g)
        # |p|^2 from |g|^2 - rho^2 |x|^2 would save a pass, but lose all digits where rho is large
        t = (squared_norm(p) / rr + 1e-12).sqrt()  # not 0, so that sin(th)/t is a number
        th = (eta * t).clamp(max=max_angle) if max_angle else eta * t
        ctx.save_for_backward(x, p, rho, rr, t, th)
        ctx.eta, ctx.max_angle = eta, max_angle
        return (th.cos() * x).addcmul_(th.sin() / t, p)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, h):
        x, p, rho, rr, t, th = ctx.saved_tensors
        a, b = th.cos(), th.sin() / t
        dth = ctx.eta * (th < ctx.max_angle) if ctx.max_angle else ctx.eta  # slope of th(t): none at the clamp
        da, db = -th.sin() * dth, (a * dth - b) / t  # slopes of a(t) and b(t)
        hx = dot(h, x)
        c = (da * hx + db * dot(h, p)) / (rr * t)
        k = b * hx / rr  # <q,x>/<x,x>, for p has no part along x
        grad_g = (b * h).addcmul_(c, p).addcmul_(-k, x)
        grad_x = (a * h).addcmul_(-rho, grad_g).addcmul_(-k, p).addcmul_(-c * t * t, x)
        return grad_x, grad_g, None, None


# eta_k / alpha for block k = 1..L (the paper's Figure 4). The paper writes linear as (T - k)/T; counted from k = 1 that
# would freeze the last block, so we count it from 0.
GEO_DECAYS = {
    "none": lambda k, L: 1.0,
    "sqrt": lambda k, L: 1.0 / math.sqrt(k),
    "linear": lambda k, L: (L - k + 1) / L,
    "harmonic": lambda k, L: 1.0 / k,
}


# ----------------------------------------------------------------------------------------------------------------------
# Residual updates: the norm modes

class RMSNormFunction(torch.autograd.Function):
    """n w with n = x / RMS(x), as torch's rms_norm. On a CPU the latter leaves its gradient to autograd, which takes
    half as long again."""

    @staticmethod
    def forward(ctx, x, w):
        r = (squared_norm(x) / x.size(-1) + NORM_EPS).rsqrt()  # 1 / RMS(x)
        ctx.save_for_backward(x, r, w)
        return (x * r).mul_(w)  # in place: fresh memory is what costs

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, h):
        x, r, w = ctx.saved_tensors
        hn = (h * x).mul_(r)
        mean = dot(hn, w) / x.size(-1)  # of h w n
        return (h * w).addcmul_(-mean * r, x).mul_(r), hn.flatten(0, -2).sum(0)


class RMSNorm(nn.Module):
    """x / RMS(x) * gain over the last axis, gain starting at 1 (arXiv 1910.07467). Any shape (..., dim), same out."""

    def __init__(self, dim):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        # bf16 from a sublayer under autocast: norms work in fp32
        return RMSNormFunction.apply(x.to(self.weight.dtype), self.weight)


NORM_MODES = {}  # name -> subclass of Residual; what --norm_mode can be


def norm_mode(name):
    """Class decorator: make a Residual available as `norm_mode=name`."""
    def register(cls):
        NORM_MODES[name] = cls
        return cls
    return register


class Residual(nn.Module):
    """
    One sublayer F and the way its output enters the stream. Subclasses write `forward`: x (B, T, C) -> x' (B, T, C).

    F: the sublayer, Attention or MLP. config: GPTConfig. k: number of the block, 1..L; its two sublayers share it.
    """
    norms = ()  # names of the RMSNorms that forward uses
    final_norm = True  # one more norm before the head? Not where the stream leaves the last block normalised.

    def __init__(self, F, config, k):
        super().__init__()
        self.F, self.k, self.L = F, k, config.n_layer
        for name in self.norms:
            self.add_module(name, RMSNorm(config.n_embd))

    def init_scale(self, matrix):
        """Factor on the initial 1/sqrt(fan_in) of `matrix`: one of q, k, v, out (attention), fc, proj (MLP)."""
        return 1.0

    @staticmethod
    def check(config):
        """Raise ValueError where this mode cannot work with the config."""


def gpt2_scale(matrix, L):
    """GPT-2's initial scale: the 2L writes start so small that all of them together have about unit size."""
    return 1 / math.sqrt(2 * L) if matrix in ("out", "proj") else 1.0


@norm_mode("pre")
class Pre(Residual):
    """Pre-Norm (GPT-2): the stream itself is never normalised, so 2L unit-size writes would grow it to sqrt(2L)."""
    norms = ("N",)

    def forward(self, x):
        return x + self.F(self.N(x))

    def init_scale(self, matrix):
        return gpt2_scale(matrix, self.L)


@norm_mode("post")
class Post(Residual):
    """Post-Norm (Vaswani et al. 2017): normalise after each addition. Known to need warmup, and to fail when deep."""
    norms = ("N",)
    final_norm = False

    def forward(self, x):
        return self.N(x + self.F(x))


@norm_mode("peri")
class Peri(Residual):
    """Peri-LN (arXiv 2502.02732): normalise what F reads and what it writes; both gains are learnable."""
    norms = ("N_in", "N_out")

    def forward(self, x):
        return x + self.N_out(self.F(self.N_in(x)))


@norm_mode("geo")
class Geo(Residual):
    """GeoNorm (arXiv 2601.22095): x follows F(x) along the sphere. F reads x itself, which has RMS 1 already, and the
    final norm does no more than give the head a gain."""

    def __init__(self, F, config, k):
        super().__init__(F, config, k)
        self.eta = config.geo_alpha * GEO_DECAYS[config.geo_decay](k, config.n_layer)
        self.max_angle = config.geo_max_angle

    def forward(self, x):
        return exp_map(x, self.F(x), self.eta, self.max_angle)

    @staticmethod
    def check(config):
        if not config.entry_norm:
            raise ValueError("entry_norm False does not go with norm_mode geo: the entry norm puts the stream on the "
                             "sphere; leave it True")


# ----------------------------------------------------------------------------------------------------------------------
# Sublayers

class KVCache:
    """Keys and values of the tokens one Attention has seen, so that the next one costs one row of attention, not T."""

    def __init__(self, size):
        self.size, self.length = size, 0

    def append(self, k, v):
        """k, v: (B, nh, T, hs) of the next T tokens -> those of all tokens so far, (B, nh, length, hs)."""
        if self.length == 0:
            self.k, self.v = (torch.empty(*t.shape[:2], self.size, t.shape[3], dtype=t.dtype, device=t.device)
                              for t in (k, v))
        start, self.length = self.length, self.length + k.size(2)
        self.k[:, :, start:self.length] = k
        self.v[:, :, start:self.length] = v
        return self.k[:, :, :self.length], self.v[:, :, :self.length]


class Attention(nn.Module):
    """Causal multi-head self-attention with rotary positions (RoPE, arXiv 2104.09864), without biases."""

    def __init__(self, config):
        super().__init__()
        self.n_head, self.dropout = config.n_head, config.dropout
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=False)  # q, k, v, one below the other
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=False)
        self.cache = None  # a KVCache while GPT.generate runs, else None
        # Position p turns the i-th pair of a head's coordinates by the angle p * 10000^(-2i/hs), so that the product of
        # a query and a key depends on their distance alone.
        hs = config.n_embd // config.n_head
        freqs = 10000.0 ** (-torch.arange(0, hs, 2) / hs)  # (hs/2)
        angles = torch.outer(torch.arange(config.block_size), freqs)
        turns = torch.stack((angles.cos(), angles.sin()), -1)
        self.register_buffer("turns", turns, persistent=False)  # (block_size, hs/2, 2)

    def rotate(self, x, start):
        """Rotary positions start, start + 1, ... for x: (B, T, heads, hs) -> the same shape and dtype."""
        turns = self.turns[start:start + x.size(1), None]  # (T, 1, hs/2, 2)
        pairs = x.to(turns.dtype).unflatten(-1, (-1, 2))  # (B, T, heads, hs/2, 2)
        if torch.compiler.is_compiling():  # it can fuse this, but not complex numbers
            (re, im), (cos, sin) = pairs.unbind(-1), turns.unbind(-1)
            pairs = torch.stack((re * cos - im * sin, re * sin + im * cos), -1)
        else:  # the same as one product of complex numbers: one pass over memory instead of seven
            pairs = torch.view_as_real(torch.view_as_complex(pairs) * torch.view_as_complex(turns))
        return pairs.flatten(-2).to(x.dtype)

    def forward(self, x):
        B, T, C = x.shape
        nh, hs = self.n_head, C // self.n_head
        past = self.cache.length if self.cache is not None else 0  # tokens already in the cache; if any, T is 1
        qk, v = self.c_attn(x).view(B, T, 3 * nh, hs).split((2 * nh, nh), dim=2)
        q, k = self.rotate(qk, past).chunk(2, dim=2)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # each (B, nh, T, hs)
        if self.cache is not None:
            k, v = self.cache.append(k, v)  # (B, nh, past + T, hs)
        y = scaled_dot_product_attention(q, k, v, dropout_p=self.dropout if self.training else 0.0, is_causal=past == 0)
        y = y.transpose(1, 2).reshape(B, T, C)  # heads side by side
        return nn.functional.dropout(self.c_proj(y), self.dropout, self.training)

    def matrices(self):
        """The weight matrices by the names the papers use, (out, in) each, as views that can be written to."""
        q, k, v = self.c_attn.weight.chunk(3)
        return {"q": q, "k": k, "v": v, "out": self.c_proj.weight}


class MLP(nn.Module):
    """Position-wise two-layer network of width 4C with GELU, without biases."""

    def __init__(self, config):
        super().__init__()
        self.dropout = config.dropout
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd, bias=False)
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd, bias=False)

    def forward(self, x):
        return nn.functional.dropout(self.c_proj(gelu(self.c_fc(x))), self.dropout, self.training)

    def matrices(self):
        """As Attention.matrices."""
        return {"fc": self.c_fc.weight, "proj": self.c_proj.weight}


class Block(nn.Module):
    """Attention, then MLP, each with its own residual update."""

    def __init__(self, config, k):
        super().__init__()
        mode = NORM_MODES[config.norm_mode]
        self.attn = mode(Attention(config), config, k)
        self.mlp = mode(MLP(config), config, k)

    def forward(self, x):
        return self.mlp(self.attn(x))


# ----------------------------------------------------------------------------------------------------------------------
# The model

@dataclass
class GPTConfig:
    """Shape and mode of a GPT. Raises ValueError, in one line, for values that make no model."""
    vocab_size: int
    block_size: int = 256  # tokens of context
    n_layer: int = 6  # L
    n_head: int = 6
    n_embd: int = 384  # C, the width of the stream
    dropout: float = 0.0
    norm_mode: str = "geo"  # a key of NORM_MODES
    entry_norm: bool = True  # RMSNorm without gain right after the embedding
    geo_decay: str = "harmonic"  # a key of GEO_DECAYS
    geo_alpha: float = 1.0  # eta of the first block
    geo_max_angle: float = math.pi / 4  # radians that one sublayer may turn the stream; 0: no clamp
    tie_weights: bool = True  # the head is the embedding; else the head starts at zero
    vocab_multiple: int = 1  # embedding and head are padded up to a multiple of this; padding is never sampled

    def __post_init__(self):
        for name in ("vocab_size", "block_size", "n_layer", "n_head", "n_embd", "vocab_multiple"):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be a whole number, 1 or more")
        if self.n_embd % self.n_head:
            raise ValueError(f"n_embd {self.n_embd} is not divisible by n_head {self.n_head}")
        if self.n_embd // self.n_head % 2:
            raise ValueError(f"n_embd {self.n_embd} / n_head {self.n_head} gives the odd head size "
                             f"{self.n_embd // self.n_head}; rotary positions turn pairs, so it must be even")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout is {self.dropout}; it must be in [0, 1)")
        if self.norm_mode not in NORM_MODES:
            raise ValueError(f"norm_mode is {self.norm_mode!r}; it must be one of {', '.join(NORM_MODES)}")
        if self.geo_decay not in GEO_DECAYS:
            raise ValueError(f"geo_decay is {self.geo_decay!r}; it must be one of {', '.join(GEO_DECAYS)}")
        if not 0 < self.geo_alpha < math.inf:
            raise ValueError(f"geo_alpha is {self.geo_alpha}; it must be positive")
        if not 0 <= self.geo_max_angle <= math.pi:
            raise ValueError(f"geo_max_angle is {self.geo_max_angle}; it must be in [0, pi], 0 for no clamp")
        NORM_MODES[self.norm_mode].check(self)


def context_start(n, block_size):
    """
    Where the context of a text of n tokens begins: at 0 while it fits, then at multiples of half a block.

    The start stays put for block_size/2 tokens at a time, so a key/value cache can be filled once and grown token by
    token; and it depends on n alone: how the text came about does not change what the model makes of it.
    """
    half = max(block_size // 2, 1)
    return half * max(0, math.ceil((n - block_size) / half))


class GPT(nn.Module):
    """
    Token embedding, entry norm, L blocks, final norm (where the mode has one), head.

    The entry norm is gain-free and stands in every mode: geo cannot do without (it puts the stream on the sphere), and
    an embedding of std 0.02 would drown in the first write of every mode that normalises what F reads or writes.
    """

    def __init__(self, config):
        super().__init__()
        self.config = config
        C = config.n_embd
        rows = math.ceil(config.vocab_size / config.vocab_multiple) * config.vocab_multiple
        self.wte = nn.Embedding(rows, C)
        self.blocks = nn.ModuleList(Block(config, k) for k in range(1, config.n_layer + 1))
        self.final_norm = RMSNorm(C) if NORM_MODES[config.norm_mode].final_norm else nn.Identity()
        self.lm_head = nn.Linear(C, rows, bias=False)
        if config.tie_weights:
            self.lm_head.weight = self.wte.weight
        self.init_weights()

    @torch.no_grad()
    def init_weights(self):
        """
        All initialisation, from torch's global random state. The draws are the same for every mode.

            embedding           normal, std 0.02
            q k v out fc proj   normal, std 1/sqrt(fan_in), times the mode's init_scale
            head                the embedding where tied, else zero (every first prediction is then uniform)
            gains               1
        """
        nn.init.normal_(self.wte.weight, std=0.02)
        for residual in self.residuals().values():
            for name, weight in residual.F.matrices().items():
                nn.init.normal_(weight, std=residual.init_scale(name) / math.sqrt(weight.size(1)))
        if not self.config.tie_weights:
            nn.init.zeros_(self.lm_head.weight)

    def residuals(self):
        """The 2L residual updates in the order the stream meets them: {"1.attn": Residual, "1.mlp": ...}."""
        return {f"{k}.{name}": residual for k, block in enumerate(self.blocks, 1)
                for name, residual in (("attn", block.attn), ("mlp", block.mlp))}

    def features(self, idx):
        """Token ids (B, T) -> what the head reads (B, T, C)."""
        if idx.size(1) > self.config.block_size:
            raise ValueError(f"{idx.size(1)} tokens do not fit into block_size {self.config.block_size}")
        x = nn.functional.dropout(self.wte(idx), self.config.dropout, self.training)  # (B, T, C)
        if self.config.entry_norm:
            x = rms_norm(x, x.shape[-1:], eps=1e-12)  # NORM_EPS beside the embedding's 0.02^2 would leave RMS 0.999
        for block in self.blocks:
            x = block(x)
        return self.final_norm(x)

    def forward(self, idx, targets=None):
        """
        idx: (B, T) int64, T <= block_size; targets: (B, T) int64 or None, -1 where nothing is to be predicted.
        Returns (logits (B, T, rows of the head), loss): the mean cross-entropy in nats per token, or None.
        """
        logits = self.lm_head(self.features(idx))
        if targets is None:
            return logits, None
        return logits, cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=-1)

    # --- training ---

    def configure_optimizer(self, learning_rate, weight_decay=0.1, betas=(0.9, 0.95), optimizer="adamw"):
        """
        A list of optimizers: [AdamW], or [AdamW, Muon] where Muon takes the hidden matrices and AdamW the rest.
        Matrices decay, gains do not. ValueError for another name, or for a parameter that no group would hold.
        """
        hidden = [p for p in self.blocks.parameters() if p.dim() == 2]
        in_blocks = {id(p) for p in hidden}
        outer = [p for p in self.parameters() if p.dim() == 2 and id(p) not in in_blocks]
        gains = [p for p in self.parameters() if p.dim() < 2]
        if len(hidden) + len(outer) + len(gains) != len(list(self.parameters())):
            raise ValueError("a parameter of more than two axes is in no optimizer group; add it here")
        if optimizer not in ("adamw", "muon"):
            raise ValueError(f"optimizer is {optimizer!r}; it must be adamw or muon")
        decayed = outer if optimizer == "muon" else hidden + outer
        groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": gains, "weight_decay": 0.0}]
        optimizers = [torch.optim.AdamW([group for group in groups if group["params"]], lr=learning_rate, betas=betas,
                                        fused=True)]
        if optimizer == "muon":  # match_rms_adamw: updates as large as AdamW's, so that one learning rate serves both
            optimizers.append(torch.optim.Muon(hidden, lr=learning_rate, weight_decay=weight_decay,
                                               adjust_lr_fn="match_rms_adamw"))
        return optimizers

    def num_params(self):
        """Number of parameters; a tied head counts once."""
        return sum(p.numel() for p in self.parameters())

    def flops_per_token(self):
        """
        Floating-point operations of forward and backward per token (PaLM, arXiv 2204.02311, appendix B): 6 for each
        weight that multiplies, and 12 L C T for attention's products QK^T and AV, the causal half not deducted.
        """
        c = self.config
        lookup_only = 0 if c.tie_weights else self.wte.weight.numel()
        return 6 * (self.num_params() - lookup_only) + 12 * c.n_layer * c.n_embd * c.block_size

    # --- looking inside ---

    def probe(self, idx, targets):
        """
        What each sublayer does to the stream on one batch, (B, T) each, without dropout. Returns one dict per sublayer:

            name        "1.attn", "1.mlp", "2.attn", ...
            rms, max    root mean square and largest |value| of the stream after the update
            F_rms       root mean square of F's output
            cos         mean over tokens of the cosine between the stream before and F's output
            angle       mean angle in radians by which the stream turned
            clamped     share of tokens that turned by geo's max_angle; 0 for other modes
            grad_norm   norm of the loss gradient of F's weights

        Changes no weight, no gradient and no random state.
        """
        rows, outputs, handles = [], {}, []

        def keep(name):
            return lambda F, inputs, out: outputs.update({name: out})

        def measure(name):
            def hook(residual, inputs, x_new):
                # on the CPU: mps has no float64
                x, g, x_new = (t.detach().cpu().double() for t in (inputs[0], outputs[name], x_new))
                unit, unit_new = (t / t.norm(dim=-1, keepdim=True) for t in (x, x_new))
                # 2 asin(|u - u'| / 2) is exact for small angles, where acos of the cosine is not
                angle = 2 * ((unit - unit_new).norm(dim=-1) / 2).clamp(max=1).asin()
                limit = getattr(residual, "max_angle", 0.0)
                rows.append({
                    "name": name, "rms": x_new.square().mean().sqrt().item(), "max": x_new.abs().max().item(),
                    "F_rms": g.square().mean().sqrt().item(),
                    "cos": nn.functional.cosine_similarity(x, g, dim=-1).mean().item(),
                    "angle": angle.mean().item(),
                    "clamped": (angle > 0.999 * limit).double().mean().item() if limit else 0.0})
            return hook

        was_training = self.training
        self.eval()
        try:
            for name, residual in self.residuals().items():
                handles += [residual.F.register_forward_hook(keep(name)),
                            residual.register_forward_hook(measure(name))]
            with torch.enable_grad():
                _, loss = self(idx, targets)
            weights = [list(residual.F.parameters()) for residual in self.residuals().values()]
            grads = iter(torch.autograd.grad(loss, sum(weights, [])))
            for row, matrices in zip(rows, weights, strict=True):
                row["grad_norm"] = torch.stack([next(grads).norm() for _ in matrices]).norm().item()
        finally:
            for handle in handles:
                handle.remove()
            self.train(was_training)
        return rows

    # --- sampling ---

    @torch.no_grad()
    def generate(self, idx, max_new_tokens, temperature=1.0, top_k=0, top_p=1.0, generator=None):
        """
        Continue idx (B, n), n >= 1, by max_new_tokens sampled tokens; returns (B, n + max_new_tokens).

        temperature: 0 (below 1e-5) is greedy; top_k: keep the k likeliest tokens (0, or beyond the vocabulary: all);
        top_p: keep the likeliest tokens that together reach this probability (1: all). generator: torch.Generator on
        the model's device; None starts one from the last torch.manual_seed, so that two calls give one text. The global
        random state and the model's mode stay as they were. ValueError for an empty idx or options out of range.

        Exact up to rounding: each token is drawn from forward(idx[:, context_start(n):]). The cache is refilled when
        that start moves; a cache that slid would keep values computed from tokens it has dropped.
        """
        if idx.size(1) < 1:
            raise ValueError("generate needs at least one token to continue")
        if not (temperature >= 0 and top_k >= 0 and 0 <= top_p <= 1):
            raise ValueError(f"temperature {temperature} and top_k {top_k} must be 0 or more, top_p {top_p} in [0, 1]")
        if generator is None:
            generator = torch.Generator(idx.device).manual_seed(torch.initial_seed())
        attentions = [block.attn.F for block in self.blocks]
        was_training, start = self.training, None
        self.eval()
        try:
            for _ in range(max_new_tokens):
                n = idx.size(1)
                new = idx[:, -1:]
                if start != context_start(n, self.config.block_size):
                    start = context_start(n, self.config.block_size)
                    new = idx[:, start:]
                    for attention in attentions:
                        attention.cache = KVCache(self.config.block_size)
                logits = self.lm_head(self.features(new)[:, -1])[:, :self.config.vocab_size]  # (B, vocab_size)
                idx = torch.cat((idx, sample_token(logits, temperature, top_k, top_p, generator)), dim=1)
        finally:
            for attention in attentions:
                attention.cache = None
            self.train(was_training)
        return idx


def sample_token(logits, temperature, top_k, top_p, generator):
    """Draw one token per row of logits (B, V); returns (B, 1). Options as in GPT.generate."""
    if temperature < 1e-5:  # as good as greedy, and logits / temperature could overflow
        return logits.argmax(-1, keepdim=True)
    logits = logits.float() / temperature
    if 0 < top_k < logits.size(-1):
        kth = logits.topk(top_k).values[:, -1:]
        logits = logits.masked_fill(logits < kth, -math.inf)
    probs = logits.softmax(-1)
    if top_p < 1:
        ordered, order = probs.sort(dim=-1, descending=True, stable=True)
        reached = ordered.cumsum(-1) - ordered >= top_p  # those before this one suffice
        reached[:, 0] = False  # the likeliest always stays
        probs = probs.masked_fill(reached.scatter(-1, order, reached), 0.0)  # multinomial normalises
    return torch.multinomial(probs, 1, generator=generator)


# ----------------------------------------------------------------------------------------------------------------------
# Variations: the other placements in use. Each is a small step from one of the four above.

@norm_mode("deepnorm")
class DeepNorm(Post):
    """DeepNorm (arXiv 2203.00555, decoder-only): Post-Norm with a heavier stream and, to match, smaller weights. The
    paper's beta scales Xavier's initial weights, here it scales ours."""

    def forward(self, x):
        return self.N((2 * self.L) ** 0.25 * x + self.F(x))

    def init_scale(self, matrix):  # never on q and k: softmax bounds what they can do
        return 1.0 if matrix in ("q", "k") else (8 * self.L) ** -0.25


@norm_mode("sandwich")
class Sandwich(Peri):
    """Sandwich-LN (CogView, arXiv 2105.13290): Peri-LN's formula, found earlier, on GPT-2's initial weights. The output
    norm cancels their smaller scale in forward; only how fast those weights then turn differs."""

    def init_scale(self, matrix):
        return gpt2_scale(matrix, self.L)


@norm_mode("reorder")
class Reorder(Residual):
    """OLMo-2's reordered norm (arXiv 2501.00656): normalise what F writes alone. OLMo-2 adds QK-norm; we do not."""
    norms = ("N",)

    def forward(self, x):
        return x + self.N(self.F(x))


@norm_mode("lns")
class LayerNormScaling(Residual):
    """LayerNorm Scaling (arXiv 2502.05795): Pre-Norm whose deeper blocks read a smaller input, so that the stream grows
    less. It takes the place of GPT-2's 1/sqrt(2L), which is left out."""
    norms = ("N",)

    def forward(self, x):
        return x + self.F(self.N(x) / math.sqrt(self.k))


@norm_mode("mix")
class MixLN(Residual):
    """Mix-LN (arXiv 2412.13795): Post-Norm in the first floor(L/4) blocks, Pre-Norm in the rest."""
    norms = ("N",)

    def forward(self, x):
        return self.N(x + self.F(x)) if self.k <= self.L // 4 else x + self.F(self.N(x))

    def init_scale(self, matrix):
        return 1.0 if self.k <= self.L // 4 else gpt2_scale(matrix, self.L)

    @staticmethod
    def check(config):
        if config.n_layer < 4:
            raise ValueError(f"norm_mode mix needs n_layer 4 or more: a quarter of {config.n_layer} blocks is none")


@norm_mode("keel")
class Keel(Residual):
    """Keel (arXiv 2601.19895): Post-Norm with an inner norm, and a stream that weighs as much as all 2L sublayers."""
    norms = ("N_in", "N_out")
    final_norm = False

    def forward(self, x):
        return self.N_out(2 * self.L * x + self.F(self.N_in(x)))


@norm_mode("orthogonal")
class Orthogonal(Pre):
    """Orthogonal residual update (arXiv 2505.11881): Pre-Norm without the part of the write that lies along x."""

    def forward(self, x):
        return x + project(x, self.F(self.N(x)).to(x.dtype))[0]
