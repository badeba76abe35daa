"""gpt_serial.py and gpt_tp.py from their command lines: the same run, and refusals."""

import re

import h5py
import numpy as np
import pytest

from tests.examples.command import curve, metrics, run_example

SMALL = (
    "--steps 4 --layers 2 --width 32 --length 32 --batch 4 --sample 8 --eval-batches 1"
)


def small(out, *more):
    return [*SMALL.split(), "--out", out, *more]


@pytest.fixture(scope="module")
def serial(tmp_path_factory):
    """Losses of the serial example, by type and model."""
    folder = tmp_path_factory.mktemp("serial")
    curves = {}
    for dtype in ("float64", "float32"):
        for model in ("gpt", "llama"):
            out = folder / f"{dtype}-{model}"
            flags = ["--dtype", dtype, "--model", model, "--kv-heads", "2"]
            run = run_example("gpt_serial.py", *small(out, *flags))
            assert run.code == 0, run.err
            curves[dtype, model] = curve(out), curve(out, "grad_norm")
    return curves


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_every_number_of_ranks_trains_as_the_serial_example(serial, ranks, tmp_path):
    for (dtype, model), (losses, norms) in serial.items():
        if ranks != 2 and (dtype, model) != ("float64", "llama"):
            continue
        out = tmp_path / f"{dtype}-{model}"
        flags = ["--dtype", dtype, "--model", model, "--kv-heads", "2"]
        run = run_example("gpt_tp.py", *small(out, *flags), ranks=ranks)
        assert run.code == 0, run.err
        close = {"float64": 1e-12, "float32": 1e-5}[dtype]
        np.testing.assert_allclose(curve(out), losses, rtol=close)
        np.testing.assert_allclose(curve(out, "grad_norm"), norms, rtol=10 * close)


def test_a_run_says_what_it_does_once_and_leaves_metrics_and_a_picture(tmp_path):
    run = run_example("gpt_tp.py", *small(tmp_path / "new"), ranks=2)
    assert run.code == 0, run.err
    for line in (
        r"^MPI +\S",
        r"^ranks +2 \(2 on this node\), \d+ threads? each$",
        r"^mesh +tp=2$",
        r"^model +gpt, 2 layers, width 32, 8 heads, vocabulary 256, float32$",
        r"^parameters +[\d,]+ in total, [\d,]+ on rank 0$",
        r"^step 1/4  loss 5\.\d+ ",
        r"^step 4/4  loss \d\.\d+  lr .* grad norm .* tokens/s .*FLOP/s  ETA 0:00$",
        r"^training loss ",
        r"^validation loss \d\.\d+ nats per token$",
        r"^sample ",
    ):
        assert len(re.findall(line, run.out, re.MULTILINE)) == 1, (line, run.out)
    assert "\r" not in run.out  # not a terminal
    sent = re.search(r"^sent +([\d,]+) bytes per step by rank 0$", run.out, re.M)
    lines = metrics(tmp_path / "new")
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert {line["bytes_sent"] for line in lines} == {int(sent[1].replace(",", ""))}
    assert all(line["tokens_per_second"] > 0 for line in lines)
    assert (tmp_path / "new" / "loss.png").exists()


def test_a_memory_profile_has_a_row_for_each_rank(tmp_path):
    flags = small(tmp_path / "new", "--profile", "memory")
    run = run_example("gpt_tp.py", *flags, ranks=2)
    assert run.code == 0, run.err
    rows = re.findall(r"^rank ([01])((?: +[\d.]+){7})$", run.out, re.MULTILINE)
    assert [rank for rank, _ in rows] == ["0", "1"]
    for _, cells in rows:
        parameters, gradients, _, activations, _, before, peak = map(
            float, cells.split()
        )
        assert parameters == gradients < activations
        assert 0 < before < peak


