"""Optimizers against PyTorch's, clipping and schedules against their definitions."""

import math

import numpy as np
import pytest

from mpiscale.models.gpt import GPT, GPTConfig
from mpiscale.nn.flat import materialize
from mpiscale.optim.adamw import AdamW
from mpiscale.optim.clip import clip, clip_coefficient, sum_of_squares
from mpiscale.optim.lr_schedule import WarmupCosine
from mpiscale.optim.sgd import SGD

FLOAT64 = np.dtype(np.float64)


def model_with_gradients(steps=4):
    model = GPT(GPTConfig(vocabulary=7, length=4, layers=1, width=8, heads=2))
    flat = materialize(model, 1, FLOAT64)
    grads = np.random.default_rng(0).normal(size=(steps, flat.size))
    return model, flat, grads


def give(flat, grad):
    for parameter in flat.parameters:
        place = flat.place(parameter)
        parameter.grad = None
        parameter._accumulate(grad[place].reshape(parameter.shape))


def run_torch(flat, grads, make):
    torch = pytest.importorskip("torch")
    groups = [
        torch.tensor(flat.data[: flat.decay_end].copy()),
        torch.tensor(flat.data[flat.decay_end :].copy()),
    ]
    optimizer = make(torch, *groups)
    for grad in grads:
        groups[0].grad = torch.tensor(grad[: flat.decay_end].copy())
        groups[1].grad = torch.tensor(grad[flat.decay_end :].copy())
        optimizer.step()
    return np.concatenate([g.numpy() for g in groups])


def test_adamw_equals_pytorch_with_decay_for_matrices_only():
    _, flat, grads = model_with_gradients()
    expected = run_torch(
        flat,
        grads,
        lambda torch, decayed, rest: torch.optim.AdamW(
            [
                {"params": [decayed], "weight_decay": 0.1},
                {"params": [rest], "weight_decay": 0},
            ],
            lr=0.01,
            betas=(0.9, 0.95),
            eps=1e-8,
        ),
    )
    optimizer = AdamW(flat, weight_decay=0.1)
    for grad in grads:
        give(flat, grad)
        optimizer.step(0.01)
    np.testing.assert_allclose(flat.data, expected, rtol=1e-12, atol=1e-14)


def test_sgd_with_momentum_equals_pytorch():
    _, flat, grads = model_with_gradients()
    expected = run_torch(
        flat,
        grads,
        lambda torch, *groups: torch.optim.SGD(groups, lr=0.01, momentum=0.9),
    )
    optimizer = SGD(flat, momentum=0.9)
    for grad in grads:
        give(flat, grad)
        optimizer.step(0.01)
    np.testing.assert_allclose(flat.data, expected, rtol=1e-12, atol=1e-14)


def test_adamw_goes_on_from_a_saved_state():
    _, flat, grads = model_with_gradients()
    optimizer = AdamW(flat)
    for grad in grads[:2]:
        give(flat, grad)
        optimizer.step(0.01)
    state, values = optimizer.state_dict(), flat.data.copy()
    give(flat, grads[2])
    optimizer.step(0.01)
    expected = flat.data.copy()
    flat.data[...] = values
    resumed = AdamW(flat)
    resumed.load_state_dict(state)
    give(flat, grads[2])
    resumed.step(0.01)
    np.testing.assert_array_equal(flat.data, expected)


def test_clipping_keeps_the_direction_and_caps_the_length():
    grad = np.array([3.0, 0.0, 4.0, 12.0])
    norm = math.sqrt(sum_of_squares(grad))
    assert norm == 13
    clip(grad, norm, 1.0)
    np.testing.assert_allclose(grad, np.array([3, 0, 4, 12]) / 13, rtol=1e-15)


def test_a_zero_gradient_is_not_clipped_to_nan():
    assert clip_coefficient(0.0, 1.0) == 1.0
    grad = np.zeros(3)
    clip(grad, 0.0, 1.0)
    assert (grad == 0).all()
    with pytest.raises(ValueError, match="max_norm must be positive"):
        clip_coefficient(1.0, 0.0)


def test_squares_of_16_bit_gradients_do_not_overflow():
    assert sum_of_squares(np.full(4, 300, np.float16)) == 4 * 300**2


def test_learning_rate_warms_up_and_then_follows_half_a_cosine():
    lr = WarmupCosine(peak=1.0, warmup=10, steps=30, floor=0.1)
    assert [lr(k) for k in (1, 5, 10)] == [0.1, 0.5, 1.0]
    assert lr(20) == pytest.approx(0.55)
    assert lr(30) == lr(100) == pytest.approx(0.1)
    assert WarmupCosine(1.0, 0, 10)(10) == 0
    with pytest.raises(ValueError, match="counted from 1"):
        lr(0)
