"""How sure a score is: sums per document, and the intervals from them."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import lmd_utils as lmd

WEIGHTS = np.random.default_rng(1).normal(size=(4, 6))


def planted(rng, m, effect=1.0, rows=30):
    """Labels and rows of m documents: all rows of a document share random effects, errors too."""
    n = np.maximum(1, rows * np.exp(0.7 * rng.normal(size=m))).astype(int)
    at = np.repeat(np.arange(m), n)
    x = effect * rng.normal(size=(m, 6))[at] + rng.normal(size=(n.sum(), 6))
    e = effect * rng.normal(size=(m, 4))[at] + rng.normal(size=(n.sum(), 4))
    other = x[:, :3] + 0.5 * rng.normal(size=(n.sum(), 3))
    return at.tolist(), {"x": x, "other": other, "y": 0.6 * x @ WEIGHTS.T + 0.7 * e}


@pytest.fixture(scope="module")
def fits():
    """y on x, y on other, x on y: fitted once, on 80 documents of their own."""
    moments = lmd.Moments.from_arrays(planted(np.random.default_rng(0), 80)[1])
    return [lmd.fit(moments, *pair) for pair in (("y", "x"), ("y", "other"), ("x", "y"))]


def sums_of(fits, documents, arrays):
    return lmd.DocumentSums(fits, documents).update(documents, arrays)


def plain_r2(fit, arrays, rows):
    """R² of a fit on some rows, from the definition."""
    u = arrays[fit.target][rows]
    error = u - fit.predict({name: array[rows] for name, array in arrays.items()})
    return 1 - (error**2).sum() / ((u - u.mean(axis=0)) ** 2).sum()


def test_by_hand():
    """u_t = 1, 3 | 5, predicted as 1, 2 | 5: SSR = 1 | 0, and SST = 8 about the mean 3."""
    arrays = {"t": np.array([[1.0], [3.0], [5.0]]), "s": np.array([[1.0], [2.0], [5.0]])}
    moments = lmd.Moments.from_arrays(arrays)
    copy = lmd.Decomposition("t", ("s",), 0.0, 3, 1, {"s": np.eye(1)}, np.zeros(1), moments)
    sums = sums_of([copy], ["a", "a", "b"], arrays)
    assert sums.n.tolist() == [2, 1] and sums.errors.tolist() == [[1, 0]]
    np.testing.assert_allclose(sums.r2(), [7 / 8])
    # 1, 3, 1, 3 has SST 4 and SSR 2; 1, 3, 5, 5 has SST 11 about its own mean 3.5, and SSR 1
    np.testing.assert_allclose(sums.r2(np.array([[2, 0], [1, 2]]))[:, 0], [1 / 2, 10 / 11])
    assert np.isnan(sums.intervals()).all(), "two documents give no interval"


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([1, 7, 10**6]))
def test_sums_are_those_of_resampled_rows(fits, seed, block):
    """Whatever the blocks and the order of the rows: R² of rows that are really repeated."""
    rng = np.random.default_rng(seed)
    documents, arrays = planted(rng, 6, rows=4)
    order = rng.permutation(len(documents))
    labels = np.array(documents)[order].tolist()
    sums = lmd.DocumentSums(fits, sorted(set(labels)))
    for start in range(0, len(labels), block):
        part = slice(start, start + block)
        sums.update(labels[part], {k: a[order][part] + 0.0 for k, a in arrays.items()})
    weights = sums.resample(3, seed)
    assert (weights.sum(axis=1) == 6).all()
    for w, scores in zip(weights, sums.r2(weights)):
        rows = [i for i, d in enumerate(documents) for _ in range(int(w[d]))]
        np.testing.assert_allclose(scores, [plain_r2(f, arrays, rows) for f in fits], atol=1e-9)
    np.testing.assert_allclose(
        sums.r2(), [f.score(lmd.Moments.from_arrays(arrays)) for f in fits], atol=1e-9
    )


def interval_by_hand(score, m, drawn):
    """Symmetric bootstrap-t of `score`, a function of a list of documents, leaving one out at a time."""

    def jackknife(documents):
        value = score(documents)
        left = np.array([score(documents[:i] + documents[i + 1 :]) for i in range(m)])
        error = np.sqrt((m - 1) / m * np.sum((left - left.mean()) ** 2))
        return value, m * value - (m - 1) * left.mean(), error

    value, centre, error = jackknife(list(range(m)))
    trials = [jackknife(documents) for documents in drawn]
    reach = error * np.quantile([abs(c - value) / e for _, c, e in trials], 0.95)
    return centre - reach, centre + reach


def test_intervals_are_those_of_documents_really_left_out(fits):
    documents, arrays = planted(np.random.default_rng(3), 12, rows=6)
    sums, rows = sums_of(fits, documents, arrays), np.array(documents)
    (low, high), both = sums.intervals(draws=40, seed=5), sums.compare(0, 1, draws=40, seed=5)
    drawn = [np.repeat(np.arange(12), w.astype(int)).tolist() for w in sums.resample(40, 5)]

    def r2(fit, chosen):
        return plain_r2(fit, arrays, np.concatenate([np.flatnonzero(rows == d) for d in chosen]))

    for fit, a, b in zip(fits, low, high):
        ends = interval_by_hand(lambda chosen, fit=fit: np.log(1 - r2(fit, chosen)), 12, drawn)
        np.testing.assert_allclose((1 - np.exp(ends[1]), 1 - np.exp(ends[0])), (a, b), atol=1e-9)
    of_x, of_other, _ = sums.r2()
    ends = interval_by_hand(lambda chosen: r2(fits[0], chosen) - r2(fits[1], chosen), 12, drawn)
    np.testing.assert_allclose(both["difference"], (of_x - of_other, *ends), atol=1e-9)
    ends = interval_by_hand(
        lambda chosen: np.log((1 - r2(fits[1], chosen)) / (1 - r2(fits[0], chosen))), 12, drawn
    )
    expected = ((1 - of_other) / (1 - of_x), *np.exp(ends))
    np.testing.assert_allclose(both["ratio"], expected, rtol=1e-9)


@pytest.mark.parametrize("m", [9, 40])
def test_coverage_of_correlated_rows(fits, m):
    """95 % intervals of R², of a difference and of a ratio hold the population's value in 90 to 98 of 100 samples."""
    rng, repetitions = np.random.default_rng(7), 300
    population = sums_of(fits, *planted(rng, 20_000))
    truth = population.r2()
    hits = np.zeros(5)
    for seed in range(repetitions):
        sums = sums_of(fits, *planted(rng, m))
        low, high = sums.intervals(draws=500, seed=seed)
        hits[:3] += (low <= truth) & (truth <= high)
        both = sums.compare(0, 1, draws=500, seed=seed)
        hits[3] += both["difference"][1] <= truth[0] - truth[1] <= both["difference"][2]
        hits[4] += both["ratio"][1] <= (1 - truth[1]) / (1 - truth[0]) <= both["ratio"][2]
    coverage = hits / repetitions
    assert (coverage >= 0.90).all() and (coverage <= 0.98).all(), coverage


