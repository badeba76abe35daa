"""Which GPU each rank uses: a function of where all ranks are and what each can see.

On each machine the ranks choose in their order, and each takes the GPU that the fewest
before it have taken, or the first of these. What comes out, for 2 machines x 4 GPUs:

ranks on the first machine      GPUs visible to each   its ranks take
0 1 2 3 (block)                 all 4                  0 1 2 3
0 2 4 6 (cyclic)                all 4                  0 1 2 3
0 1 2 3                         one each, its own      0 0 0 0   (four different GPUs)
0 1 2 3 4 5                     all 4                  0 1 2 3 0 1, and a warning

The numbers are CUDA's in each process, which count visible GPUs only; so ranks tell
each other the PCI addresses. rank % 4 would leave half of the GPUs idle in the second
case.

Seen in: JoonhoLee-Group/ipie PR #91, AMReX-Codes/amrex PR #3382, open-mpi/ompi #13323.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from types import ModuleType
from typing import Literal, NamedTuple, TypeAlias

from mpiscale.errors import InputError

# A GPU if every rank can have one; a GPU or an error; this GPU or an error.
DeviceChoice: TypeAlias = "Literal['cpu', 'auto', 'cuda'] | int"


class Sight(NamedTuple):
    """What one rank sees and wants."""

    machine: str
    gpus: tuple[str, ...]  # PCI addresses, in the order of CUDA's numbers
    wanted: DeviceChoice = "auto"
    problem: str = ""  # why there are none


class Placement(NamedTuple):
    """The GPU of each rank by its number there, None for the CPU; and warnings."""

    devices: list[int | None]
    warnings: tuple[str, ...]


def place_on_devices(ranks: Sequence[Sight]) -> Placement:
    """Choose every rank's device.

    Raises:
        InputError: if a rank insists on a GPU that it can't see.
    """
    for rank, sight in enumerate(ranks):
        _check(rank, sight)
    without = [rank for rank, sight in enumerate(ranks) if not sight.gpus]
    users: Counter[tuple[str, str]] = Counter()
    devices: list[int | None] = []
    for sight in ranks:
        if sight.wanted == "cpu" or (sight.wanted == "auto" and without):
            devices.append(None)
            continue
        device = _least_used(sight, users)
        users[sight.machine, sight.gpus[device]] += 1
        devices.append(device)
    return Placement(devices, _warnings(ranks, without, users))


def _check(rank: int, sight: Sight) -> None:
    if sight.wanted in ("cpu", "auto"):
        return
    if not sight.gpus:
        raise InputError(
            f"rank {rank} on {sight.machine} was to use a GPU but has none: "
            f"{sight.problem or 'CUDA shows no device'}. Run on the CPU, or start it "
            "where nvidia-smi lists a GPU."
        )
    if isinstance(sight.wanted, int) and not 0 <= sight.wanted < len(sight.gpus):
        raise InputError(
            f"rank {rank} on {sight.machine} was to use GPU {sight.wanted}, but sees "
            f"{len(sight.gpus)} of them: choose 0 ... {len(sight.gpus) - 1}, or 'cuda' "
            "to share them out"
        )


def _least_used(sight: Sight, users: Counter[tuple[str, str]]) -> int:
    if isinstance(sight.wanted, int):
        return sight.wanted
    numbers = range(len(sight.gpus))
    return min(numbers, key=lambda i: (users[sight.machine, sight.gpus[i]], i))


def _warnings(
    ranks: Sequence[Sight], without: Sequence[int], users: Counter[tuple[str, str]]
) -> tuple[str, ...]:
    warnings = []
    if any(sight.gpus and sight.wanted == "auto" for sight in ranks) and without:
        first = ranks[without[0]]
        warnings.append(
            f"all ranks run on the CPU, because {len(without)} of {len(ranks)} see no "
            f"GPU, the first of them rank {without[0]} on {first.machine}: "
            f"{first.problem or 'CUDA shows no device'}"
        )
    shared = {gpu: n for gpu, n in users.items() if n > 1}
    if shared:
        (machine, gpu), most = max(shared.items(), key=lambda item: item[1])
        warnings.append(
            f"{sum(shared.values())} ranks share {len(shared)} GPU"
            f"{'s' * (len(shared) > 1)}, up to {most} one of them ({gpu} on "
            f"{machine}): they take turns, and NCCL refuses to run; start one rank "
            "for each GPU"
        )
    return tuple(warnings)


def visible_gpus() -> tuple[tuple[str, ...], str]:
    """The GPUs that CUDA shows this process; why there are none.

    It leaves nothing behind on a GPU: a context is created by the first allocation.
    """
    try:
        import cupy
    except ImportError as error:
        return (), f"CuPy can't be imported ({error}): pip install 'mpiscale[cuda12]'"
    return gpus_of(cupy.cuda.runtime)


def gpus_of(runtime: ModuleType) -> tuple[tuple[str, ...], str]:
    """What `visible_gpus` returns, asked of CuPy's module for the CUDA runtime."""
    try:
        numbers = range(runtime.getDeviceCount())
        return tuple(runtime.deviceGetPCIBusId(i) for i in numbers), ""
    except runtime.CUDARuntimeError as error:
        return (), str(error)


def use_device(number: int) -> ModuleType:
    """Make this GPU the current one, for all that comes; returns CuPy."""
    import cupy

    cupy.cuda.Device(number).use()
    return cupy
