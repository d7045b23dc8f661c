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
    frame = pd.concat([frame.assign(run=run) for run in range(3)])
    frame.assign(model="mini").to_csv(folder / "embedding.csv", index=False)
    said = readme_results.bench_block()
    for part in (
        "12 group and 132 pair fits", "in float64: 20 s", "400 s, 20.0 times", "800 s, 40.0 times",
        "1.25 times the floor", "3.1 GiB at n = 20,000 and 3.2 GiB at n = 128,000",
        "mini, same texts and batch size: 30 texts a second, sentence-transformers' `encode` 20",
        "2 cores of Chip, 2026-01-02", "load 0.5 to 0.5",
    ):  # fmt: skip
        assert part in said, part
    assert "bfloat16" not in said

    half = frame[frame["method"] == "lmd.embed"].assign(method=bench.BFLOAT16, texts_per_second=6.0)
    frame = pd.concat([frame, half]).assign(model="mini", bfloat16_units=False)
    frame.to_csv(folder / "embedding.csv", index=False)
    change = [("pair", 1e-4), ("pair", -3e-4), ("group", 0.0)]
    change = pd.DataFrame(change, columns=["kind", "difference"]).assign(models="zoo", T=32)
    change.to_csv(folder / "bfloat16.csv", index=False)
    said = readme_results.bench_block()
    assert '`dtype="bfloat16"`, 0.20 times the float32 rate, on a processor that does not' in said
    assert "2 pair fits of zoo 3.0e-04 at most and 2.0e-04 on average (T = 32)" in said


def test_a_forward_pass_is_two_operations_a_weight_and_token_and_the_products_of_attention():
    """MiniLM: 10.6 million weights in its blocks; one text of 130 tokens, by hand."""
    weights, attention = 6 * 12 * 384**2, 6 * 2 * (2 * 130 * 130 * 384)
    assert weights == 10_616_832
    assert bench.forward(6, 384, 130) == 2 * weights * 130 + attention
    assert [bench.tokens_of(T) for T in (16, 510, 512)] == [18, 512, 512]
    assert bench.tokens_of(16, "longformer") == 512
    assert len(bench.PAPER_BLOCKS) == 12 and sum(bench.PAPER_BLOCKS.values()) == 126


def test_the_paper_is_worked_out_from_the_measured_rates(tmp_path, monkeypatch):
    machine = {"cores": 2, "processor": "Chip", "date": "2026-01-02", "clock": "wall"}
    solver = [
        {"sweep": "size", "run": run, "method": method, "seconds": seconds, "gflops_float64": 100.0}
        for run in range(3)
        for method, seconds in (("ours", 12.0), ("floor", 10.0))
    ]
    solver = pd.DataFrame(solver).assign(**machine)
    memory = pd.DataFrame({"n": [20_000, 128_000], "peak_gib": [3.0, 3.2], "square_gib": 0.64})
    per_text = np.mean([bench.forward(6, 384, T + 2) for T in (16, 32, 64, 128)])
    speed = {
        "model": "all-MiniLM-L6-v2",
        "method": "lmd.embed",
        "texts_per_second": 2e11 / per_text,
    }
    embedding = pd.DataFrame([speed] * 3).assign(**machine)
    table = bench.scale(solver, memory, embedding).set_index("run")
    paper, hundred = table.loc["the paper"], table.loc["a hundred models"]
    assert (paper["D"], hundred["D"], paper["sequences"]) == (9216, 76_800, 153_600)
    assert paper["gflops_float32"] == pytest.approx(200)
    assert paper["embed_hours"] == pytest.approx(paper["embed_pflop"] * 1e15 / 2e11 / 3600)
    assert paper["disk_gb"] == pytest.approx(153_600 * 9216 * 4 * 6 / 1e9)
    fits = 6 * (153_600 * 76_800**2 + 76_800**3)
    assert hundred["fit_hours"] == pytest.approx(1.2 * fits / 1e11 / 3600)
    assert hundred["square_gib"] * 2**30 / 1e9 == pytest.approx(47.2, abs=0.05)
    assert hundred["memory_gib"] == pytest.approx(6 * hundred["square_gib"])
    one = embedding.assign(clock="processor, one thread")
    both = bench.scale(solver.assign(clock="processor, one thread"), memory, one).set_index("run")
    assert both["embed_hours"].tolist() == pytest.approx((table["embed_hours"] / 2).tolist())
    assert both["fit_hours"].tolist() == pytest.approx((table["fit_hours"] / 2).tolist())

    monkeypatch.setattr(readme_results, "ROOT", tmp_path)
    assert "Not measured" in readme_results.scale_block()
    folder = tmp_path / "data" / "results" / "bench"
    folder.mkdir(parents=True)
    table.reset_index().to_csv(folder / "scale.csv", index=False)
    said = readme_results.scale_block()
    for part in (
        "153,600 sequences",
        "| 76,800 |",
        "200 GFLOP/s",
        "1.20 times",
        "34 GB",
        "264 GiB",
    ):
        assert part in said, part
