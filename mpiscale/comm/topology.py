"""A topology file: what `mpiscale bench collectives` measured, for others to read.

JSON, times in seconds:

    {
      "format": "mpiscale topology 1",
      "date": "2026-01-31", "mpi": "MPICH 5.0.2",
      "nodes": [[0, 1], [2, 3]],           ranks of each node, when it was measured
      "hosts": ["n1", "n2"],
      "inside": {"alpha_seconds": ..., "beta_seconds_per_byte": ...,
                 "share_seconds_per_byte": ...},
      "across": {...} or null,             messages between nodes
      "gamma_seconds_per_byte": ..., "gamma_share_seconds_per_byte": ...
    }

What the numbers mean is said in `cost_model.py`.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path

from mpiscale.comm.cost_model import Level, Machine
from mpiscale.errors import InputError

FORMAT = "mpiscale topology 1"


@dataclass(frozen=True)
class Topology:
    """A measured machine, and where and when it was measured."""

    date: str
    mpi: str
    nodes: list[list[int]]
    hosts: list[str]
    machine: Machine

    def write(self, path: Path) -> None:
        """Write the file."""
        head = {"format": FORMAT, "date": self.date, "mpi": self.mpi}
        where = {"nodes": self.nodes, "hosts": self.hosts}
        path.write_text(
            json.dumps(head | where | asdict(self.machine), indent=2) + "\n"
        )


def read_topology(path: Path) -> Topology:
    """Read a topology file.

    Raises:
        InputError: if there is no such file, it is another kind of file, or a time in
            it is none.
    """
    try:
        read = json.loads(path.read_text())
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise InputError(f"cannot read topology file {path}: {error}") from None
    if not isinstance(read, dict) or read.get("format") != FORMAT:
        found = read.get("format") if isinstance(read, dict) else type(read).__name__
        raise InputError(
            f"{path} is no topology file: expected format {FORMAT!r}, got {found!r}. "
            "`mpirun -n 4 mpiscale bench collectives` writes one"
        )
    try:
        across = read["across"]
        gammas = read["gamma_seconds_per_byte"], read["gamma_share_seconds_per_byte"]
        machine = Machine(
            Level(**read["inside"]),
            None if across is None else Level(**across),
            *gammas,
        )
        topology = Topology(
            read["date"], read["mpi"], read["nodes"], read["hosts"], machine
        )
    except (KeyError, TypeError) as error:
        raise InputError(f"topology file {path} lacks or misnames {error}") from None
    for level in filter(None, (machine.inside, machine.across)):
        _check_times(path, asdict(level))
    _check_times(path, {"gamma_seconds_per_byte": gammas[0]})
    _check_times(path, {"gamma_share_seconds_per_byte": gammas[1]})
    return topology


def _check_times(path: Path, times: dict[str, object]) -> None:
    for name, time in times.items():
        if not isinstance(time, (int, float)) or not 0 <= time < math.inf:
            raise InputError(
                f"topology file {path}: {name} must be a number that is finite and at "
                f"least 0, got {time!r}: measure with `mpiscale bench collectives`"
            )
