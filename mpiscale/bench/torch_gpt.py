"""PyTorch's contender: GPT-2 as one writes it there, from our first weights."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from mpiscale.bench.contender import GEMM_SIZE, Settings
from mpiscale.bench.shapes import Shape, batch
from mpiscale.bench.start import start
from mpiscale.comm.communicator import Communicator
from mpiscale.train.memory import MemoryReport


class Attention(nn.Module):
    """Causal self-attention.  [b, t, width] both ways"""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [b, t, width] -> [b, t, width]"""
        b, t, width = x.shape
        q, k, v = (
            part.view(b, t, self.heads, -1).transpose(1, 2)
            for part in self.qkv(x).split(width, dim=2)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(b, t, width))


class MLP(nn.Module):
    """Two layers with GELU between.  [b, t, width] both ways"""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [b, t, width] -> [b, t, width]"""
        return self.down(F.gelu(self.up(x), approximate="tanh"))


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)).  [b, t, width] both ways"""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(shape.width)
        self.attention = Attention(shape.width, shape.heads)
        self.norm2 = nn.LayerNorm(shape.width)
        self.mlp = MLP(shape.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [b, t, width] -> [b, t, width]"""
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """Token ids and labels -> loss; names as in `models/gpt.py`."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.position_embedding = nn.Embedding(shape.length, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.final_norm = nn.LayerNorm(shape.width)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """tokens, labels [b, t] -> mean loss, in nats per token"""
        positions = torch.arange(tokens.shape[1])
        x = self.token_embedding(tokens) + self.position_embedding(positions)
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.final_norm(x), self.token_embedding.weight)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class TorchGPT:
    """The model with PyTorch's fused AdamW, eager or compiled."""

    def __init__(self, settings: Settings, comm: Communicator | None = None) -> None:
        torch.set_num_threads(settings.threads)
        torch.set_num_interop_threads(1)
        self.name = "PyTorch compiled" if settings.compile else "PyTorch"
        self.details = [
            f"torch {torch.__version__}, BLAS: {torch_blas()}, vector instructions: "
            f"{torch.backends.cpu.get_cpu_capability()}"
        ]
        self.settings = settings
        model = GPT(settings.shape)
        load_weights(model, settings)
        self.optimizer = adamw(model, settings)
        self.rank = 0 if comm is None else comm.rank
        self.model: Any = model
        if comm is not None:
            rendezvous = f"file://{settings.folder}/gloo"
            distributed.init_process_group(
                "gloo", rendezvous, rank=comm.rank, world_size=comm.size
            )
            self.model = DistributedDataParallel(model)
            self.name += " DDP, gloo"
        if settings.compile:
            self.model = torch.compile(self.model)

    def step(self, number: int) -> float:
        """Train on batch `number`; return this rank's part of the loss."""
        ranks = self.settings.ranks  # which divides the batch: DDP takes the mean
        tokens, labels = (
            torch.from_numpy(np.array_split(ids, ranks)[self.rank])
            for ids in batch(self.settings.shape, number)
        )
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.model(tokens, labels)
        loss.backward()
        self.optimizer.step()
        return float(loss.item()) / ranks

    def memory(self, before: int) -> MemoryReport | None:
        """PyTorch keeps no account of its memory on a CPU."""
        return None

    def product(self) -> Callable[[], object]:
        """PyTorch's product of two [GEMM_SIZE, GEMM_SIZE] matrices."""
        a = torch.ones(GEMM_SIZE, GEMM_SIZE)
        return functools.partial(torch.matmul, a, a, out=torch.empty_like(a))


def torch_blas() -> str:
    """The BLAS that PyTorch was built with, as it calls it: mkl, open, ..."""
    found = re.search(r"BLAS_INFO=(\w+)", torch.__config__.show())
    return found[1] if found else "unknown"


def load_weights(model: GPT, settings: Settings) -> None:
    """Fill the model from files named as our parameters are, one at a time.

    Ours are called gain where PyTorch says weight, and its linear layers hold [m, n]
    where ours hold [n, m].
    """
    with torch.no_grad():
        for path, module in model.named_modules():
            for kind, parameter in module.named_parameters(recurse=False):
                is_gain = isinstance(module, nn.LayerNorm) and kind == "weight"
                name = f"{path}.{'gain' if is_gain else kind}"
                values = torch.from_numpy(np.load(settings.folder / f"{name}.npy"))
                transposed = isinstance(module, nn.Linear) and kind == "weight"
                parameter.copy_(values.T if transposed else values)


def adamw(model: GPT, settings: Settings) -> torch.optim.AdamW:
    """Fused AdamW; matrices decay, gains and biases do not."""
    made = settings.optimizer
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    return torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": made.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ],
        lr=made.lr,
        betas=(made.beta1, made.beta2),
        eps=made.eps,
        fused=True,
    )


if __name__ == "__main__":
    start(TorchGPT)
