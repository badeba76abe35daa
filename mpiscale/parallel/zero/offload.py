"""Offload: the optimizer's state, and the update, live in the host's memory.

    GPU    gradients --copy-->  host   update, with moments and a copy of the values
    GPU    values    <--copy--  host

Frees K Psi / N bytes of GPU memory for 2 Psi / N elements over the bus in each step.

    state = OffloadedState(dp)
    optimizer = AdamW(state)
    ...
    dp.finish(); optimizer.step(lr); state.write_back(); dp.publish()

Source: J. Ren et al., "ZeRO-Offload: Democratizing billion-scale model training",
USENIX ATC 2021, section 4.
"""

from __future__ import annotations

from mpiscale.backend import DType, is_on_device, to_device, to_host
from mpiscale.nn.flat import Segment
from mpiscale.parallel.data_parallel.interface import DataParallel


class OffloadedState:
    """What an optimizer updates on the host in place of `dp`'s arrays on a GPU.

    Raises:
        ValueError: if those arrays are in the host's memory already.
    """

    def __init__(self, dp: DataParallel) -> None:
        self.dp, segments = dp, dp.segments()
        self._values = [to_host(segment.data) for segment in segments]
        if not all(is_on_device(segment.data) for segment in segments):
            raise ValueError(
                "offload moves the optimizer's state from a GPU to the host, but these "
                "parameters are in the host's memory already: leave it out"
            )

    @property
    def size(self) -> int:
        """Elements that this rank updates."""
        return self.dp.size

    @property
    def grad_dtype(self) -> DType:
        """Type of the gradients."""
        return self.dp.grad_dtype

    def segments(self) -> list[Segment]:
        """The host's values, and copies of the gradients."""
        return [
            Segment(values, to_host(segment.grad), segment.state, segment.decays)
            for values, segment in zip(self._values, self.dp.segments(), strict=True)
        ]

    def write_back(self) -> None:
        """Copy the updated values to the GPU."""
        for values, segment in zip(self._values, self.dp.segments(), strict=True):
            segment.data[...] = to_device(values, segment.data)
