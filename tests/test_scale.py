"""Every pair and group R² of twelve models equals a direct solve of its own fit, to 1e-6.

The default size takes seconds. The size of the paper's models (twelve of 768 dimensions, 20,000
texts; about 20 minutes of two cores, 6 GB):

    LMD_SCALE_DIM=768 LMD_SCALE_N=20000 python -m pytest tests/test_scale.py
"""

import os

import numpy as np
import pytest

import lmd_utils as lmd

DIM = int(os.environ.get("LMD_SCALE_DIM", "48"))
N = int(os.environ.get("LMD_SCALE_N", "2000"))
ALPHA = 1.0e-6
NAMES = [f"m{k:02d}" for k in range(12)]
LATENT = 2 * DIM


def blocks(n, seed):
    """Rows of twelve correlated models, {name: float32 [b, DIM]}, a thousand at a time.

    Each model's spectrum falls over three decades and its mean is far from zero, so that its
    covariance has eigenvalues from 1 down to the size of alpha.
    """
    fixed, rng = np.random.default_rng(7), np.random.default_rng(seed)
    decay = np.geomspace(1, 1e-3, DIM)
    maps = []
    for _ in NAMES:
        mixing = fixed.normal(size=(LATENT, DIM)) / np.sqrt(LATENT)
        turn, _ = np.linalg.qr(fixed.normal(size=(DIM, DIM)))
        maps.append(((mixing * decay) @ turn, decay[:, None] * turn, fixed.normal(size=DIM)))
    for start in range(0, n, 1000):
        size = min(1000, n - start)
        latent = rng.normal(size=(size, LATENT))
        yield {
            name: (latent @ signal + 0.5 * rng.normal(size=(size, DIM)) @ own + mean).astype(
                np.float32
            )
            for name, (signal, own, mean) in zip(NAMES, maps, strict=True)
        }


def rows(n, seed):
    x = np.empty((n, len(NAMES) * DIM), np.float32)
    for i, block in enumerate(blocks(n, seed)):
        x[1000 * i : 1000 * i + 1000] = np.concatenate([block[name] for name in NAMES], axis=1)
    return x


def columns(k):
    return np.arange(k * DIM, (k + 1) * DIM)


def direct_r2(train, cov, mean, basis, target, splits):
    """One fit by numpy.linalg.solve, scored from its residuals on the rows themselves."""
    gram = cov[np.ix_(basis, basis)]
    gram.flat[:: len(gram) + 1] += ALPHA
    weights = np.linalg.solve(gram, cov[np.ix_(basis, target)])
    del gram
    bias = mean[target] - mean[basis] @ weights
    scores = {}
    for split, x in splits.items():
        residual_sum = 0.0
        for start in range(0, len(x), 2000):
            part = x[start : start + 2000]
            residual = part[:, target] - part[:, basis].astype(np.float64) @ weights - bias
            residual_sum += np.vdot(residual, residual)
        y = x[:, target].astype(np.float64)
        scores[split] = 1 - residual_sum / ((y - y.mean(axis=0)) ** 2).sum()
    return scores


@pytest.fixture(scope="module")
def splits():
    return {"train": rows(N, seed=0), "test": rows(max(N // 4, 100), seed=1)}


@pytest.fixture(scope="module")
def moments(splits):
    return {
        split: lmd.Moments.from_arrays(
            {name: x[:, columns(k)] for k, name in enumerate(NAMES)}, 2000
        )
        for split, x in splits.items()
    }


@pytest.fixture(scope="module")
def covariance(splits):
    """float64 covariance and mean of the train rows, by numpy alone."""
    x = splits["train"].astype(np.float64)
    mean = x.mean(axis=0)
    x -= mean
    return x.T @ x / (len(x) - 1), mean


def test_the_models_are_ill_conditioned(covariance):
    values = np.linalg.eigvalsh(covariance[0][:DIM, :DIM])
    assert values[-1] / values[0] > 1e5
    assert values[0] < 100 * ALPHA


def test_every_group_r2_equals_a_direct_solve(splits, moments, covariance):
    found = lmd.group_scores(moments["train"], moments, alpha=ALPHA)
    everything = np.arange(len(NAMES) * DIM)
    worst = 0.0
    for k, target in enumerate(NAMES):
        basis = np.setdiff1d(everything, columns(k))
        expected = direct_r2(splits["train"], *covariance, basis, columns(k), splits)
        others = [name for name in NAMES if name != target]
        fitted = lmd.fit(moments["train"], target, others, alpha=ALPHA)
        for split in splits:
            worst = max(worst, abs(found[split][target] - expected[split]))
            worst = max(worst, abs(fitted.score(moments[split]) - expected[split]))
        assert 0.1 < expected["train"] < 0.999
    print(f"groups: largest difference in R² {worst:.1e}")
    assert worst < 1e-6


def test_every_pair_r2_equals_a_direct_solve(splits, moments, covariance):
    found = lmd.pair_scores(moments["train"], moments, alpha=ALPHA)
    worst = 0.0
    for i, basis in enumerate(NAMES):
        for k, target in enumerate(NAMES):
            if i == k:
                continue
            expected = direct_r2(splits["train"], *covariance, columns(i), columns(k), splits)
            for split in splits:
                worst = max(worst, abs(found[split].loc[basis, target] - expected[split]))
            assert 0.01 < expected["train"] < 0.999
    print(f"pairs: largest difference in R² {worst:.1e}")
    assert worst < 1e-6