def test_generated_text_is_the_same_on_every_layout(tmp_path):
    samples = []
    for ranks in (None, 4):
        name = "gpt_serial.py" if ranks is None else "gpt_tp.py"
        flags = small(tmp_path / str(ranks), "--dtype", "float64", "--sample", "40")
        run = run_example(name, *flags, ranks=ranks)
        samples.append(run.out.split("sample")[1].split("wrote")[0])
    assert samples[0] == samples[1]
    assert len(samples[0]) > 40


def refused(message, *flags, ranks=2, name="gpt_tp.py"):
    """The run ends with one clear error and writes nothing."""
    run = run_example(name, *flags, ranks=ranks)
    assert run.code == 2, run.err
    assert run.out == ""
    assert len(re.findall(message, run.err)) == 1, run.err
    for word in ("Traceback", "Abort", "on rank"):
        assert word not in run.err


def test_bad_input_is_refused_once_before_anything_is_written(tmp_path):
    out = tmp_path / "out"
    for message, flags in {
        r"attention heads \(length 3\) into 2 equal blocks: 3 = 1 x 2 \+ 1": (
            ["--heads", "3", "--width", "30"]
        ),
        r"width 30 cannot be cut into 8 heads: 30 = 3 x 8 \+ 6": ["--width", "30"],
        r"--layers must be at least 1, got 0": ["--layers", "0"],
        r"does not exist|no such|not found": ["--data", tmp_path / "missing.txt"],
        r"--widht": ["--widht", "3"],
        r"vocabulary": ["--vocab", "100"],
    }.items():
        refused(message, *small(out, *flags))
        assert not out.exists()
    empty = tmp_path / "empty.txt"
    empty.touch()
    refused("no text in file", *small(out, "--data", empty))
    short = tmp_path / "short.txt"
    short.write_text("too short")
    refused(r"expected at least 33", *small(out, "--data", short))
    (tmp_path / "file").touch()
    refused("cannot write to --out", *small(tmp_path / "file" / "folder"))
    settings = tmp_path / "settings.yaml"
    settings.write_text("wdith: 3\n")
    refused(r"unknown key 'wdith'; did you mean width", "--config", settings)
    assert not out.exists()


def test_the_serial_example_refuses_several_ranks(tmp_path):
    refused("runs on one rank, got 2", *small(tmp_path / "out"), name="gpt_serial.py")


def test_help_is_printed_once():
    run = run_example("gpt_tp.py", "--help", ranks=2)
    assert run.code == 0
    assert run.out.count("--kv-heads") == 1


def test_own_text_and_settings_from_a_file(tmp_path):
    (tmp_path / "texts").mkdir()
    for i in range(3):
        (tmp_path / "texts" / f"{i}.txt").write_text("to be or not to be, " * 200)
    settings = tmp_path / "run.yaml"
    settings.write_text(f"steps: 3\nlength: 16\nout: {tmp_path / 'out'}\nsample: 0\n")
    run = run_example(
        "gpt_tp.py", "--config", settings, "--data", tmp_path / "texts", ranks=2
    )
    assert run.code == 0, run.err
    assert len(metrics(tmp_path / "out")) == 3


def test_a_loss_that_is_not_a_number_names_the_step_and_keeps_the_last_state(tmp_path):
    out = tmp_path / "out"
    flags = small(
        out, "--lr", "1e30", "--warmup", "0", "--clip", "1e30", "--steps", "9"
    )
    run = run_example("gpt_tp.py", *flags, ranks=2)
    assert run.code == 2
    stops = re.findall(r"(?:loss|norm) is (?:nan|inf) in step (\d+) on all 2", run.err)
    assert len(stops) == 1, run.err
    step = int(stops[0])
    assert f"the state after step {step - 1} is kept" in run.err
    for rank in (0, 1):
        with h5py.File(out / f"last_state-rank{rank}.h5") as file:
            assert file.attrs["step"] == step - 1
            for group in file.values():
                assert all(np.isfinite(values).all() for values in group.values())
    assert [line["step"] for line in metrics(out)] == list(range(1, step))
