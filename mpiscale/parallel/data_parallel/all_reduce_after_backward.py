"""Plain data parallelism: backward first, then one all-reduce of all gradients.

    rank 0   samples 0 1   forward, backward  |  all-reduce  |  update
    rank 1   samples 2 3   forward, backward  |  all-reduce  |  update

Replicated: parameters, gradients, optimizer state. Cut: the batch. Per step a rank
sends 2 (N - 1) / N Psi elements (N ranks, Psi parameters), and holds

    Psi (bytes of a parameter + of a gradient + of the optimizer's state).

`bucketed_overlap.py` sends the same while backward runs.

Source: P. Patarasuk, X. Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
workstations", 2009, for the traffic.
"""

from __future__ import annotations

from mpi4py import MPI

from mpiscale.backend import Array, DType
from mpiscale.comm.communicator import Communicator
from mpiscale.nn.flat import FlatParameters, Piece, Segment
from mpiscale.parallel.data_parallel.interface import DataParallel, Held


class AllReduceAfterBackward(DataParallel):
    """Replicas whose gradients are summed when backward is done.

    Args:
        flat: the materialised model's flat arrays, whole on every rank.
        comm: the replicas.
        gradients: the same ranks, on a communicator for gradients alone: one whose
            all-reduce compresses, for instance. None: `comm`.
    """

    def __init__(
        self,
        flat: FlatParameters,
        comm: Communicator,
        gradients: Communicator | None = None,
    ) -> None:
        self.flat, self.comm, self.parameters = flat, comm, flat.parameters
        self.gradients = comm if gradients is None else gradients

    def finish(self) -> None:
        """Sum the flat gradient over the replicas."""
        grad = self.flat.complete_grad()
        if self.comm.size > 1:
            self.gradients.Allreduce(MPI.IN_PLACE, grad)

    @property
    def replica_groups(self) -> tuple[Communicator, ...]:
        """All replicas."""
        return (self.comm,)

    def segments(self) -> list[Segment]:
        """All elements: those that decay, and the others."""
        return self.flat.segments()

    def pieces(self) -> list[Piece]:
        """Every parameter, whole."""
        return self.flat.pieces()

    @property
    def size(self) -> int:
        """All elements."""
        return self.flat.size

    @property
    def grad_dtype(self) -> DType:
        """Type of the gradients."""
        return self.flat.grad_dtype

    def arrays(self) -> list[Array]:
        """The two flat arrays."""
        return [self.flat.data, self.flat.grad]

    def held(self) -> Held:
        """All parameters and all gradients."""
        return Held(self.flat.data.nbytes, self.flat.grad.nbytes)
