from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minivllm.device import Readback, Staging, pick_kv_dtype, upload

CPU = torch.device("cpu")
DTYPES = [np.int32, np.int64, np.float32]


@given(
    st.lists(
        st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 5), min_size=1, max_size=2)),
        max_size=8,
    )
)
def test_what_is_sent_arrives(kinds) -> None:
    """Any arrays keep types, shapes and values, at aligned addresses that do not overlap."""
    arrays = {
        str(i): np.arange(np.prod(shape), dtype=dtype).reshape(shape) + i
        for i, (dtype, shape) in enumerate(kinds)
    }
    staging = Staging(4096, CPU)
    sent = staging.send(arrays)
    for name, array in arrays.items():
        assert sent[name].numpy().dtype == array.dtype
        np.testing.assert_array_equal(sent[name].numpy(), array)
        assert sent[name].data_ptr() % 16 == 0


def test_equal_shapes_lie_at_equal_addresses() -> None:
    """What a captured graph relies on: the next step's numbers lie where the last one's did."""
    staging = Staging(4096, CPU)
    first = staging.send({"a": np.arange(3), "b": np.zeros(2, np.int32), "rest": np.arange(9)})
    second = staging.send({"a": np.arange(3) + 7, "b": np.ones(2, np.int32), "rest": np.arange(2)})
    assert [first[n].data_ptr() for n in "ab"] == [second[n].data_ptr() for n in "ab"]
    assert first["a"].tolist() == [7, 8, 9]


def test_more_than_fits_is_an_error() -> None:
    """Nothing is cut off silently."""
    with pytest.raises((AssertionError, ValueError)):
        Staging(64, CPU).send({"a": np.arange(9)})


def test_a_readback_keeps_what_was_there() -> None:
    """A buffer that is written again does not change a result that was read before."""
    buffer = torch.arange(3)
    readback = Readback([buffer])
    buffer.zero_()
    readback.wait()
    assert readback.tensors[0].tolist() == [0, 1, 2]
    assert not readback.must_wait


def test_an_upload_has_the_array_s_values() -> None:
    """And its type."""
    assert torch.equal(upload(np.array([1.5, 2], np.float32), CPU), torch.tensor([1.5, 2]))


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("auto", torch.bfloat16),
        ("float16", torch.float16),
        ("bfloat16", torch.bfloat16),
        ("fp8", torch.float8_e4m3fn),
    ],
)
def test_the_kv_cache_has_the_dtype_of_its_setting(name, dtype) -> None:
    """Auto is what is computed in."""
    assert pick_kv_dtype(name, torch.bfloat16) == dtype
