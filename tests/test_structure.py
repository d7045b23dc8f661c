"""06_structure: shares of R², weights of growing freedom, other measures, kept layers, against other routes."""

import json
from itertools import combinations
from types import SimpleNamespace

import numpy as np
import pytest

import lmd_utils as lmd

NOTEBOOK = lmd.ROOT / "notebooks" / "06_structure.ipynb"
SPLITS = {"train": 60, "validation": 40, "test": 50}
DIMS = {"a": 2, "b": 3, "c": 1, "d": 3}
ALPHA = 1e-3


@pytest.fixture(scope="module")
def notebook():
    """The functions of the notebook, on made-up models of different widths."""
    import matplotlib

    matplotlib.use("agg")
    space = {}
    for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]:
        if "helper" in cell["metadata"].get("tags", []):
            exec(compile("".join(cell["source"]), cell["id"], "exec"), space)  # our own notebook
    rng = np.random.default_rng(0)
    common = {s: rng.normal(size=(n, 3)) for s, n in SPLITS.items()}
    maps = {name: rng.normal(size=(3, d)) for name, d in DIMS.items()}
    shift = {"train": 0.0, "validation": 0.1, "test": 0.3}
    space["rows"] = {
        s: {k: z @ maps[k] + rng.normal(size=(len(z), d)) + shift[s] for k, d in DIMS.items()}
        for s, z in common.items()
    }
    space["moments"] = {s: lmd.Moments.from_arrays(rows) for s, rows in space["rows"].items()}
    space["alpha"] = ALPHA
    yield space
    space["plt"].rcdefaults()


def direct(rows, target, basis, split):
    """R² by ridge regression on the rows themselves."""
    x, y = (np.hstack([rows["train"][k] for k in names]) for names in (basis, [target]))
    centred = x - x.mean(axis=0)
    penalty = ALPHA * (len(x) - 1) * np.eye(x.shape[1])
    weights = np.linalg.solve(centred.T @ centred + penalty, centred.T @ (y - y.mean(axis=0)))
    new_x, new_y = (np.hstack([rows[split][k] for k in names]) for names in (basis, [target]))
    missed = new_y - y.mean(axis=0) - (new_x - x.mean(axis=0)) @ weights
    return 1 - (missed**2).sum() / ((new_y - new_y.mean(axis=0)) ** 2).sum()


def test_every_subset_is_scored_as_a_fit_on_its_own_rows(notebook):
    names, rows = list(DIMS), notebook["rows"]
    r2 = notebook["all_subsets"](notebook["moments"], names)
    assert r2.shape == (3, 4, 16) and np.isfinite(r2).sum() == 3 * 4 * 8
    for i, split in enumerate(SPLITS):
        for t, target in enumerate(names):
            others = [j for j in range(4) if j != t]
            for k in range(4):
                for chosen in combinations(others, k):
                    found = r2[i, t, sum(1 << j for j in chosen)]
                    if chosen:
                        expected = direct(rows, target, [names[j] for j in chosen], split)
                    else:
                        y, mean = rows[split][target], rows["train"][target].mean(axis=0)
                        expected = 1 - ((y - mean) ** 2).sum() / ((y - y.mean(axis=0)) ** 2).sum()
                    np.testing.assert_allclose(found, expected, atol=1e-10)
    assert np.isnan(r2[:, 0, 1]).all(), "a target in its own basis has a score"


def test_shapley_shares_of_the_glove_game(notebook):
    """One left glove and two right ones, worth 1 as a pair: 2/3, 1/6, 1/6 (Shapley 1953)."""
    value = np.full(16, np.nan)
    for number in range(0, 16, 2):  # bit 0 is the target
        left, right = number & 2, number & 12
        value[number] = bool(left and right)
    shares = notebook["shapley"](value, 0, 4)
    np.testing.assert_allclose(shares[1:], [2 / 3, 1 / 6, 1 / 6], atol=1e-15)
    assert np.isnan(shares[0])


def test_two_models_share_as_their_only_fit_does(notebook):
    r2 = notebook["all_subsets"](notebook["moments"], ["a", "b"])
    shares = notebook["shapley"](r2[:, 0], 0, 2)
    np.testing.assert_allclose(shares[:, 1], r2[:, 0, 2] - r2[:, 0, 0], atol=1e-15)


def test_directions_add_up_to_pooled_r2(notebook):
    moments = notebook["moments"]
    found = notebook["by_direction"]("b", ["a", "d"])
    score = lmd.fit(moments["train"], "b", ["a", "d"], ALPHA).score(moments["test"])
    np.testing.assert_allclose(found["pooled"], score, atol=1e-12)
    np.testing.assert_allclose(found["axes"] @ found["axis_share"], score, atol=1e-12)
    variance = np.diag(moments["test"].cov_block(["b"], ["b"]))
    weighted = found["dimensions"] @ variance / variance.sum()
    np.testing.assert_allclose(weighted, score, atol=1e-12)


