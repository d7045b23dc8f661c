"""10_your_models: two models and a text file, as the README says it, and what is refused."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import numpy as np
import pandas as pd
import parameters
import pytest
from clone import changes, clone, environment
from conftest import ROOT

NOTEBOOK = ROOT / "notebooks" / "10_your_models.ipynb"


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    return clone(tmp_path_factory.mktemp("yours") / "copy")


@pytest.fixture(scope="module")
def text():
    """Twelve documents of 700 words."""
    words = [
        f"{w}{i % 7}"
        for i, w in enumerate("river house of the old town near a bridge".split() * 80)
    ]
    return "\n\n".join(" ".join(words[i:] + words[:i]) + "." for i in range(12))


def test_the_first_two_parameters_are_the_lines_to_change():
    assert list(parameters.declared(NOTEBOOK))[:2] == ["sources", "text_file"]
    lines = parameters.parameters_code(NOTEBOOK).splitlines()
    assert [line.split(" = ")[0] for line in lines[:2]] == ["sources", "text_file"]
    assert (
        "10_your_models" in parameters.appendices()
        and "10_your_models" not in parameters.all_declared()[0]
    )


def test_the_command_of_the_readme(copy, text, tiny_models, tmp_path):
    """As it stands there, with tiny models for its folders."""
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"^ {4}(\.venv/bin/papermill .*)$", page, re.MULTILINE)
    words = shlex.split(command)
    words[0] = str(Path(sys.prefix, "bin", "papermill"))
    for name, model in (("a", "bert-base-uncased"), ("b", "distilroberta-base")):
        shutil.copytree(tiny_models / model, tmp_path / "folder" / name)
        words[-1] = words[-1].replace(f"folder/{name}", str(tmp_path / "folder" / name))
    (tmp_path / "my.txt").write_text(text, encoding="utf-8")
    words[-1] = words[-1].replace("my.txt", str(tmp_path / "my.txt"))
    words[2] = str(copy / words[2])  # where the README has it: git ignores it
    settings = environment(PYTHONPATH=str(copy), HF_HUB_OFFLINE="1")
    done = subprocess.run(words, cwd=copy, env=settings, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert (copy / "figures/yours/your_models.png").is_file() and changes(copy) == ""
    scores = pd.read_csv(copy / "data/results/yours/scores.csv")
    assert set(scores["basis"]) == {"a", "b", "a-untrained", "b-untrained"}
    assert set(scores["target"]) == {"a", "b"} and len(scores) == 6
    assert scores[["ci_low", "ci_high"]].isna().all(axis=None)  # three test documents
    assert (scores["test"] <= 1).all() and (scores["n"] == scores["n"].iloc[0]).all()
    printed = json.dumps(nbformat.read(copy / "yours.ipynb", as_version=4))
    assert "12 documents, 12 of them with 30 words or more" in printed
    assert "Warning: fewer than 5 test documents" in printed


def run(copy, monkeypatch, tmp_path, until="embed", **given):
    """Execute the cells before `until`, with other parameters; the names they leave."""
    monkeypatch.chdir(tmp_path)
    space = {"display": lambda *_: None}
    for cell in nbformat.read(NOTEBOOK, as_version=4).cells:
        if cell.id == until:
            return space
        if cell.cell_type == "code":
            exec(compile(cell.source, cell.id, "exec"), space)
            if "parameters" in cell.metadata.get("tags", []):
                space |= given
    raise AssertionError(f"there is no cell {until}")


def test_no_document_is_on_both_sides(copy, text, tiny_models, tmp_path, monkeypatch):
    (tmp_path / "my.txt").write_text("\n\n".join([text, text]), encoding="utf-8")  # each twice
    given = {"sources": [str(tiny_models / n) for n in ("gpt2", "albert-base-v2")]}
    space = run(copy, monkeypatch, tmp_path, text_file="my.txt", **given)
    assert len(space["documents"]) == 12 and space["held"] == 3
    parts = [{s for i in part for s in space["sequences"][i]}
             for part in (space["order"][3:], space["order"][:3])]  # fmt: skip
    assert set(space["train_texts"]) <= parts[0] and set(space["test_texts"]) <= parts[1]
    assert all(len(s.split()) == 30 for s in space["train_texts"] + space["test_texts"])
    few = run(copy, monkeypatch, tmp_path, text_file="my.txt", most=100, **given)
    assert 95 <= len(few["train_texts"]) + len(few["test_texts"]) <= 100
    for texts in ("train", "test"):  # each sequence with the document that it is from
        pairs = list(zip(few[f"{texts}_texts"], few[f"{texts}_documents"], strict=True))
        assert all(found in few["sequences"][i] for found, i in pairs)
    assert set(few["train_documents"]).isdisjoint(few["test_documents"])


@pytest.mark.parametrize(
    "given, message",
    [
        ({"sources": ["bert-base-uncased"]}, "two different models or more are needed"),
        ({"sources": ["gpt2", "gpt2"]}, "two different models or more are needed"),
        ({"sources": ["gpt2", "build/nowhere"]}, "model folder 'build/nowhere' does not exist"),
        ({"text_file": "none.txt"}, "text_file 'none.txt': no such file"),
        ({"text_file": "one.txt"}, "too few documents of 30 words to hold some out"),
        (
            {"text_file": "one.txt"},
            "(different blocks: 1, long enough: 1, longest: 720 words): put blank lines",
        ),
        ({"text_file": "empty.txt"}, "longest: 0 words): there is no text"),
        (
            {"text_file": "wrapped.txt"},
            "(different blocks: 9, long enough: 0, longest: 12 words): lower words, or, if lines",
        ),
        ({"text_file": "unspaced.txt"}, "next to no spaces: use make reproduce"),
        (
            {"text_file": "latin1.txt"},
            "text_file 'latin1.txt' is not UTF-8 (if it is Latin-1: iconv",
        ),
    ],
)
def test_what_cannot_be_used_is_one_line(
    copy, text, tiny_models, tmp_path, monkeypatch, given, message
):
    (tmp_path / "one.txt").write_text(text.split("\n\n")[0], encoding="utf-8")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "wrapped.txt").write_text("\n".join(f"{i}" + " word" * 11 for i in range(9)))
    (tmp_path / "unspaced.txt").write_text(
        "\n\n".join(["河流" * 300, "房子" * 300]), encoding="utf-8"
    )
    (tmp_path / "latin1.txt").write_bytes("café".encode("latin1"))
    for name in ("gpt2", "bert-base-uncased"):
        (tmp_path / name).symlink_to(tiny_models / name)
    given = {"sources": ["gpt2", "bert-base-uncased"], "text_file": "one.txt"} | given
    with pytest.raises((ValueError, FileNotFoundError), match=re.escape(message)):
        run(copy, monkeypatch, tmp_path, **given)


def test_of_the_table_of_documents_only_what_the_zoo_has_not_read(
    copy, text, tiny_models, tmp_path, monkeypatch
):
    parts = text.split("\n\n")
    splits = ["train", "validation", "test"] * 4
    pd.DataFrame({"doc_id": range(12), "split": splits, "text": parts}).to_parquet(
        tmp_path / "documents.parquet"
    )
    given = {"sources": [str(tiny_models / n) for n in ("gpt2", "albert-base-v2")]}
    space = run(copy, monkeypatch, tmp_path, text_file="documents.parquet", **given)
    assert list(space["documents"]) == [t for t, s in zip(parts, splits) if s != "train"]


@pytest.mark.parametrize(
    "folders, names",
    [
        ("x/checkpoint-1000 y/checkpoint-1000/", "x/checkpoint-1000 y/checkpoint-1000"),
        ("p/x/last q/x/last r/bert", "p/x/last q/x/last bert"),
        ("last x/last", "last x/last"),
    ],
)
def test_labels_are_the_shortest_tails_that_differ(
    copy, tiny_models, tmp_path, monkeypatch, folders, names
):
    for folder in folders.split():
        (tmp_path / folder).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / folder.rstrip("/")).symlink_to(tiny_models / "gpt2")
    space = run(copy, monkeypatch, tmp_path, until="documents", sources=folders.split())
    assert space["names"] == names.split()


@pytest.mark.parametrize("backwards", [False, True])
def test_yardstick_intervals_and_advice(tmp_path, monkeypatch, copy, capsys, backwards):
    """Planted vectors: each cell against its own basis' twin, whatever the order of the models."""
    import lmd_utils as lmd

    rng, n, m = np.random.default_rng(3), 200, 60
    a, b = rng.normal(size=(n + m, 2)), rng.normal(size=(n + m, 3))
    noise = rng.normal(size=(n + m, 90))
    vectors = {
        "a": a,
        "b": np.hstack([a, 0.1 * b[:, :1]]),
        "a-untrained": b[:, :2],
        "b-untrained": noise,
    }
    names = ["b", "a"] if backwards else ["a", "b"]
    at = [i // 10 for i in range(m)]
    space = {"display": lambda *_: None, "names": names, "vectors": vectors, "n": n, "keep": 0.5}
    space |= {"twins": {k: f"{k}-untrained" for k in names}, "alpha": 1e-6, "seed": 0, "run": "t"}
    space |= {"total": [400], "most": 200, "test_documents": at}
    written = {}
    monkeypatch.setattr(
        lmd, "write_results", lambda run, name, table: written.update({name: table})
    )
    cells = [c for c in nbformat.read(NOTEBOOK, as_version=4).cells if c.cell_type == "code"]
    for cell in cells:
        if cell.id in ("setup", "moments", "enough", "scores", "sure", "against"):
            exec(compile(cell.source, cell.id, "exec"), space)
    above = space["trained"] - space["yardstick"]
    printed = capsys.readouterr().out
    assert "dimensions of b-untrained" in printed and "raise most (the text has 400" in printed
    assert "give more text" not in printed and space["small"] == ["b-untrained"]
    scores = written["scores"].set_index(["basis", "target"])
    assert len(scores) == 6 and scores.loc[("b-untrained", "a"), "test"] < 0  # counted as 0
    assert above.loc["b", "a"] == pytest.approx(scores.loc[("b", "a"), "test"])
    twin = max(0, scores.loc[("a-untrained", "b"), "test"])
    assert above.loc["a", "b"] == pytest.approx(scores.loc[("a", "b"), "test"] - twin)
    assert (scores["ci_low"] < scores["test"]).all() and (scores["test"] < scores["ci_high"]).all()
    fit = lmd.fit(space["train"], "b", "a", 1e-6)
    sums = lmd.DocumentSums([fit], at).update(at, {k: v[n:] for k, v in vectors.items()})
    low, high = (float(end[0]) for end in sums.intervals())
    assert scores.loc[("a", "b"), ["ci_low", "ci_high"]].tolist() == pytest.approx([low, high])
