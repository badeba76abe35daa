"""The files of a run: the text that all ranks read, the folder that rank 0 writes."""

from __future__ import annotations

from pathlib import Path

from mpiscale.comm.agreement import on_some_ranks
from mpiscale.comm.world import World
from mpiscale.data.prepare import prepare
from mpiscale.data.token_file import TokenFile
from mpiscale.errors import InputError
from mpiscale.train.config import TrainConfig


def open_data(world: World, config: TrainConfig) -> TokenFile:
    """The token file; one rank of each node makes it if it is not cached yet."""

    def make() -> None:
        prepare(config.data, config.vocab, config.cache)

    on_some_ranks(world.comm, world.local_rank == 0, make)
    tokens = TokenFile(prepare(config.data, config.vocab, config.cache))
    digests = world.comm.allgather((tokens.digest, world.node))
    others = [node for digest, node in digests if digest != digests[0][0]]
    if others:
        raise InputError(
            f"the text on {', '.join(sorted(set(others)))} is not that on "
            f"{digests[0][1]}: give --data a file that all nodes see"
        )
    return tokens


def make_folder(world: World, folder: Path) -> None:
    """Create the run's folder, on rank 0; refuse on all ranks if that can't be done."""

    def make() -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / ".writable").touch()
            (folder / ".writable").unlink()
        except OSError as error:
            raise InputError(f"cannot write to --out {folder}: {error}") from None

    on_some_ranks(world.comm, world.rank == 0, make)
