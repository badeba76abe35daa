"""From facts to findings: pure functions, each a line or two of the report."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from mpiscale.doctor.facts import RankFacts
from mpiscale.doctor.finding import Finding, many

FEW_OPEN_FILES = 1024
LITTLE_SHM_BYTES = 64 << 20
CLOCK_SKEW_S = 1.0
UNLIMITED = -1


def judge_versions(facts: Sequence[RankFacts], library: str) -> list[Finding]:
    """What is installed, and whether it is the same on all nodes."""
    first = facts[0].versions
    text = ", ".join(f"{name} {version}" for name, version in first.items())
    found = [Finding("ok", "versions", f"{text}, {library}")]
    others = [f for f in facts if f.versions != first]
    if others:
        differing = sorted(
            name
            for name in first.keys() | others[0].versions.keys()
            if first.get(name) != others[0].versions.get(name)
        )
        found.append(
            Finding(
                "error",
                "versions",
                f"rank {others[0].rank} on {others[0].node} has other versions of "
                f"{', '.join(differing)} than rank 0",
                "use one environment on a shared file system on all nodes",
            )
        )
    return found


def judge_launcher(ranks: int, mpirun_says: str, library: str) -> Finding:
    """Whether the mpirun on the PATH belongs to the MPI that Python has loaded.

    mpirun_says: what `mpirun --version` prints; "" without an mpirun.
    """
    subject = "launcher"
    alone = "alone; for several ranks: mpirun -n 4 mpiscale doctor"
    text = alone if ranks == 1 else f"{ranks} ranks see each other"
    family = family_of(mpirun_says)
    if mpirun_says and family and family != family_of(library):
        return Finding(
            "warning",
            subject,
            f"{text}; the mpirun on PATH is {family}'s, Python has loaded {library}",
            "with that mpirun every rank would be a world of its own: put the mpirun "
            "of the loaded MPI first on PATH (activate the virtual environment)",
        )
    return Finding("ok", subject, text)


def family_of(text: str) -> str:
    """ "MPICH" or "Open MPI", from a version's text; "" if unknown."""
    if re.search(r"open.?mpi|open-?rte|prrte", text, re.I):
        return "Open MPI"
    return "MPICH" if re.search(r"mpich|hydra", text, re.I) else ""


def judge_placement(facts: Sequence[RankFacts]) -> list[Finding]:
    """Ranks on each node, CPUs and threads."""
    per_node = Counter(f.node for f in facts)
    ranks = ", ".join(f"{node}: {n}" for node, n in per_node.items())
    found = [Finding("ok", "ranks per node", ranks)]
    for node in per_node:
        here = [f for f in facts if f.node == node]
        busy, cpus = sum(f.threads for f in here), max(f.cpus for f in here)
        text = (
            f"{node}: {many(len(here), 'rank')} x {many(here[0].threads, 'thread')} on "
            f"{many(cpus, 'CPU')} each may use"
        )
        if len(here) > cpus:
            advice = "ranks take turns on a CPU: start fewer, or on more nodes"
            found.append(Finding("warning", "CPUs", text, advice))
        elif busy > cpus:
            advice = "unset OMP_NUM_THREADS and MPISCALE_THREADS, or lower them"
            found.append(Finding("warning", "CPUs", text, advice))
        else:
            found.append(Finding("ok", "CPUs", text))
    return found


def judge_shared_memory(facts: Sequence[RankFacts]) -> Finding:
    """Ranks of a node should share memory, and have some."""
    subject = "shared memory"
    for f in facts:
        local = [other.rank for other in facts if other.node == f.node]
        if f.shares_memory_with != min(local):
            return Finding(
                "warning",
                subject,
                f"MPI does not know that ranks {local} share node {f.node}",
                "messages between them may be slow, hierarchical algorithms find one "
                "rank a node: use the MPI's own mpirun, or srun --mpi=pmi2",
            )
    broken = [f for f in facts if f.window_works]
    if broken:
        text = f"rank {broken[0].rank} can't allocate it: {broken[0].window_works}"
        return Finding("error", subject, text, "enlarge /dev/shm (docker: --shm-size)")
    little = [
        f for f in facts if f.shm_free is not None and f.shm_free < LITTLE_SHM_BYTES
    ]
    if little:
        free = (little[0].shm_free or 0) >> 20
        text = f"/dev/shm of {little[0].node} has {free} MiB free"
        return Finding("warning", subject, text, "enlarge it (docker: --shm-size)")
    return Finding("ok", subject, "ranks of a node share memory")


