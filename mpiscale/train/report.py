"""What a run says before it starts: what runs where, how large, what is sent."""

from __future__ import annotations

from typing import Protocol

from mpiscale.comm.world import World
from mpiscale.train.config import TrainConfig


class Traffic(Protocol):
    """Bytes that this rank sends in a training step, and their formula."""

    @property
    def sent_bytes(self) -> int:
        """Bytes per step."""

    @property
    def formula(self) -> str:
        """How they are computed."""


def describe_run(
    world: World,
    config: TrainConfig,
    mesh: str,
    held: int,
    traffic: Traffic,
) -> str:
    """The start-up report, a few aligned lines; held: parameters on this rank."""
    whole = config.build_model(config.vocab)  # shapes only
    total = sum(p.full_size for p in whole.parameters())
    data = config.data or "the source of Python's standard library"
    heads = f"{config.heads} heads"
    if config.kv_heads not in (None, config.heads):
        heads += f" ({config.kv_heads} key/value)"
    rows = {
        "MPI": world.library,
        "ranks": f"{world.size} ({world.local_size} on this node), "
        f"{world.threads} thread{'s' if world.threads > 1 else ''} each",
        "mesh": mesh,
        "model": f"{config.model}, {config.layers} layers, width {config.width}, "
        f"{heads}, vocabulary {config.vocab}, {config.dtype}",
        "parameters": f"{total:,} in total, {held:,} on rank 0",
        "data": f"{data}; {config.batch} x {config.length} tokens a step",
        "sent": f"{traffic.sent_bytes:,} bytes per step by rank 0",
        "": f"= {traffic.formula}",
    }
    indented = {
        name: text.replace("\n", "\n" + " " * 14) for name, text in rows.items()
    }
    return "\n".join(f"{name:<11} {text}" for name, text in indented.items())
