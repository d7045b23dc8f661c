"""make verify, make bundle and make params: what is compared, what is published, what is listed."""

import hashlib
import re
import shutil
import subprocess
import sys
import zipfile

import nbformat
import numpy as np
import pandas as pd
import parameters
import publish
import pytest
import verify
from clone import environment
from conftest import ROOT

import lmd_utils as lmd

LISTED = ["git", "ls-files", "data/results/*/scores.csv"]
LISTED = subprocess.run(LISTED, cwd=ROOT, capture_output=True, text=True).stdout.splitlines()
COMMITTED = [line.split("/")[2] for line in LISTED] or ["course"]


def read(run, name):
    return pd.read_csv(ROOT / "data" / "results" / run / f"{name}.csv", dtype={"basis": str})


# --- verify --------------------------------------------------------------------------------------

EXPECTED = pd.DataFrame(
    {
        "T": [16, 16, 32],
        "split": ["train", "test", "test"],
        "basis": ["a", "a", "b"],
        "target": ["b", "b", "a"],
        "n": [300, 40, 40],
        "r2": [0.4127, -1.5, np.nan],
        "condition": [802000.0, 1000.0, 10.0],
        "alpha": [1e-6, 1e-6, 1e-6],
        "code_sha256": ["x", "x", "x"],
    }
)


def off(**changes):
    """Columns of EXPECTED that are off after the changes {column: (row, value)}."""
    found = EXPECTED.copy()
    for column, (at, value) in changes.items():
        found.loc[at, column] = value
    _, told, faults = verify.report({"t.csv": found}, {"t.csv": EXPECTED})
    assert bool(told) == bool(faults)
    return faults


@pytest.mark.parametrize(
    "changes, faults",
    [
        ({}, 0),
        ({"r2": (0, 0.4137)}, 1),  # one in the third decimal
        ({"r2": (0, 0.4117)}, 1),
        ({"r2": (0, 0.4131)}, 0),  # the fourth
        ({"r2": (1, -1.5007)}, 0),  # 0.0005 of the value, above 1
        ({"r2": (1, -1.501)}, 1),
        ({"r2": (0, np.nan)}, 1),
        ({"r2": (2, 0.1)}, 1),  # no number in the commit
        ({"n": (0, 301)}, 1),
        ({"alpha": (0, 1e-5)}, 1),
        ({"condition": (0, 803000.0)}, 0),
        ({"condition": (2, 10.3)}, 1),
        ({"code_sha256": (0, "y")}, 0),  # said, but no fault
        ({"split": (1, "validation")}, 2),  # one row missing, one new
    ],
)
def test_what_counts_as_a_difference(changes, faults):
    assert off(**changes) == faults


def test_rows_are_matched_by_their_keys_and_columns_must_be_the_same():
    expected = {"t.csv": EXPECTED}
    assert verify.report({"t.csv": EXPECTED.iloc[::-1]}, expected)[2] == 0
    assert verify.report({"t.csv": EXPECTED.drop(columns="n")}, expected)[2] == 3
    assert verify.report({"t.csv": EXPECTED.assign(new=1)}, expected)[2] == 3
    assert verify.report({}, expected)[2] == 1
    lines, _, faults = verify.report({"t.csv": EXPECTED, "u.csv": EXPECTED}, expected)
    assert faults == 0 and lines[-1][0] == "u.csv" and "not compared" in lines[-1][-1]


def test_rows_without_keys_are_matched_by_their_place():
    table = pd.DataFrame({"T": [1, 1], "value": [0.1, 0.2]})
    assert verify.report({"t.csv": table}, {"t.csv": table})[2] == 0
    assert (
        verify.report({"t.csv": table.iloc[::-1].reset_index(drop=True)}, {"t.csv": table})[2] == 2
    )


def test_a_table_in_the_order_of_its_scores_may_come_in_another_order():
    """The last digits, and with them the order of near ties, are another processor's own."""
    table = read("course", "how_sure_choices")
    noise = 1e-7 * np.random.default_rng(0).normal(size=len(table))
    other = table.assign(r2=table["r2"] + noise).sort_values("r2", ignore_index=True)
    assert not other["text"].equals(table["text"])
    assert verify.report({"t.csv": other}, {"t.csv": table})[2] == 0
    other.loc[3, "r2"] += 0.001
    assert verify.report({"t.csv": other}, {"t.csv": table})[2] == 1


