"""The training loop: what every strategy's example runs."""

from __future__ import annotations

import math
import time
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from mpiscale.comm.communicator import Communicator
from mpiscale.comm.launcher import stdout_is_terminal
from mpiscale.comm.trace import gather_trace, write_trace
from mpiscale.comm.world import World
from mpiscale.data.batches import Batch, Batches
from mpiscale.data.token_file import Split, TokenFile
from mpiscale.errors import NotFiniteError
from mpiscale.nn.language_model import LanguageModel
from mpiscale.nn.module import evaluating
from mpiscale.nn.placement import Noise
from mpiscale.optim.adamw import AdamW
from mpiscale.optim.lr_schedule import WarmupCosine
from mpiscale.parallel.data_parallel.check_replicas import check_replicas
from mpiscale.parallel.data_parallel.interface import DataParallel, sum_over
from mpiscale.parallel.tied_parameters import gradient_norm, synchronise
from mpiscale.tensor import no_grad
from mpiscale.train.config import TrainConfig
from mpiscale.train.files import make_folder, open_data
from mpiscale.train.flops import model_flops_per_token
from mpiscale.train.generate import generate
from mpiscale.train.last_state import save_last_state
from mpiscale.train.memory import (
    MemoryReport,
    memory_table,
    peak_resident_bytes,
)
from mpiscale.train.metrics import (
    MetricsFile,
    Progress,
    StepMetrics,
    draw_loss_curve,
)
from mpiscale.train.passes import Passes
from mpiscale.train.report import describe_run
from mpiscale.train.strategy import Strategy
from mpiscale.train.warm_up import compile_kernels

PROMPT = "def "


@dataclass
class Trainer:
    """A model, its optimizer, and one step of training.

    Attributes:
        passes: forward and backward of the model.
        model_group: the ranks over which the model is spread; alone if it is serial.
    """

    world: World
    config: TrainConfig
    model: LanguageModel
    passes: Passes
    dp: DataParallel
    optimizer: AdamW
    schedule: WarmupCosine
    model_group: Communicator

    def step(self, k: int, batch: Batch) -> tuple[float, float]:
        """Train on one batch as step k = 1, 2, ...; return (loss, gradient norm).

        Raises:
            NotFiniteError: if the loss or the gradient's norm is not finite; parameters
                stay as they were and are written to the run's folder.
        """
        ledger = self.world.comm.ledger
        self.dp.zero_grad()
        noise = Noise(self.config.seed, k)
        mine = self.passes.forward_backward(self.dp.share(batch), noise, self.dp)
        with ledger.phase("gradients"):
            self.dp.finish()
            loss = self.dp.total_loss(mine)
            self._stop_unless_finite(k, "loss", loss)
            pieces = self.dp.pieces()
            synchronise(pieces)
            norm = gradient_norm(pieces, *self.dp.shard_groups, self.model_group)
            self._stop_unless_finite(k, "gradient norm", norm)
        with ledger.phase("optimizer"):
            self.dp.clip(norm, self.config.clip)
            self.optimizer.step(self.schedule(k))
            self.dp.publish()
        if self.config.check_replicas and k % self.config.check_replicas == 0:
            with ledger.phase("check"):
                moments = {"m": self.optimizer.m, "v": self.optimizer.v}
                check_replicas(k, self.dp.replicated(moments))
        return loss, norm

    def evaluate(self, batches: Batches) -> float:
        """Loss over the first batches of the validation split, in nats per token.

        Every rank takes its part of each batch, also of a last, smaller one.
        """
        total, tokens = 0.0, 0
        phase = self.world.comm.ledger.phase("evaluation")
        with evaluating(self.model), no_grad(), phase:
            for batch in batches.evaluation_batches(self.config.eval_batches):
                mine = batch.part(*self.dp.samples)
                total += self.passes.loss(mine) * batch.valid
                tokens += batch.valid
            total = sum_over(total, self.dp.sample_groups)
        return total / max(tokens, 1)

    def memory(self, before: int) -> MemoryReport:
        """Where this rank's memory went; `before`: peak before the model was built."""
        held = self.dp.held()
        return MemoryReport(
            parameters=held.parameters,
            gradients=held.gradients,
            optimizer=self.optimizer.m.nbytes + self.optimizer.v.nbytes,
            activations=self.passes.activations or 0,
            before=before,
            peak=peak_resident_bytes(),
        )

    def _stop_unless_finite(self, k: int, what: str, value: float) -> None:
        """Loss and norm are the same on all ranks, so all ranks stop, or none."""
        if math.isfinite(value):
            return
        folder, size = self.config.out, self.world.size
        save_last_state(folder, self.world.rank, k - 1, self.dp, self.optimizer)
        ranks = f"all {size} ranks" if size > 1 else "rank 0"
        raise NotFiniteError(
            f"{what} is {value} in step {k} on {ranks}; the state after step {k - 1} "
            f"is kept in {folder}/last_state-rank*.h5. Lower --lr, or look at that "
            "step's data"
        )


def make_trainer(
    world: World,
    config: TrainConfig,
    model: LanguageModel,
    passes: Passes,
    strategy: Strategy,
) -> Trainer:
    """Give the model its values, and it an optimizer and a learning rate schedule."""
    dp = strategy.data_parallel(model)
    return Trainer(
        world,
        config,
        model,
        passes,
        dp,
        AdamW(dp, weight_decay=config.weight_decay),
        WarmupCosine(config.lr, config.warmup, config.steps, config.lr / 10),
        strategy.model_group,
    )