def test_steps_of_the_ladder_find_what_was_planted(notebook):
    rng = np.random.default_rng(1)
    x = rng.normal(size=(200, 8)) * np.arange(1, 9) + 5.0
    turn = np.linalg.qr(rng.normal(size=(8, 8)))[0]
    planted = {
        "scalar": -0.5 * x,
        "diagonal": x * rng.uniform(0.1, 3, 8),
        "rotation": x @ turn,
        "and scale": 4 * x @ turn,
        "rank 2": x @ rng.normal(size=(8, 2)) @ rng.normal(size=(2, 8)),
        "full": x @ rng.normal(size=(8, 8)),
    }
    wider = {"identity": {"scalar", "diagonal", "rotation", "and scale", "full"}}
    for step, y in planted.items():
        data = {"x": x, "y": y + 7.0}
        space = notebook["ladder_weights"].__globals__
        kept = space["moments"]
        space["moments"] = {"train": lmd.Moments.from_arrays(data)}
        space["moments"]["test"] = lmd.Moments.from_arrays({k: v[:90] for k, v in data.items()})
        try:
            weights = notebook["ladder_weights"]("x", "y")
            pieces = notebook["pieces"]("x", "y", "test")
            r2 = {k: notebook["ladder_r2"](W, *pieces) for k, W in weights.items()}
            raw = x[:90] @ weights["rank 1"].T
            bias = data["y"].mean(axis=0) - x.mean(axis=0) @ weights["rank 1"].T
            missed = ((data["y"][:90] - raw - bias) ** 2).sum()
            spread = ((data["y"][:90] - data["y"][:90].mean(axis=0)) ** 2).sum()
        finally:
            space["moments"] = kept
        np.testing.assert_allclose(r2["rank 1"], 1 - missed / spread, atol=1e-10)
        exact = {k for k, value in r2.items() if value > 1 - 1e-4}
        assert step in exact and "full" in exact and "identity" not in exact
        assert "rank 1" not in exact and ("rank 2" in exact) == (step == "rank 2")
        if step in ("diagonal", "rank 2", "full"):
            assert not exact & {"scalar", "rotation", "and scale"}
        assert not exact & wider.get(step, set())


def test_debiased_cka_is_that_of_gram_matrices_and_zero_for_independent_rows(notebook):
    """Case S4: 32 rows of 40 dimensions, where the plain estimate is far from zero."""
    rng, values = np.random.default_rng(2), []
    for _ in range(100):
        x, y = rng.normal(size=(32, 40)) + 3.0, rng.normal(size=(32, 40))
        views = [notebook["view"](m) for m in (x, y)]
        values.append(notebook["MEASURES"]["CKA"](*views))
        hsic, (k, m) = notebook["hsic_of_grams"], (rows @ rows.T for rows in (x, y))
        expected = hsic(k, m) / np.sqrt(hsic(k, k) * hsic(m, m))
        np.testing.assert_allclose(values[-1], expected, atol=1e-10)
    k, m = (v.X @ v.X.T for v in views)
    assert (k * m).sum() / np.linalg.norm(k) / np.linalg.norm(m) > 0.4
    assert abs(np.mean(values)) < 3 * np.std(values) / 10


def test_canonical_correlations_worked_by_hand(notebook):
    """Centred columns e1, e2, e3 at right angles; X spans e1 and e2, Y spans e1 and e3."""
    e1, e2, e3 = np.array([[1, 1, -1, -1], [1, -1, 1, -1], [1, -1, -1, 1]]) / 2
    x, y = (notebook["view"](np.column_stack([a * e1, e])) for a, e in ((20, e2), (3, e3)))
    measures = notebook["MEASURES"]
    np.testing.assert_allclose(measures["CCA"](x, y), 0.5, atol=1e-12)  # 1 and 0
    # Y has 3 on the shared direction and 1 on the other; X has 20 and 1
    np.testing.assert_allclose(measures["PWCCA"](x, y), 0.75, atol=1e-12)
    np.testing.assert_allclose(measures["PWCCA"](y, x), 20 / 21, atol=1e-12)
    # 99 % of the variance of X lie on e1 alone, and 9/10 of that of Y
    np.testing.assert_allclose(measures["SVCCA"](x, y), 1, atol=1e-12)
    assert (x.leading.shape, y.leading.shape) == ((4, 1), (4, 2))


def test_procrustes_knows_a_turned_shape_and_agrees_with_scipy(notebook):
    rng = np.random.default_rng(3)
    x, turn = rng.normal(size=(50, 6)), np.linalg.qr(rng.normal(size=(6, 6)))[0]
    y = rng.normal(size=(50, 6)) + x
    views = [notebook["view"](m) for m in (x, 3 * x @ turn + 1, y)]
    np.testing.assert_allclose(notebook["procrustes"](*views[:2]), 1, atol=1e-12)
    ours, scipys = notebook["procrustes"](views[0], views[2]), notebook["procrustes_of_scipy"](x, y)
    np.testing.assert_allclose(scipys, ours, atol=1e-10)


def test_kept_layers_belong_to_one_record_and_a_damaged_file_is_made_again(notebook, tmp_path):
    path, vectors = tmp_path / "T064" / "m.layers.safetensors", np.ones((2, 3, 4), np.float32)
    assert notebook["kept"](path, {"a": 1}) is None
    notebook["keep"](path, {"a": 1}, vectors)
    np.testing.assert_array_equal(notebook["kept"](path, {"a": 1}), vectors)
    assert notebook["kept"](path, {"a": 2}) is None
    path.write_bytes(path.read_bytes()[:-8])
    assert notebook["kept"](path, {"a": 1}) is None
    path.write_bytes(b"")
    assert notebook["kept"](path, {"a": 1}) is None
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_a_token_becomes_its_copy_and_special_ones_stay(notebook):
    mark = notebook["MARK"]
    vocabulary = {"[CLS]": 0, "the": 1, "cat": 2, mark + "the": 3, mark + "cat": 4}
    table = notebook["copies"](SimpleNamespace(get_vocab=lambda: vocabulary))
    assert table[[0, 1, 2, 1]].tolist() == [0, 3, 4, 3]
