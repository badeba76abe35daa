"""Settings from flags and YAML files, and what is refused."""

from dataclasses import replace
from pathlib import Path

import pytest

from mpiscale.data.batches import IGNORE as DATA_IGNORE
from mpiscale.errors import InputError
from mpiscale.ops.cross_entropy import IGNORE
from mpiscale.train.config import TrainConfig, _parse_here, yaml_flags

DEFAULTS = TrainConfig()


def parse(*flags):
    return _parse_here("A test.", DEFAULTS, flags)


def test_no_flags_give_the_defaults_of_the_example():
    assert parse() == DEFAULTS


def test_flags_of_the_training_examples():
    config = parse(
        *"--steps 3 --seed 7 --dtype float64 --data a.txt --out b --layers 2".split(),
        *"--width 48 --heads 6 --kv-heads 2 --vocab 300 --length 9 --batch 5".split(),
        *"--lr 0.01 --no-tied --dropout 0.1 --profile memory".split(),
    )
    assert config == replace(
        DEFAULTS, steps=3, seed=7, dtype="float64", data=Path("a.txt"), out=Path("b"),
        layers=2, width=48, heads=6, kv_heads=2, vocab=300, length=9, batch=5, lr=0.01,
        tied=False, dropout=0.1, profile="memory",
    )  # fmt: skip
    assert parse("--tied").tied


def test_a_yaml_file_sets_flags_and_flags_win(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("steps: 5\nkv_heads: 2\ntied: false\nmodel: llama\n")
    config = parse("--config", str(path), "--steps", "9")
    assert (config.steps, config.kv_heads, config.tied) == (9, 2, False)
    assert config.model == "llama"


def test_unknown_flags_and_keys_are_refused_by_name(tmp_path, capsys):
    with pytest.raises(SystemExit) as leaving:
        parse("--widht", "3")
    assert leaving.value.code == 2
    assert "--widht" in capsys.readouterr().err
    path = tmp_path / "run.yaml"
    path.write_text("widht: 3\n")
    with pytest.raises(InputError, match=r"unknown key 'widht'; did you mean width\?"):
        yaml_flags(path)


def test_values_of_the_wrong_type_are_refused(tmp_path, capsys):
    path = tmp_path / "run.yaml"
    path.write_text("width: wide\n")
    with pytest.raises(SystemExit):
        parse("--config", str(path))
    assert "width" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        parse("--dtype", "float8")


def test_files_that_are_no_settings_are_refused(tmp_path):
    with pytest.raises(InputError, match=r"cannot read --config .*none\.yaml"):
        yaml_flags(tmp_path / "none.yaml")
    path = tmp_path / "list.yaml"
    path.write_text("- 1\n")
    with pytest.raises(InputError, match="must hold `name: value` lines, got list"):
        yaml_flags(path)
    path.write_text("lr: [1, 2]\n")
    with pytest.raises(InputError, match=r"list\.yaml: lr must be a single value"):
        yaml_flags(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(InputError, match="cannot read"):
        yaml_flags(path)
    path.write_text("a: [\n")
    with pytest.raises(InputError, match="cannot read"):
        yaml_flags(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": 0}, "--steps must be at least 1, got 0"),
        ({"heads": 0}, "--heads must be at least 1"),
        ({"log_every": 0}, "--log-every must be at least 1"),
        ({"dropout": 1.0}, r"--dropout must be in \[0, 1\), got 1.0"),
        ({"lr": 0.0}, "--lr must be positive"),
        ({"lr": float("nan")}, "--lr must be positive"),
        ({"lr": float("inf")}, "--lr must be positive and finite"),
        ({"temperature": -1.0}, "--temperature must be at least 0"),
        ({"temperature": float("nan")}, "--temperature must be at least 0"),
        ({"weight_decay": -1.0}, "--weight-decay must be at least 0"),
        ({"eval_batches": -1}, "--eval-batches must be at least 0"),
        ({"model": "llama", "dropout": 0.1}, "Llama has none"),
        ({"hidden": 8}, "--hidden is for --model llama"),
    ],
)
def test_values_that_no_run_can_use_are_refused(change, message):
    with pytest.raises(InputError, match=message):
        replace(DEFAULTS, **change).check()


def test_data_and_loss_agree_on_the_label_that_does_not_count():
    assert DATA_IGNORE == IGNORE
