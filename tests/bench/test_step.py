"""Contenders take turns, must agree, and leave a report; their times are made up."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from mpiscale.bench import step_report
from mpiscale.bench.conductor import (
    REMOVED_VARIABLES,
    ContenderError,
    ContenderProcess,
    alternate,
    clean_command,
    contenders,
)
from mpiscale.bench.contender import Settings
from mpiscale.bench.shapes import SHAPES, Shape
from mpiscale.bench.step import DisagreementError, measure_step
from mpiscale.models.gpt import GPT, GPTConfig
from mpiscale.train.flops import model_flops_per_token
from mpiscale.train.memory import MIB, MemoryReport
from tests.comm.scripts import run_command

TINY = Shape(layers=1, width=32, heads=2, length=16, batch=2, vocabulary=64)
SETTINGS = Settings(TINY, threads=1, weights="")
FAKE = Path(__file__).with_name("fake_contender.py")


def fake(name, log, *options):
    return [sys.executable, str(FAKE), name, str(log), *map(str, options)]


def measure(log, *options_of_b, threads=1):
    settings = replace(SETTINGS, threads=threads)
    commands = [fake("A", log), fake("B", log, *options_of_b)]
    return measure_step(settings, 7, commands, say=lambda text: None)


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """What came of two contenders of which B takes three times as long, and the log."""
    log = tmp_path_factory.mktemp("fakes") / "log"
    return measure(log, "--seconds", 3.0), log.read_text().splitlines()


def test_contenders_take_turns_from_the_first_step_to_the_last(measured):
    _, log = measured
    steps = [line.split() for line in log if " step " in line]
    turns = [(name, k) for k in range(1, 11) for name in "AB"]  # 3 to warm up, then 7
    assert [(name, int(k)) for name, _, k in steps] == turns


def test_weights_are_written_by_the_first_before_the_second_builds(measured):
    _, log = measured
    assert [line.split()[0] for line in log if " build " in line] == ["A", "B"]
    assert log[:2] == ["A build ", "B build "]


def test_ratios_are_taken_pair_by_pair(measured):
    result, _ = measured
    ours, theirs = result.contestants
    paired = replace(
        result,
        contestants=[
            replace(ours, wall_s=[1.0, 2.0, 4.0]),
            replace(theirs, wall_s=[3.0, 2.0, 2.0]),
        ],
    )
    assert paired.ratios(paired.contestants[1], "wall_s") == [3.0, 1.0, 0.5]
    row = step_report.summary(paired, paired.contestants[1])["wall_s"]
    assert row["ratio"] == 1.0
    assert row["median_s"] == 2.0
    assert row["tokens_per_second"] == TINY.tokens / 2.0


def test_cpu_time_is_reported_for_one_thread_only(measured, tmp_path):
    result, _ = measured
    assert result.clocks == ["wall_s", "cpu_s"]
    text = step_report.step_report(result)
    assert "wall time" in text
    assert "CPU time " in text
    two = step_report.step_report(replace(result, threads=2))
    assert "wall time" in two
    assert "CPU time " not in two


@pytest.mark.parametrize("loss", [5.001, float("nan"), float("inf")])
def test_contenders_that_disagree_are_refused_before_any_timing(loss, tmp_path):
    with pytest.raises(DisagreementError, match=r"is 5 in A and .* in B, expected"):
        measure(tmp_path / "log", "--loss", loss)
    assert "step 2" not in (tmp_path / "log").read_text()


def test_a_difference_of_rounding_is_no_disagreement(tmp_path):
    assert measure(tmp_path / "log", "--loss", 5.0004).contestants[1].name == "B"


def test_a_contender_that_dies_is_reported_with_its_last_words(tmp_path):
    with pytest.raises(ContenderError, match=r"B .* ended; .*\nno memory left"):
        measure(tmp_path / "log", "--dies")


def test_a_contender_that_never_answers_is_given_up_and_ended(tmp_path):
    process = ContenderProcess(fake("A", tmp_path / "log", "--sleeps"), limit_s=0.5)
    with pytest.raises(ContenderError, match=r"not answered for 0\.5 s"):
        process.ask(do="step", number=1)
    process.close(limit_s=0.1)
    assert process.exit_code() is not None


def test_all_contenders_end_when_one_fails(tmp_path):
    with pytest.raises(RuntimeError, match="on purpose"):
        with contenders([fake("A", tmp_path / "log")] * 2) as processes:
            alternate(processes, [{"do": "step", "number": 1}])
            raise RuntimeError("on purpose")
    assert [process.exit_code() for process in processes] == [0, 0]


def test_the_environment_of_contenders_is_clean_and_has_their_threads(monkeypatch):
    for name in REMOVED_VARIABLES:
        monkeypatch.setenv(name, "Haswell")
    command = clean_command("mpiscale.bench.kernels", 3, "{}")
    interpreter = command.index(sys.executable)
    show = "import json, os; print(json.dumps(dict(os.environ)))"
    process = ContenderProcess([*command[: interpreter + 1], "-c", show])
    environment = process.ask(do="nothing")
    process.close()
    assert not set(REMOVED_VARIABLES) & set(environment)
    assert environment["OMP_NUM_THREADS"] == environment["NUMBA_NUM_THREADS"] == "3"
    assert command[interpreter + 1 :] == ["-m", "mpiscale.bench.kernels", "{}"]


def test_json_holds_every_step_and_what_follows(measured, tmp_path):
    pytest.importorskip("matplotlib")
    result, _ = measured
    told = step_report.write_report(result, tmp_path / "new", "step")
    written = json.loads((tmp_path / "new" / "step.json").read_text())
    assert {
        "shape", "threads", "machine", "removed_variables", "contestants", "memory",
        "step_flops", "gemm_flops_per_second", "ranks",
    } == set(written)  # fmt: skip
    assert written["shape"]["width"] == TINY.width
    assert written["gemm_flops_per_second"]["cpu_s"] == 2 * 1024**3 / 0.02
    b = written["contestants"][1]
    assert b["name"] == "B"
    assert b["wall_s"] == [3.0] * 7
    assert b["cpu_s"] == [1.5] * 7
    assert (b["peak_bytes"], b["before_bytes"], b["first_loss"]) == (2**30, 100, 5.0)
    assert set(b["summary"]) == {"wall_s", "cpu_s"}
    assert b["summary"]["wall_s"]["ratio"] == 3.0
    assert b["summary"]["wall_s"]["flops_per_second"] == TINY.step_flops / 3.0
    assert told == [f"wrote {tmp_path}/new/step.json", f"wrote {tmp_path}/new/step.png"]
    assert (tmp_path / "new" / "step.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_the_picture_is_missed_by_name(
    measured, tmp_path, monkeypatch
):
    monkeypatch.setattr(step_report, "find_spec", lambda name: None)
    told = step_report.write_report(measured[0], tmp_path, "step")
    assert told[1] == "no picture: `pip install 'mpiscale[plot]'` draws it"
    assert not (tmp_path / "step.png").exists()


def test_the_report_names_kernels_removed_variables_and_memory(measured):
    result, _ = measured
    memory = MemoryReport(MIB, MIB, 2 * MIB, 3 * MIB, 4 * MIB, 16 * MIB)
    text = step_report.step_report(replace(result, memory=memory))
    for part in ("made up", *REMOVED_VARIABLES, "first loss 5.000000", "1,024.0"):
        assert part in text
    assert (
        text.splitlines()[-2].split() == "rank 0 1.0 1.0 2.0 3.0 5.0 4.0 16.0".split()
    )


@pytest.mark.parametrize("shape", [TINY, *SHAPES.values()], ids=str)
def test_operations_of_a_step_are_those_that_the_training_loop_counts(shape):
    model = GPT(
        GPTConfig(
            vocabulary=shape.vocabulary, length=shape.length, layers=shape.layers,
            width=shape.width, heads=shape.heads,
        )
    )  # fmt: skip
    matrices = sum(
        p.full_size
        for name, p in model.named_parameters()
        if p.decays and name != "position_embedding.weight"
    )
    per_token = model_flops_per_token(matrices, shape.layers, shape.width, shape.length)
    assert shape.step_flops == per_token * shape.tokens


def test_ranks_share_the_batch_and_compute_the_loss_of_one(tmp_path):
    losses = []
    for ranks, name in (("1", "step-a-1thread"), ("2", "step-a-1thread-2ranks")):
        done = run_command(
            0, "bench", "step", "--ranks", ranks, "--steps", "1", "--out", str(tmp_path)
        )
        assert done.returncode == 0, done.stderr
        written = json.loads((tmp_path / f"{name}.json").read_text())
        assert written["ranks"] == int(ranks)
        losses.append(written["contestants"][0]["first_loss"])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
