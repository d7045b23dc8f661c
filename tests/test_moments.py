"""Moments: joint mean and covariance of several models, accumulated block by block."""

import pickle
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import zarr
from hypothesis import given
from hypothesis import strategies as st
from threadpoolctl import threadpool_limits

import lmd_utils as lmd

N = 1234
DIMS = {"a": 3, "b": 5, "c": 2}


@pytest.fixture
def arrays(rng):
    mixing = rng.normal(size=(10, 10))
    x = rng.normal(size=(N, 10)) @ mixing + np.linspace(-20, 20, 10)
    return dict(zip(DIMS, np.split(x.astype(np.float32), [3, 8], axis=1), strict=True))


def stacked(arrays):
    return np.concatenate(list(arrays.values()), axis=1).astype(np.float64)


def assert_moments(moments, x, tolerance=1e-10):
    """Against numpy on the rows themselves, divisor n - 1."""
    assert moments.n == len(x)
    scale = np.sqrt(np.outer(x.var(axis=0), x.var(axis=0)))
    np.testing.assert_allclose(moments.mean, x.mean(axis=0), rtol=tolerance, atol=tolerance)
    np.testing.assert_array_less(np.abs(moments.cov - np.cov(x, rowvar=False)), tolerance * scale)
    assert moments.mean.dtype == moments.cov.dtype == np.float64


def test_moments_by_hand():
    """Two one-dimensional models over three texts."""
    arrays = {"a": np.array([[1.0], [2.0], [6.0]]), "b": np.array([[0.0], [3.0], [3.0]])}
    moments = lmd.Moments.from_arrays(arrays)
    assert moments.names == ["a", "b"]
    np.testing.assert_allclose(moments.mean, [3.0, 2.0], rtol=1e-15)
    np.testing.assert_allclose(moments.cov, [[7.0, 3.0], [3.0, 3.0]], rtol=1e-15)


@pytest.mark.parametrize("block_size", [1, 7, 1000, N, 10 * N])
def test_block_sizes_agree_with_numpy(arrays, block_size):
    moments = lmd.Moments.from_arrays(arrays, block_size=block_size)
    assert_moments(moments, stacked(arrays))
    np.testing.assert_allclose(moments.cov, moments.cov.T, rtol=1e-12)


def test_slices_follow_the_order_given(arrays):
    moments = lmd.Moments.from_arrays(arrays)
    assert list(moments.names) == ["a", "b", "c"]
    for name, array in arrays.items():
        np.testing.assert_allclose(
            moments.mean[moments.slice(name)], array.astype(np.float64).mean(axis=0), rtol=1e-12
        )
        block = moments.cov[moments.slice(name), moments.slice(name)]
        np.testing.assert_allclose(
            block, np.cov(array.astype(np.float64), rowvar=False), rtol=1e-10
        )
    with pytest.raises(KeyError, match="nobody"):
        moments.slice("nobody")


@pytest.mark.parametrize("names", [["b"], ["a", "c"], ["c", "a"], ["a", "b", "c"]])
def test_a_selection_is_the_moments_of_those_models(arrays, names):
    moments = lmd.Moments.from_arrays(arrays)
    chosen, direct = moments.select(names), lmd.Moments.from_arrays({k: arrays[k] for k in names})
    assert chosen.names == names and chosen.n == N
    np.testing.assert_allclose(chosen.mean, direct.mean, rtol=1e-12)
    np.testing.assert_allclose(chosen.cov, direct.cov, rtol=1e-9)
    assert all(chosen.slice(name) == direct.slice(name) for name in names)


def test_a_part_of_the_moments_does_not_grow_with_them(arrays):
    moments = lmd.Moments.from_arrays(arrays)
    part = moments.select(["a", "c"])
    before = part.n, part.mean.copy(), part.cov
    moments.update(arrays)
    assert part.n == before[0]
    np.testing.assert_array_equal(part.mean, before[1])
    np.testing.assert_array_equal(part.cov, before[2])
    part.update({name: arrays[name] for name in ("a", "c")})
    assert moments.n == 2 * N == part.n


def test_a_selection_of_unknown_models_is_refused(arrays):
    with pytest.raises(KeyError, match="zebra"):
        lmd.Moments.from_arrays(arrays).select(["a", "zebra"])


def test_names_and_values_do_not_depend_on_the_order_of_a_block(arrays):
    moments = lmd.Moments.from_arrays(arrays)
    again = lmd.Moments({name: array.shape[1] for name, array in arrays.items()})
    again.update(dict(reversed(arrays.items())))
    np.testing.assert_allclose(again.cov, moments.cov, rtol=1e-12)


