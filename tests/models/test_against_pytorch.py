"""Logits, loss and every gradient of GPT and Llama equal PyTorch's, same weights."""

from typing import Any

import numpy as np
import pytest

from mpiscale.models.gpt import GPT, GPTConfig
from mpiscale.models.llama import Llama, LlamaConfig
from mpiscale.nn.flat import materialize
from mpiscale.nn.placement import Placement
from mpiscale.ops.cross_entropy import IGNORE

torch = pytest.importorskip("torch")

SIZES: dict[str, Any] = dict(vocabulary=19, length=12, layers=2, width=24, heads=6)
CASES: dict[str, tuple[Any, Any]] = {
    "gpt": (GPT, GPTConfig(**SIZES)),
    "gpt untied, grouped heads, smoothing": (
        GPT,
        GPTConfig(**SIZES, kv_heads=3, tied=False, label_smoothing=0.1),
    ),
    "llama": (Llama, LlamaConfig(**SIZES, kv_heads=2, hidden=32)),
    "llama tied, one key/value head": (
        Llama,
        LlamaConfig(**SIZES, kv_heads=1, hidden=32, tied=True),
    ),
}


def batch(vocabulary, length):
    rng = np.random.default_rng(0)
    tokens, labels = rng.integers(0, vocabulary, size=(2, 3, length))
    labels[0, :4] = IGNORE
    return tokens, labels


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("case", CASES)
def test_logits_loss_and_gradients_equal_pytorch(case, dtype):
    from tests.models import torch_models

    kind, config = CASES[case]
    close = {"float64": (1e-10, 1e-12), "float32": (2e-4, 2e-6)}[dtype]
    model = kind(config)
    materialize(model, 3, np.dtype(dtype))
    rng = np.random.default_rng(1)
    for parameter in model.parameters():  # gains and biases too: nothing stays 0 or 1
        parameter.data[...] += rng.normal(size=parameter.shape) * 0.1
    tokens, labels = batch(config.vocabulary, config.length)
    placement = Placement.whole(*tokens.shape)

    p = torch_models.leaves(model.state_dict())
    reference = getattr(torch_models, kind.__name__.lower())
    expected = reference(p, config, torch.tensor(tokens))
    loss = torch.nn.functional.cross_entropy(
        expected.flatten(0, 1),
        torch.tensor(labels).flatten(),
        ignore_index=IGNORE,
        label_smoothing=config.label_smoothing,
    )
    loss.backward()

    logits = model(tokens, placement)
    np.testing.assert_allclose(
        logits.data, expected.detach().numpy(), rtol=close[0], atol=close[1] * 100
    )
    ours = model.loss(tokens, labels, placement)
    ours.backward()
    assert ours.item() == pytest.approx(loss.item(), rel=close[0] / 10)
    for name, parameter in model.named_parameters():
        np.testing.assert_allclose(
            parameter.grad,
            p[name].grad.numpy(),
            rtol=close[0],
            atol=close[1] * 10,
            err_msg=name,
        )


def test_parameter_counts_equal_the_published_models():
    # GPT-2 small: 124,439,808 parameters (Hugging Face `gpt2`); Llama 2 7B:
    # 6,738,415,616 (Hugging Face `meta-llama/Llama-2-7b`, num_parameters).
    gpt2 = GPT(GPTConfig(vocabulary=50257, length=1024, layers=12, width=768, heads=12))
    assert sum(p.full_size for p in gpt2.parameters()) == 124_439_808
    llama2 = Llama(
        LlamaConfig(
            vocabulary=32000,
            length=4096,
            layers=32,
            width=4096,
            heads=32,
            kv_heads=None,
            hidden=11008,
        )
    )
    assert sum(p.full_size for p in llama2.parameters()) == 6_738_415_616
