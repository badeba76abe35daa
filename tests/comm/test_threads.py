"""Threads a rank: what is granted, and what is warned of."""

import pytest

from mpiscale.comm.threads import choose_threads, sharing_ranks


@pytest.mark.parametrize(
    ("cpus", "ranks", "environ", "threads"),
    [
        (8, 1, {}, 8),
        (8, 2, {}, 4),
        (8, 3, {}, 2),
        (2, 8, {}, 1),
        (40, 2, {"OMP_NUM_THREADS": "20"}, 20),
        (8, 2, {"OMP_NUM_THREADS": "2,1"}, 2),
        (8, 2, {"OMP_NUM_THREADS": "4", "MPISCALE_THREADS": "3"}, 3),
        (2, 8, {"OMP_NUM_THREADS": "1"}, 1),
        (8, 2, {"OMP_NUM_THREADS": ""}, 4),
    ],
)
def test_threads_that_fit_are_granted_without_warning(cpus, ranks, environ, threads):
    assert choose_threads(cpus, ranks, environ) == (threads, ())


def test_eight_threads_on_the_one_cpu_of_a_bound_rank():
    threads, (warning,) = choose_threads(1, 1, {"OMP_NUM_THREADS": "8"})
    assert threads == 8
    assert "OMP_NUM_THREADS=8 gives 1 rank x 8 threads = 8 on 1 CPU," in warning


def test_ranks_times_threads_above_the_cpus():
    threads, (warning,) = choose_threads(40, 2, {"MPISCALE_THREADS": "40"})
    assert threads == 40
    assert "2 ranks x 40 threads = 80 on 40 CPUs, where 20 a rank fit" in warning


@pytest.mark.parametrize("text", ["many", "0", "-3", "2.5"])
def test_what_is_no_number_of_threads_is_ignored_loudly(text):
    threads, (warning,) = choose_threads(8, 2, {"OMP_NUM_THREADS": text})
    assert threads == 4
    assert f"OMP_NUM_THREADS={text} is not a number of threads: using 4" == warning


def test_ranks_share_cpus_only_where_their_masks_meet():
    both, first, second = frozenset({0, 1}), frozenset({0}), frozenset({1})
    assert sharing_ranks(both, [both, both]) == 2
    assert sharing_ranks(first, [first, second]) == 1
    assert sharing_ranks(first, [first, both, second]) == 2
