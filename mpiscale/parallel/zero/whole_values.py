"""What stages 1 and 2 share: every rank has all parameters, and updates its chunks."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from mpi4py import MPI

from mpiscale.backend import Array
from mpiscale.parallel.data_parallel.check_replicas import Replicated
from mpiscale.parallel.zero.sharded import Sharded


class WholeValues(Sharded):
    """Parameters are views of whole flat arrays, one a unit."""

    def _allocate_values(self, seed: int) -> None:
        self._values = [np.zeros(unit.padded, self.dtype) for unit in self.units]
        for unit, values in zip(self.units, self._values, strict=True):
            unit.attach_values(values)
            unit.draw(values, seed, self.dtype)
        self.value_chunks = self._mine(self._values)

    def publish(self) -> None:
        """All-gather: every rank gets the chunks that the others updated."""
        for values in self._values:
            self.comm.Allgather(MPI.IN_PLACE, values)

    def replicated(self, state: dict[str, Array]) -> Iterable[Replicated]:
        """The whole values, and what the replicas have in common."""
        for parameter in self.parameters:
            name = f"value of {parameter.name}"
            yield Replicated(self.comm, name, parameter.data)
        yield from super().replicated(state)
