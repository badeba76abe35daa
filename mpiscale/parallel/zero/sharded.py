"""What the three stages share: units, chunks, and what an optimizer sees of them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator

from mpi4py import MPI

from mpiscale.backend import Array, DType, accumulation_dtype
from mpiscale.comm.communicator import Communicator
from mpiscale.nn.flat import Piece, Segment, name_parameters
from mpiscale.nn.module import Module
from mpiscale.parallel.data_parallel.interface import DataParallel, Held
from mpiscale.parallel.zero.unit import Unit, layer_groups, make_units


class Sharded(DataParallel):
    """A model whose optimizer state, at least, is cut over the ranks of `comm`.

    Building one gives the model its values, as `materialize` does for a serial one.

    Args:
        model: cut already if another strategy cuts it, not materialised.
        comm: the ranks that share each other's state.
        seed, dtype: of the first values.
        replicas: the ranks that hold the same chunks in other groups like `comm`, if
            any (hybrid sharding: cut inside a node, replicated across nodes).

    Attributes:
        units: in the order of the model.
        value_chunks, grad_chunks: [chunk] of each unit on this rank.
    """

    value_chunks: list[Array]
    grad_chunks: list[Array]

    def __init__(
        self,
        model: Module,
        comm: Communicator,
        seed: int,
        dtype: DType,
        replicas: Communicator | None = None,
    ) -> None:
        name_parameters(model)
        self.model, self.comm, self.replicas, self.dtype = model, comm, replicas, dtype
        self.shard_groups = (comm,)
        self.units = make_units(layer_groups(model), comm)
        self.parameters = [p for unit in self.units for p in unit.parameters]
        self._allocate(seed)

    @abstractmethod
    def _allocate(self, seed: int) -> None:
        """Make the arrays of values and gradients; draw the values."""

    @abstractmethod
    def held(self) -> Held:
        """What stays in this rank's memory between two steps."""

    def _sum_over_replicas(self) -> None:
        """The chunks are sums over `comm`; make them sums over all groups."""
        if self.replicas is not None and self.replicas.size > 1:
            for chunk in self.grad_chunks:
                self.replicas.Allreduce(MPI.IN_PLACE, chunk)

    def _mine(self, whole: list[Array]) -> list[Array]:
        """This rank's chunk of every unit's flat array, a view."""
        pairs = zip(self.units, whole, strict=True)
        return [unit.mine(flat) for unit, flat in pairs]

    def _chunks(self) -> Iterator[tuple[Unit, Array, Array]]:
        return zip(self.units, self.value_chunks, self.grad_chunks, strict=True)

    @property
    def replica_groups(self) -> tuple[Communicator, ...]:
        """The ranks with the same chunks in the other groups."""
        return () if self.replicas is None else (self.replicas,)

    def segments(self) -> list[Segment]:
        """What decays in this rank's chunks, and the rest; no padding."""
        return [
            segment
            for unit, values, grads in self._chunks()
            for segment in unit.segments(values, grads)
        ]

    def pieces(self) -> list[Piece]:
        """The parts of parameters in this rank's chunks."""
        return [
            piece
            for unit, values, grads in self._chunks()
            for piece in unit.pieces(values, grads)
        ]

    @property
    def size(self) -> int:
        """Elements that this rank updates."""
        return sum(unit.real for unit in self.units)

    @property
    def grad_dtype(self) -> DType:
        """Gradients of 16-bit parameters are added up in float32."""
        return accumulation_dtype(self.dtype)