@given(
    sizes=st.lists(st.integers(0, 30), min_size=1, max_size=5),
    shift=st.sampled_from([0.0, 1e4]),
    seed=st.integers(0, 2**16),
)
def test_merge_and_update_equal_concatenation(sizes, shift, seed):
    rng = np.random.default_rng(seed)
    sizes = [*sizes, 5]
    parts = [{"a": rng.normal(size=(n, 2)) + shift, "b": rng.normal(size=(n, 3))} for n in sizes]
    whole = stacked({name: np.concatenate([part[name] for part in parts]) for name in "ab"})
    merged, updated = (lmd.Moments({"a": 2, "b": 3}) for _ in range(2))
    for part in parts:
        merged.merge(lmd.Moments.from_arrays(part, block_size=4))
        updated.update(part)
    assert_moments(merged, whole)
    assert_moments(updated, whole)


def test_merge_leaves_the_other_as_it_was(arrays):
    half = {name: array[: N // 2] for name, array in arrays.items()}
    other = lmd.Moments.from_arrays({name: array[N // 2 :] for name, array in arrays.items()})
    mean, cov = other.mean.copy(), other.cov.copy()
    merged = lmd.Moments.from_arrays(half).merge(other)
    merged.update(half)
    assert other.n == N - N // 2
    np.testing.assert_array_equal(other.mean, mean)
    np.testing.assert_array_equal(other.cov, cov)
    empty = lmd.Moments(DIMS).merge(other)
    empty.update(half)
    np.testing.assert_array_equal(other.mean, mean)
    np.testing.assert_array_equal(other.cov, cov)


def test_the_input_is_not_changed(arrays):
    before = {name: array.copy() for name, array in arrays.items()}
    doubles = {name: array.astype(np.float64) for name, array in arrays.items()}
    lmd.Moments.from_arrays(arrays)
    lmd.Moments.from_arrays(doubles)
    for name in arrays:
        np.testing.assert_array_equal(arrays[name], before[name])
        np.testing.assert_array_equal(doubles[name], before[name])


def test_a_large_mean_costs_no_digits(rng):
    """S2: float32 rows, mean 1e4 standard deviations: E[x²] - E[x]² would lose half the digits."""
    x = (rng.normal(size=(5000, 4)) + 1e4).astype(np.float32)
    for block_size in (13, 5000):
        moments = lmd.Moments.from_arrays({"a": x[:, :2], "b": x[:, 2:]}, block_size)
        assert_moments(moments, x.astype(np.float64))


def test_s2_tf32_changes_no_digit_of_the_moments(arrays):
    import torch

    exact = lmd.Moments.from_arrays(arrays)
    torch.set_float32_matmul_precision("medium")
    try:
        allowed = lmd.Moments.from_arrays(arrays)
    finally:
        torch.set_float32_matmul_precision("highest")
    assert allowed.cov.dtype == np.float64
    np.testing.assert_array_equal(allowed.cov, exact.cov)
    np.testing.assert_array_equal(allowed.mean, exact.mean)


def test_zarr_arrays_and_memory_maps(arrays, tmp_path):
    expected = lmd.Moments.from_arrays(arrays)
    stored = {}
    for name, array in arrays.items():
        stored[name] = zarr.create_array(
            tmp_path / f"{name}.zarr", data=array, chunks=(100, array.shape[1])
        )
    np.testing.assert_array_equal(lmd.Moments.from_arrays(stored).cov, expected.cov)
    for name, array in arrays.items():
        np.save(tmp_path / f"{name}.npy", array)
        stored[name] = np.load(tmp_path / f"{name}.npy", mmap_mode="r")
    np.testing.assert_array_equal(lmd.Moments.from_arrays(stored).cov, expected.cov)


def test_save_and_load(arrays, tmp_path):
    moments = lmd.Moments.from_arrays(arrays)
    moments.save(tmp_path / "moments")
    assert [path.name for path in tmp_path.iterdir()] == ["moments"]
    again = lmd.Moments.load(tmp_path / "moments")
    assert (list(again.names), again.n) == (list(moments.names), moments.n)
    np.testing.assert_array_equal(again.mean, moments.mean)
    np.testing.assert_array_equal(again.cov, moments.cov)
    again.update(arrays)
    assert_moments(again, np.concatenate([stacked(arrays)] * 2))


class Payload:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_load_never_unpickles(tmp_path):
    (tmp_path / "moments").write_bytes(pickle.dumps(Payload(tmp_path / "it-ran")))
    with pytest.raises(Exception, match=r"."):
        lmd.Moments.load(tmp_path / "moments")
    assert not (tmp_path / "it-ran").exists()


def test_a_block_costs_one_block_of_memory_and_no_square(rng):
    """Products go straight into the sums: beside them, one float64 copy of the block."""
    moments = lmd.Moments({"a": 400, "b": 400})
    block = {name: rng.normal(size=(50, 400)) for name in "ab"}
    moments.update(block)
    tracemalloc.start()
    moments.update(block)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1.5 * 51 * 800 * 8 < 800 * 800 * 8


# --- refusals ------------------------------------------------------------------------------------


def test_different_numbers_of_rows_are_named(arrays):
    arrays["b"] = arrays["b"][:-1]
    with pytest.raises(ValueError, match=rf"{N}.*{N - 1}"):
        lmd.Moments.from_arrays(arrays)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("block_size", [1, 100, N])
def test_a_non_finite_value_is_named_by_model_and_row(arrays, value, block_size):
    arrays["b"][777, 4] = value
    with pytest.raises(ValueError, match=r"'b'.*\b777\b"):
        lmd.Moments.from_arrays(arrays, block_size=block_size)


def test_a_refused_block_leaves_the_moments_as_they_were(arrays):
    moments = lmd.Moments.from_arrays(arrays)
    before = moments.cov
    bad = {name: array[:10].copy() for name, array in arrays.items()}
    bad["c"][3, 0] = np.nan
    with pytest.raises(ValueError, match="'c'"):
        moments.update(bad)
    assert moments.n == N
    np.testing.assert_array_equal(moments.cov, before)


def test_blocks_of_other_models_or_sizes_are_refused(arrays):
    moments = lmd.Moments.from_arrays(arrays)
    with pytest.raises(ValueError, match="'d'"):
        moments.update({**arrays, "d": arrays["a"]})
    with pytest.raises(ValueError, match=r"'b'"):
        moments.update({"a": arrays["a"], "b": arrays["b"]})
    with pytest.raises(ValueError, match=r"\b4\b"):
        moments.update({**arrays, "b": arrays["b"][:, :4]})
    with pytest.raises(ValueError, match=r"\b9\b"):
        moments.update({**{k: v[:10] for k, v in arrays.items()}, "b": arrays["b"][:9]})
    assert moments.n == N


def test_moments_of_other_models_do_not_merge(arrays):
    moments = lmd.Moments.from_arrays(arrays)
    for other in (
        {"a": arrays["a"]},
        {"b": arrays["b"], "a": arrays["a"], "c": arrays["c"]},
        {**arrays, "c": arrays["b"]},
    ):
        with pytest.raises(ValueError, match="merge"):
            moments.merge(lmd.Moments.from_arrays(other))


def test_nothing_is_no_moments(arrays):
    with pytest.raises(ValueError):
        lmd.Moments.from_arrays({})
    with pytest.raises(ValueError, match=r"\b[Nn]\b|rows?"):
        lmd.Moments.from_arrays({"a": np.empty((0, 3))}).cov  # noqa: B018
    with pytest.raises(ValueError, match=r"\b1\b"):
        lmd.Moments.from_arrays({"a": arrays["a"][:1]}).cov  # noqa: B018


def test_arrays_of_another_shape_are_named(arrays):
    with pytest.raises(ValueError, match="'a'"):
        lmd.Moments.from_arrays({"a": arrays["a"][:, 0], "b": arrays["b"]})
    with pytest.raises(ValueError, match="block_size"):
        lmd.Moments.from_arrays(arrays, block_size=0)


# --- H12 -----------------------------------------------------------------------------------------


def scores(arrays, block_size=4096):
    moments = lmd.Moments.from_arrays(arrays, block_size)
    pairs = lmd.pair_scores(moments, moments).to_numpy()
    return np.append(pairs[~np.isnan(pairs)], lmd.group_scores(moments, moments).to_numpy())


def models_of(rng, n=3000, dims=(40, 64, 24)):
    latent = rng.normal(size=(n, 48))
    return {
        name: (latent @ rng.normal(size=(48, d)) + rng.normal(size=(n, d))).astype(np.float32)
        for name, d in zip("abc", dims, strict=True)
    }


def test_h12_row_order_does_not_move_r2(rng):
    arrays = models_of(rng)
    expected = scores(arrays)
    assert expected.size == 9
    for _ in range(3):
        order = rng.permutation(3000)
        found = scores({name: array[order] for name, array in arrays.items()}, block_size=500)
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-9)


def test_h12_threads_do_not_move_r2(rng):
    arrays = models_of(rng)
    found = []
    for threads in (1, 8):
        with threadpool_limits(limits=threads):
            found.append(scores(arrays))
    np.testing.assert_allclose(found[1], found[0], rtol=0, atol=1e-9)