@pytest.fixture
def repository(tmp_path):
    """A git checkout with the tool and the results of course; run the tool there: (status, output)."""
    for name in ("tools/verify.py", "data/published/zhang2022_r2.csv"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    shutil.copytree(ROOT / "data/results/course", tmp_path / "data/results/course")
    git = ["git", "-c", "user.name=test", "-c", "user.email=test@example.invalid"]
    for arguments in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "results"]):
        subprocess.run([*git, *arguments], cwd=tmp_path, check=True, env=environment())

    def run(*arguments):
        done = subprocess.run(
            [sys.executable, "tools/verify.py", *arguments],
            cwd=tmp_path, env=environment(), capture_output=True, text=True,
        )  # fmt: skip
        return done.returncode, done.stdout + done.stderr

    return tmp_path, run


def test_verify_passes_on_the_committed_results_and_fails_on_a_third_decimal(repository):
    root, run = repository
    status, said = run("course")
    assert status == 0 and said.endswith("verify: course is as expected\n"), said
    assert "Spearman's rho" in said and "scores.csv" in said and "0.0005" in said
    path = root / "data/results/course/scores.csv"
    text = path.read_text()
    number = re.search(r",0\.(\d\d)([1-8])(\d{6}),", text)
    changed = f",0.{number[1]}{int(number[2]) + 1}{number[3]},"
    path.write_text(text.replace(number[0], changed, 1))
    status, said = run("course")
    assert status == 1 and "1 values of course are not as expected" in said, said
    (line,) = [line for line in said.splitlines() if " instead of " in line]
    assert number[0].strip(",").rstrip("0") in line and line.startswith("scores.csv, r2")


def test_verify_against_another_run_and_without_anything_to_compare(repository):
    root, run = repository
    shutil.copytree(root / "data/results/course", root / "data/results/again")
    for path in (root / "data/results/again").glob("*.csv"):
        path.write_text(path.read_text().replace("course,", "again,"))
    assert run("again", "course")[0] == 0
    status, said = run("again")
    assert status == 1 and said.startswith("verify: no table of again is committed; ")
    assert run("nothing")[1].startswith("verify: data/results/nothing has no table: run make")
    shutil.rmtree(root / ".git")
    assert "AGAINST=name" in run("course")[1]


def test_runs_of_other_models_are_not_compared(repository):
    root, run = repository
    shutil.copytree(root / "data/results/course", root / "data/results/mine")
    models = root / "data/results/mine/models.csv"
    table = pd.read_csv(models)
    table["name"] = "my-" + table["name"]
    table.to_csv(models, index=False)
    status, said = run("mine", "course")
    assert status == 1 and said.startswith("verify: mine (my-albert, my-bert, ")
    assert said.endswith(
        "and course have no model in common; AGAINST is for two runs of the same models\n"
    )


def test_the_run_of_the_paper_is_held_to_the_published_scores():
    published = pd.read_csv(ROOT / "data" / "published" / "zhang2022_r2.csv")
    names = list(published["target"].unique())
    others = {t: "+".join(sorted(set(names) - {t})) for t in names}
    ours = published.assign(basis=published["basis"].fillna(published["target"].map(others)))
    lines, faults = verify.against_published("paper", {"scores.csv": ours})
    assert faults == 0 and "0.02" in lines[0] and lines[1].count(" ok") == 36
    shifted = ours.assign(r2=ours["r2"] - 0.03 * (ours["kind"] == "group"))
    assert verify.against_published("paper", {"scores.csv": shifted})[1] == 18
    assert verify.against_published("paper_corrected", {"scores.csv": shifted})[1] == 0


# --- tables and bundle ---------------------------------------------------------------------------