def test_rows_taken_for_independent_would_be_too_sure(fits):
    """Why documents: with each row a document of its own, the intervals are far too narrow."""
    documents, arrays = planted(np.random.default_rng(11), 12)
    clustered = sums_of(fits, documents, arrays).intervals(draws=300)
    rows = sums_of(fits, range(len(documents)), arrays).intervals(draws=300)
    assert (clustered[1] - clustered[0] > 1.5 * (rows[1] - rows[0])).all()


def test_a_perfect_fit_and_equal_fits_have_no_width(fits):
    documents, arrays = planted(np.random.default_rng(2), 6)
    moments = lmd.Moments.from_arrays({"a": arrays["x"], "b": arrays["x"]})
    exact = lmd.Decomposition("a", ("b",), 0.0, 9, 6, {"b": np.eye(6)}, np.zeros(6), moments)
    sums = sums_of([exact, exact], documents, {"a": arrays["x"], "b": arrays["x"]})
    assert np.array(sums.intervals(draws=50)).tolist() == [[1, 1], [1, 1]]
    assert sums.compare(0, 1, draws=50)["difference"] == (0, 0, 0)
    own = sums_of([fits[0], fits[0]], documents, arrays).compare(0, 1, draws=50)
    assert own == {"difference": (0, 0, 0), "ratio": (1, 1, 1)}


def test_what_is_refused(fits):
    documents, arrays = planted(np.random.default_rng(2), 6)
    sums = sums_of(fits, documents, arrays)
    with pytest.raises(KeyError, match="document 'z' was not named at the start"):
        sums.update(["z"], {name: rows[:1] for name, rows in arrays.items()})
    with pytest.raises(ValueError, match="model 'x' has 2 rows, not 1"):
        sums.update(documents[:1], {name: rows[:2] for name, rows in arrays.items()})
    with pytest.raises(ValueError, match="'y' and 'x': only fits of one target compare"):
        sums.compare(0, 2)
    few = sums_of(fits, *planted(np.random.default_rng(2), 4))
    assert np.isnan(few.intervals(draws=50)).all()
    assert all(np.isnan(ends[1:]).all() for ends in few.compare(0, 1, draws=50).values())
