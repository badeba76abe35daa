"""GPT-2 and Llama in PyTorch, from a state dict of ours: an independent second opinion.

Written from the papers, with plain attention; weights are [n_in, n_out] as ours are.
"""

import math

import torch
import torch.nn.functional as F  # noqa: N812


def leaves(state):
    return {
        name: torch.tensor(values, requires_grad=True) for name, values in state.items()
    }


def causal_attention(q, k, v):
    """q [b, t, h, d], k and v [b, t, hk, d] -> [b, t, h * d]"""
    b, t, h, d = q.shape
    k, v = (x.repeat_interleave(h // x.shape[2], dim=2) for x in (k, v))
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    scores = q @ k.transpose(-1, -2) / math.sqrt(d)
    scores = scores.masked_fill(~torch.ones(t, t).tril().bool(), -math.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2).reshape(b, t, h * d)


def heads(qkv, h, hk, d):
    b, t, _ = qkv.shape
    q, k, v = qkv.split((h * d, hk * d, hk * d), dim=-1)
    return q.view(b, t, h, d), k.view(b, t, hk, d), v.view(b, t, hk, d)


def gpt(p, config, tokens):
    hk = config.kv_heads or config.heads
    x = p["token_embedding.weight"][tokens]
    x = x + p["position_embedding.weight"][: tokens.shape[1]]
    for i in range(config.layers):

        def w(name, i=i):
            return p[f"blocks.{i}.{name}"]

        def norm(x, name, w=w):
            return F.layer_norm(x, x.shape[-1:], w(f"{name}.gain"), w(f"{name}.bias"))

        y = norm(x, "norm1") @ w("attention.qkv.weight") + w("attention.qkv.bias")
        y = causal_attention(*heads(y, config.heads, hk, config.width // config.heads))
        x = x + y @ w("attention.out.weight") + w("attention.out.bias")
        y = norm(x, "norm2") @ w("mlp.up.weight") + w("mlp.up.bias")
        y = F.gelu(y, approximate="tanh")
        x = x + y @ w("mlp.down.weight") + w("mlp.down.bias")
    x = F.layer_norm(x, x.shape[-1:], p["final_norm.gain"], p["final_norm.bias"])
    table = p["token_embedding.weight" if config.tied else "head.weight"]
    return x @ table.T


def rotate(x, base):
    """RoPE as in Hugging Face's Llama: x cos + rotate_half(x) sin."""
    _, t, _, d = x.shape
    frequency = base ** (-torch.arange(0, d, 2, dtype=torch.float64) / d)
    angle = torch.arange(t, dtype=torch.float64)[:, None] * frequency
    angle = torch.cat([angle, angle], dim=-1)[None, :, None, :]
    half = torch.cat([-x[..., d // 2 :], x[..., : d // 2]], dim=-1)
    return x * angle.cos().to(x.dtype) + half * angle.sin().to(x.dtype)


def llama(p, config, tokens):
    hk = config.kv_heads or config.heads
    x = p["token_embedding.weight"][tokens]

    def norm(x, gain):
        return gain * x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()

    for i in range(config.layers):

        def w(name, i=i):
            return p[f"blocks.{i}.{name}"]

        y = norm(x, w("norm1.gain")) @ w("attention.qkv.weight")
        q, k, v = heads(y, config.heads, hk, config.width // config.heads)
        q, k = rotate(q, config.rope_base), rotate(k, config.rope_base)
        x = x + causal_attention(q, k, v) @ w("attention.out.weight")
        gate, up = (norm(x, w("norm2.gain")) @ w("mlp.up.weight")).chunk(2, dim=-1)
        x = x + (F.silu(gate) * up) @ w("mlp.down.weight")
    x = norm(x, p["final_norm.gain"])
    table = p["token_embedding.weight" if config.tied else "head.weight"]
    return x @ table.T
