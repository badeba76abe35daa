"""`mpiscale bench collectives`: what it prints, writes, and refuses."""

import json
from pathlib import Path

import pytest

from mpiscale.bench.collectives import Point, elements
from mpiscale.bench.fit_machine import fit_line
from mpiscale.cli.bench_collectives import BenchCollectives
from mpiscale.comm.cost_model import Level, Machine
from mpiscale.comm.topology import Topology, read_topology
from mpiscale.errors import InputError
from tests.comm.scripts import run_command

MACHINE = Machine(Level(1e-6, 1e-10, 5e-11), Level(2e-5, 8e-9, 8e-9), 1e-10, 5e-11)


def test_a_small_sweep_prints_tables_and_writes_files_that_can_be_read(tmp_path):
    done = run_command(
        4, "bench", "collectives", "--smallest", "8", "--largest", "4096", "--factor",
        "512", "--repeats", "2", "--out", str(tmp_path),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for text in ("same node", "all-to-all, 4 ranks", "double-binary-tree", "wrote"):
        assert text in done.stdout
    topology = read_topology(tmp_path / "topology.json")
    assert topology.nodes == [[0, 1, 2, 3]] and topology.machine.across is None
    points = json.loads((tmp_path / "collectives.json").read_text())
    assert {p["kind"] for p in points} == {
        "all-reduce", "reduce-scatter", "all-gather", "all-to-all",
    }  # fmt: skip
    for p in points:
        assert p["seconds"] > 0
        assert p["algbw"] == pytest.approx(p["nbytes"] / p["seconds"])


def test_one_rank_is_told_to_use_mpirun(tmp_path):
    done = run_command(1, "bench", "collectives", "--out", str(tmp_path))
    assert done.returncode == 2
    assert "mpirun -n 4 mpiscale bench collectives" in done.stderr


def test_bandwidths_follow_the_convention_of_nccl_tests():
    factors = {"all-reduce": 1.5, "reduce-scatter": 0.75, "all-gather": 0.75}
    for kind, factor in factors.items():
        point = Point(kind, "ring", 1000, 1e-6, None, 4)
        assert point.algbw == pytest.approx(1e9)
        assert point.busbw == pytest.approx(factor * 1e9)


def test_sizes_are_cut_evenly_where_a_collective_needs_it():
    assert elements("all-reduce", 8, 3) == 2
    assert elements("all-gather", 8, 3) == 3
    assert elements("all-to-all", 1, 4) == 4


def test_a_line_is_fitted_by_relative_errors():
    sizes = [8, 1000, 100_000]
    a, b = fit_line(sizes, [1e-6 + 2e-9 * size for size in sizes])
    assert (a, b) == (pytest.approx(1e-6), pytest.approx(2e-9))
    assert fit_line(sizes, [1e-9 * size for size in sizes])[0] == pytest.approx(0)
    assert min(fit_line(sizes, [5e-6, 4e-6, 3e-6])) == 0


def test_what_cannot_be_measured_is_refused():
    for wrong, message in (
        ({"kinds": ()}, "--kinds must name at least one"),
        ({"smallest": 9, "largest": 8}, "--smallest <= --largest"),
        ({"factor": 1}, "--factor must be at least 2"),
    ):
        with pytest.raises(InputError, match=message):
            BenchCollectives(**wrong).check(ranks=2)
    assert BenchCollectives(smallest=8, largest=100, factor=4).sizes() == [8, 32, 100]


def test_a_topology_file_is_read_as_it_was_written(tmp_path):
    topology = Topology("2026-01-31", "MPICH 5", [[0, 1], [2]], ["a", "b"], MACHINE)
    path = tmp_path / "topology.json"
    topology.write(path)
    assert read_topology(path) == topology


@pytest.mark.parametrize("time", ("fast", -1e-6, float("nan"), float("inf"), None))
@pytest.mark.parametrize("name", ("gamma_seconds_per_byte", "beta_seconds_per_byte"))
def test_a_time_that_is_none_is_refused_by_name(tmp_path, name, time):
    path = tmp_path / "topology.json"
    Topology("2026-01-31", "MPICH 5", [[0]], ["a"], MACHINE).write(path)
    written = json.loads(path.read_text())
    (written if name in written else written["across"])[name] = time
    path.write_text(json.dumps(written))
    with pytest.raises(InputError, match=f"{name} must be a number that is finite"):
        read_topology(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot read topology file"),
        ("{", "cannot read topology file"),
        ("[]", "is no topology file.*got 'list'"),
        ('{"format": "mpiscale topology 9"}', "got 'mpiscale topology 9'"),
        ('{"format": "mpiscale topology 1"}', "lacks or misnames 'across'"),
    ],
)
def test_another_file_is_refused(tmp_path: Path, text, message):
    path = tmp_path / "topology.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(InputError, match=message):
        read_topology(path)
