"""Names, state, modes and values of modules."""

import math
from dataclasses import replace

import numpy as np
import pytest

from mpiscale.errors import InputError
from mpiscale.models.gpt import GPT, GPTConfig
from mpiscale.models.llama import Llama, LlamaConfig
from mpiscale.nn.attention import Attention
from mpiscale.nn.flat import materialize
from mpiscale.nn.layers import Dropout, Linear
from mpiscale.nn.module import Module, evaluating
from mpiscale.nn.parameter import Constant
from mpiscale.nn.placement import Noise, Placement
from mpiscale.tensor import Tensor

INIT = Constant(1.0)
SMALL = GPTConfig(vocabulary=11, length=6, layers=2, width=8, heads=2)
FLOAT32, FLOAT64 = np.dtype(np.float32), np.dtype(np.float64)


def test_parameters_have_full_names_and_tied_ones_are_listed_once():
    names = [name for name, _ in GPT(SMALL).named_parameters()]
    assert names[:4] == [
        "token_embedding.weight",
        "position_embedding.weight",
        "blocks.0.norm1.gain",
        "blocks.0.norm1.bias",
    ]
    assert "blocks.1.attention.qkv.weight" in names
    assert "head.weight" not in names
    untied = GPT(GPTConfig(vocabulary=11, layers=1, width=8, heads=2, tied=False))
    assert "head.weight" in [name for name, _ in untied.named_parameters()]


def test_a_model_has_shapes_before_it_has_values():
    model = GPT(SMALL)
    parameter = next(model.parameters())
    assert parameter.full_shape == (11, 8)
    with pytest.raises(RuntimeError, match="call materialize"):
        _ = parameter.data


def test_values_depend_on_seed_and_name_alone():
    a, b, c = GPT(SMALL), GPT(SMALL), GPT(SMALL)
    for model, seed in ((a, 1), (b, 1), (c, 2)):
        materialize(model, seed, FLOAT64)
    states = [model.state_dict() for model in (a, b, c)]
    for name, values in states[0].items():
        np.testing.assert_array_equal(values, states[1][name])
        if values.std() > 0:
            assert (values != states[2][name]).all(), name
    qkv = [states[0][f"blocks.{i}.attention.qkv.weight"] for i in range(2)]
    assert (qkv[0] != qkv[1]).all()
    assert abs(qkv[0].std() / (0.02 * math.sqrt(768 / 8)) - 1) < 0.2


def test_parameters_and_gradients_are_views_of_flat_buffers():
    model = GPT(SMALL)
    flat = materialize(model, 1, FLOAT32)
    assert flat.size == sum(p.full_size for p in model.parameters())
    for parameter in model.parameters():
        assert np.shares_memory(parameter.data, flat.data)
        place = flat.place(parameter)
        np.testing.assert_array_equal(flat.data[place], parameter.data.reshape(-1))
        assert (place.stop <= flat.decay_end) == parameter.decays
    tokens = np.zeros((2, 6), int)
    model.loss(tokens, tokens, Placement.whole(2, 6)).backward()
    for parameter in model.parameters():
        assert np.shares_memory(parameter.grad, flat.grad)


def test_unused_parameters_have_zero_gradient_not_an_old_one():
    model = Linear(2, (2,), Constant(1.0))
    flat = materialize(model, 0, FLOAT64)
    flat.grad[...] = np.nan
    model.weight.grad = None
    model.bias._accumulate(np.ones(2))
    np.testing.assert_array_equal(flat.complete_grad(), [0, 0, 0, 0, 1, 1])


def test_state_round_trip_and_its_errors():
    a, b = GPT(SMALL), GPT(SMALL)
    materialize(a, 1, FLOAT64)
    materialize(b, 2, FLOAT64)
    b.load_state_dict(a.state_dict())
    for name, values in a.state_dict().items():
        np.testing.assert_array_equal(values, b.state_dict()[name])
    state = a.state_dict()
    gain = state.pop("final_norm.gain")
    with pytest.raises(KeyError, match=r"missing .*final_norm\.gain"):
        b.load_state_dict(state)
    with pytest.raises(ValueError, match=r"final_norm.gain has shape \(8,\)"):
        b.load_state_dict(state | {"final_norm.gain": gain[:3]})


