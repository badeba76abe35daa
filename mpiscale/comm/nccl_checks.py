"""What NCCL can't do, said before anything is sent."""

from __future__ import annotations

import platform
from collections import Counter

from mpi4py import MPI

from mpiscale.backend import Array, is_on_device
from mpiscale.comm.buffers import Landing, check_array, reduced_dtype
from mpiscale.comm.communicator import SendBuffer
from mpiscale.comm.device_buffers import Arrival
from mpiscale.errors import InputError

SUMMABLE = "int8 uint8 int32 uint32 int64 uint64 float32 float64".split()


class NcclAccess:
    """Pointers for NCCL, which keeps to the order of the stream by itself."""

    def for_sending(self, wire: Array) -> Array:
        """`wire` itself."""
        return check_on_device(wire)

    def for_receiving(self, landing: Landing, filled: bool) -> Arrival:
        """`landing` itself."""
        check_on_device(landing.wire)
        return landing

    def transport(self, wire: Array) -> str:
        """nccl"""
        return "nccl"


def check_on_device(wire: Array) -> Array:
    """`wire` itself if it lies on a GPU.

    Raises:
        TypeError: if it is NumPy's.
    """
    if not is_on_device(wire):
        raise TypeError(
            "NCCL moves arrays on a GPU, got a NumPy array: copy it there with "
            "cupy.asarray, or use an MpiCommunicator"
        )
    return wire


def check_summable(sendbuf: SendBuffer, recvbuf: Array | None) -> None:
    """Refuse types that MPI can reduce but NCCL can't."""
    in_place = isinstance(sendbuf, MPI.InPlaceType)
    x = check_array(recvbuf if in_place else sendbuf, "sendbuf")
    dtype = reduced_dtype(x.dtype)  # float32 for 16-bit floats
    if dtype.name not in SUMMABLE:
        raise TypeError(
            f"NCCL can't reduce elements of type {dtype}: convert the array to one of "
            f"{', '.join(SUMMABLE)}, or to a 16-bit float"
        )


def check_tag(tag: int) -> None:
    """Refuse tags: NCCL has none."""
    if tag not in (0, MPI.ANY_TAG):
        raise ValueError(
            "NCCL has no tags: messages between two ranks arrive in the order in "
            f"which they were sent; use tag 0, got {tag}"
        )


def check_source(source: int) -> None:
    """Refuse to receive from anybody."""
    if source == MPI.ANY_SOURCE:
        raise ValueError("NCCL receives from a rank that is named: pass source")


def check_one_rank_for_each_gpu(comm: MPI.Comm, gpu: str) -> None:
    """Refuse ranks that share a GPU; NCCL would, too, but not say which; collective.

    gpu: PCI address of this rank's.
    """
    places = comm.allgather((platform.node(), gpu))
    (place, most), *_ = Counter(places).most_common(1)
    if most > 1:
        ranks = [rank for rank, other in enumerate(places) if other == place]
        raise InputError(
            f"ranks {ranks} all use GPU {place[1]} of {place[0]}, but NCCL needs a GPU "
            "for each rank: start fewer ranks, or use an MpiCommunicator"
        )
