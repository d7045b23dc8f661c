"""The figures: published table, list, heatmap labels (H20), equal bytes, odd tables, agreement."""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

import lmd_utils as lmd

NOTEBOOK = lmd.ROOT / "notebooks" / "04_figures.ipynb"
TABLE = lmd.ROOT / "data" / "published" / "zhang2022_r2.csv"
LIST = (lmd.ROOT / "figures" / "FIGURES.md").read_text(encoding="utf-8")
PUBLISHED = pd.read_csv(TABLE)
GROUPS = PUBLISHED[PUBLISHED.kind == "group"]
TWELVE = list(GROUPS.target.unique())
AFTER = {f"small-{i:02d}": name for i, name in enumerate(TWELVE[::-1])}  # another order
STALE = ["pairs_T016.pdf", "pairs_T1024.png", "multilingual.png", "compare_scatter.pdf"]
STALE += ["yardstick.pdf", "compare_pairs_by_T.png"]
FOREIGN = ["overview_question.png", "corpus_documents.pdf", "pairs_of_mine.png", "pairs_T016.svg"]
EXECUTE = """
import json, sys
import matplotlib
matplotlib.use("agg")
notebook, parameters = sys.argv[1], json.loads(sys.argv[2])
space = {}
for cell in json.load(open(notebook, encoding="utf-8"))["cells"]:
    if cell["cell_type"] == "code":
        exec(compile("".join(cell["source"]), cell["id"], "exec"), space)
        if "parameters" in cell["metadata"].get("tags", []):
            space.update(parameters)
"""


def cells(path, kind):
    notebook = json.loads(path.read_text(encoding="utf-8"))
    return [c for c in notebook["cells"] if c["cell_type"] == kind]


def source(cell):
    return "".join(cell["source"])


def entries():
    """FIGURES.md as {name: {field: text}}."""
    parts = re.split(r"^## `(.+)`$", LIST, flags=re.M)[1:]
    fields = [dict(re.findall(r"^- ([A-Z][a-z ]+): (.+)$", part, re.M)) for part in parts[1::2]]
    assert len(set(parts[::2])) == len(fields), "a figure is listed twice"
    return dict(zip(parts[::2], fields))


def saved_names(path):
    """Names that a notebook's source gives to save_figure or, in 04_figures, to its `save`.

    A length in braces becomes <T>.
    """
    text = "\n".join(source(cell) for cell in cells(path, "code"))
    helper = (
        "def save(fig, name):\n    lmd.save_figure(fig, profile, name)\n    written.add(name)\n"
    )
    assert (helper in text) == (path == NOTEBOOK)
    text = text.replace(helper, "")
    call = r"(?:\bsave_figure|(?<![.\w])save)\("
    names = re.findall(call + r'[^"]+?, f?"([^"]+)"\)', text)
    calls = re.findall(call, text)
    assert len(names) == len(calls), f"{path.name}: a name that is no literal"
    assert path != NOTEBOOK or "save_figure(" not in text, "a figure that `save` does not know"
    return {re.sub(r"\{T:03d\}", "<T>", name) for name in names}


def write_run(root, profile, models, controls, lengths, missing=0, shift=0.0, after=None):
    """A made-up result in the schema of data/results, all scores under `root`."""
    rng, rows, every = np.random.default_rng(0), [], models + controls

    def score(T, kind, basis, target, p):
        r2 = rng.uniform(0.2, 0.9) + shift
        for split, n in (("train", 3200), ("validation", 400), ("test", 400)):
            adjusted = lmd.adjusted_r2(r2, n, p) if split == "train" else np.nan
            rows.append([T, split, kind, basis, target, n, p, r2, adjusted])

    for T in lengths:
        for target in every:
            others = [m for m in models if m != target]
            for basis in every:
                if basis != target:
                    control = basis in controls or target in controls
                    score(T, "control" if control else "pair", basis, target, 384)
            kind = "control" if target in controls else "group"
            score(T, kind, "+".join(sorted(others)), target, 384 * len(others))
    scores = pd.DataFrame(rows, columns="T split kind basis target n p r2 r2_adjusted".split())
    scores = scores.assign(profile=profile, pooling="mean", alpha=1e-6, ci_low=None, ci_high=None)
    scores.loc[rng.choice(len(scores), missing, replace=False), "r2"] = np.nan
    names = pd.DataFrame([(T, m) for T in lengths for m in every], columns=["T", "name"])
    names["role"] = np.where(names.name.isin(controls), "control", "model")
    names["source"] = names.name.replace({name: models[0] for name in controls})
    names = names if after is None else names.assign(after=names.name.map(after))
    folder = root / "data" / "results" / profile
    folder.mkdir(parents=True, exist_ok=True)
    scores.to_csv(folder / "scores.csv", index=False, float_format="%.9f")
    names.to_csv(folder / "models.csv", index=False)


