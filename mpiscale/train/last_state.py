"""The state before a step that failed, one HDF5 file per rank."""

from __future__ import annotations

from pathlib import Path

import h5py

from mpiscale.nn.flat import FlatParameters
from mpiscale.optim.adamw import AdamW


def save_last_state(
    folder: Path, rank: int, step: int, flat: FlatParameters, optimizer: AdamW
) -> Path:
    """Write this rank's parameters and moments by full name; return the file's path."""
    path = folder / f"last_state-rank{rank}.h5"
    with h5py.File(path, "w") as file:
        file.attrs["step"] = step
        for parameter in flat.parameters:
            shape = parameter.shape
            place = flat.place(parameter)
            group = file.create_group(parameter.name)
            group["value"] = parameter.data
            group["m"] = optimizer.m[place].reshape(shape)
            group["v"] = optimizer.v[place].reshape(shape)
    return path
