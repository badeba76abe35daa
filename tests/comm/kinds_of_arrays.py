"""Arrays with the same values, laid out in every way that NumPy knows."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from mpiscale.backend import Array


def layouts(values: Array) -> Iterator[tuple[str, Array]]:
    """Copies of the 2-D `values` by name; each is a view into more memory, or not."""
    m, n = values.shape
    spread = np.zeros((2 * m, 3 * n), values.dtype)
    for name, empty in (
        ("C", np.empty((m, n), values.dtype)),
        ("Fortran", np.empty((m, n), values.dtype, order="F")),
        ("transposed", np.empty((n, m), values.dtype).T),
        ("stepped", spread[::2, 1::3]),
        ("negative stride", np.empty((m, n), values.dtype)[::-1, ::-1]),
    ):
        empty[...] = values
        yield name, empty
