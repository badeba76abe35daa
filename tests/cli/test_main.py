"""The program's command line: help, refusals, and what it starts."""

import re
import subprocess
import sys

import pytest

from mpiscale.bench.step import DisagreementError
from mpiscale.cli import bench
from mpiscale.cli.main import main


def leave(*args):
    with pytest.raises(SystemExit) as leaving:
        main(args)
    return leaving.value.code


def test_no_arguments_give_help(capsys):
    assert leave() == 0
    out = capsys.readouterr().out
    assert out.startswith("usage: mpiscale")
    assert "bench" in out


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["bench", "--help"], ["step", "kernels"]),
        (
            ["bench", "step", "--help"],
            ["--shape {a,b,c}", "--vs", "--ranks", "--threads", "--steps", "--out",
             "--profile", "--compile"],
        ),
        (["bench", "kernels", "--help"], ["--shape {a,b,c}", "--vs", "--threads"]),
    ],
)  # fmt: skip
def test_every_command_explains_its_options(args, words, capsys):
    assert leave(*args) == 0
    out = capsys.readouterr().out
    for word in words:
        assert word in out


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["bnech"], "bnech"),
        (["bench"], "Expected one of"),
        (["bench", "stpe"], "stpe"),
        (["bench", "step", "--shpae", "a"], "--shpae"),
        (["bench", "step", "--shape", "d"], "'d'"),
        (["bench", "step", "--ranks", "3"], "--ranks 3 does not divide the 8 samples"),
        (["bench", "step", "--ranks", "0"], "--ranks must be at least 1, got 0"),
        (["bench", "step", "--steps", "0"], "--steps must be at least 1, got 0"),
        (["bench", "step", "--threads", "0"], "--threads must be at least 1, got 0"),
        (["bench", "step", "--compile"], "--compile is PyTorch's: add --vs torch"),
        (["bench", "kernels", "--threads", "-1"], "--threads must be at least 1"),
    ],
)
def test_what_cannot_be_used_is_refused_by_name_with_code_2(args, message, capsys):
    assert leave(*args) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Traceback" not in captured.err
    words = " ".join(captured.err.replace("│", " ").split())
    assert re.search(message, words), captured.err


@pytest.mark.parametrize("command", ["step", "kernels"])
def test_a_missing_pytorch_is_named(command, capsys, monkeypatch):
    monkeypatch.setattr(bench, "find_spec", lambda name: None)
    assert leave("bench", command, "--vs", "torch") == 2
    assert "pip install torch" in capsys.readouterr().err


def test_contenders_that_disagree_end_the_program_with_code_1(capsys, monkeypatch):
    def disagree(settings, steps, commands):
        raise DisagreementError("loss of the first step is 1 in A and 2 in B")

    monkeypatch.setattr(bench, "measure_step", disagree)
    assert leave("bench", "step") == 1
    captured = capsys.readouterr()
    assert captured.err.startswith("mpiscale: error: loss of the first step is 1")
    assert captured.out == ""


def test_options_reach_the_measurement(monkeypatch):
    asked = {}

    def note(settings, steps, commands):
        asked.update(settings=settings, steps=steps, commands=commands)
        raise DisagreementError("enough")

    monkeypatch.setattr(bench, "measure_step", note)
    monkeypatch.setattr(bench, "find_spec", lambda name: object())
    flags = "--shape b --threads 2 --steps 9 --vs torch --compile --profile memory"
    assert leave("bench", "step", *flags.split()) == 1
    settings = asked["settings"]
    assert settings.shape.width == 384
    assert (settings.threads, settings.compile, settings.memory) == (2, True, True)
    assert asked["steps"] == 9
    modules = [command[-1] for command in asked["commands"]]
    assert modules == ["mpiscale.bench.mpiscale_gpt", "mpiscale.bench.torch_gpt"]


def test_the_program_itself_loads_nothing_large():
    # Help comes at once, and the contenders have the machine to themselves.
    large = {"numba", "torch", "matplotlib", "mpi4py"}
    code = f"import sys, mpiscale.cli.main; print({large!r} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "set()"
