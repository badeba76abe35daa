"""`mpiscale doctor`: what is said about facts of many machines; the command itself."""

import dataclasses
import re

import pytest

from mpiscale.doctor.facts import RankFacts
from mpiscale.doctor.finding import Finding
from mpiscale.doctor.judge import (
    judge_clock,
    judge_files,
    judge_gpus,
    judge_launcher,
    judge_limits,
    judge_placement,
    judge_shared_memory,
    judge_versions,
)
from mpiscale.doctor.messages import Ping, judge_large_message, judge_pings
from mpiscale.doctor.report import exit_code, report
from tests.comm.scripts import run_command

HEALTHY = RankFacts(
    rank=0, node="n0", cpus=4, threads=1, versions={"Python": "3.11", "numpy": "2.0"},
    shares_memory_with=0, window_works="", shm_free=1 << 30, clock_offset_s=0.0,
    sees_file=True, lock_error="", open_files=4096, locked_memory=-1, gpus=(),
    gpu_problem="", cuda_aware=False,
)  # fmt: skip


def ranks(*changes):
    """Facts of as many ranks as there are changes, all on one node if not said."""
    return [
        dataclasses.replace(HEALTHY, rank=rank, **change)
        for rank, change in enumerate(changes)
    ]


def other_node(**change):
    return {"node": "n1", "shares_memory_with": 1} | change


@pytest.mark.parametrize(
    ("found", "level", "words"),
    [
        (judge_versions(ranks({}, {}), "MPICH 5"), "ok", "numpy 2.0, MPICH 5"),
        (
            judge_versions(ranks({}, other_node(versions={"Python": "3.12"})), ""),
            "error",
            "rank 1 on n1 has other versions of Python, numpy",
        ),
        (judge_launcher(1, "HYDRA build", "MPICH 5"), "ok", "mpirun -n 4 mpiscale"),
        (judge_launcher(4, "", "MPICH 5"), "ok", "4 ranks see each other"),
        (
            judge_launcher(1, "mpirun (Open MPI) 5.0", "MPICH 5"),
            "warning",
            "is Open MPI's, Python has loaded MPICH 5",
        ),
        (judge_launcher(2, "prterun (PRRTE) 3", "Open MPI v5"), "ok", "2 ranks"),
        (judge_placement(ranks({}, {})), "ok", "n0: 2"),
        (judge_placement(ranks({}, {}))[1:], "ok", "2 ranks x 1 thread on 4 CPUs"),
        (
            judge_placement(ranks({"cpus": 1}, {"cpus": 1}))[1:],
            "warning",
            "take turns on a CPU",
        ),
        (
            judge_placement(ranks(*[{"threads": 4}] * 2))[1:],
            "warning",
            "unset OMP_NUM_THREADS",
        ),
        (judge_shared_memory(ranks({}, {})), "ok", "share memory"),
        (
            judge_shared_memory(ranks({}, {"shares_memory_with": 1})),
            "warning",
            r"does not know that ranks \[0, 1\] share node n0",
        ),
        (judge_shared_memory(ranks({"window_works": "no"})), "error", "--shm-size"),
        (judge_shared_memory(ranks({"shm_free": 1 << 20})), "warning", "1 MiB free"),
        (judge_gpus(ranks({}), False), "ok", "no CuPy"),
        (judge_gpus(ranks({}), True), "ok", "no GPU is visible"),
        (
            judge_gpus(ranks({"gpu_problem": "no driver"}), True),
            "warning",
            "no driver",
        ),
        (
            judge_gpus(ranks({"gpus": ("a",)}, {"gpus": ("a",)}), True),
            "warning",
            "2 ranks, 1 GPU.*ranks share a GPU",
        ),
        (
            judge_gpus(ranks({"gpus": ("a",)}), True)[1:],
            "warning",
            "staged through the host",
        ),
        (
            judge_gpus(ranks({"gpus": ("a",), "cuda_aware": True}), True)[1:],
            "ok",
            "pointers to GPU memory",
        ),
        (judge_files(ranks({}), False), "ok", "all ranks see"),
        (judge_files(ranks({"sees_file": False}), False), "error", "can't write here"),
        (
            judge_files(ranks({}, other_node(sees_file=False)), False),
            "error",
            "rank 1 on n1 does not see",
        ),
        (judge_files(ranks({}), None)[1:], "error", "pip install h5py"),
        (judge_files(ranks({}), True)[1:], "ok", "parallel"),
        (
            judge_files(ranks({"lock_error": "errno 11"}), False)[1:],
            "error",
            "errno 11.*HDF5_USE_FILE_LOCKING=FALSE",
        ),
        (judge_limits(ranks({"open_files": -1})), "ok", "suffice"),
        (judge_limits(ranks({"open_files": 256})), "warning", "256.*ulimit -n 1024"),
        (judge_limits(ranks({"locked_memory": 65536})), "ok", "suffice"),
        (
            judge_limits(ranks({"locked_memory": 65536}, other_node())),
            "warning",
            "64 KiB of locked memory on n0",
        ),
        (judge_clock(ranks({}, {"clock_offset_s": 0.1}), 1e-9), "ok", "within 0.1 s"),
        (
            judge_clock(ranks({}, other_node(clock_offset_s=-60)), 1e-9),
            "warning",
            "clock of n1 is off",
        ),
        (judge_pings([Ping("same node", (0, 1), 1e-6, 5e9)]), "ok", "1.0 us, 5.00 GB"),
        (judge_pings([Ping("same node", (0, 1), 1e-6, 1e8)]), "warning", "above 0.5"),
        (judge_pings([Ping("other node", (0, 2), 1e-3, 1e9)]), "warning", "below 500"),
        (judge_large_message(""), "ok", "arrive whole"),
        (judge_large_message("not tried"), "ok", "5 GiB of free memory"),
        (judge_large_message("did not arrive whole"), "error", "max_count"),
    ],
)
def test_facts_are_judged(found, level, words):
    first = found if isinstance(found, Finding) else found[0]
    wrong = [found] if isinstance(found, Finding) else found
    spoken = next((f for f in wrong if f.level == level), first)
    assert spoken.level == level
    assert re.search(words, f"{spoken.text} {spoken.advice}")
    assert (spoken.level == "ok") == (spoken.advice == "")