def train(world: World, config: TrainConfig, strategy: Strategy) -> None:
    """Train, evaluate, generate a sample, and write metrics and a loss curve.

    Args:
        world: all ranks; collective.
        config: the run's settings.
        strategy: what runs where.
    """
    # Refuses what can't be cut, before anything is read or written.
    model = strategy.build(config, config.vocab, strategy.model_group)
    passes = strategy.passes(world, config, model)
    with open_data(world, config) as tokens:
        batches = _batches(tokens, "train", config)
        held_out = _batches(tokens, "validation", config)
        make_folder(world, config.out)
        before = peak_resident_bytes()
        compile_kernels(world, config, strategy.build)
        trainer = make_trainer(world, config, model, passes, strategy)
        expected = strategy.traffic(model, trainer.dp)
        if world.rank == 0:
            held = trainer.dp.held().parameters // config.numpy_dtype.itemsize
            print(
                describe_run(world, config, strategy.mesh, held, expected), flush=True
            )
        losses = _run_steps(trainer, batches)
        if config.profile == "memory":
            reports = world.comm.gather(trainer.memory(before))
            if reports is not None:
                print(memory_table(reports))
        validation = None
        if config.eval_batches:
            validation = trainer.evaluate(held_out)
        _finish(trainer, tokens, losses, validation)


def _batches(tokens: TokenFile, split: Split, config: TrainConfig) -> Batches:
    return Batches(tokens, split, config.batch, config.length, config.seed)


def _run_steps(trainer: Trainer, batches: Batches) -> list[float]:
    """All training steps; rank 0 writes metrics and progress."""
    config, world = trainer.config, trainer.world
    flops = step_flops(config)
    losses = []
    with ExitStack() as stack:
        reporter = None
        if world.rank == 0:
            file = stack.enter_context(MetricsFile(config.out))
            reporter = _Reporter(config, flops, file)
        for k in range(1, config.steps + 1):
            started, sent = time.monotonic(), world.comm.ledger.sent_bytes()
            loss, norm = trainer.step(k, batches(k - 1))
            losses.append(loss)
            if reporter is not None:
                seconds = time.monotonic() - started
                sent = world.comm.ledger.sent_bytes() - sent
                reporter.step(k, loss, norm, trainer.schedule(k), sent, seconds)
    return losses


def step_flops(config: TrainConfig) -> int:
    """Floating-point operations of one training step of the whole model."""
    looked_up = {"position_embedding.weight"}
    if not config.tied:
        looked_up.add("token_embedding.weight")
    whole = config.build_model(config.vocab)  # shapes only
    matrices = sum(
        p.full_size
        for name, p in whole.named_parameters()
        if p.decays and name not in looked_up
    )
    per_token = model_flops_per_token(
        matrices, config.layers, config.width, config.length
    )
    return per_token * config.batch * config.length


class _Reporter:
    """Rank 0's metrics file and progress lines."""

    def __init__(self, config: TrainConfig, flops: int, file: MetricsFile) -> None:
        self.tokens, self.flops = config.batch * config.length, flops
        self.file = file
        self.progress = Progress(config.steps, config.log_every, stdout_is_terminal())

    def step(
        self, k: int, loss: float, norm: float, lr: float, sent: int, seconds: float
    ) -> None:
        metrics = StepMetrics(
            step=k,
            loss=loss,
            grad_norm=norm,
            lr=lr,
            bytes_sent=sent,
            tokens_per_second=self.tokens / seconds,
            model_flops_per_second=self.flops / seconds,
        )
        self.file.write(metrics)
        self.progress.show(metrics)


def _finish(
    trainer: Trainer, tokens: TokenFile, losses: list[float], validation: float | None
) -> None:
    """Generate text on all ranks; rank 0 prints it and draws the curve."""
    config = trainer.config
    text = ""
    if config.sample:
        with evaluating(trainer.model), no_grad():
            text = generate(
                trainer.passes.next_token,
                config.length,
                tokens.tokenizer(),
                PROMPT,
                config.sample,
                config.temperature,
                config.seed,
            )
    trainer.passes.report()
    if config.trace is not None:
        _write_trace(trainer, config.trace)
    if trainer.world.rank != 0:
        return
    print(f"training loss   {losses[0]:.3f} -> {losses[-1]:.3f} nats per token")
    if validation is not None:
        print(f"validation loss {validation:.3f} nats per token")
    if text:
        print(f"sample (temperature {config.temperature}):\n{_indent(text)}")
    print(f"wrote {config.out / 'metrics.jsonl'}")
    if find_spec("matplotlib") is None:
        print("no loss curve: `pip install matplotlib` draws it")
        return
    path = config.out / "loss.png"
    draw_loss_curve(losses, validation, path, f"{config.model}, {config.out.name}")
    print(f"wrote {path}")


def _write_trace(trainer: Trainer, path: Path) -> None:
    slices = gather_trace(trainer.world.comm, trainer.world.comm.ledger)
    if slices is not None:
        write_trace(path, [*slices, *trainer.passes.predicted()])
        print(f"wrote {path}: open it in https://ui.perfetto.dev")


def _indent(text: str) -> str:
    return "\n".join("    " + line for line in text.splitlines())
