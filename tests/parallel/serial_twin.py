"""A serial model and its parallel twin, and what must be equal between them."""

import numpy as np
from mpi4py import MPI

from mpiscale.comm.mpi import MpiCommunicator
from mpiscale.models.gpt import GPT, GPTConfig
from mpiscale.models.llama import Llama
from mpiscale.nn.flat import materialize
from mpiscale.nn.placement import Noise, Placement
from mpiscale.ops.cross_entropy import IGNORE
from mpiscale.optim.adamw import AdamW
from mpiscale.optim.clip import clip
from mpiscale.parallel.sequence_parallel import sequence_parallelize
from mpiscale.parallel.sharding import gather_whole
from mpiscale.parallel.tensor_parallel.tensor_parallelize import tensor_parallelize
from mpiscale.parallel.tied_parameters import gradient_norm, synchronise
from tests.communicators import world_communicator

FLOAT64 = np.dtype(np.float64)
CLOSE = {"rtol": 1e-12, "atol": 1e-12}  # float64: only the order of sums differs


def world():
    return world_communicator()


def alone():
    return MpiCommunicator(MPI.COMM_SELF)


def make(config, comm=None, seed=1, dtype=FLOAT64, boundary=None):
    """(model, flat parameters): cut over `comm`, or serial.

    boundary: a class of `sequence_parallel`, to cut the sequences, too.
    """
    model = (GPT if isinstance(config, GPTConfig) else Llama)(config)
    if comm is not None:
        tensor_parallelize(model, comm)
    if boundary is not None:
        sequence_parallelize(model, comm, boundary(comm))
    return model, materialize(model, seed, dtype)


def batch(config, batch=2, seed=0):
    """Tokens and labels, some of them ignored."""
    rng = np.random.default_rng(seed)
    tokens, labels = rng.integers(0, config.vocabulary, (2, batch, config.length))
    labels[0, : config.length // 2] = IGNORE
    return tokens, labels


def step(model, flat, optimizer, data, comm, k=1, lr=1e-3, max_norm=1.0):
    """One training step as the loop does it; returns (loss, gradient norm)."""
    tokens, labels = data
    flat.zero_grad()
    placement = Placement.whole(*tokens.shape, Noise(seed=5, step=k))
    loss = model.loss(tokens, labels, placement)
    loss.backward()
    grad = flat.complete_grad()
    synchronise(flat.pieces())
    norm = gradient_norm(flat.pieces(), comm)
    clip(grad, norm, max_norm)
    if optimizer is not None:
        optimizer.step(lr)
    return loss.item(), norm


def train(config, comm, steps, tensor_parallel=True, dtype=FLOAT64, boundary=None):
    """(losses, norms, whole gradients, whole parameters) after some steps."""
    cut_over = comm if tensor_parallel else None
    model, flat = make(config, cut_over, dtype=dtype, boundary=boundary)
    # A bias of the keys shifts all scores of a query alike: its gradient is rounding
    # noise (1e-18), which Adam divides by eps. With 1e-8, 20 steps make it 1e-12.
    optimizer = AdamW(flat, eps=1e-7)
    curve = [
        step(model, flat, optimizer, batch(config, seed=k), comm, k)
        for k in range(1, steps + 1)
    ]
    losses, norms = zip(*curve, strict=True)
    grads = {p.name: gather_whole(p, p.grad, comm) for p in model.parameters()}
    values = {p.name: gather_whole(p, p.data, comm) for p in model.parameters()}
    return losses, norms, grads, values


def assert_equal_runs(parallel, serial, **close):
    """Losses, norms, every gradient and every parameter of two runs agree."""
    close = close or CLOSE
    np.testing.assert_allclose(parallel[0], serial[0], **close, err_msg="losses")
    np.testing.assert_allclose(parallel[1], serial[1], **close, err_msg="norms")
    for got, expected in zip(parallel[2:], serial[2:], strict=True):
        assert got.keys() == expected.keys()
        for name in expected:
            np.testing.assert_allclose(got[name], expected[name], **close, err_msg=name)
