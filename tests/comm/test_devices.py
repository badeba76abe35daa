"""Which GPU each rank gets, on any layout of ranks."""

from types import SimpleNamespace

import pytest

from mpiscale.comm.devices import Sight, gpus_of, place_on_devices
from mpiscale.errors import InputError
from tests.comm.scripts import run_script

FOUR = tuple(f"0000:{bus}:00.0" for bus in ("18", "3b", "86", "af"))


def placed(machines, gpus=FOUR, wanted="cuda"):
    return place_on_devices([Sight(machine, gpus, wanted) for machine in machines])


@pytest.mark.parametrize("machines", ["aaaabbbb", "abababab", "aabbbbaa", "abbaabba"])
def test_two_machines_with_four_gpus_give_each_rank_its_own(machines):
    devices, warnings = placed(machines)
    for machine in "ab":
        here = [d for d, m in zip(devices, machines, strict=True) if m == machine]
        assert here == [0, 1, 2, 3]
    assert warnings == ()


def test_one_visible_gpu_for_each_rank_is_number_0_everywhere():
    ranks = [Sight("a", (FOUR[i],), "cuda") for i in range(4)]
    assert place_on_devices(ranks) == ([0, 0, 0, 0], ())


def test_ranks_that_see_gpus_in_different_orders_take_different_ones():
    orders = [FOUR[i:] + FOUR[:i] for i in range(4)]
    devices, warnings = place_on_devices([Sight("a", gpus) for gpus in orders])
    taken = [gpus[device] for gpus, device in zip(orders, devices, strict=True)]
    assert sorted(taken) == sorted(FOUR)
    assert warnings == ()


def test_more_ranks_than_gpus_share_them_with_a_warning():
    devices, (warning,) = placed("aaaaaa")
    assert devices == [0, 1, 2, 3, 0, 1]
    assert warning.startswith("4 ranks share 2 GPUs, up to 2 one of them (0000:18:00.0")
    devices, (warning,) = placed("aa", FOUR[:1])
    assert devices == [0, 0]
    assert warning.startswith("2 ranks share 1 GPU, up to 2")


def test_without_gpus_every_rank_runs_on_the_cpu():
    assert placed("aab", (), "auto") == ([None] * 3, ())
    assert placed("aab", FOUR, "cpu") == ([None] * 3, ())


def test_one_rank_without_a_gpu_takes_all_to_the_cpu_and_says_so():
    ranks = [Sight("a", FOUR), Sight("b", (), problem="no CUDA driver")]
    devices, (warning,) = place_on_devices(ranks)
    assert devices == [None, None]
    assert "1 of 2 see no GPU, the first of them rank 1 on b: no CUDA driver" in warning


def test_a_gpu_that_must_be_there_is_an_error_when_it_is_not():
    with pytest.raises(InputError, match=r"rank 1 on b .* no CUDA driver"):
        place_on_devices([Sight("a", FOUR), Sight("b", (), "cuda", "no CUDA driver")])


def test_a_chosen_gpu_is_taken_or_refused():
    assert placed("aa", FOUR, 2)[0] == [2, 2]
    ranks = [Sight("a", FOUR, 0), Sight("a", FOUR, "cuda")]
    assert place_on_devices(ranks) == ([0, 1], ())
    with pytest.raises(InputError, match=r"GPU 4, but sees 4 .* choose 0 \.\.\. 3"):
        placed("a", FOUR, 4)
    with pytest.raises(InputError, match="rank 0 on a was to use a GPU but has none"):
        placed("a", (), 0)


def test_visible_gpus_are_asked_for_without_touching_one():
    class CUDARuntimeError(RuntimeError):
        pass

    def no_driver():
        raise CUDARuntimeError("cudaErrorNoDevice: no CUDA-capable device")

    runtime = SimpleNamespace(
        getDeviceCount=lambda: 4,
        deviceGetPCIBusId=lambda i: FOUR[i],
        CUDARuntimeError=CUDARuntimeError,
    )
    assert gpus_of(runtime) == (FOUR, "")
    runtime.getDeviceCount = no_driver
    assert gpus_of(runtime) == ((), "cudaErrorNoDevice: no CUDA-capable device")


CUPY = """
import types
class CUDARuntimeError(RuntimeError): pass
used = []
cuda = types.SimpleNamespace(
    Device=lambda number: types.SimpleNamespace(use=lambda: used.append(number)),
    runtime=types.SimpleNamespace(
        getDeviceCount=lambda: {gpus},
        deviceGetPCIBusId=lambda i: f"0000:{{i:02x}}:00.0",
        CUDARuntimeError=CUDARuntimeError,
    ),
)
"""
MAIN = """
def main(world: World) -> None:
    cupy = sys.modules.get("cupy")
    line = f"{world.device} {cupy and cupy.used} {world.comm.cuda_aware}"
    lines = world.comm.gather(line + " " + str(world).rpartition(", ")[2])
    if lines:
        print(*lines, sep=chr(10))

"""


@pytest.mark.parametrize(
    ("call", "gpus", "expected"),
    [
        ("run(main)", 4, ["None None False "] * 2),
        ("run(main, device='auto')", 0, ["None [] False "] * 2),
        (
            "run(main, device='auto')",
            4,
            ["0 [0] False rank 0 on GPU 0", "1 [1] False rank 1 on GPU 1"],
        ),
        (
            "run(main, device=3)",
            4,
            ["3 [3] False rank 0 on GPU 3", "3 [3] False rank 1 on GPU 3"],
        ),
    ],
)
def test_world_makes_its_device_the_current_one(tmp_path, call, gpus, expected):
    (tmp_path / "cupy.py").write_text(CUPY.format(gpus=gpus))
    result = run_script(tmp_path, MAIN + call + "\n", ranks=2)
    for line, begin in zip(result.out.splitlines(), expected, strict=True):
        assert line.startswith(begin)
    assert ("warning: 2 ranks share 1 GPU" in result.err) == ("=3" in call)


def test_a_job_that_needs_gpus_says_once_that_there_are_none(tmp_path):
    script = "run(lambda world: print('started'), device='cuda')"
    result = run_script(tmp_path, script, ranks=2)
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith("error: rank 0 on ")
    assert result.err.count("\n") == 1
