"""gpt_dp.py, gpt_zero.py and gpt_diloco.py: the serial run, and what they say of it."""

import json
import re

import numpy as np
import pytest

from tests.examples.command import curve, metrics, run_example
from tests.examples.test_gpt_examples import small

EXACT = ("--dtype", "float64", "--dropout", "0.1")


@pytest.fixture(scope="module")
def serial(tmp_path_factory):
    """Losses and norms of the serial example."""
    out = tmp_path_factory.mktemp("serial")
    run = run_example("gpt_serial.py", *small(out, *EXACT))
    assert run.code == 0, run.err
    return curve(out), curve(out, "grad_norm"), validation(run)


def validation(run):
    return float(re.search(r"validation loss ([\d.]+)", run.out)[1])


@pytest.mark.parametrize(
    ("ranks", "command"),
    [
        (2, "gpt_dp.py --check-replicas 2"),
        (3, "gpt_dp.py --no-overlap --accumulate 2"),
        (4, "gpt_dp.py --accumulate 3 --all-reduce ring"),
        (3, "gpt_dp.py --gather-lookups --accumulate 2"),
        (2, "gpt_zero.py --stage 0"),
        (3, "gpt_zero.py --stage 1 --check-replicas 1"),
        (4, "gpt_zero.py --stage 2 --accumulate 2 --all-reduce recursive-doubling"),
        (2, "gpt_zero.py --stage 3 --accumulate 2"),
        (4, "gpt_tp.py --all-reduce hierarchical"),
        (2, "gpt_sp.py --overlap"),
        (4, "gpt_sp.py --check-replicas 2"),
        (2, "gpt_pp.py --micro-batches 3 --split balanced --profile memory"),
        (2, "gpt_pp.py --schedule zb_v --micro-batches 2 --split 0,1,1,0"),
        (4, "gpt_pp.py --schedule dualpipe --micro-batches 2 --replicas 2"),
        (3, "gpt_tp.py --all-reduce double-binary-tree --heads 6 --width 24"),
    ],
)
def test_every_layout_trains_as_the_serial_example(serial, ranks, command, tmp_path):
    losses, norms, held_out = serial
    name, *flags = command.split()
    if "--heads" in flags:
        run = run_example("gpt_serial.py", *small(tmp_path / "s", *EXACT, *flags[-4:]))
        losses, norms = curve(tmp_path / "s"), curve(tmp_path / "s", "grad_norm")
        held_out = validation(run)
    run = run_example(name, *small(tmp_path / "p", *EXACT, *flags), ranks=ranks)
    assert run.code == 0, run.err
    np.testing.assert_allclose(curve(tmp_path / "p"), losses, rtol=1e-12)
    np.testing.assert_allclose(curve(tmp_path / "p", "grad_norm"), norms, rtol=1e-11)
    assert validation(run) == held_out


@pytest.mark.parametrize(
    "command",
    [
        "gpt_dp.py",
        "gpt_dp.py --compress",
        "gpt_dp.py --gather-lookups",
        "gpt_dp.py --gather-lookups --no-tied",
        "gpt_dp.py --all-reduce rabenseifner",
        "gpt_zero.py --stage 2 --accumulate 2",
        "gpt_zero.py --stage 3 --all-reduce double-binary-tree",
        "gpt_tp.py --all-reduce ring",
        "gpt_sp.py --overlap",
    ],
)
def test_a_step_sends_what_the_run_announces(command, tmp_path):
    name, *flags = command.split()
    run = run_example(name, *small(tmp_path, *flags), ranks=4)
    assert run.code == 0, run.err
    announced = re.search(r"^sent +([\d,]+) bytes per step", run.out, re.M)[1]
    sent = {line["bytes_sent"] for line in metrics(tmp_path)}
    assert sent == {int(announced.replace(",", ""))}


