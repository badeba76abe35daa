"""How MPI gets at the memory of a GPU: by pointer, or through a copy on the host.

The kernels that fill an array may still be queued when MPI is called, and MPI knows
nothing of streams: it would read what was there before. So each access waits for the
current stream first. What arrives can be used on the stream that is current when the
call, or the Wait or Test of a non-blocking one, returns.

access          array on a GPU                         NumPy array    ledger
DirectAccess    MPI gets the device pointer            as it is       mpi
StagedAccess    copied to pinned host memory or back   as it is       mpi, staged

A device pointer in the hands of an MPI that is not CUDA-aware is a segmentation fault,
so staging is what happens unless `cuda_aware.py` has found otherwise. Pinned memory is
what the GPU can copy at full speed. `nccl_checks.py` adds a third access, for NCCL.

An array that was filled on another stream than the current one must be waited for by
the caller, as everywhere in CuPy: stream.wait_event(other.record()).

Seen in: mpi4py/mpi4py #36, #115; mpi4jax/mpi4jax #106; PyLops/pylops-mpi #144.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from mpiscale.backend import Array, array_module, is_on_device
from mpiscale.comm.buffers import Landing
from mpiscale.comm.streams import settled


class Arrival(Protocol):
    """Where a message is written (`wire` [n]), and how it gets to its `target`."""

    target: Array
    wire: Array

    def finish(self) -> None:
        """Bring what arrived to the target; call it once."""


class Access(Protocol):
    """How a library for messages reaches the elements of a wire."""

    def for_sending(self, wire: Array) -> Array:
        """`wire`, or a copy of it, as the library may read it now."""

    def for_receiving(self, landing: Landing, filled: bool) -> Arrival:
        """Where the library may write now; with `filled` the contents are there."""

    def transport(self, wire: Array) -> str:
        """The word for it in the ledger."""


class DirectAccess:
    """Pointers: for NumPy arrays, and those of a GPU where MPI is CUDA-aware."""

    def for_sending(self, wire: Array) -> Array:
        """`wire` itself, when its stream is done."""
        return settled(wire)

    def for_receiving(self, landing: Landing, filled: bool) -> Arrival:
        """`landing` itself, when nothing on the stream reads or fills it any more."""
        settled(landing.wire)
        return landing

    def transport(self, wire: Array) -> str:
        """mpi"""
        return "mpi"


class StagedAccess:
    """Copies on the host for arrays on a GPU: works with every MPI."""

    def for_sending(self, wire: Array) -> Array:
        """A host copy of a wire on a GPU."""
        return host_copy(wire) if is_on_device(wire) else wire

    def for_receiving(self, landing: Landing, filled: bool) -> Arrival:
        """Host memory in front of a wire on a GPU."""
        return Staged(landing, filled) if is_on_device(landing.wire) else landing

    def transport(self, wire: Array) -> str:
        """mpi, or mpi, staged"""
        return "mpi, staged" if is_on_device(wire) else "mpi"


class Staged:
    """A landing on a GPU whose message is written to pinned host memory first."""

    def __init__(self, landing: Landing, filled: bool) -> None:
        self.target, self._landing = landing.target, landing
        self.wire = (host_copy if filled else pinned_like)(landing.wire)

    def finish(self) -> None:
        """Copy to the GPU, and there to the target."""
        device_wire: Any = self._landing.wire
        device_wire.set(self.wire)
        self._landing.finish()
        settled(self.target)  # or the pinned memory could be used again too early


def host_copy(wire: Any) -> Array:
    """What `wire` on a GPU holds when the current stream is done, in pinned memory."""
    host = pinned_like(wire)
    wire.get(out=host)
    settled(wire)  # CuPy before 13 doesn't wait on streams other than the default one
    return host


def pinned_like(wire: Array) -> Array:
    """Uninitialised NumPy array like `wire`, in pinned memory."""
    allocate = array_module(wire).cuda.alloc_pinned_memory
    return np.ndarray(wire.shape, wire.dtype, buffer=allocate(max(1, wire.nbytes)))