def test_dropout_only_in_training_and_only_with_noise():
    layer = Dropout(0.5, "here")
    x = Tensor(np.ones((2, 4, 64)))
    placement = Placement.whole(2, 4, Noise(seed=1, step=3))
    first = layer(x, placement).data
    assert set(np.unique(first)) == {0.0, 2.0}
    np.testing.assert_array_equal(first, layer(x, placement).data)
    other_step = Placement.whole(2, 4, Noise(seed=1, step=4))
    other_layer = Dropout(0.5, "there")
    for changed in (layer(x, other_step), other_layer(x, placement)):
        assert 0.4 < (changed.data == first).mean() < 0.6
    with pytest.raises(ValueError, match=r"needs placement\.noise"):
        layer(x, Placement.whole(2, 4))
    layer.eval()
    np.testing.assert_array_equal(layer(x, Placement.whole(2, 4)).data, x.data)
    with pytest.raises(ValueError, match=r"\[0, 1\), got 1.0"):
        Dropout(1.0, "all")


def test_a_part_of_the_batch_gets_its_part_of_the_mask():
    layer = Dropout(0.3, "here")
    noise = Noise(seed=1, step=0)
    whole = layer(Tensor(np.ones((4, 6, 8))), Placement.whole(4, 6, noise)).data
    samples, positions = np.array([1, 3]), np.array([0, 4, 5])
    x = Tensor(np.ones((2, 3, 4)))
    part = layer(x, Placement(samples, positions, 6, noise), first_column=4, columns=8)
    expected = whole[samples][:, positions][:, :, 4:]
    np.testing.assert_array_equal(part.data, expected)


def test_parts_in_containers_without_names_are_refused():
    class Hidden(Module):
        def __init__(self, parts):
            self.parts = parts

    layer = Linear(2, (2,), INIT)
    for parts in ((layer,), {"a": layer}, [layer.weight]):
        with pytest.raises(TypeError, match="'parts' holds parts in a"):
            list(Hidden(parts).parameters())
    assert len(list(Hidden([layer]).parameters())) == 2


def test_evaluation_gives_the_mode_back_and_does_not_smooth():
    model = GPT(replace(SMALL, label_smoothing=0.5))
    materialize(model, 0, FLOAT64)
    tokens = np.arange(12).reshape(2, 6) % 11
    placement = Placement.whole(2, 6)
    smoothed = model.loss(tokens, tokens, placement).item()
    with evaluating(model):
        plain = model.loss(tokens, tokens, placement).item()
    assert model.training and model.blocks[0].dropout1.training
    assert smoothed != plain
    model.loss_function.label_smoothing = 0.0
    assert model.loss(tokens, tokens, placement).item() == plain


def test_a_parameter_can_be_printed_before_it_has_values():
    model = GPT(SMALL)
    assert "(11, 8), no values yet" in repr(model.head.weight)
    materialize(model, 0, FLOAT64)
    assert repr(model.head.weight) == "Parameter('token_embedding.weight', (11, 8))"


def test_heads_that_do_not_divide_are_refused_with_the_arithmetic():
    with pytest.raises(
        InputError, match=r"width 10 cannot be cut into 4 heads: 10 = 2 x 4 \+ 2"
    ):
        Attention(10, 4, None, INIT, INIT)
    with pytest.raises(
        InputError, match="heads 6 cannot be cut into 4 key/value heads"
    ):
        Attention(12, 6, 4, INIT, INIT)
    with pytest.raises(InputError, match=r"12 / 4 heads = 3 is odd"):
        Attention(12, 4, None, INIT, INIT, rope_base=1e4)
    with pytest.raises(InputError, match="into 0 heads"):
        Attention(10, 0, None, INIT, INIT)


def test_llama_can_be_longer_than_in_training_but_a_gpt_can_not():
    llama = Llama(
        LlamaConfig(vocabulary=7, length=4, layers=1, width=8, heads=2, hidden=8)
    )
    materialize(llama, 0, FLOAT32)
    assert llama(np.zeros((1, 9), int), Placement.whole(1, 9)).shape == (1, 9, 7)
    gpt = GPT(SMALL)
    materialize(gpt, 0, FLOAT32)
    with pytest.raises(ValueError, match="position 6"):
        gpt(np.zeros((1, 7), int), Placement.whole(1, 7))
