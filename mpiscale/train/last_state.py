"""The state before a step that failed, one HDF5 file per rank."""

from __future__ import annotations

import math
from pathlib import Path

import h5py

from mpiscale.optim.adamw import AdamW
from mpiscale.parallel.data_parallel.interface import DataParallel


def save_last_state(
    folder: Path, rank: int, step: int, dp: DataParallel, optimizer: AdamW
) -> Path:
    """Write what this rank updates, by full name; return the file's path.

    Of a parameter that is cut flat, `first` says where this rank's elements begin.
    """
    path = folder / f"last_state-rank{rank}.h5"
    with h5py.File(path, "w") as file:
        file.attrs["step"] = step
        for piece in dp.pieces():
            parameter = piece.parameter
            is_whole = piece.data.size == math.prod(parameter.local_shape)
            shape = parameter.local_shape if is_whole else (-1,)
            group = file.create_group(parameter.name)
            group.attrs["first"] = piece.place.start
            group["value"] = piece.data.reshape(shape)
            group["m"] = optimizer.m[piece.state].reshape(shape)
            group["v"] = optimizer.v[piece.state].reshape(shape)
    return path
