"""A stand-in for CuPy on machines without a GPU: arrays whose memory nobody may touch.

This module takes CuPy's place: `array_module(x)` returns it for its arrays. It is
stricter than a GPU, so that what would go wrong there now and then fails here always:

- work (arithmetic, copies) is queued on the current stream and runs only when somebody
  waits for the stream; until then an array holds 0xA5 in every byte, a wrong number;
- copies between host and GPU are queued, too, as CuPy does on a stream of its own;
- pinned memory is overwritten as soon as it is freed, as if used for something else;
- a device pointer in the hands of the host is a segmentation fault, unless the block
  `mapped_for_mpi()` pretends that MPI is CUDA-aware;
- every implicit way to the host (numpy.asarray, float, bool, iteration) raises.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
from collections import deque
from types import SimpleNamespace
from typing import ClassVar

import numpy as np

NOWHERE = 1 << 48  # added to a pointer it is no address of a process
GARBAGE = 0xA5
_alive: list[np.ndarray] = []  # never given back: work on it may still be queued
_state = SimpleNamespace(pointers_lead=NOWHERE, streams=[])


@contextlib.contextmanager
def mapped_for_mpi():
    """Let MPI follow device pointers in this block, as a CUDA-aware one can."""
    _state.pointers_lead = 0
    try:
        yield
    finally:
        _state.pointers_lead = NOWHERE


def garbage(shape, dtype):
    """New host memory that holds no number anybody expects; it is never freed."""
    return as_garbage(np.empty(shape, dtype))


def as_garbage(host):
    host[...] = np.full(host.itemsize, GARBAGE, np.uint8).view(host.dtype)[0]
    _alive.append(host)
    return host


class Stream:
    """Work that runs in its order, but only when somebody waits for it."""

    by_pointer: ClassVar[dict[int, Stream]] = {}
    numbers = itertools.count(1)

    def __init__(self):
        self.ptr = next(Stream.numbers)
        Stream.by_pointer[self.ptr] = self
        self.queue = deque()

    def __enter__(self):
        _state.streams.append(self)
        return self

    def __exit__(self, *error):
        _state.streams.pop()

    def synchronize(self):
        while self.queue:
            self.queue.popleft()()

    def record(self, event=None):
        event = Event() if event is None else event
        event.record(self)
        return event

    def wait_event(self, event):
        self.queue.append(event.synchronize)


class Event:
    """A place in a stream's queue."""

    def __init__(self, block=False, disable_timing=False):
        self.stream, self.reached, self.asked = None, True, False

    def record(self, stream=None):
        self.stream, self.reached = stream or get_current_stream(), False
        self.stream.queue.append(self._reach)

    def _reach(self):
        self.reached = True

    def synchronize(self):
        while not self.reached:
            self.stream.queue.popleft()()

    @property
    def done(self):
        """False when asked first; then the GPU has moved on."""
        if self.asked:
            self.synchronize()
        self.asked = True
        return self.reached


def get_current_stream():
    return _state.streams[-1]


def alloc_pinned_memory(size):
    """Bytes for the GPU to copy from and to; freed, they are used for other things."""
    store = garbage(size, np.uint8)

    class PinnedMemory(ctypes.c_uint8 * size):
        def __del__(self):
            store[...] = GARBAGE

    return PinnedMemory.from_address(store.ctypes.data)


class Device:
    """The GPU of this rank; another rank has another one."""

    id = 0

    @property
    def pci_bus_id(self):
        from mpi4py import MPI

        return f"0000:{MPI.COMM_WORLD.rank:02x}:00.0"


cuda = SimpleNamespace(
    Stream=Stream,
    Event=Event,
    Device=Device,
    get_current_stream=get_current_stream,
    alloc_pinned_memory=alloc_pinned_memory,
)


def queue(work):
    get_current_stream().queue.append(work)


def refuse(how):
    def refused(self, *_args, **_options):
        raise TypeError(f"implicit way from the device to the host: {how}")

    return refused


