"""Where a rank's memory goes: parameters, gradients, moments, activations, the rest.

Activations are not estimated. At the end of forward everything that backward will need
is held by the graph's nodes, in the closures of their `backward`; the walk below finds
those arrays and counts the memory under them, each block once.
"""

from __future__ import annotations

import functools
import resource
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any

import numpy as np

from mpiscale.backend import Array
from mpiscale.tensor import LazyGradient, Node, Tensor

MIB = 2**20
Root = Tensor | Callable[[], None]


@dataclass(frozen=True)
class MemoryReport:
    """What one rank holds at the end of forward, in bytes.

    Attributes:
        parameters: values of this rank's parameters.
        gradients: their gradients.
        optimizer: the optimizer's state.
        activations: what the graph keeps for backward, inputs and labels included.
        before: peak resident memory before the model was built: interpreter, libraries.
        peak: peak resident memory of the process so far.
    """

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    before: int
    peak: int

    @property
    def workspace(self) -> int:
        """The peak minus all named parts: temporaries, gradients of activations.

        An approximation: memory that was resident before may have been used again.
        """
        named = self.parameters + self.gradients + self.optimizer + self.activations
        return max(self.peak - self.before - named, 0)


def memory_table(reports: Sequence[MemoryReport]) -> str:
    """A row a rank, in MiB."""
    parts = ["parameters", "gradients", "optimizer", "activations", "workspace"]
    parts += ["before", "peak"]
    lines = ["memory, MiB   " + "".join(f"{part:>13}" for part in parts)]
    for rank, report in enumerate(reports):
        cells = (f"{getattr(report, part) / MIB:>13,.1f}" for part in parts)
        lines.append(f"rank {rank:<9}" + "".join(cells))
    lines.append("before: interpreter and libraries; workspace: peak minus the others")
    return "\n".join(lines)


def peak_resident_bytes() -> int:
    """The most memory that this process ever had resident.

    On Linux it is VmHWM: `ru_maxrss`, which the other systems have, is there never less
    than that of the process which started this one.
    """
    if sys.platform == "linux":
        status = Path("/proc/self/status").read_text()
        return 1024 * int(status.partition("VmHWM:")[2].split()[0])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def saved_bytes(roots: Iterable[Root], other_than: Iterable[Array]) -> int:
    """Bytes that the graphs below `roots` keep alive, but for what `other_than` owns.

    Call it before backward, which frees the graph as it goes.

    Args:
        roots: the loss, or other ends of graphs; also weight gradients put off.
        other_than: arrays counted elsewhere: parameters, gradients.
    """
    blocks = {id(block): block for block in map(_block, saved_arrays(*roots))}
    for array in other_than:
        blocks.pop(id(_block(array)), None)
    return sum(block.nbytes for block in blocks.values())


def saved_arrays(*roots: Root) -> Iterator[Array]:
    """Every array that a node below `roots` can reach, parameters included.

    Followed are what ops capture: arrays, tensors, functions, and containers of these;
    a captured object of any other class (a communicator, a module) is not entered.
    """
    stack: list[Any] = [
        root._source if isinstance(root, Tensor) else root for root in roots
    ]
    seen: dict[int, Any] = {}  # holds what it names, so that no id is given out twice
    while stack:
        value = stack.pop()
        if id(value) in seen:
            continue
        seen[id(value)] = value
        if isinstance(value, np.ndarray):
            yield value
        stack.extend(_held_by(value))


def _held_by(value: Any) -> Iterable[Any]:
    """What `value` refers to, as far as an array may be behind it."""
    if isinstance(value, Node):
        return value.inputs, value.backward
    if isinstance(value, Tensor):
        return value.data, value._source
    if isinstance(value, LazyGradient):
        return (value.write,)
    if isinstance(value, FunctionType):
        return [cell.cell_contents for cell in value.__closure__ or ()]
    if isinstance(value, MethodType):
        return value.__self__, value.__func__
    if isinstance(value, functools.partial):
        return value.func, value.args, value.keywords
    if isinstance(value, dict):
        return value.values()
    if isinstance(value, (tuple, list, set)):
        return value
    return ()


def _block(array: Array) -> Array:
    """The array that owns the memory of a view."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array
