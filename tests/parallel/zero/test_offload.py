"""Optimizer state in the host's memory, of parameters on a (stand-in for a) GPU."""

import numpy as np
import pytest

from mpiscale.backend import FLOAT32
from mpiscale.nn.flat import Segment
from mpiscale.optim.adamw import AdamW
from mpiscale.parallel.zero.offload import OffloadedState
from tests.comm import strict_device_array as device


class OnDevice:
    """What a strategy shows of two chunks on a GPU."""

    size, grad_dtype = 7, FLOAT32

    def __init__(self, put):
        values = np.arange(7, dtype=np.float32)
        cuts = (slice(0, 4), slice(4, 7))
        self.data = [put(values[cut].copy()) for cut in cuts]
        self.grads = [put(values[cut] + 1) for cut in cuts]
        self.cuts = cuts

    def segments(self):
        return [
            Segment(data, grad, cut, decays)
            for data, grad, cut, decays in zip(
                self.data, self.grads, self.cuts, (True, False), strict=True
            )
        ]


def test_the_update_is_that_of_the_host():
    here = OnDevice(np.array)
    there = OnDevice(device.asarray)
    state = OffloadedState(there)
    optimizers = AdamW(here), AdamW(state)
    for _ in range(3):
        for optimizer in optimizers:
            optimizer.step(0.1)
        state.write_back()
    assert isinstance(optimizers[1].m, np.ndarray)
    for expected, got in zip(here.data, there.data, strict=True):
        np.testing.assert_array_equal(device.asnumpy(got), expected)


def test_there_is_nothing_to_offload_on_a_cpu():
    with pytest.raises(ValueError, match="in the host's memory already: leave it out"):
        OffloadedState(OnDevice(np.array))
