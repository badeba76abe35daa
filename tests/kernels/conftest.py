"""Kernels' tests run on one thread unless they ask for more."""

import numba
import pytest


@pytest.fixture(autouse=True)
def one_thread():
    granted = numba.get_num_threads()
    numba.set_num_threads(1)
    yield
    numba.set_num_threads(granted)


@pytest.fixture
def two_threads(one_thread):
    if numba.config.NUMBA_NUM_THREADS < 2:
        pytest.skip("needs two threads, Numba has one")
    numba.set_num_threads(2)
