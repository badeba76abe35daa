"""Ranks on a grid with named dimensions: one communicator per kind of parallelism.

The last dimension varies fastest. ProcessMesh(comm, pp=2, tp=2) on four ranks:

          tp=0    tp=1
    pp=0  rank 0  rank 1
    pp=1  rank 2  rank 3
"""

from __future__ import annotations

import math

from mpiscale.comm.communicator import Communicator
from mpiscale.errors import InputError


class ProcessMesh:
    """ProcessMesh(comm, dp=2, pp=2, tp=4): 16 ranks, tp varying fastest.

    mesh.along("tp") joins the ranks that differ from this one in tp alone;
    mesh.along("dp", "pp") those that share its tp.

    Raises:
        InputError: if the dimensions don't multiply to the number of ranks.
    """

    def __init__(self, comm: Communicator, **dims: int) -> None:
        self.comm, self.dims = comm, dims
        needed = math.prod(dims.values())
        if min(dims.values(), default=1) < 1:
            raise InputError(f"mesh {self}: every dimension must be at least 1")
        if needed != comm.size:
            raise InputError(
                f"mesh {self} needs {needed} ranks, got {comm.size}: start it with "
                f"`mpirun -n {needed}`, or change a dimension"
            )
        self._coordinates = coordinates(comm.rank, dims)
        self._comms: dict[frozenset[str], Communicator] = {}

    def __str__(self) -> str:
        return " x ".join(f"{name}={size}" for name, size in self.dims.items())

    def size(self, name: str) -> int:
        """How many ranks lie along dimension `name`."""
        self._check([name])
        return self.dims[name]

    def coordinate(self, name: str) -> int:
        """This rank's place along dimension `name`, 0 <= place < size(name)."""
        self._check([name])
        return self._coordinates[name]

    def along(self, *names: str) -> Communicator:
        """The communicator over the named dimensions, in the order of the mesh.

        The first call for the same names is collective: all ranks of the mesh make it,
        in the same order as other first calls. Later calls return the same object.
        """
        self._check(names)
        key = frozenset(names)
        if key not in self._comms:
            self._comms[key] = self._split(key)
        return self._comms[key]

    def _split(self, inside: frozenset[str]) -> Communicator:
        outside = {name: n for name, n in self.dims.items() if name not in inside}
        group = self.comm.Split(self._index(outside), key=self.comm.rank)
        group.name = " x ".join(name for name in self.dims if name in inside)
        return group

    def _index(self, dims: dict[str, int]) -> int:
        """This rank's place among all coordinates in `dims`, the last one fastest."""
        index = 0
        for name, size in dims.items():
            index = index * size + self._coordinates[name]
        return index

    def _check(self, names: tuple[str, ...] | list[str]) -> None:
        unknown = [name for name in names if name not in self.dims]
        if unknown or not names:
            raise InputError(
                f"expected one or more of the dimensions {list(self.dims)} of mesh "
                f"{self}, got {list(names)}"
            )


def coordinates(rank: int, dims: dict[str, int]) -> dict[str, int]:
    """The place of `rank` along each dimension; the last dimension varies fastest."""
    places = {}
    for name, size in reversed(dims.items()):
        rank, places[name] = divmod(rank, size)
    return places
