"""The pipelined twin of a serial run, on the same global batches."""

from functools import cache

import numpy as np

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
from mpiscale.parallel.pipeline_parallel.run_schedule import PipelineRunner
from mpiscale.parallel.pipeline_parallel.schedules import forward_schedule
from mpiscale.parallel.pipeline_parallel.split_into_stages import (
    even_split,
    split_into_stages,
    tell_complete,
)
from mpiscale.parallel.sequence_parallel import sequence_parallelize
from mpiscale.parallel.tensor_parallel.tensor_parallelize import tensor_parallelize
from mpiscale.parallel.tied_parameters import gradient_norm, synchronise
from mpiscale.tensor import no_grad
from mpiscale.train.pipelined import Samples
from tests.parallel import replica_twin
from tests.parallel.replica_twin import FLOAT64, alone, batch

SAMPLES = 9
STEPS = 2


@cache
def serial(config, samples=SAMPLES):
    """What `replica_twin.train` says of the serial model."""
    return replica_twin.train("plain", config, alone(), samples, STEPS)


class PipelinedTwin:
    """A model split into stages over pp, replicated over dp, cut over tp."""

    def __init__(
        self, config, schedule, pp, dp=None, tp=None, blocks=None, sequences=False
    ):
        self.schedule, self.pp, self.dp_comm = schedule, pp, dp or alone()
        model = (GPT if isinstance(config, GPTConfig) else Llama)(config)
        if tp is not None:
            tensor_parallelize(model, tp)
        if sequences:
            sequence_parallelize(model, tp)
        blocks = blocks or even_split(config.layers, schedule.stages)
        self.stages = split_into_stages(model, schedule.stage_map, blocks, pp)
        self.model = model
        flat = materialize(model, 1, FLOAT64)
        if dp is None:
            self.dp = AllReduceAfterBackward(flat, alone())
        else:
            self.dp = BucketedOverlap(flat, dp, bucket_bytes=4000)
        self.runner = PipelineRunner(dict(self.stages), pp, lambda m: m.tokens.shape)
        self.optimizer = AdamW(self.dp, eps=1e-7)
        self.groups = (pp,) if tp is None else (pp, tp)

    def micro_batches(self, data, count, noise=None):
        """This replica's samples, unevenly cut."""
        tokens, labels = data
        valid = int((labels != IGNORE).sum())
        length = tokens.shape[1]
        mine = np.array_split(np.arange(len(tokens)), self.dp_comm.size)
        parts = np.array_split(mine[self.dp_comm.rank], count)
        micro_batches = []
        for rows in parts:
            placement = Placement(rows, np.arange(length), length, noise)
            arranged = self.model.arrange(tokens[rows], placement, labels[rows])
            micro_batches.append(
                Samples(arranged.tokens, arranged.placement, arranged.labels, valid)
            )
        return micro_batches

    def step(self, data, k, max_norm=0.5):
        """One training step; (loss of the global batch, norm)"""
        self.dp.zero_grad()
        micro_batches = self.micro_batches(
            data, self.schedule.micro_batches, Noise(5, k)
        )
        with self.dp.no_sync():
            losses = self.runner.run(
                self.schedule, micro_batches, tell_complete(self.stages, self.dp)
            )
        self.dp.finish()
        loss = self.dp_comm.allreduce(float(losses.sum()))
        synchronise(self.dp.pieces())
        norm = gradient_norm(self.dp.pieces(), *self.groups)
        self.grads = self.whole("grad")
        self.dp.clip(norm, max_norm)
        self.optimizer.step(1e-2)
        return loss, norm

    def whole(self, what):
        """Full name -> values or gradients; copies must be equal to the bit."""
        mine = {p.name: getattr(p, what).reshape(-1).copy() for p in self.dp.parameters}
        found = {}
        for of_rank in self.pp.allgather(mine):
            for name, values in of_rank.items():
                same = found.setdefault(name, values)
                np.testing.assert_array_equal(values, same, err_msg=name)
        return found

    def evaluation_loss(self, data):
        """Forward passes alone, in three micro-batches."""
        count = min(3, len(data[0]) // self.dp_comm.size)
        with evaluating(self.model), no_grad():
            losses = self.runner.run(
                forward_schedule(self.schedule, count), self.micro_batches(data, count)
            )
        return self.dp_comm.allreduce(float(losses.sum()))

    def train(self, config, samples=SAMPLES, steps=STEPS):
        """As `replica_twin.train`."""
        curve = [self.step(batch(config, samples, k), k) for k in range(1, steps + 1)]
        losses, norms = zip(*curve, strict=True)
        validation = self.evaluation_loss(batch(config, samples + 1, 99))
        return losses, norms, self.grads, self.whole("data"), validation
