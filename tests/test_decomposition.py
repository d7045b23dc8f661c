"""fit, Decomposition, pair_scores, group_scores, adjusted_r2, against scikit-learn and numpy."""

import json
import warnings

import numpy as np
import pandas as pd
import pytest
from conftest import ROOT
from hypothesis import given
from hypothesis import strategies as st
from sklearn.linear_model import LinearRegression, Ridge
from sklearn.metrics import r2_score

import lmd_utils as lmd

SEEDS = st.integers(0, 2**16)
DIMS = {"a": 4, "b": 7, "c": 5, "d": 3}


def make(rng, n, dims=DIMS, noise=0.5):
    """Correlated models with means and scales of their own: {name: [n, d]}."""
    width = max(sum(dims.values()) // 2, 2)
    latent = rng.normal(size=(n, width))
    mixing = np.random.default_rng(99)
    arrays = {}
    for name, d in dims.items():
        signal = latent @ mixing.normal(size=(width, d)) / np.sqrt(width)
        scale, mean = np.exp(mixing.normal(size=d)), 3 * mixing.normal(size=d)
        arrays[name] = (signal + noise * rng.normal(size=(n, d))) * scale + mean
    return arrays


@pytest.fixture
def train_arrays(rng):
    return make(rng, 400)


@pytest.fixture
def test_arrays(rng, train_arrays):
    return make(rng, 150)


@pytest.fixture
def train(train_arrays):
    return lmd.Moments.from_arrays(train_arrays)


@pytest.fixture
def test(test_arrays):
    return lmd.Moments.from_arrays(test_arrays)


def moments_of(x, y):
    return lmd.Moments.from_arrays({"x": x, "y": y})


def joined(arrays, names):
    return np.concatenate([arrays[name] for name in names], axis=1)


def weights_of(decomposition):
    return np.concatenate([decomposition.weights[name] for name in decomposition.basis], axis=1)


# --- one fit -------------------------------------------------------------------------------------


def test_a_fit_by_hand():
    """y = 2x + 1 but for the last text, alpha = 0: SSR = 0.4, SST = 32.8."""
    x = np.array([[0.0], [1.0], [2.0], [3.0], [4.0]])
    y = np.array([[1.0], [3.0], [5.0], [7.0], [8.0]])
    fitted = lmd.fit(moments_of(x, y), "y", ["x"], alpha=0)
    np.testing.assert_allclose(fitted.weights["x"], [[1.8]], rtol=1e-14)
    np.testing.assert_allclose(fitted.bias, [1.2], rtol=1e-14)
    assert fitted.score(moments_of(x, y)) == pytest.approx(1 - 0.4 / 32.8, abs=1e-14)
    assert (fitted.n, fitted.p, fitted.rank) == (5, 1, 1)


def test_alpha_by_hand():
    """var x = 1, cov xy = 2: the slope is 2 / (1 + alpha)."""
    x = np.array([[-1.0], [0.0], [1.0]])
    moments = moments_of(x + 10, 2 * x - 1)
    for alpha in (0.0, 1e-6, 1.0):
        fitted = lmd.fit(moments, "y", ["x"], alpha=alpha)
        np.testing.assert_allclose(fitted.weights["x"], [[2 / (1 + alpha)]], rtol=1e-14)
        np.testing.assert_allclose(fitted.bias, [-1 - 20 / (1 + alpha)], rtol=1e-14)
        assert fitted.score(moments) == pytest.approx(1 - (alpha / (1 + alpha)) ** 2, abs=1e-14)


@pytest.mark.parametrize("alpha", [0.0, 1e-6, 1e-2, 10.0])
@pytest.mark.parametrize("target, basis", [("a", ["b"]), ("b", ["a", "d"]), ("c", ["d", "a", "b"])])
def test_weights_and_bias_equal_ridge(train_arrays, train, target, basis, alpha):
    """scikit-learn penalises the sum of squares, we the mean with divisor n - 1."""
    x, y = joined(train_arrays, basis), train_arrays[target]
    ridge = Ridge(alpha=alpha * (len(x) - 1), solver="cholesky" if alpha else "svd").fit(x, y)
    fitted = lmd.fit(train, target, basis, alpha=alpha)
    np.testing.assert_allclose(weights_of(fitted), ridge.coef_, atol=1e-9)
    np.testing.assert_allclose(fitted.bias, ridge.intercept_, atol=1e-9)
    assert {name: w.shape for name, w in fitted.weights.items()} == {
        name: (DIMS[target], DIMS[name]) for name in basis
    }
    np.testing.assert_allclose(fitted.predict(train_arrays), ridge.predict(x), atol=1e-9)


@pytest.mark.parametrize("alpha", [0.0, 1e-6, 1e-2, 10.0])
def test_r2_equals_scikit_learns(train_arrays, test_arrays, train, test, alpha):
    """Variance-weighted over dimensions, on the rows of the fit and on others."""
    for target, basis in (("a", ["b"]), ("b", ["a", "d"]), ("c", ["d", "a", "b"])):
        fitted = lmd.fit(train, target, basis, alpha=alpha)
        for arrays, moments in ((train_arrays, train), (test_arrays, test)):
            x = joined(arrays, basis)
            predicted = x @ weights_of(fitted).T + fitted.bias
            expected = r2_score(arrays[target], predicted, multioutput="variance_weighted")
            assert fitted.score(moments) == pytest.approx(expected, abs=1e-9)
            np.testing.assert_allclose(fitted.predict(arrays), predicted, atol=1e-10)


def test_r2_may_be_negative_on_other_rows(rng):
    """The mean is the scored rows' own: a shifted target is predicted worse than by its mean."""
    x, y = rng.normal(size=(100, 2)), rng.normal(size=(100, 2))
    fitted = lmd.fit(moments_of(x, y), "y", ["x"])
    shifted = y + 100
    expected = r2_score(
        shifted, x @ fitted.weights["x"].T + fitted.bias, multioutput="variance_weighted"
    )
    assert expected < -1000
    assert fitted.score(moments_of(x, shifted)) == pytest.approx(expected, rel=1e-9)


def test_the_order_of_the_basis_changes_nothing(train, test):
    one, other = (lmd.fit(train, "c", basis) for basis in (["a", "b", "d"], ["d", "a", "b"]))
    assert one.score(test) == pytest.approx(other.score(test), abs=1e-12)
    for name in "abd":
        np.testing.assert_allclose(one.weights[name], other.weights[name], atol=1e-10)


def test_a_basis_may_be_one_name(train, test):
    assert lmd.fit(train, "a", "b").score(test) == lmd.fit(train, "a", ["b"]).score(test)


def test_the_default_alpha_is_the_papers(train):
    default, stated = lmd.fit(train, "a", ["b"]), lmd.fit(train, "a", ["b"], alpha=1.0e-6)
    np.testing.assert_array_equal(default.weights["b"], stated.weights["b"])
    assert default.alpha == 1e-6


def test_a_fit_leaves_the_moments_as_they_were(train, test):
    before, before_test = (train.mean.copy(), train.cov), test.cov
    lmd.fit(train, "a", ["b", "c"], alpha=0.5).score(test)
    for alpha in (0.0, 0.5):
        lmd.pair_scores(train, test, alpha)
        lmd.group_scores(train, test, alpha)
    np.testing.assert_array_equal(train.mean, before[0])
    np.testing.assert_array_equal(train.cov, before[1])
    np.testing.assert_array_equal(test.cov, before_test)


def test_a_fit_keeps_its_scores_when_its_moments_take_in_more_rows(train_arrays, train, test):
    """The map was fitted to the rows of then, and is what is scored."""
    one = lmd.fit(train, "a", ["c", "b"], alpha=0.5)
    expected, rank, columns = one.score(test), one.rank, one.predict(train_arrays)
    fresh = lmd.fit(train, "a", ["c", "b"], alpha=0.5)
    train.update({name: rows[:50] + 3 for name, rows in train_arrays.items()})
    assert one.score(test) == fresh.score(test) == expected
    np.testing.assert_array_equal(one.predict(train_arrays), columns)
    assert one.n == len(train_arrays["a"]) and one.rank == rank
    with pytest.raises(ValueError, match="fit again"):
        fresh.rank  # noqa: B018


# --- properties ----------------------------------------------------------------------------------


def invertible(rng, d):
    """Orthogonal x diagonal x orthogonal, condition number 100."""
    (q, _), (r, _) = (np.linalg.qr(rng.normal(size=(d, d))) for _ in range(2))
    return q @ np.diag(np.geomspace(0.1, 10, d)) @ r


@given(seed=SEEDS)
def test_r2_does_not_change_under_an_invertible_map_of_the_basis(seed):
    """At alpha = 0 a basis counts as the space that it spans."""
    rng = np.random.default_rng(seed)
    arrays, held_out = make(rng, 200), make(rng, 80)
    maps = {name: (invertible(rng, DIMS[name]), rng.normal(size=DIMS[name])) for name in "bc"}
    mapped = [
        part | {name: part[name] @ m + shift for name, (m, shift) in maps.items()}
        for part in (arrays, held_out)
    ]
    before = lmd.fit(lmd.Moments.from_arrays(arrays), "a", ["b", "c"], alpha=0)
    after = lmd.fit(lmd.Moments.from_arrays(mapped[0]), "a", ["b", "c"], alpha=0)
    for plain, other in ((arrays, mapped[0]), (held_out, mapped[1])):
        assert after.score(lmd.Moments.from_arrays(other)) == pytest.approx(
            before.score(lmd.Moments.from_arrays(plain)), abs=1e-9
        )


@given(seed=SEEDS, scale=st.floats(1e-3, 1e3), alpha=st.sampled_from([0.0, 1e-6, 0.1]))
def test_r2_does_not_change_under_rotation_shift_and_scaling_of_the_target(seed, scale, alpha):
    rng = np.random.default_rng(seed)
    arrays, held_out = make(rng, 200), make(rng, 80)
    rotation, _ = np.linalg.qr(rng.normal(size=(DIMS["a"],) * 2))
    shift = rng.normal(size=DIMS["a"])
    before = lmd.fit(lmd.Moments.from_arrays(arrays), "a", ["b", "c"], alpha=alpha)
    after = lmd.fit(
        lmd.Moments.from_arrays(arrays | {"a": scale * arrays["a"] @ rotation + shift}),
        "a", ["b", "c"], alpha=alpha,
    )  # fmt: skip
    for part in (arrays, held_out):
        turned = part | {"a": scale * part["a"] @ rotation + shift}
        assert after.score(lmd.Moments.from_arrays(turned)) == pytest.approx(
            before.score(lmd.Moments.from_arrays(part)), abs=1e-9
        )


@given(seed=SEEDS, n=st.integers(5, 60))
@pytest.mark.filterwarnings("ignore:n = ")
def test_another_basis_model_never_lowers_train_r2(seed, n):
    """Least squares (alpha = 0), with more rows than dimensions or fewer."""
    moments = lmd.Moments.from_arrays(make(np.random.default_rng(seed), n))
    scores = [
        lmd.fit(moments, "a", basis, alpha=0).score(moments)
        for basis in (["b"], ["b", "c"], ["b", "c", "d"])
    ]
    assert -1e-9 <= scores[0] <= scores[1] + 1e-9 <= scores[2] + 2e-9 <= 1 + 3e-9


@pytest.mark.parametrize("planted", [0.0, 0.25, 0.9, 1.0])
def test_a_planted_r2_is_found(rng, planted):
    """The noise is made orthogonal to the basis, so that the train R² is planted exactly."""
    x = rng.normal(size=(300, 6)) @ rng.normal(size=(6, 6)) + 5
    design = np.column_stack([np.ones(300), x])
    signal = (x - x.mean(axis=0)) @ rng.normal(size=(6, 4))
    noise = rng.normal(size=(300, 4))
    noise -= design @ np.linalg.lstsq(design, noise)[0]
    y = np.sqrt(planted) * signal / np.linalg.norm(signal)
    y = y + np.sqrt(1 - planted) * noise / np.linalg.norm(noise) - 7
    moments = moments_of(x, y)
    assert lmd.fit(moments, "y", ["x"], alpha=0).score(moments) == pytest.approx(planted, abs=1e-9)


def test_a_planted_r2_is_found_on_new_rows(rng):
    weights = rng.normal(size=(6, 4))

    def sample(n):
        x = rng.normal(size=(n, 6))
        noise = rng.normal(size=(n, 4)) * np.sqrt((weights**2).sum() / 4 * (1 / 0.6 - 1))
        return moments_of(x, x @ weights + noise)

    fitted = lmd.fit(sample(20_000), "y", ["x"])
    assert fitted.score(sample(20_000)) == pytest.approx(0.6, abs=0.01)


# --- all pairs, all groups -----------------------------------------------------------------------


@pytest.mark.parametrize("alpha", [0.0, 1e-6, 0.3])
def test_pair_scores_are_the_separate_fits(train, test, alpha):
    for evaluate in (train, test):
        table = lmd.pair_scores(train, evaluate, alpha=alpha)
        assert isinstance(table, pd.DataFrame)
        assert list(table.index) == list(table.columns) == list("abcd")
        for basis in "abcd":
            assert np.isnan(table.loc[basis, basis])
            for target in set("abcd") - {basis}:
                expected = lmd.fit(train, target, [basis], alpha=alpha).score(evaluate)
                assert table.loc[basis, target] == pytest.approx(expected, abs=1e-9)
    table = lmd.pair_scores(train, train, alpha=0)
    assert abs(table.loc["a", "b"] - table.loc["b", "a"]) > 1e-3, "R² is not symmetric"


@pytest.mark.parametrize("alpha", [0.0, 1e-6, 0.3])
def test_group_scores_are_the_separate_fits(train, test, alpha):
    for evaluate in (train, test):
        scores = lmd.group_scores(train, evaluate, alpha=alpha)
        assert isinstance(scores, pd.Series)
        assert list(scores.index) == list("abcd")
        for target in "abcd":
            basis = [name for name in "abcd" if name != target]
            expected = lmd.fit(train, target, basis, alpha=alpha).score(evaluate)
            assert scores[target] == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("alpha", [0.0, 1e-6, 0.3])
def test_pairs_groups_and_fits_agree_on_rows_of_another_mean(train_arrays, train, alpha):
    """The bias of the fit counts there, and the models may stand in another order."""
    moved = {name: 1.5 * train_arrays[name][:99] - 2 for name in reversed(DIMS)}
    moved = lmd.Moments.from_arrays(moved)
    pairs, groups = (scores(train, moved, alpha) for scores in (lmd.pair_scores, lmd.group_scores))
    for target in DIMS:
        others = [name for name in DIMS if name != target]
        expected = lmd.fit(train, target, others[::-1], alpha).score(moved)
        assert groups[target] == pytest.approx(expected, abs=1e-9)
        for basis in others:
            expected = lmd.fit(train, target, basis, alpha).score(moved)
            assert pairs.loc[basis, target] == pytest.approx(expected, abs=1e-9)


def test_group_scores_equal_scikit_learn(train_arrays, test_arrays, train, test):
    alpha = 1e-2
    scores = lmd.group_scores(train, test, alpha=alpha)
    for target in "abcd":
        basis = [name for name in "abcd" if name != target]
        ridge = Ridge(alpha=alpha * 399).fit(joined(train_arrays, basis), train_arrays[target])
        expected = r2_score(
            test_arrays[target],
            ridge.predict(joined(test_arrays, basis)),
            multioutput="variance_weighted",
        )
        assert scores[target] == pytest.approx(expected, abs=1e-9)


def test_several_splits_share_the_fits(train, test):
    for scores in (lmd.pair_scores, lmd.group_scores):
        both = scores(train, {"train": train, "test": test})
        assert list(both) == ["train", "test"]
        for split, moments in (("train", train), ("test", test)):
            alone = scores(train, moments)
            np.testing.assert_array_equal(both[split].to_numpy(), alone.to_numpy())


@pytest.mark.filterwarnings("ignore:n = ")
@pytest.mark.parametrize("alpha", [0.0, 1e-6])
def test_all_scores_of_a_singular_covariance(rng, alpha):
    """A model and its copy, a constant dimension, more dimensions than rows."""
    arrays = make(rng, 60)
    arrays["b"][:, 2] = 1.5
    arrays["twin"] = 2 * arrays["a"] + 1
    arrays["wide"] = rng.normal(size=(60, 80))
    train = lmd.Moments.from_arrays({name: array[:40] for name, array in arrays.items()})
    test = lmd.Moments.from_arrays({name: array[40:] for name, array in arrays.items()})
    for evaluate in (train, test):
        pairs = lmd.pair_scores(train, evaluate, alpha=alpha)
        assert pairs.loc["a", "twin"] == pytest.approx(1, abs=1e-9)
        groups = lmd.group_scores(train, evaluate, alpha=alpha)
        for target in train.names:
            others = [name for name in train.names if name != target]
            expected = lmd.fit(train, target, others, alpha=alpha).score(evaluate)
            assert groups[target] == pytest.approx(expected, abs=1e-6 if alpha else 1e-9)
            for basis in others:
                expected = lmd.fit(train, target, [basis], alpha=alpha).score(evaluate)
                assert pairs.loc[basis, target] == pytest.approx(expected, abs=1e-9)


def test_two_models_have_equal_pair_and_group_scores(train_arrays, test_arrays):
    train, test = (
        lmd.Moments.from_arrays({name: arrays[name] for name in "ab"})
        for arrays in (train_arrays, test_arrays)
    )
    pairs, groups = lmd.pair_scores(train, test), lmd.group_scores(train, test)
    assert groups["a"] == pytest.approx(pairs.loc["b", "a"], abs=1e-9)
    assert groups["b"] == pytest.approx(pairs.loc["a", "b"], abs=1e-9)


# --- H13: too few rows, singular features --------------------------------------------------------


def minimum_norm(x, y):
    """The oracle: [d_t, p] weights of least norm among the least-squares solutions."""
    return np.linalg.lstsq(x - x.mean(axis=0), y - y.mean(axis=0))[0].T


def test_h13_fifty_rows_and_768_dimensions(rng):
    x, y = rng.normal(size=(50, 768)) + 2, rng.normal(size=(50, 16))
    moments = moments_of(x, y)
    with pytest.warns(UserWarning, match=r"50.*768"):
        fitted = lmd.fit(moments, "y", ["x"], alpha=0)
    np.testing.assert_allclose(fitted.weights["x"], minimum_norm(x, y), atol=1e-8)
    np.testing.assert_allclose(
        fitted.bias, y.mean(axis=0) - minimum_norm(x, y) @ x.mean(axis=0), atol=1e-8
    )
    assert (fitted.n, fitted.p, fitted.rank) == (50, 768, 49)
    assert fitted.score(moments) == pytest.approx(1, abs=1e-9), "in-sample R² shows nothing here"
    others = moments_of(rng.normal(size=(50, 768)) + 2, rng.normal(size=(50, 16)))
    assert fitted.score(others) < 0.2


@pytest.mark.parametrize("scale", [1.0, 100.0])
def test_h13_duplicate_and_constant_columns(rng, scale):
    """S5 too: one dimension may be 100 times as large as the others."""
    a = rng.normal(size=(500, 12))
    a[:, 3] *= scale
    x = np.column_stack([a, a[:, :5], np.full(500, 7.0), np.zeros(500), a[:, 0] + a[:, 1]])
    y = a @ rng.normal(size=(12, 4)) + rng.normal(size=(500, 4))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fitted = lmd.fit(moments_of(x, y), "y", ["x"], alpha=0)
    np.testing.assert_allclose(fitted.weights["x"], minimum_norm(x, y), atol=1e-8)
    assert (fitted.n, fitted.p, fitted.rank) == (500, 20, 12)
    expected = r2_score(y, fitted.predict({"x": x}), multioutput="variance_weighted")
    assert fitted.score(moments_of(x, y)) == pytest.approx(expected, abs=1e-9)


@pytest.fixture(scope="module")
def by_dimension():
    """The function of 03_decomposition."""
    cells = json.loads((ROOT / "notebooks" / "03_decomposition.ipynb").read_text())["cells"]
    names = {"np": np, "pd": pd, "lmd": lmd}
    exec("".join(next(c for c in cells if c["id"] == "dimensions")["source"]), names)
    return names["by_dimension"]


@pytest.mark.parametrize("scale", [1.0, 100.0])
def test_s5_r2_of_each_dimension_is_that_of_its_own_residuals(by_dimension, rng, scale):
    """Dimension 2 is noise: times 100, it takes the pooled R² with it, and no other's own."""
    x, new_x = rng.normal(size=(400, 6)) + 1, rng.normal(size=(90, 6)) + 1
    mixing = rng.normal(size=(6, 4)) * [1, 1, 0, 1]
    y, new_y = (a @ mixing + 0.3 * rng.normal(size=(len(a), 4)) - 2 for a in (x, new_x))
    y[:, 2], new_y[:, 2] = scale * y[:, 2], scale * new_y[:, 2]
    fitted, scored = lmd.fit(moments_of(x, y), "y", ["x"], alpha=0), moments_of(new_x, new_y)
    found = by_dimension(fitted, scored)
    predicted = LinearRegression().fit(x, y).predict(new_x)
    np.testing.assert_allclose(found["r2"], r2_score(new_y, predicted, multioutput="raw_values"))
    np.testing.assert_allclose(found["variance"], new_y.var(axis=0))
    pooled = 1 - found["error"].sum() / found["variance"].sum()
    assert pooled == pytest.approx(fitted.score(scored), abs=1e-12)
    assert found["r2"].drop(2).min() > 0.8 and abs(found["r2"][2]) < 0.2
    if scale == 1:
        assert pooled > 0.8 and found["r2"].mean() > 0.6
    else:
        assert pooled < 0.1 and found["r2"].mean() > 0.6


def test_s5_a_dimension_that_does_not_vary_has_no_r2(by_dimension, rng):
    x = rng.normal(size=(100, 3))
    y = np.column_stack([x[:, 0], np.full(100, 7.0), x[:, 1]])
    found = by_dimension(lmd.fit(moments_of(x, y), "y", ["x"]), moments_of(x, y))
    assert found["r2"].isna().tolist() == [False, True, False]
    assert found["r2"].mean() == pytest.approx(1, abs=1e-5)


def test_h13_a_ridge_needs_no_full_rank(rng):
    x = rng.normal(size=(50, 80))
    y = rng.normal(size=(50, 3))
    centred_x, centred_y = x - x.mean(axis=0), y - y.mean(axis=0)
    gram = centred_x.T @ centred_x / 49 + 1e-3 * np.eye(80)
    expected = np.linalg.solve(gram, centred_x.T @ centred_y / 49).T
    with pytest.warns(UserWarning, match=r"50.*80"):
        fitted = lmd.fit(moments_of(x, y), "y", ["x"], alpha=1e-3)
    np.testing.assert_allclose(fitted.weights["x"], expected, atol=1e-9)
    assert fitted.rank == 49


def test_h13_all_scores_warn_too(rng):
    moments = lmd.Moments.from_arrays(make(rng, 12))
    with pytest.warns(UserWarning, match=r"12.*1[5-6]"):
        lmd.group_scores(moments, moments)
    wide = moments_of(rng.normal(size=(12, 30)), rng.normal(size=(12, 2)))
    with pytest.warns(UserWarning, match=r"12.*30"):
        lmd.pair_scores(wide, wide)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lmd.pair_scores(moments, moments)


def test_h13_a_constant_basis_explains_nothing(rng):
    y = rng.normal(size=(40, 3))
    moments = moments_of(np.full((40, 2), 5.0), y)
    for alpha in (0.0, 1e-6):
        fitted = lmd.fit(moments, "y", ["x"], alpha=alpha)
        np.testing.assert_array_equal(fitted.weights["x"], np.zeros((3, 2)))
        np.testing.assert_allclose(fitted.bias, y.mean(axis=0), rtol=1e-12)
        assert fitted.score(moments) == pytest.approx(0, abs=1e-12)
        assert fitted.rank == 0


# --- adjusted R² ---------------------------------------------------------------------------------


def test_adjusted_r2_by_hand():
    assert lmd.adjusted_r2(0.9, 101, 10) == pytest.approx(1 - 0.1 * 100 / 90, abs=1e-15)
    assert lmd.adjusted_r2(0.5, 21, 10) == pytest.approx(0.0, abs=1e-15)
    assert lmd.adjusted_r2(0.0, 12, 10) == pytest.approx(-10.0, abs=1e-12)
    assert lmd.adjusted_r2(1.0, 12, 10) == 1.0
    np.testing.assert_allclose(lmd.adjusted_r2(np.array([0.9, 0.5]), 101, 10), [8 / 9, 4 / 9])


@pytest.mark.parametrize("n", [11, 10, 5])
def test_adjusted_r2_without_degrees_of_freedom_is_not_a_number(n):
    assert np.isnan(lmd.adjusted_r2(0.9, n, 10))
    assert np.isnan(lmd.adjusted_r2(np.array([0.9, 1.0]), n, 10)).all()


def test_adjusted_r2_takes_the_credit_of_noise_back(rng):
    """Targets that have nothing to do with the basis: train R² near p / n, adjusted near 0."""
    scores = []
    for _ in range(20):
        moments = moments_of(rng.normal(size=(200, 50)), rng.normal(size=(200, 30)))
        scores.append(lmd.fit(moments, "y", ["x"], alpha=0).score(moments))
    assert np.mean(scores) == pytest.approx(50 / 199, abs=0.01)
    assert np.mean(lmd.adjusted_r2(np.array(scores), 200, 50)) == pytest.approx(0, abs=0.01)


# --- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize("basis", [["a"], ["b", "a"], [], ["b", "b"]])
def test_a_basis_that_makes_no_sense_is_refused(train, basis):
    with pytest.raises(ValueError, match="basis"):
        lmd.fit(train, "a", basis)


@pytest.mark.parametrize("target, basis", [("zebra", ["b"]), ("a", ["b", "zebra"])])
def test_an_unknown_model_is_named(train, target, basis):
    with pytest.raises(KeyError, match="zebra"):
        lmd.fit(train, target, basis)


@pytest.mark.parametrize("alpha", [-1e-6, float("nan"), float("inf")])
def test_an_alpha_below_zero_or_not_finite_is_refused(train, alpha):
    for call in (
        lambda: lmd.fit(train, "a", ["b"], alpha=alpha),
        lambda: lmd.pair_scores(train, train, alpha=alpha),
        lambda: lmd.group_scores(train, train, alpha=alpha),
    ):
        with pytest.raises(ValueError, match="alpha"):
            call()


def test_a_target_that_does_not_vary_has_no_r2(rng):
    arrays = {"x": rng.normal(size=(40, 2)), "flat": np.full((40, 3), 0.1)}
    moments = lmd.Moments.from_arrays(arrays, block_size=7)
    for call in (
        lambda: lmd.fit(moments, "flat", ["x"]).score(moments),
        lambda: lmd.pair_scores(moments, moments),
        lambda: lmd.group_scores(moments, moments),
    ):
        with pytest.raises(ValueError, match="flat"):
            call()


def test_one_row_is_no_fit(train_arrays):
    one = lmd.Moments.from_arrays({name: array[:1] for name, array in train_arrays.items()})
    many = lmd.Moments.from_arrays(train_arrays)
    for call in (
        lambda: lmd.fit(one, "a", ["b"]),
        lambda: lmd.pair_scores(one, many),
        lambda: lmd.group_scores(one, many),
    ):
        with pytest.warns(UserWarning), pytest.raises(ValueError, match=r"two rows, not 1\b"):
            call()


def test_one_model_has_no_group(train_arrays):
    moments = lmd.Moments.from_arrays({"a": train_arrays["a"]})
    with pytest.raises(ValueError, match="a"):
        lmd.group_scores(moments, moments)


def test_rows_to_score_must_have_the_models_of_the_fit(train_arrays, train):
    fitted = lmd.fit(train, "a", ["b"])
    without = lmd.Moments.from_arrays({name: train_arrays[name] for name in "acd"})
    with pytest.raises(KeyError, match="'b'"):
        fitted.score(without)
    narrower = lmd.Moments.from_arrays(train_arrays | {"b": train_arrays["b"][:, :6]})
    with pytest.raises(ValueError, match="b"):
        fitted.score(narrower)
    for scores in (lmd.pair_scores, lmd.group_scores):
        with pytest.raises((KeyError, ValueError), match="b"):
            scores(train, without)
        with pytest.raises(ValueError, match="b"):
            scores(train, narrower)


def test_dimensions_that_only_add_up_are_not_the_same_models(train_arrays, train):
    """a and b swap a dimension: the total is the same, the models are not."""
    fitted = lmd.fit(train, "a", ["b"])
    swapped = lmd.Moments.from_arrays(
        train_arrays | {"a": train_arrays["b"][:, :5], "b": train_arrays["b"][:, :6]}
    )
    with pytest.raises(ValueError, match="a"):
        fitted.score(swapped)


def test_scores_follow_names_not_positions(train_arrays, train, test_arrays, test):
    """Held-out moments may hold the models in another order, or more of them."""
    turned = lmd.Moments.from_arrays({name: test_arrays[name] for name in "dbca"})
    for scores in (lmd.pair_scores, lmd.group_scores):
        expected = scores(train, test)
        np.testing.assert_allclose(
            scores(train, turned).to_numpy(), expected.to_numpy(), atol=1e-12
        )
    assert lmd.fit(train, "a", ["b", "c"]).score(turned) == pytest.approx(
        lmd.fit(train, "a", ["b", "c"]).score(test), abs=1e-12
    )


def test_predict_needs_every_basis_model(train_arrays, train):
    fitted = lmd.fit(train, "a", ["b", "c"])
    with pytest.raises(KeyError, match="c"):
        fitted.predict({"b": train_arrays["b"]})
    with pytest.raises(ValueError):
        fitted.predict({"b": train_arrays["b"], "c": train_arrays["c"][:, :2]})


def test_predictions_leave_residuals_without_mean_or_correlation(train_arrays, train):
    """The normal equations, on the rows of the fit (alpha = 0)."""
    fitted = lmd.fit(train, "a", ["b", "c"], alpha=0)
    residual = train_arrays["a"] - fitted.predict(train_arrays)
    x = joined(train_arrays, "bc")
    np.testing.assert_allclose(residual.mean(axis=0), 0, atol=1e-10)
    np.testing.assert_allclose((x - x.mean(axis=0)).T @ residual, 0, atol=1e-7)


def truncated_ridge(x, y, alpha, rank):
    """The oracle: ridge weights [d_t, p] by SVD, with the singular values beyond `rank` taken as 0."""
    u, s, v = np.linalg.svd(x - x.mean(axis=0), full_matrices=False)
    u, s, v = u[:, :rank], s[:rank], v[:rank]
    return ((y - y.mean(axis=0)).T @ u) @ np.diag(s / (s**2 + alpha * (len(x) - 1))) @ v


@pytest.mark.filterwarnings("ignore:n = ")
@pytest.mark.parametrize("scale", [1.0, 1e2, 1e4, 1e6])
@pytest.mark.parametrize("kind", ["few rows", "duplicate columns"])
def test_h13_an_alpha_that_is_lost_in_rounding(rng, scale, kind):
    """Large hidden states: alpha nears the rounding of C, which is singular without it.

    Where C has no variance, its rounding eps trace(C) stands against alpha; once alpha is lost
    in it, such directions take no part and nothing is amplified.
    """
    x, y = scale * rng.normal(size=(100, 80)), rng.normal(size=(100, 3))
    rows, rank = slice(0, 40), 39
    if kind == "duplicate columns":
        x, rows, rank = np.hstack([x[:, :6], x[:, :6]]), slice(0, 60), 6
    others = slice(rows.stop, 100)
    train, test = moments_of(x[rows], y[rows]), moments_of(x[others], y[others])
    expected = truncated_ridge(x[rows], y[rows], 1e-6, rank)
    rounding = np.finfo(float).eps * x[rows].var(axis=0, ddof=1).sum()
    tolerance = max(rounding / 1e-6 if 1e-6 > x.shape[1] * rounding else 0, 1e-9)
    fitted = lmd.fit(train, "y", ["x"], alpha=1e-6)
    np.testing.assert_allclose(scale * fitted.weights["x"], scale * expected, atol=tolerance)
    assert fitted.rank == rank
    for moments, part in ((train, rows), (test, others)):
        predicted = (x[part] - x[rows].mean(axis=0)) @ expected.T + y[rows].mean(axis=0)
        r2 = r2_score(y[part], predicted, multioutput="variance_weighted")
        pairs, groups = lmd.pair_scores(train, moments), lmd.group_scores(train, moments)
        for found in (fitted.score(moments), pairs.loc["x", "y"], groups["y"]):
            assert found == pytest.approx(r2, abs=tolerance)


def test_scores_do_not_depend_on_where_the_rows_were_cut_or_kept(
    train_arrays, test_arrays, tmp_path
):
    """Blocks, merged parts, a saved file and a selection of the models: the same moments."""
    whole, test = (lmd.Moments.from_arrays(arrays) for arrays in (train_arrays, test_arrays))
    halves = [{k: a[s] for k, a in train_arrays.items()} for s in (slice(150), slice(150, None))]
    merged = lmd.Moments.from_arrays(halves[0]).merge(lmd.Moments.from_arrays(halves[1], 7))
    merged.save(tmp_path / "moments")
    for other in (merged, lmd.Moments.load(tmp_path / "moments")):
        for scores in (lmd.pair_scores, lmd.group_scores):
            np.testing.assert_allclose(
                scores(other, test).to_numpy(), scores(whole, test).to_numpy(), atol=1e-12
            )
    turned = whole.select(list("dbac"))
    np.testing.assert_allclose(turned.cov, turned.cov.T, rtol=1e-12)
    np.testing.assert_allclose(
        lmd.group_scores(turned, test)[list("abcd")], lmd.group_scores(whole, test), atol=1e-12
    )


def test_group_scores_of_models_of_very_different_sizes(rng):
    """One dimension beside forty; held-out rows in fewer dimensions than they have."""
    arrays = make(rng, 300, {"one": 1, "wide": 40, "two": 2})
    train = lmd.Moments.from_arrays({k: a[:270] for k, a in arrays.items()})
    test = lmd.Moments.from_arrays({k: a[270:] for k, a in arrays.items()})
    groups = lmd.group_scores(train, test)
    for target in arrays:
        others = [name for name in arrays if name != target]
        one = lmd.fit(train, target, others)
        x, y = joined(arrays, others)[270:], arrays[target][270:]
        predicted = x @ weights_of(one).T + one.bias
        expected = r2_score(y, predicted, multioutput="variance_weighted")
        assert groups[target] == pytest.approx(expected, abs=1e-9)
