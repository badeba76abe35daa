"""The mesh: places, groups, and errors with the arithmetic."""

import numpy as np
import pytest
from mpi4py import MPI

from mpiscale.comm.process_mesh import ProcessMesh, coordinates
from mpiscale.errors import InputError
from tests.communicators import world_communicator


def test_last_dimension_varies_fastest():
    places = [coordinates(r, {"pp": 2, "dp": 1, "tp": 3}) for r in range(6)]
    assert [(p["pp"], p["tp"]) for p in places] == [
        (0, 0),
        (0, 1),
        (0, 2),
        (1, 0),
        (1, 1),
        (1, 2),
    ]


@pytest.mark.mpi(ranks=(8,))
def test_groups_join_the_ranks_that_differ_in_their_dimensions_alone():
    comm = world_communicator()
    mesh = ProcessMesh(comm, pp=2, dp=2, tp=2)
    grid = np.arange(8).reshape(2, 2, 2)
    pp, dp, tp = (mesh.coordinate(name) for name in ("pp", "dp", "tp"))
    assert grid[pp, dp, tp] == comm.rank
    groups = {
        ("tp",): grid[pp, dp, :],
        ("dp",): grid[pp, :, tp],
        ("pp",): grid[:, dp, tp],
        ("pp", "tp"): grid[:, dp, :].ravel(),
        ("tp", "dp"): grid[pp, :, :].ravel(),
        ("pp", "dp", "tp"): grid.ravel(),
    }
    for names, expected in groups.items():
        group = mesh.along(*names)
        assert group.allgather(comm.rank) == expected.tolist(), names
        assert mesh.along(*reversed(names)) is group
    assert mesh.along("tp", "dp").name == "dp x tp"
    assert mesh.size("dp") == 2
    assert str(mesh) == "pp=2 x dp=2 x tp=2"


@pytest.mark.mpi(ranks=(4,))
def test_ledger_knows_the_groups_of_a_mesh():
    comm = world_communicator()
    mesh = ProcessMesh(comm, dp=1, tp=4)
    mesh.along("tp").Allreduce(MPI.IN_PLACE, np.zeros(4))
    mesh.along("dp").Allreduce(MPI.IN_PLACE, np.zeros(4))
    assert comm.ledger.sent_bytes(group="tp") == 2 * 3 * 8
    assert comm.ledger.sent_bytes(group="dp") == 0


@pytest.mark.mpi(ranks=(2,))
def test_mesh_over_a_bare_mpi4py_communicator():
    tp = ProcessMesh(MPI.COMM_WORLD, dp=1, tp=2).along("tp")
    assert (tp.size, tp.name) == (2, "tp")


@pytest.mark.mpi(ranks=(3,))
def test_wrong_product_says_the_arithmetic_and_the_command():
    comm = world_communicator()
    with pytest.raises(InputError) as error:
        ProcessMesh(comm, dp=2, tp=4)
    assert str(error.value) == (
        "mesh dp=2 x tp=4 needs 8 ranks, got 3: start it with `mpirun -n 8`, "
        "or change a dimension"
    )
    with pytest.raises(InputError, match="every dimension must be at least 1"):
        ProcessMesh(comm, dp=-3, tp=-1)
    mesh = ProcessMesh(comm, dp=3)
    for ask in (mesh.along, mesh.size, mesh.coordinate):
        with pytest.raises(InputError, match=r"dimensions \['dp'\] .* got \['tp'\]"):
            ask("tp")
    with pytest.raises(InputError, match=r"got \[\]"):
        mesh.along()