def small_tree(root):
    """The files that 04_figures needs, and no others."""
    for name in ("lmd_utils.py", "notebooks/lmd.mplstyle", "data/published/zhang2022_r2.csv"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(lmd.ROOT / name, root / name)
    return root


def draw(root, profile, lengths, seed="0"):
    """Run every code cell in a fresh process; returns what it printed."""
    parameters = json.dumps({"profile": profile, "lengths": lengths})
    environment = os.environ | {"PYTHONPATH": str(root), "PYTHONHASHSEED": seed}
    command = [sys.executable, "-W", "error::UserWarning:__main__", "-c", EXECUTE]
    done = subprocess.run(
        [*command, str(NOTEBOOK), parameters], env=environment, cwd=root, text=True,
        capture_output=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stderr == ""
    return done.stdout


def digests(folder):
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.iterdir()}


def expected_names(lengths, without):
    plain = {n for n in saved_names(NOTEBOOK) if "<T>" not in n} - without
    six = sorted(PUBLISHED["T"].unique())
    plain |= {f"pairs_T{T:03d}" for T in lengths} | {f"published_pairs_T{T:03d}" for T in six}
    return {f"{name}.{kind}" for name in plain for kind in ("pdf", "png")}


@pytest.fixture(scope="module")
def thirteen(tmp_path_factory):
    """Twelve models that stand for the published ones, in another order, and a control at two T."""
    root = small_tree(tmp_path_factory.mktemp("thirteen"))
    controls, lengths = ["acme/random-twin"], [16, 512]
    write_run(root, "thirteen", list(AFTER), controls, lengths, missing=20, after=AFTER)
    return root / "figures" / "thirteen", draw(root, "thirteen", [16, 512], seed="1")


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """Two models at one T, one of which stands for a published one, all scores far below zero.

    Drawn in another process. An earlier run of that name and other notebooks have left figures.
    """
    root = small_tree(tmp_path_factory.mktemp("two"))
    (root / "figures" / "two").mkdir(parents=True)
    for name in (*STALE, *FOREIGN):
        (root / "figures" / "two" / name).write_text("old")
    (root / "data" / "results" / "two").mkdir(parents=True)
    (root / "data" / "results" / "two" / "agreement.csv").write_text("old")
    write_run(root, "two", ["org/one", "two"], [], [64], shift=-3, after={"two": "roberta-base"})
    return root / "figures" / "two", draw(root, "two", [64], seed="2")


@pytest.fixture(scope="module")
def helpers():
    """The drawing functions of the notebook, without its figures."""
    import matplotlib

    matplotlib.use("agg")
    space = {}
    for cell in cells(NOTEBOOK, "code"):
        if "helper" in cell["metadata"].get("tags", []):
            exec(compile(source(cell), cell["id"], "exec"), space)  # our own notebook
    yield space
    space["plt"].rcdefaults()


def test_published_table_is_whole():
    assert len(PUBLISHED) == 6 * 3 * (12 * 11 + 12)
    assert not PUBLISHED.duplicated(["T", "split", "kind", "basis", "target"]).any()
    assert PUBLISHED.r2.between(0, 1).all() and PUBLISHED.basis.isna().sum() == 6 * 3 * 12
    assert set(PUBLISHED.basis.dropna()) == set(PUBLISHED.target) == set(TWELVE)


@pytest.mark.parametrize(
    "split, means",
    [
        ("train", [0.7788, 0.8257, 0.8802, 0.9114, 0.9323, 0.9447]),
        ("validation", [0.7445, 0.7999, 0.8602, 0.8942, 0.9149, 0.9306]),
        ("test", [0.7427, 0.7925, 0.8543, 0.8904, 0.9151, 0.9299]),
    ],
)
def test_published_group_means(split, means):
    of_split = GROUPS[GROUPS.split == split].groupby("T").r2.mean()
    np.testing.assert_allclose(of_split, means, atol=6e-5)


def test_what_the_alternative_texts_say_of_the_published_figures():
    test = PUBLISHED[PUBLISHED.split == "test"]
    for T, rows in test[test.kind == "pair"].groupby("T"):
        best = rows.nlargest(2, "r2")
        assert set(best.target) == {"roberta-base", "allenai/longformer-base-4096"}
        if T <= 32:
            assert rows.groupby("target").r2.mean().idxmin() == "xlnet-base-cased"
    wide = GROUPS.pivot(index=["T", "target"], columns="split", values="r2")
    assert (wide.train > wide.test).all()
    multilingual = wide.index.get_level_values("target").str.contains("multilingual|xlm")
    of_kind = wide.test.groupby(["T", multilingual]).mean().unstack()
    assert (of_kind[False] > of_kind[True]).all()


def test_the_list_names_what_the_notebooks_save():
    saved = {p.stem: saved_names(p) for p in sorted((lmd.ROOT / "notebooks").glob("*.ipynb"))}
    listed = entries()
    assert set().union(*saved.values()) == set(listed)
    for name, fields in listed.items():
        notebook = re.match(r"\[(\w+)\]\(\.\./notebooks/\1\.ipynb\)", fields["Notebook"])[1]
        assert name in saved[notebook], f"{name} is not saved by {notebook}"
        for field in ("Data", "Command", "Caption", "Alternative text"):
            assert fields[field].strip(), f"{name}: no {field}"


def test_captions_and_alternative_texts_stand_in_the_notebook():
    prose = "\n".join(source(cell) for cell in cells(NOTEBOOK, "markdown"))
    for name in saved_names(NOTEBOOK):
        fields = entries()[name]
        assert f"**Figure `{name}`.** {fields['Caption']}\n" in prose, name
        assert f"*Alternative text:* {fields['Alternative text']}\n" in prose, name


def test_links_of_the_list_lead_to_files():
    for link in re.findall(r"\]\(([^)#]+)\)", LIST):
        assert (lmd.ROOT / "figures" / link).exists(), link


def test_h20_a_heatmap_of_thirteen_has_all_labels(helpers):
    names = [f"org/model-{i}" for i in range(13)]
    rng = np.random.default_rng(0)
    table = pd.DataFrame(rng.uniform(-0.5, 1, (13, 13)), names, names)
    np.fill_diagonal(values := table.to_numpy(copy=True), np.nan)
    table.iloc[:, :] = values
    table.iloc[2, 5] = np.nan
    fig, ax = helpers["plt"].subplots(figsize=(6.8, 6.4), layout="compressed")
    helpers["draw_heatmap"](ax, table, controls=1)
    fig.draw_without_rendering()
    assert len(ax.texts) == 169
    edge = ax.get_window_extent().width / 13
    for label, ((i, j), value) in zip(ax.texts, np.ndenumerate(values)):
        absent = "–" if i == j else "n/a"
        assert label.get_text() == (absent if np.isnan(table.iloc[i, j]) else f"{value:.3f}")
        assert label.get_position() == (j + 0.5, i + 0.5)
        assert label.get_window_extent().width < edge, "a label wider than its cell"
    assert [t.get_text() for t in ax.get_yticklabels()] == [n.split("/")[1] for n in names]
    assert [t.get_text() for t in ax.get_xticklabels()] == [n.split("/")[1] for n in names]
    helpers["plt"].close(fig)


def test_two_decimals_drop_the_leading_zero_alone(helpers):
    values = [0.5, -0.25, 1.0, -10.05, 0.0, np.nan]
    table = pd.DataFrame([values] * 6)
    table = table.set_axis(list("abcdef")).set_axis(list("abcdef"), axis=1)
    fig, ax = helpers["plt"].subplots()
    helpers["draw_heatmap"](ax, table, digits=2)
    shown = [label.get_text() for label in ax.texts[:6]]
    assert shown == [".50", "-.25", "1.00", "-10.05", ".00", "n/a"]
    helpers["plt"].close(fig)


def test_names_keep_their_organisation_where_the_rest_is_not_unique(helpers):
    assert helpers["short"](["a/x", "b/x", "c/y", "z"]) == ["a/x", "b/x", "y", "z"]


def test_h20_two_processes_give_equal_bytes(thirteen, two):
    published = [
        {name: digest for name, digest in digests(folder).items() if name.startswith("published")}
        for folder, _ in (thirteen, two)
    ]
    assert len(published[0]) >= 20 and published[0] == published[1]


def test_h20_a_figure_drawn_twice_has_equal_bytes(helpers, thirteen):
    folder, _ = thirteen
    scores = pd.read_csv(folder.parents[1] / "data" / "results" / "thirteen" / "scores.csv")
    source = SimpleNamespace(scores=scores, models=list(AFTER), controls=["acme/random-twin"])
    before = digests(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lmd, "ROOT", folder.parents[1])
        lmd.save_figure(helpers["pair_figure"](source, [16]), "thirteen", "pairs_T016")
    helpers["plt"].close("all")
    assert digests(folder) == before


def test_thirteen_models_give_every_figure(thirteen):
    folder, said = thirteen
    assert set(digests(folder)) == expected_names([16, 512], set())
    assert "without a value: 20" in said and "12 of the 12 published models" in said
    assert "random-twin → small-00" in said and "small-00 → random-twin" in said


def test_two_models_below_the_floor(two):
    folder, said = two
    absent = {"multilingual", "compare_scatter", "compare_pairs_by_T", "yardstick"}
    assert set(digests(folder)) == expected_names([64], absent) | set(FOREIGN)
    for name in absent:
        assert f"No figure `{name}`" in said
    assert not (folder.parents[1] / "data" / "results" / "two" / "agreement.csv").exists()


def known_square(rng, k=12):
    square = rng.uniform(0, 1, (k, k))
    np.fill_diagonal(square, np.nan)
    return square


def test_agreement_is_written_for_pairs_and_groups_of_every_common_length(thirteen):
    root, said = thirteen[0].parents[1], thirteen[1]
    table = pd.read_csv(root / "data" / "results" / "thirteen" / "agreement.csv")
    assert list(table) == ["T", "kind", "n", "rho", "ci_low", "ci_high"]
    scores = pd.read_csv(root / "data" / "results" / "thirteen" / "scores.csv")
    scores = scores[scores.split == "test"].replace({"basis": AFTER, "target": AFTER})
    scores["basis"] = scores.basis.where(scores.kind == "pair")
    both = PUBLISHED.merge(scores, on=["T", "split", "kind", "basis", "target"])
    both = both.dropna(subset=["r2_x", "r2_y"])
    assert "Spearman's rho of ours with the published test R²" in said
    assert sorted(zip(table["T"], table.kind)) == [
        (T, k) for T in (16, 512) for k in ("group", "pair")
    ]
    for row in table.itertuples():
        of_row = both[(both["T"] == row.T) & (both.kind == row.kind)]
        assert row.n == len(of_row)
        rho = of_row.r2_x.corr(of_row.r2_y, method="spearman")
        np.testing.assert_allclose(row.rho, rho, atol=1e-8)
        assert row.ci_low <= row.rho <= row.ci_high


def test_a_square_agrees_with_itself_and_an_interval_covers_chance(helpers):
    square, other = map(known_square, np.random.default_rng(0).spawn(2))
    same = helpers["agreement_of_pairs"](square, square)
    np.testing.assert_allclose([same["rho"], same["ci_low"], same["ci_high"]], 1)
    assert (same["n"], same["p_shuffled"]) == (132, 1 / 2001)
    chance = helpers["agreement_of_pairs"](square, other)
    assert chance["ci_low"] < 0 < chance["ci_high"] and chance["p_shuffled"] > 0.01
    assert chance == helpers["agreement_of_pairs"](square, other)
    groups = helpers["agreement_of_groups"](square[0], -square[0])
    np.testing.assert_allclose([groups["rho"], groups["ci_low"], groups["ci_high"]], -1)


def test_a_drawn_pair_counts_as_often_as_its_models_and_never_one_with_itself(helpers):
    a, b = map(known_square, np.random.default_rng(1).spawn(2))
    a[4, 5] = np.nan
    drawn = [0, 4, 4, 5, 9, 9]
    pairs = [(i, j) for i in drawn for j in drawn if i != j and (i, j) != (4, 5)]
    expected = pd.DataFrame([(a[p], b[p]) for p in pairs]).corr(method="spearman").iloc[0, 1]
    np.testing.assert_allclose(helpers["pair_rho"](a, b, drawn, drawn), expected)
    assert np.isnan(helpers["pair_rho"](a, b, [3, 3], [3, 3]))


def test_parts_of_an_additive_square_leave_nothing(helpers):
    rows, columns = np.random.default_rng(2).uniform(0, 1, (2, 12))
    square = rows[:, None] + columns
    square[np.diag_indices(12)] = square[3, 7] = np.nan
    parts = helpers["three_parts"](square)
    np.testing.assert_allclose(
        parts["rest of the pairs"][np.isfinite(square.ravel())], 0, atol=1e-12
    )
    np.testing.assert_allclose(parts["bases (row means)"], np.nanmean(square, axis=1))
    assert helpers["shares"](square)["rest"] < 1e-12
    only = np.where(np.isnan(square), np.nan, columns)
    found = helpers["shares"](only)
    np.testing.assert_allclose([found["columns"], found["rest"]], [1, 0], atol=1e-12)
    assert found["rows"] < 0.05  # the diagonal is not there, so that means of rows differ a little
    square[2, 1] += 0.5
    rest = helpers["three_parts"](square)["rest of the pairs"].reshape(12, 12)
    assert np.nanargmax(rest) == 2 * 12 + 1


def test_kinds_of_pairs_and_what_a_model_stands_for(helpers):
    kinds = [helpers["kind_of_pair"](a, b) for a in TWELVE for b in TWELVE if a != b]
    assert pd.Series(kinds).value_counts().to_dict() == {
        "other pair": 64, "pair with a multilingual model": 58, "pair of one family": 10,
    }  # fmt: skip
    models = pd.DataFrame({"T": [8, 8, 16], "name": ["a", "b", "a"], "role": "model"})
    assert helpers["published_names"](models) == {"a": "a", "b": "b"}
    models["after"] = ["bert-base-uncased", np.nan, "bert-base-uncased"]
    assert helpers["published_names"](models, ["b"]) == {"a": "bert-base-uncased"}
    assert helpers["published_names"](models.assign(after=np.nan)) == {"a": "a", "b": "b"}


@pytest.mark.parametrize(
    "control, source, expected",
    [
        ("bert-random", "zoo/bert", ["bert"]),
        ("bert-seed", "zoo/bert-seed", ["bert"]),
        ("noise", "zoo/noise", ["bert", "deep-l2", "deep-l4"]),
        ("deep-random", "zoo/deep", ["deep-l2", "deep-l4"]),
    ],
)
def test_a_control_is_held_against_its_relatives(helpers, control, source, expected):
    sources = {"bert": "zoo/bert", "deep-l2": "zoo/deep", "deep-l4": "zoo/deep", control: source}
    assert helpers["relatives"](control, ["bert", "deep-l2", "deep-l4"], sources) == expected


def test_a_missing_table_is_named(tmp_path):
    with pytest.raises(
        AssertionError,
        match=r"no table data/results/none/scores\.csv: run the earlier notebooks for",
    ):
        draw(small_tree(tmp_path), "none", [16])


def test_figures_of_an_earlier_run_are_removed_and_no_others(two):
    folder, said = two
    assert re.findall(r"removed (\S+), of an earlier run", said) == sorted(STALE)
    for name in FOREIGN:
        assert (folder / name).read_text() == "old"


def test_fits_on_few_rows_are_marked(helpers):
    """n < 3p: hatched cells, hatched bars, a dagger at T; and nothing else is."""
    rows = [
        (T, split, kind, basis, target, n if split == "train" else 50, p, 0.5)
        for T, n in ((16, 300), (32, 299))
        for split in ("train", "test")
        for kind, basis, target, p in (
            ("pair", "a", "b", 100), ("pair", "b", "a", 40), ("group", "a+c", "b", 140),
            ("group", "b+c", "a", 40), ("pair", "a", "c", 99), ("group", "a+b", "c", 90),
        )
    ]  # fmt: skip
    scores = pd.DataFrame(rows, columns="T split kind basis target n p r2".split())
    source = SimpleNamespace(
        scores=scores.assign(r2_adjusted=0.5), models=list("abc"), controls=[], lengths=[16, 32]
    )
    assert helpers["small_fits"](source) == {(16, "a+c", "b"), (32, "a+c", "b"), (32, "a", "b")}
    assert helpers["mark_T"](source, [16, 32, 64]) == ["16†", "32†", "64"]
    assert helpers["mark_T"](SimpleNamespace(scores=PUBLISHED), [16, 512]) == ["16", "512"]
    for T, expected in ((16, []), (32, [(1, 0)])):
        fig, ax = helpers["plt"].subplots()
        helpers["draw_heatmap"](ax, helpers["pair_table"](source, T).loc[list("abc")])
        assert [patch.get_xy() for patch in ax.patches if patch.get_hatch()] == expected
    fig, ax = helpers["plt"].subplots()
    table = helpers["group_table"](source).loc[16]
    helpers["draw_bars"](ax, table, small={"b"})
    assert [bool(bar.get_hatch()) for bar in ax.patches] == [False, True, False]
    helpers["plt"].close("all")