def test_the_report_is_aligned_and_ends_with_a_verdict():
    findings = [
        Finding("ok", "clock", "fine"),
        Finding("warning", "CPUs", "two ranks", "start fewer " * 12),
    ]
    plain = report(findings, colour=False)
    lines = plain.splitlines()
    assert [
        line.index(text) for line, text in zip(lines, ("fine", "two"), strict=False)
    ] == [26, 26]
    assert lines[2].startswith(" " * 26 + "-> start") and lines[3].startswith(" " * 29)
    assert lines[-1] == "1 warning: it runs, but could run better"
    assert exit_code(findings) == 0
    findings.append(Finding("error", "HDF5", "none", "install it"))
    assert report(findings, True).endswith("1 error: it will not run well like this")
    assert "\033[31merror" in report(findings, True) and "\033" not in plain
    assert exit_code(findings) == 1


@pytest.mark.parametrize("ranks", [0, 2])
def test_the_command_examines_this_machine(ranks, tmp_path):
    done = run_command(ranks, "doctor", folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    subjects = re.findall(r"^(?:ok|warning) +(\S+(?: \S+)*?)  ", done.stdout, re.M)
    for subject in ("versions", "launcher", "CPUs", "shared memory", "HDF5", "clock"):
        assert subjects.count(subject) == 1
    assert ("same node" in subjects) == (ranks == 2)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_is_an_error():
    done = run_command(0, "doctor", folder="/proc")
    assert done.returncode == 1
    assert re.search(r"^error +folder +rank 0 can't write here", done.stdout, re.M)