def test_diloco_sends_nothing_between_two_outer_steps(tmp_path):
    run = run_example("gpt_diloco.py", *small(tmp_path, "--every", "2"), ranks=2)
    assert run.code == 0, run.err
    sent = [line["bytes_sent"] for line in metrics(tmp_path)]
    assert sent[0] == sent[2] == 0 < sent[1] == sent[3]


def test_the_memory_table_of_zero_shows_every_rank_beside_the_formula(tmp_path):
    run = run_example("gpt_zero.py", *small(tmp_path, "--stage", "3"), ranks=4)
    rows = re.findall(r"^(rank \d|formula) +(.*)$", run.out, re.M)
    assert [name for name, _ in rows] == [
        "rank 0",
        "rank 1",
        "rank 2",
        "rank 3",
        "formula",
    ]
    assert len({cells for _, cells in rows}) == 1


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (
            "gpt_dp.py --compress --dtype float64",
            "--compress is an all-reduce of float32",
        ),
        ("gpt_dp.py --all-reduce auto", "--all-reduce auto and --topology FILE go"),
        (
            "gpt_dp.py --all-reduce auto --topology nowhere.json",
            "cannot read topology file nowhere.json",
        ),
        (
            "gpt_pp.py --accumulate 2 --micro-batches 2",
            "a pipeline has --micro-batches",
        ),
        ("gpt_pp.py --micro-batches 9", "--micro-batches 9: expected 1 ... "),
        ("gpt_pp.py --replicas 3 --micro-batches 1", "mesh pp=1 x dp=3 needs 3 ranks"),
        ("gpt_pp.py --replicas 0", "--replicas must be at least 1, got 0"),
        ("gpt_pp.py --micro-batches 2 --split 3", "holds 3 layers; expected 2 stages"),
        (
            "gpt_pp.py --micro-batches 2 --schedule zb_v",
            "2 layers cannot fill 4 pipeline stages",
        ),
        ("gpt_dp.py --accumulate 0", "--accumulate must be at least 1, got 0"),
        ("gpt_diloco.py --every 3", "--steps 4 must be a multiple of --every 3"),
    ],
)
def test_flags_that_do_not_fit_are_refused_once(command, message, tmp_path):
    name, *flags = command.split()
    run = run_example(name, *small(tmp_path, *flags), ranks=2)
    assert run.code == 2
    assert run.err.count(message) == 1


def test_a_pipeline_draws_its_timeline_and_writes_a_trace(tmp_path):
    trace = tmp_path / "trace.json"
    flags = ("--schedule", "zb_h1", "--micro-batches", "4", "--trace", trace)
    run = run_example("gpt_pp.py", *small(tmp_path, *flags), ranks=2)
    assert run.code == 0, run.err
    assert re.search(r"^zb_h1 measured: bubble [\d.]+ % of [\d.]+ ms$", run.out, re.M)
    assert re.search(r"^zb_h1 predicted: bubble [\d.]+ % of [\d.]+ ms$", run.out, re.M)
    assert (tmp_path / "timeline.png").stat().st_size > 5000
    events = json.loads(trace.read_text())["traceEvents"]
    processes = {e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert processes == {"rank 0", "rank 1", "predicted, rank 0", "predicted, rank 1"}
    lengths = [line["bytes_sent"] for line in metrics(tmp_path)]
    announced = re.search(r"^sent +([\d,]+) bytes per step", run.out, re.M)[1]
    assert lengths[0] == int(announced.replace(",", "")) + 80  # and a header
    assert set(lengths[1:]) == {int(announced.replace(",", ""))}


def test_every_example_writes_a_trace(tmp_path):
    trace = tmp_path / "trace.json"
    run = run_example("gpt_dp.py", *small(tmp_path, "--trace", trace), ranks=2)
    assert f"wrote {trace}" in run.out
    names = {e["name"] for e in json.loads(trace.read_text())["traceEvents"]}
    assert {"forward", "backward", "gradients", "optimizer", "Iallreduce"} <= names