@pytest.mark.parametrize("run", COMMITTED)
def test_committed_latex_tables_are_those_of_the_results(run, tmp_path, monkeypatch):
    folder = ROOT / "figures" / run / "tables"
    committed = {p.name: p.read_text(encoding="utf-8") for p in folder.glob("*.tex")}
    (tmp_path / "figures" / run / "tables").mkdir(parents=True)
    (tmp_path / "figures" / run / "tables" / "stale.tex").write_text("old")
    (tmp_path / "data").symlink_to(ROOT / "data")
    monkeypatch.setattr(publish, "ROOT", tmp_path)
    publish.write_tables(run)
    made = (tmp_path / "figures" / run / "tables").glob("*.tex")
    assert {p.name: p.read_text(encoding="utf-8") for p in made} == committed, "make figures"


def test_a_latex_table_has_every_score_of_its_square():
    scores, names = read("course", "scores"), list(read("course", "models")["name"].unique())
    text = (ROOT / "figures/course/tables/pairs_T128.tex").read_text(encoding="utf-8")
    rows = [line.removesuffix(r" \\").split(" & ") for line in text.splitlines() if " & " in line]
    assert rows[0][1:] == [row[0] for row in rows[1:]] == names
    test = scores[(scores["T"] == 128) & (scores["split"] == "test")]
    test = test.set_index(["basis", "target"])["r2"]
    for row in rows[1:]:
        for target, shown in zip(names, row[1:], strict=True):
            value = shown.removesuffix(r"\textsuperscript{\dag}")
            assert value == ("--" if row[0] == target else f"{test[row[0], target]:.3f}")


def test_of_two_models_all_the_others_are_one():
    scores, names = read("course", "scores"), ["bert", "xlnet"]
    pairs = scores[(scores["kind"] == "pair") & scores["basis"].isin(names)]
    pairs = pairs[pairs["target"].isin(names)]
    two = pd.concat([pairs, pairs.assign(kind="group")])
    square, everyone = publish.square(two, names, 16), publish.on_all(two, names, 16)
    assert everyone["test"].tolist() == [square.loc["xlnet", "bert"], square.loc["bert", "xlnet"]]
    assert list(everyone["p"]) == ["64", "64"]


@pytest.mark.parametrize("run", COMMITTED)
def test_latex_is_whole(run):
    for path in (ROOT / "figures" / run / "tables").glob("*.tex"):
        text = path.read_text(encoding="utf-8")
        bare = re.sub(r"\\[{}\\&%$#_]", "", text)
        assert bare.count("{") == bare.count("}"), path.name
        assert text.isascii(), f"{path.name}: {[c for c in text if not c.isascii()][:5]}"
        for name in re.findall(r"\\input\{tables/(.+)\}", text):
            assert (path.parent / f"{name}.tex").is_file()


def test_latex_of_captions_is_ascii_and_escaped():
    assert publish.latex("a_b & 50 % of {x} R² ~ †") == (
        r"a\_b \& 50 \% of \{x\} R\textsuperscript{2} \textasciitilde{} \textsuperscript{\dag}"
    )
    assert publish.latex("a\\b") == r"a\textbackslash{}b"
    for fields in publish.listed().values():
        texts = (publish.latex(publish.plain(fields[k])) for k in ("Caption", "Alternative text"))
        assert all(text.isascii() and "`" not in text for text in texts)


@pytest.fixture
def run_of_one(tmp_path, monkeypatch):
    """A copy of the results and some figures of course, with two executed notebooks."""
    for name in ("LICENSE-TEXT", "CITATION.cff", "requirements.txt"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "data/results/course", tmp_path / "data/results/course")
    (tmp_path / "figures/course").mkdir(parents=True)
    for name in ("pairs", "pairs_T016"):
        shutil.copy(ROOT / f"figures/course/{name}.pdf", tmp_path / "figures/course")
    record = {"start_time": "2026-01-02T03:04:05.6+00:00", "duration": 61.4}
    record |= {"parameters": {"alpha": 1e-6, "corpus": "/somewhere/else/my.txt"}}
    record["parameters"]["scheduler"] = "tcp://node17.somewhere:8786"
    for name in ("01_corpus", "02_embeddings"):
        notebook = nbformat.v4.new_notebook(metadata={"papermill": record})
        path = tmp_path / "build/course/notebooks" / f"{name}.ipynb"
        path.parent.mkdir(parents=True, exist_ok=True)
        nbformat.write(notebook, path)
    monkeypatch.setattr(publish, "ROOT", tmp_path)
    monkeypatch.setattr(lmd, "ROOT", tmp_path)
    return tmp_path


