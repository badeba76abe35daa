"""The kernel benchmark: every kernel has its case, bytes by formula, PyTorch's op."""

import itertools
import json
import pkgutil
from importlib import import_module

import numpy as np
import pytest

from mpiscale import kernels
from mpiscale.bench import kernels as bench
from mpiscale.bench.kernel_cases import CASES, bytes_moved, drawing
from mpiscale.bench.kernel_report import kernel_table, write_kernels
from mpiscale.bench.shapes import Shape
from mpiscale.kernels.bench import largest_error

SHAPE = Shape(layers=1, width=16, heads=2, length=12, batch=2, vocabulary=24)
N, D, T, H, V, B = SHAPE.tokens, 16, 12, 2, 24, 2
BYTES = {  # read and written in float32; ids are int64, statistics of norms float64
    "product_into": 4 * (N * D + 4 * D * D + 2 * 4 * N * D),
    "layer_norm": 4 * (2 * N * D + 2 * D) + 8 * 2 * N,
    "layer_norm_backward": 4 * (3 * N * D + 3 * D) + 8 * 2 * N,
    "gelu_tanh": 4 * 2 * 4 * N * D,
    "gelu_tanh_backward": 4 * 3 * 4 * N * D,
    "flash_attention": 4 * (4 * N * D + N * H),
    "flash_attention_backward": 4 * (8 * N * D + N * H),
    "logits_statistics": 4 * (N * V + 4 * N) + 8 * N,
    "cross_entropy_backward": 4 * (2 * N * V + 2 * N) + 8 * N,
    "adamw": 4 * 7 * (12 * D * D + V * D),
    "dropout": 4 * 2 * N * D + 8 * (N + D),
    "swiglu": 4 * (8 + 4) * N * D,
    "swiglu_backward": 4 * (8 + 4 + 8) * N * D,
    "rms_norm": 4 * (2 * N * D + D) + 8 * N,
    "rms_norm_backward": 4 * (3 * N * D + 2 * D) + 8 * N,
    "rope": 4 * (2 * N * D + 2 * T * (D // H // 2)),
    "gelu": 4 * 2 * 4 * N * D,
    "gelu_backward": 4 * 3 * 4 * N * D,
    "softmax": 4 * 2 * B * H * T * T,
    "softmax_backward": 4 * 3 * B * H * T * T,
    "log_softmax": 4 * 2 * B * H * T * T,
    "log_softmax_backward": 4 * 3 * B * H * T * T,
}
by_name = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def result_of(case, arguments):
    """Outputs, or what was updated in place; the arguments stay as they are."""
    copies = [a.copy() if isinstance(a, np.ndarray) else a for a in arguments]
    result = case.reference(*copies)
    return copies[case.updated[0]] if case.updated else result


def test_every_kernel_with_a_reference_has_its_case():
    modules = pkgutil.walk_packages(kernels.__path__, kernels.__name__ + ".")
    found = {
        name.removesuffix("_reference")
        for module in modules
        for name in vars(import_module(module.name))
        if name.endswith("_reference")
    }
    assert found == {case.name for case in CASES}


@by_name
def test_bytes_are_those_of_the_formula(case):
    arguments = case.arguments(drawing(), SHAPE)
    result = case.reference(*arguments)
    assert bytes_moved(case, arguments, result) == BYTES[case.name]


@by_name
def test_pytorchs_op_computes_the_same(case):
    torch = pytest.importorskip("torch")
    from mpiscale.bench.torch_kernels import TORCH_CALLS

    arguments = case.arguments(drawing(), SHAPE)
    expected = result_of(case, arguments)
    got = TORCH_CALLS[case.name](*arguments)()
    if case.name == "dropout":  # other masks, but as many kept and the same scale
        kept = got[got != 0].numpy()
        np.testing.assert_allclose(kept, arguments[0][got != 0] / 0.9, rtol=1e-6)
        assert 0.8 < kept.size / got.numel() < 0.97
        return
    if case.name == "logits_statistics":
        maximum, sum_exp, target, _ = expected
        expected = maximum + np.log(sum_exp) - target
    outputs = got if isinstance(got, tuple) else (got,)
    wanted = expected if isinstance(expected, tuple) else (expected,)
    assert all(isinstance(output, torch.Tensor) for output in outputs)
    for want, output in zip(wanted, outputs, strict=False):  # ours give statistics too
        assert largest_error(want, output.detach().numpy()) < 1e-4


def test_calls_are_made_in_turn_and_the_median_is_taken():
    made = []
    ticks = itertools.accumulate(
        # warm-up is not timed; each call is between two readings
        [0, 1, 0, 10, 0, 5, 0, 20, 0, 3, 0, 90]
    )
    calls = [lambda: made.append("A"), lambda: made.append("B")]
    medians = bench.medians(calls, 3, lambda: float(next(ticks)))
    assert made == ["A", "B"] * 4
    assert medians == [3.0, 20.0]


def test_a_kernel_that_differs_from_its_reference_is_refused():
    norm = next(case for case in CASES if case.name == "layer_norm")
    case = norm._replace(compiled=lambda x, *_: (x, x[..., 0], x[..., 0]))
    with pytest.raises(RuntimeError, match="layer_norm differs from its reference"):
        bench.measure(case, SHAPE, lambda: 0.0, 1.0, {})


def test_an_update_in_place_is_checked_too():
    adamw = next(case for case in CASES if case.name == "adamw")
    with pytest.raises(RuntimeError, match="adamw differs from its reference"):
        bench.measure(
            adamw._replace(compiled=lambda *args: None), SHAPE, float, 1.0, {}
        )


def test_table_and_json_hold_each_kernel_with_its_share_of_the_copys_speed(tmp_path):
    clock = itertools.count().__next__  # every call takes a second

    def case_time(case):
        return bench.measure(case, SHAPE, lambda: float(clock()), 1000.0, {})

    rows = [vars(case_time(case)) for case in CASES[1:3]]
    measured = {
        "threads": 1, "clock": "CPU time", "repeats": 7, "kernels": rows,
        "copy_bytes_per_second": 1000.0,
    }  # fmt: skip
    assert [row["name"] for row in rows] == ["layer_norm", "layer_norm_backward"]
    share = BYTES["layer_norm"] / 1000
    assert rows[0]["bandwidth_share"] == pytest.approx(share)
    line = kernel_table(measured).splitlines()[2].split()
    assert line == [
        "layer_norm",
        "1,000.00",
        "1,000.000",
        "-",
        "-",
        "0.0",
        f"{share:.0%}",
    ]
    write_kernels(measured, tmp_path / "new", "kernels")
    written = json.loads((tmp_path / "new" / "kernels.json").read_text())
    assert written["kernels"][0]["bytes"] == BYTES["layer_norm"]
    assert written["kernels"][0]["shapes"] == [[B, T, D], [D], [D]]


def test_one_thread_is_timed_by_cpu_time_and_several_by_wall_time():
    assert bench.clock_for(1).__name__ == "process_time"
    assert bench.clock_for(2).__name__ == "perf_counter"


def test_copy_bandwidth_counts_what_is_read_and_what_is_written(monkeypatch):
    monkeypatch.setattr(bench, "COPY_BYTES", 1000)
    clock = itertools.count(step=2).__next__
    assert bench.copy_bandwidth(3, lambda: float(clock())) == 2 * 1000 / 2