class ndarray(np.lib.mixins.NDArrayOperatorsMixin):  # noqa: N801
    """An array on the device: NumPy's attributes, but no way to its elements."""

    def __init__(self, memory, writeable=True):
        self._memory, self._writeable = memory, writeable

    dtype = property(lambda self: self._memory.dtype)
    shape = property(lambda self: self._memory.shape)
    strides = property(lambda self: self._memory.strides)
    size = property(lambda self: self._memory.size)
    ndim = property(lambda self: self._memory.ndim)
    nbytes = property(lambda self: self._memory.nbytes)
    itemsize = property(lambda self: self._memory.itemsize)
    T = property(lambda self: self._view(self._memory.T))
    data = property(lambda self: SimpleNamespace(ptr=self._pointer()))

    __array__ = refuse("numpy.asarray")
    __iter__ = refuse("iteration")
    __float__ = refuse("float")
    __int__ = refuse("int")
    __bool__ = refuse("bool")
    __index__ = refuse("index")
    __complex__ = refuse("complex")
    tolist = refuse("tolist")

    def __len__(self):
        return self.shape[0]

    @property
    def flags(self):  # CuPy's have no `writeable`
        flags = self._memory.flags
        return SimpleNamespace(
            c_contiguous=flags.c_contiguous,
            f_contiguous=flags.f_contiguous,
            owndata=flags.owndata,
        )

    @property
    def __cuda_array_interface__(self):
        return {
            "version": 3,
            "shape": self.shape,
            "typestr": self.dtype.str,
            "strides": None if self.flags.c_contiguous else self.strides,
            "data": (self._pointer(), not self._writeable),
        }

    @property
    def flat(self):
        return Flat(self)

    def _pointer(self):
        return self._memory.ctypes.data + _state.pointers_lead if self.size else 0

    def _view(self, memory):
        return ndarray(memory, self._writeable)

    def view(self, dtype):
        return self._view(self._memory.view(dtype))

    def reshape(self, *shape):
        shape = shape[0] if isinstance(shape[0], tuple) else shape
        memory = self._memory.reshape(shape)
        if np.may_share_memory(memory, self._memory) or not self.size:
            return self._view(memory)
        return self.copy().reshape(*shape)

    def __getitem__(self, key):
        return self._view(self._memory[(*key, ...) if isinstance(key, tuple) else key])

    def __setitem__(self, key, value):
        if isinstance(value, np.ndarray):
            raise TypeError("copy a NumPy array with set or asarray")
        target = self._memory[key]
        source = value._memory if isinstance(value, ndarray) else value

        def work():
            target[...] = source

        queue(work)

    def astype(self, dtype, order="K", copy=True):
        if not copy and self.dtype == dtype:
            return self
        result = ndarray(as_garbage(np.empty_like(self._memory, dtype, order)))
        result[...] = self
        return result

    def copy(self, order="C"):
        return self.astype(self.dtype, order)

    def flatten(self):
        return self.copy().reshape(-1)

    def fill(self, value):
        self[...] = value

    def get(self, stream=None, order="C", out=None, blocking=True):
        """Queue a copy to the host, as on CuPy's streams of before version 13."""
        memory = self._memory
        assert out is not None, "not in this stand-in: use asnumpy"
        assert (out.shape, out.dtype) == (self.shape, self.dtype)

        def work():
            out[...] = memory

        queue(work)
        return out

    def set(self, arr, stream=None):
        """Queue a copy from the host; `arr` isn't kept alive until it is done."""
        assert isinstance(arr, np.ndarray) and self.flags.c_contiguous
        assert (arr.shape, arr.dtype) == (self.shape, self.dtype)
        memory, source = self._memory, seen_without_owning(arr)

        def work():
            memory[...] = source

        queue(work)

    def __array_ufunc__(self, ufunc, method, *inputs, out=None):
        assert method == "__call__"
        if any(isinstance(x, np.ndarray) for x in inputs):
            raise TypeError("arithmetic between arrays of the host and of the device")
        values = [x._memory if isinstance(x, ndarray) else x for x in inputs]
        if out is None:
            shape = np.broadcast_shapes(*(np.shape(value) for value in values))
            out = (ndarray(garbage(shape, np.result_type(*values))),)
        target = out[0]._memory
        queue(lambda: ufunc(*values, out=target, casting="unsafe"))
        return out[0]


class Flat:
    """x.flat: assignment to a slice of the elements in their order."""

    def __init__(self, x):
        self._x = x

    def __setitem__(self, key, value):
        memory, source = self._x._memory, value._memory

        def work():
            memory.flat[key] = source

        queue(work)


def seen_without_owning(host):
    """The same memory, which the array does not keep from being freed."""
    address, n = host.ctypes.data, host.nbytes
    return at_address(address, n).view(host.dtype).reshape(host.shape)


def at_address(address, nbytes):
    """Host memory at an address, as bytes."""
    interface = {"data": (address, False), "shape": (nbytes,), "typestr": "|u1"}
    return np.asarray(SimpleNamespace(__array_interface__=interface | {"version": 3}))


def behind_pointer(pointer, nbytes):
    """The memory that a device pointer points to: what only a GPU can do."""
    return at_address(pointer - _state.pointers_lead, nbytes) if nbytes else b""


def empty(shape, dtype=float):
    return ndarray(garbage(shape, dtype))


def empty_like(x):
    return empty(x.shape, x.dtype)


def asarray(host):
    """A copy on the device."""
    base = garbage(host.shape, host.dtype)
    base[...] = host
    return ndarray(base)


def asnumpy(x):
    """A copy on the host, once the current stream is done."""
    get_current_stream().synchronize()
    return x._memory.copy()


def ascontiguousarray(x, dtype=None):
    dtype = x.dtype if dtype is None else np.dtype(dtype)
    if x.flags.c_contiguous and x.dtype == dtype:
        return x
    return x.astype(dtype, order="C")


def concatenate(arrays):
    whole = empty(sum(x.size for x in arrays), arrays[0].dtype)
    start = 0
    for x in arrays:
        whole[start : start + x.size] = x
        start += x.size
    return whole


def may_share_memory(a, b):
    return np.may_share_memory(a._memory, b._memory)


_state.streams.append(Stream())
