"""What a run writes and prints."""

import json

import pytest

from mpiscale.train.flops import model_flops_per_token
from mpiscale.train.metrics import (
    MetricsFile,
    Progress,
    StepMetrics,
    draw_loss_curve,
    duration,
)

METRICS = StepMetrics(
    step=1,
    loss=1 / 3,
    grad_norm=0.1,
    lr=1e-3,
    bytes_sent=8,
    tokens_per_second=1234.5,
    model_flops_per_second=5e9,
)


def at(step):
    return StepMetrics(**{**METRICS.__dict__, "step": step})


def test_metrics_are_lines_of_json_in_full_precision(tmp_path):
    with MetricsFile(tmp_path / "new" / "folder") as file:
        file.write(METRICS)
        lines = file.path.read_text().splitlines()  # on disk before it is closed
    assert json.loads(lines[0])["loss"] == 1 / 3
    assert json.loads(lines[0])["bytes_sent"] == 8


def test_metrics_of_earlier_runs_are_kept(tmp_path):
    for step in (1, 2, 3):
        with MetricsFile(tmp_path) as file:
            file.write(at(step))
    steps = [
        json.loads((tmp_path / name).read_text())["step"]
        for name in ("metrics.1.jsonl", "metrics.2.jsonl", "metrics.jsonl")
    ]
    assert steps == [1, 2, 3]


def test_a_log_gets_one_plain_line_per_interval(capsys):
    progress = Progress(steps=7, every=3, moves=False)
    for step in range(1, 8):
        progress.show(at(step))
    out = capsys.readouterr().out
    assert "\r" not in out
    assert [line.split()[1] for line in out.splitlines()] == [
        "1/7",
        "3/7",
        "6/7",
        "7/7",
    ]
    for part in ("loss 0.333333", "lr 1.00e-03", "grad norm 0.100", "tokens/s", "ETA"):
        assert part in out


def test_in_a_terminal_the_line_moves_with_every_step(capsys):
    progress = Progress(steps=7, every=3, moves=True)
    for step in range(1, 8):
        progress.show(at(step))
    out = capsys.readouterr().out
    assert out.count("\r") == 7
    assert out.count("\n") == 4


def test_durations():
    assert duration(5) == "0:05"
    assert duration(3723) == "1:02:03"
    assert duration(float("inf")) == "?"


def test_the_loss_curve_is_a_picture(tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "loss.png"
    draw_loss_curve([3.0, 2.0, 1.5], 1.7, path, "a run")
    assert path.read_bytes().startswith(b"\x89PNG")


def test_model_flops_of_a_published_model():
    # PaLM (2022), appendix B: 6 N + 12 L H Q T per token. GPT-3 175B: N = 175e9,
    # L = 96, H Q = 12288, T = 2048.
    flops = model_flops_per_token(175_000_000_000, 96, 12288, 2048)
    assert flops == 6 * 175_000_000_000 + 12 * 96 * 12288 * 2048
