"""Checks and conversions of arrays, without MPI."""

import ml_dtypes
import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided

from mpiscale.comm.buffers import (
    Landing,
    block_spec,
    carried_dtype,
    check_apart,
    check_object,
    outgoing,
    parts,
    reduced_dtype,
)
from tests.comm.kinds_of_arrays import layouts

VALUES = np.arange(6.0).reshape(2, 3)


def test_what_is_sent_is_in_row_major_order_for_every_layout():
    for name, x in layouts(VALUES):
        np.testing.assert_array_equal(outgoing(x, "x"), range(6), err_msg=name)
    np.testing.assert_array_equal(outgoing(VALUES.T, "x"), [0, 3, 1, 4, 2, 5])
    broadcast = np.broadcast_to(np.float32(7), (2, 2))
    np.testing.assert_array_equal(outgoing(broadcast, "x"), [7, 7, 7, 7])


def test_contiguous_arrays_are_not_copied():
    x = VALUES.copy()
    x.flags.writeable = False
    assert np.shares_memory(outgoing(x, "x"), x)
    y = np.empty(3)
    assert np.shares_memory(Landing(y, "y").wire, y)


def test_scalars_and_empty_arrays_have_a_wire():
    assert outgoing(np.array(3.0), "x").shape == (1,)
    assert outgoing(np.empty((0, 3)), "x").shape == (0,)
    y = np.array(0.0)
    landing = Landing(y, "y")
    landing.wire[:] = 5
    landing.finish()
    assert y == 5


def test_what_arrives_gets_to_its_place_in_every_layout():
    for name, y in layouts(np.zeros((2, 3))):
        landing = Landing(y, "y")
        landing.wire[:] = range(6)
        landing.finish()
        np.testing.assert_array_equal(y, VALUES, err_msg=name)


def test_columns_beside_a_received_slice_stay():
    y = np.zeros((3, 4))
    landing = Landing(y[:, ::2], "y")
    landing.wire[:] = range(1, 7)
    landing.finish()
    np.testing.assert_array_equal(y, [[1, 0, 2, 0], [3, 0, 4, 0], [5, 0, 6, 0]])


def test_filled_landing_starts_with_the_contents():
    for name, y in layouts(VALUES):
        wire = Landing(y, "y", filled=True).wire
        np.testing.assert_array_equal(wire, range(6), err_msg=name)


@pytest.mark.parametrize("half", [np.float16, ml_dtypes.bfloat16])
def test_halves_move_as_words_and_are_reduced_in_float32(half):
    x = np.array([1.5, -2.0], half)
    assert outgoing(x, "x").dtype == np.uint16
    assert np.shares_memory(outgoing(x, "x"), x)
    assert outgoing(x, "x", reduced=True).dtype == np.float32
    landing = Landing(x, "x", reduced=True)
    landing.wire[:] = [1.0, 1 + 2**-12]  # the second rounds to 1
    landing.finish()
    np.testing.assert_array_equal(x, np.array([1, 1], half))


def test_eight_bit_floats_move_but_are_not_reduced():
    dtype = np.dtype(ml_dtypes.float8_e4m3fn)
    assert carried_dtype(dtype) == np.uint8
    with pytest.raises(TypeError, match="cannot reduce elements of type float8"):
        reduced_dtype(dtype)


@pytest.mark.parametrize("dtype", [">f4", ">i8"])
def test_byte_swapped_types_are_refused(dtype):
    with pytest.raises(TypeError, match=r"byte-swapped .*newbyteorder"):
        outgoing(np.zeros(3, dtype), "x")
    with pytest.raises(TypeError, match="byte-swapped"):
        Landing(np.zeros(3, dtype), "x")


@pytest.mark.parametrize("dtype", ["O", "U3", "M8[s]", "V4", [("a", "f4")]])
def test_what_is_no_number_is_refused(dtype):
    with pytest.raises(TypeError, match="cannot move elements of type"):
        outgoing(np.zeros(3, dtype), "x")


def test_bools_are_moved_but_not_summed():
    assert outgoing(np.array([True]), "x").dtype == bool
    with pytest.raises(TypeError, match="cannot reduce elements of type bool"):
        outgoing(np.array([True]), "x", reduced=True)


@pytest.mark.parametrize("thing", [[1.0, 2.0], 3, None, (np.zeros(2), 2)])
def test_what_is_no_array_is_refused(thing):
    with pytest.raises(TypeError, match="sendbuf must be a NumPy array, got"):
        outgoing(thing, "sendbuf")


def test_receive_buffers_must_be_writable_and_without_overlap():
    read_only = np.zeros(3)
    read_only.flags.writeable = False
    with pytest.raises(ValueError, match="recvbuf is read-only"):
        Landing(read_only, "recvbuf")
    with pytest.raises(ValueError, match="read-only"):
        Landing(np.broadcast_to(1.0, 3), "recvbuf")
    repeated = as_strided(np.zeros(3), (2, 3), (0, 8))
    windows = as_strided(np.zeros(5), (3, 3), (8, 8))
    for x in (repeated, windows):
        with pytest.raises(ValueError, match="share memory"):
            Landing(x, "recvbuf")


def test_overlapping_send_and_receive_buffers_are_refused():
    x = np.zeros(4)
    check_apart(x[:2], x[2:])
    with pytest.raises(ValueError, match=r"MPI\.IN_PLACE"):
        check_apart(x[:3], x[2:])


def test_lower_case_methods_refuse_arrays():
    check_object({"a": 1}, "send")
    with pytest.raises(TypeError, match="use Send, which"):
        check_object(np.zeros(3), "send")


def test_parts_cover_everything_once():
    assert list(parts(7, 3)) == [slice(0, 3), slice(3, 6), slice(6, 7)]
    assert list(parts(6, 3)) == [slice(0, 3), slice(3, 6)]
    assert list(parts(0, 3)) == [slice(0, 0)]  # a collective call is still one


def test_block_specifications():
    x = np.arange(7.0)
    assert block_spec(x, 3, "x")[1:] == ([3, 2, 2], [0, 3, 5])
    assert block_spec([x, [1, 0, 4]], 3, "x")[1:] == ([1, 0, 4], [0, 1, 1])
    for spec in ((x, ([1, 2], [4, 0])), (x, np.array([1, 2])), (x, (1, 2))):
        assert block_spec(spec, 2, "x").counts == [1, 2]
    assert block_spec((x, ([1, 2], [4, 0])), 2, "x").slices() == [
        slice(4, 5),
        slice(0, 2),
    ]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ((np.zeros(5), [2, 2, 1]), "needs 2 counts"),
        ((np.zeros(5), [6, -1]), "needs 2 counts >= 0"),
        ((np.zeros(5), [3, 3]), "end at element 6, but its array has 5"),
        ((np.zeros(5), ([1, 1], [0])), "needs 2 displs"),
        ((np.zeros(5), [1, 1], [0, 0]), "must be array, "),
        ((np.zeros(5), "float"), "must be array, "),
        ((np.zeros(5), [1.0, 2.0]), "must be array, "),
    ],
)
def test_wrong_block_specifications_are_refused(spec, message):
    with pytest.raises((TypeError, ValueError), match=message):
        block_spec(spec, 2, "recvbuf")
