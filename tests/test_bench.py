"""make bench: what it compares gives the same scores, and README says what its tables say."""

import bench
import numpy as np
import pandas as pd
import pytest
import readme_results

import lmd_utils as lmd


@pytest.fixture(scope="module")
def arrays():
    whole = bench.arrays(4, 16, 660)
    return tuple({k: a[s] for k, a in whole.items()} for s in (slice(600), slice(600, None)))


def test_the_rows_are_those_of_one_stream_and_ill_conditioned(arrays):
    blocks = list(bench.rows(4, 16, 660, block=4096))
    np.testing.assert_array_equal(blocks[0]["m02"][:600], arrays[0]["m02"])
    values = np.linalg.eigvalsh(np.cov(arrays[0]["m00"].astype(float), rowvar=False))
    assert values[-1] / values[0] > 1e4


def test_all_three_ways_have_the_same_scores(arrays):
    scores = bench.ours(*arrays)
    assert len(scores) == 16 and not np.isnan(list(scores.values())).any()
    for way, tolerance in ((bench.ridge, 1e-9), (bench.authors, 1e-2)):
        _, found = bench.sampled(way, *arrays, most=100)
        assert set(found) == set(scores)
        for key, r2 in found.items():
            assert r2 == pytest.approx(scores[key], abs=tolerance), (way, key)


def test_a_sample_of_fits_is_of_both_kinds(arrays):
    _, found = bench.sampled(lambda *_: 0.5, *arrays, most=4)
    assert sorted(basis is None for basis, _ in found) == [False] * 4 + [True]


def test_streamed_embeddings_are_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(lmd, "ROOT", tmp_path)
    (row,) = bench.memory("small", 500)
    assert row["n"] == 500 and row["before_gib"] > 0
    assert list((tmp_path / "build" / "bench").iterdir()) == []


def test_the_readme_says_what_the_tables_say(tmp_path, monkeypatch):
    folder = tmp_path / "data" / "results" / "bench"
    folder.mkdir(parents=True)
    monkeypatch.setattr(readme_results, "ROOT", tmp_path)
    assert "Not measured" in readme_results.bench_block()
    common = {"cores": 2, "processor": "Chip", "date": "2026-01-02", "clock": "wall", "load": 0.5}
    common |= {"torch": "1", "numpy": "2", "scikit_learn": "3"}
    rows = [
        {"sweep": "size", "run": run, "K": 12, "d": 768, "n": 20_000, "held_out": 2_000}
        | {"method": method, "fits": 144, "timed": timed, "seconds": seconds * (run + 1)}
        | {"gflops_float64": 100.0, "r2_difference": 1e-9}
        for run in range(3)
        for method, timed, seconds in (
            ("ours", 144, 10.0), ("authors", 5, 200.0), ("ridge", 5, 400.0), ("floor", 0, 8.0)
        )
    ]  # fmt: skip
    pd.DataFrame(rows).assign(**common).to_csv(folder / "solver.csv", index=False)
    sizes = [
        {"n": n, "peak_gib": p, "square_gib": 0.633} for n, p in ((20_000, 3.1), (128_000, 3.2))
    ]
    pd.DataFrame(sizes).to_csv(folder / "memory.csv", index=False)
    speeds = [("lmd.embed", 30.0), ("sentence-transformers", 20.0)]
    frame = pd.DataFrame(speeds, columns=["method", "texts_per_second"])
    frame.assign(model="mini").to_csv(folder / "embedding.csv", index=False)
    said = readme_results.bench_block()
    for part in (
        "12 group and 132 pair fits", "in float64: 20 s", "400 s, 20.0 times", "800 s, 40.0 times",
        "1.25 times the floor", "3.1 GiB at n = 20,000 and 3.2 GiB at n = 128,000",
        "mini, same texts and batch size: 30 texts a second, sentence-transformers' `encode` 20",
        "2 cores of Chip, 2026-01-02", "load 0.5 to 0.5",
    ):  # fmt: skip
        assert part in said, part
