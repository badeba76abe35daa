"""Our contender and PyTorch's, as they are: the same model, data and optimizer."""

import numpy as np
import pytest

from mpiscale.bench.contender import Session, Settings
from mpiscale.bench.shapes import AdamWSettings, Shape, batch
from mpiscale.bench.step import commands, measure_step
from mpiscale.models.gpt import GPTConfig
from mpiscale.train.activation_bytes import gpt_activation_bytes
from mpiscale.train.memory import MemoryReport

SHAPE = Shape(layers=2, width=32, heads=2, length=16, batch=2, vocabulary=64)
# So fast that a wrong moment, bias correction or decay shows in the losses.
OPTIMIZER = AdamWSettings(lr=0.02, weight_decay=3.0)


def test_both_train_alike_and_ours_accounts_for_its_memory():
    pytest.importorskip("torch")
    settings = Settings(SHAPE, 1, "", OPTIMIZER, memory=True)
    result = measure_step(settings, 4, commands(1, True), say=lambda text: None)
    ours, theirs = result.contestants
    assert (ours.name, theirs.name) == ("mpiscale", "PyTorch")
    np.testing.assert_allclose(ours.losses, theirs.losses, rtol=1e-4)
    assert ours.losses[-1] != pytest.approx(ours.first_loss, rel=1e-3)
    config = GPTConfig(
        vocabulary=64, length=16, layers=2, width=32, heads=2
    )  # as SHAPE
    d, v, t = 32, 64, 16
    block = 12 * d * d + 13 * d  # matrices; 9 d of biases, 4 d of the norms
    parameters = 4 * (2 * block + v * d + t * d + 2 * d)
    report = result.memory
    assert report is not None
    assert report.parameters == report.gradients == parameters
    assert report.optimizer == 2 * parameters
    assert report.activations == gpt_activation_bytes(config, 2, 4)
    assert 0 < report.before < report.peak


class Recorder:
    """A contender that notes what is asked of it."""

    name = "recorder"

    def __init__(self, settings):
        self.details = [str(settings)]
        self.numbers = []

    def step(self, number):
        self.numbers.append(number)
        return 1.5

    def memory(self, before):
        return MemoryReport(1, 2, 3, 4, before, before + 10)

    def product(self):
        return lambda: None


def test_a_session_answers_each_message_with_what_was_measured():
    session = Session(Recorder)
    message = {
        "do": "build", "shape": vars(SHAPE), "threads": 2, "weights": "w",
        "optimizer": vars(OPTIMIZER), "compile": True, "memory": False,
    }  # fmt: skip
    built = session.answer(message)
    assert built["name"] == "recorder"
    expected = Settings(SHAPE, 2, "w", OPTIMIZER, compile=True)
    assert built["details"] == [str(expected)]
    step = session.answer({"do": "step", "number": 3})
    assert set(step) == {"loss", "wall_s", "cpu_s", "idle_cpu_s", "peak_bytes"}
    assert step["loss"] == 1.5
    assert step["peak_bytes"] >= built["before_bytes"] > 2**20
    memory = session.answer({"do": "memory"})
    assert memory["peak"] - memory["before"] == 10
    assert set(session.answer({"do": "multiply"})) == {"wall_s", "cpu_s"}
    with pytest.raises(ValueError, match="got do='dance', expected build, step"):
        session.answer({"do": "dance"})


def test_all_contenders_get_the_same_new_batch_every_step():
    tokens, labels = batch(SHAPE, 1)
    again, _ = batch(SHAPE, 1)
    other, _ = batch(SHAPE, 2)
    assert tokens.shape == labels.shape == (2, 16)
    np.testing.assert_array_equal(tokens[:, 1:], labels[:, :-1])
    np.testing.assert_array_equal(tokens, again)
    assert (tokens != other).any()
    assert 0 <= min(tokens.min(), labels.min())
    assert max(tokens.max(), labels.max()) < SHAPE.vocabulary