def judge_gpus(facts: Sequence[RankFacts], has_cupy: bool) -> list[Finding]:
    """GPUs, and whether MPI can be given their memory."""
    if not has_cupy:
        text = "no CuPy: NumPy on the CPU"
        return [Finding("ok", "GPUs", text)]
    problems = [f for f in facts if f.gpu_problem]
    if problems:
        text = f"rank {problems[0].rank}: {problems[0].gpu_problem}"
        advice = "look at nvidia-smi and at CUDA_VISIBLE_DEVICES"
        return [Finding("warning", "GPUs", text, advice)]
    if not any(f.gpus for f in facts):
        return [Finding("ok", "GPUs", "CuPy is installed, but no GPU is visible")]
    found = []
    for node in dict.fromkeys(f.node for f in facts):
        here = [f for f in facts if f.node == node]
        seen = {gpu for f in here for gpu in f.gpus}
        text = f"{node}: {many(len(here), 'rank')}, {many(len(seen), 'GPU')}"
        if len(here) > len(seen):
            advice = "ranks share a GPU: start as many ranks as there are GPUs"
            found.append(Finding("warning", "GPUs", text, advice))
        else:
            found.append(Finding("ok", "GPUs", text))
    if all(f.cuda_aware for f in facts):
        found.append(Finding("ok", "CUDA-aware", "MPI takes pointers to GPU memory"))
    else:
        text = "MPI takes none of GPU memory: arrays are staged through the host"
        advice = "faster: a CUDA-aware MPI, or NCCL"
        found.append(Finding("warning", "CUDA-aware", text, advice))
    return found


def judge_files(
    facts: Sequence[RankFacts], parallel_hdf5: bool | None
) -> list[Finding]:
    """The working directory, and HDF5 in it."""
    blind = [f for f in facts if not f.sees_file]
    if blind and blind[0].rank == 0:
        advice = "change into a folder that you may write to"
        found = [Finding("error", "folder", "rank 0 can't write here", advice)]
    elif blind:
        text = f"rank {blind[0].rank} on {blind[0].node} does not see rank 0's files"
        advice = "run in a folder on a file system that all nodes share"
        found = [Finding("error", "folder", text, advice)]
    else:
        found = [Finding("ok", "folder", "all ranks see the files that rank 0 writes")]
    if parallel_hdf5 is None:
        found.append(Finding("error", "HDF5", "no h5py", "pip install h5py"))
    elif facts[0].lock_error:
        text = f"can't write a file here: {facts[0].lock_error}"
        advice = "on file systems without locks: export HDF5_USE_FILE_LOCKING=FALSE"
        found.append(Finding("error", "HDF5", text, advice))
    else:
        kind = "parallel" if parallel_hdf5 else "serial: each rank writes its own file"
        found.append(Finding("ok", "HDF5", kind))
    return found


def judge_limits(facts: Sequence[RankFacts]) -> list[Finding]:
    """Limits of the process that large runs meet."""
    found = []
    limited = [f.open_files for f in facts if f.open_files != UNLIMITED]
    few = min(limited, default=FEW_OPEN_FILES)
    if few < FEW_OPEN_FILES:
        text, advice = f"{few} open files", f"ulimit -n {FEW_OPEN_FILES}"
        found.append(Finding("warning", "limits", text, advice))
    several_nodes = len({f.node for f in facts}) > 1
    locked = [f for f in facts if f.locked_memory != UNLIMITED]
    if several_nodes and locked:
        text = (
            f"{locked[0].locked_memory >> 10} KiB of locked memory on {locked[0].node}"
        )
        advice = "InfiniBand needs more: ulimit -l unlimited"
        found.append(Finding("warning", "limits", text, advice))
    return found or [Finding("ok", "limits", "open files and locked memory suffice")]


def judge_clock(facts: Sequence[RankFacts], tick_s: float) -> Finding:
    """System clocks of the nodes, and MPI's own."""
    worst = max(facts, key=lambda f: abs(f.clock_offset_s))
    skew = abs(worst.clock_offset_s)
    text = f"resolution {1e9 * tick_s:.0f} ns, ranks within {skew:.2g} s"
    if skew > CLOCK_SKEW_S:
        advice = f"the clock of {worst.node} is off: start NTP; traces would not align"
        return Finding("warning", "clock", text, advice)
    return Finding("ok", "clock", text)
