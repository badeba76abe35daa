"""The whole measurement of collectives on all ranks: fit, sweep, report."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from pathlib import Path

from mpiscale.bench.collectives import sweep
from mpiscale.bench.collectives_report import (
    machine_lines,
    selection,
    table,
    write,
)
from mpiscale.bench.fit_machine import fit_machine
from mpiscale.comm.algorithms.node_groups import nodes_of
from mpiscale.comm.topology import Topology
from mpiscale.comm.world import World


def measure(
    world: World, kinds: Sequence[str], sizes: Sequence[int], repeats: int, out: Path
) -> None:
    """Measure; rank 0 prints, and writes into `out`. Collective.

    Args:
        kinds: of collectives.
        sizes: in bytes.
        repeats: timings of each size up to 1 MiB; of larger ones a third, at least 5.
        out: folder.
    """
    comm = world.comm
    nodes = nodes_of(comm)
    hosts = list(dict.fromkeys(comm.allgather(world.node)))
    machine = fit_machine(comm, nodes)
    today = datetime.date.today().isoformat()
    topology = Topology(today, world.library, nodes, hosts, machine)
    if world.rank == 0:
        print(machine_lines(topology), flush=True)

    def repeats_of(nbytes: int) -> int:
        return repeats if nbytes <= 1 << 20 else max(min(5, repeats), repeats // 3)

    points = sweep(comm, nodes, machine, kinds, sizes, repeats_of)
    if world.rank == 0:
        print(f"\n{table(points)}\n\n{selection(points)}")
        print("\n".join(write(points, topology, out)))