def test_a_bundle_has_everything_and_the_same_bytes_twice(run_of_one):
    digests = []
    for _ in range(2):
        path = publish.bundle("course")
        digests.append(hashlib.sha256(path.read_bytes()).hexdigest())
        path.unlink()
    assert digests[0] == digests[1]
    with zipfile.ZipFile(publish.bundle("course")) as archive:
        names = {name.removeprefix("lmd-course/") for name in archive.namelist()}
        captions = archive.read("lmd-course/captions.md").decode()
        floats = archive.read("lmd-course/figures.tex").decode()
    assert {"figures/pairs.pdf", "tables/all.tex", "results/scores.csv", "captions.md"} <= names
    assert {"figures.tex", "REPRODUCIBILITY.md", "LICENSE-TEXT", "CITATION.cff"} <= names
    fields = publish.listed()["pairs"]
    assert fields["Caption"] in captions and fields["Alternative text"] in captions
    assert re.findall(r"\]\{figures/(.+)\.pdf\}", floats) == ["pairs", "pairs_T016"]


def test_a_figure_without_a_caption_is_named(run_of_one):
    (run_of_one / "figures/course/mine.pdf").write_bytes(b"")
    with pytest.raises(ValueError, match="course/mine.pdf is not listed in figures/FIGURES.md"):
        publish.bundle("course")


def test_the_statement_is_of_the_run(run_of_one):
    text = publish.statement("course")
    models = read("course", "models")
    assert "| 01_corpus | 2026-01-02 03:04:05 | 61 |" in text
    assert all(f"| {name} | {digest[:16]}" in re.sub(r"\| \S+ \| (?=[0-9a-f]{16})", "| ", text)
               for name, digest in zip(models["name"], models["model_sha256"]))  # fmt: skip
    assert all(digest in text for digest in models["sequences_sha256"])
    assert '- corpus: `"my.txt"`' in text and "somewhere" not in text
    assert '- scheduler: `"tcp"`' in text
    data = (ROOT / "data/results/course/scores.csv").read_bytes()
    assert hashlib.sha256(data).hexdigest() in text
    assert "- numpy " in text and "cores" in text and "Code: not a git checkout." in text


# --- parameters ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path", sorted((ROOT / "notebooks").glob("[0-9A][0-9]*.ipynb")), ids=lambda p: p.stem
)
def test_every_parameter_has_a_type_and_a_meaning(path):
    found = parameters.described(path)
    assert [row[0] for row in found] == list(parameters.declared(path)) != []
    for name, kind, default, meaning in found:
        assert kind and default and len(meaning) > 5, name


def test_parameters_in_words(tmp_path):
    code = (
        "profile = 'x'  # whose\n"
        "models = [  # source: folder\n    {'name': 'a'},\n    {'name': 'b'},  # the second\n]\n"
        "alpha = 1.0e-6  # a = b # c\nflag = False  # '#' or not\n"
    )
    cell = nbformat.v4.new_code_cell(code, metadata={"tags": ["parameters"]})
    nbformat.write(nbformat.v4.new_notebook(cells=[cell]), tmp_path / "n.ipynb")
    assert parameters.described(tmp_path / "n.ipynb") == [
        ("profile", "text", '"x"', "whose"),
        (
            "models",
            "a list of 2: a mapping",
            '[{"name": "a"}, {"name": "b"}]',
            "source: folder the second",
        ),
        ("alpha", "a number", "1e-06", "a = b # c"),
        ("flag", "true or false", "false", "'#' or not"),
    ]


def test_the_list_shows_every_notebook():
    text = "\n".join(parameters.overview())
    for path in (ROOT / "notebooks").glob("[0-9A][0-9]*.ipynb"):
        assert f"\n{path.stem}\n" in f"\n{text}\n"
