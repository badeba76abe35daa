"""A serial run and its data-parallel twin, on the same global batches."""

import numpy as np
from mpi4py import MPI

from mpiscale.comm.mpi import MpiCommunicator
from mpiscale.models.gpt import GPT, GPTConfig
from mpiscale.models.llama import Llama
from mpiscale.nn.flat import materialize
from mpiscale.nn.module import evaluating
from mpiscale.nn.placement import Noise, Placement
from mpiscale.ops.cross_entropy import IGNORE
from mpiscale.optim.adamw import AdamW
from mpiscale.parallel.data_parallel.all_reduce_after_backward import (
    AllReduceAfterBackward,
)
from mpiscale.parallel.data_parallel.bucketed_overlap import BucketedOverlap
from mpiscale.parallel.data_parallel.gathered_lookups import GatheredLookups
from mpiscale.parallel.tied_parameters import gradient_norm
from mpiscale.parallel.zero.zero1_optimizer_state import Zero1
from mpiscale.parallel.zero.zero2_gradients import Zero2
from mpiscale.parallel.zero.zero3_parameters import Zero3
from mpiscale.tensor import no_grad
from tests.communicators import world_communicator

FLOAT64 = np.dtype(np.float64)
STAGES = {1: Zero1, 2: Zero2, 3: Zero3}


def world():
    return world_communicator()


def alone():
    return MpiCommunicator(MPI.COMM_SELF)


def make(kind, config, comm, dtype=FLOAT64, **options):
    """(model, data parallelism of this kind)"""
    model = (GPT if isinstance(config, GPTConfig) else Llama)(config)
    if kind in STAGES:
        return model, STAGES[kind](model, comm, 1, dtype, **options)
    flat = materialize(model, 1, dtype)
    if kind == "plain":
        return model, AllReduceAfterBackward(flat, comm)
    lookups = None
    if kind == "gathered lookups":
        embedding = model.token_embedding
        lookups = GatheredLookups(embedding, comm, config.tied)
    return model, BucketedOverlap(flat, comm, bucket_bytes=4000, lookups=lookups)


def batch(config, samples, seed):
    """Tokens and labels; very different numbers of labels count in each sample."""
    rng = np.random.default_rng(seed)
    tokens, labels = rng.integers(0, config.vocabulary, (2, samples, config.length))
    for i, row in enumerate(labels):
        row[: (i * 3) % config.length] = IGNORE
    return tokens, labels


def rows_of(samples, part, parts, accumulate):
    """The rows of each micro-batch of one rank."""
    mine = np.array_split(np.arange(samples), parts)[part]
    return np.array_split(mine, accumulate)


def step(model, dp, optimizer, data, k, accumulate=1, max_norm=0.5):
    """One training step; (loss of the global batch, norm, gradients by name)"""
    tokens, labels = data
    valid = int((labels != IGNORE).sum())
    loss_sum = 0.0
    dp.zero_grad()
    micro_batches = rows_of(len(tokens), *dp.samples, accumulate)
    for i, rows in enumerate(micro_batches):
        placement = Placement(
            rows, np.arange(tokens.shape[1]), tokens.shape[1], Noise(5, k)
        )
        if i < accumulate - 1:
            with dp.no_sync():
                loss = model.loss(tokens[rows], labels[rows], placement, valid)
                loss.backward()
        else:
            loss = model.loss(tokens[rows], labels[rows], placement, valid)
            loss.backward()
        loss_sum += loss.item()
    dp.finish()
    for group in dp.sample_groups:
        loss_sum = group.allreduce(loss_sum)
    norm = gradient_norm(dp.pieces(), *dp.shard_groups)
    grads = whole(dp, "grad")
    dp.clip(norm, max_norm)
    optimizer.step(1e-2)
    dp.publish()
    return loss_sum, norm, grads


def whole(dp, what):
    """Full name -> values or gradients, put together from all ranks' pieces."""
    mine = [
        (piece.parameter.name, piece.place.start, getattr(piece, what).copy())
        for piece in dp.pieces()
    ]
    found = {p.name: np.full(p.full_size, np.nan) for p in dp.parameters}
    everyone = [mine]
    for group in dp.shard_groups:
        everyone = group.allgather(mine)
    for name, first, values in (piece for rank in everyone for piece in rank):
        found[name][first : first + values.size] = values
    return found


def evaluation_loss(model, dp, data):
    """Summed loss of a batch over its valid labels, outside of training."""
    tokens, labels = data
    valid = int((labels != IGNORE).sum())
    part, parts = dp.samples
    rows = np.array_split(np.arange(len(tokens)), parts)[part]
    placement = Placement(rows, np.arange(tokens.shape[1]), tokens.shape[1])
    with evaluating(model), no_grad():
        loss = model.loss(tokens[rows], labels[rows], placement, valid).item()
    for group in dp.sample_groups:
        loss = group.allreduce(loss)
    return loss


def train(kind, config, comm, samples, steps=5, accumulate=1, **options):
    """(losses, norms, gradients of the last step, parameters, evaluation loss)"""
    model, dp = make(kind, config, comm, **options)
    optimizer = AdamW(dp, eps=1e-7)  # 1e-8 would blow up the noise of key biases
    losses, norms = [], []
    for k in range(1, steps + 1):
        loss, norm, grads = step(
            model, dp, optimizer, batch(config, samples, k), k, accumulate
        )
        losses.append(loss)
        norms.append(norm)
    validation = evaluation_loss(model, dp, batch(config, samples + 1, 99))
    return losses, norms, grads, whole(dp, "data"), validation


def assert_equal_runs(parallel, serial, **close):
    """Losses, norms, every gradient and every parameter of two runs agree."""
    close = close or {"rtol": 1e-12, "atol": 1e-12}
    np.testing.assert_allclose(parallel[0], serial[0], **close, err_msg="losses")
    np.testing.assert_allclose(parallel[1], serial[1], **close, err_msg="norms")
    for got, expected in zip(parallel[2:4], serial[2:4], strict=True):
        assert got.keys() == expected.keys()
        for name in expected:
            np.testing.assert_allclose(got[name], expected[name], **close, err_msg=name)
    np.testing.assert_allclose(parallel[4], serial[4], **close, err_msg="evaluation")
