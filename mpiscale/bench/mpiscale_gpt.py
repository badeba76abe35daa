"""mpiscale's contender: a step as `train/loop.py` makes it, without clipping."""

from __future__ import annotations

import functools
import platform
from collections.abc import Callable

import numpy as np

from mpiscale.backend import FLOAT32, keep_freed_memory
from mpiscale.bench.contender import GEMM_SIZE, Settings
from mpiscale.bench.machine import blas_libraries
from mpiscale.bench.shapes import batch
from mpiscale.bench.start import start
from mpiscale.comm.communicator import Communicator
from mpiscale.comm.threads import apply_threads
from mpiscale.kernels.choose import implementation
from mpiscale.models.gpt import GPT, GPTConfig
from mpiscale.nn.flat import materialize
from mpiscale.nn.placement import Placement
from mpiscale.optim.adamw import AdamW
from mpiscale.parallel.data_parallel.all_reduce_after_backward import (
    AllReduceAfterBackward,
)
from mpiscale.tensor import Tensor
from mpiscale.train.memory import MemoryReport, peak_resident_bytes, saved_bytes

SEED = 1


class MpiscaleGPT:
    """GPT with flat buffers and AdamW, kernels as shipped."""

    name = "mpiscale"

    def __init__(self, settings: Settings, comm: Communicator | None = None) -> None:
        apply_threads(settings.threads)  # both as `comm/world.py` does at every start
        keep_freed_memory()
        self.details = [
            f"kernels: {implementation()}, numpy {np.__version__}, "
            f"Python {platform.python_version()}",
            *blas_libraries(),
        ]
        self.settings, shape = settings, settings.shape
        self.model = GPT(
            GPTConfig(
                vocabulary=shape.vocabulary,
                length=shape.length,
                layers=shape.layers,
                width=shape.width,
                heads=shape.heads,
            )
        )
        self.flat = materialize(self.model, SEED, FLOAT32)
        if comm is None or comm.rank == 0:
            for parameter in self.flat.parameters:
                np.save(settings.folder / f"{parameter.name}.npy", parameter.data)
        self.dp = None if comm is None else AllReduceAfterBackward(self.flat, comm)
        made = settings.optimizer
        self.optimizer = AdamW(
            self.flat, made.beta1, made.beta2, made.eps, made.weight_decay
        )
        self.activations: int | None = None

    def step(self, number: int) -> float:
        """Train on batch `number`; return this rank's part of the loss."""
        shape = self.settings.shape
        tokens, labels = batch(shape, number)
        part, parts = self.dp.samples if self.dp else (0, 1)
        rows = np.array_split(np.arange(shape.batch), parts)[part]
        placement = Placement(rows, np.arange(shape.length), shape.length)
        self.flat.zero_grad()
        loss = self.model.loss(tokens[rows], labels[rows], placement, labels.size)
        if self.settings.memory and self.activations is None:
            self.activations = self._saved_bytes(loss)
        loss.backward()
        if self.dp is not None:
            self.dp.finish()
        self.optimizer.step(self.settings.optimizer.lr)
        return loss.item()

    def _saved_bytes(self, loss: Tensor) -> int:
        return saved_bytes([loss], (self.flat.data, self.flat.grad))

    def memory(self, before: int) -> MemoryReport | None:
        """Where the memory goes, once a step has been made with `settings.memory`."""
        if self.activations is None:
            return None
        return MemoryReport(
            parameters=self.flat.data.nbytes,
            gradients=self.flat.grad.nbytes,
            optimizer=self.optimizer.m.nbytes + self.optimizer.v.nbytes,
            activations=self.activations,
            before=before,
            peak=peak_resident_bytes(),
        )

    def product(self) -> Callable[[], object]:
        """NumPy's product of two [GEMM_SIZE, GEMM_SIZE] matrices."""
        a = np.ones((GEMM_SIZE, GEMM_SIZE), np.float32)
        return functools.partial(np.matmul, a, a, out=np.empty_like(a))


if __name__ == "__main__":
    start(MpiscaleGPT)
