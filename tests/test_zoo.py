"""The models of data/zoo as they are shipped, and the notebook that trains them."""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pandas as pd
import pytest
import yaml
import zoo_trials
from clone import clone, environment
from conftest import ROOT
from safetensors import safe_open

import lmd_utils as lmd

ZOO = ROOT / "data" / "zoo"
MANIFEST = json.loads((ZOO / "MANIFEST.json").read_text())
NAMES = sorted(MANIFEST["models"])
PUBLISHED = set(pd.read_csv(ROOT / "data/published/zhang2022_r2.csv", usecols=["target"])["target"])
TINY = {"steps": 12, "hidden_size": 16, "layers": 2, "batch_tokens": 256, "vocabulary": 1500}


def record(name):
    return json.loads((ZOO / name / "record.json").read_text())


# --- as shipped ----------------------------------------------------------------------------------


def test_rhos_of_scores_with_themselves_and_with_their_reverse():
    names = list("abcd")
    square = pd.DataFrame(np.random.default_rng(0).uniform(size=(4, 4)), names, names)
    square = square.where(~np.eye(4, dtype=bool))
    groups = pd.Series(np.random.default_rng(1).uniform(size=4), names)
    shuffled = square.loc[names[::-1], names[::-1]], groups[names[::-1]]
    assert zoo_trials.rhos(square, groups, shuffled) == pytest.approx(
        dict.fromkeys(["pairs", "targets", "bases", "groups"], 1)
    )
    row, column = np.arange(4.0)[:, None], np.arange(4.0)
    ours, theirs = (
        (row + sign * column + 0 * square, sign * pd.Series(column, names)) for sign in (1, -1)
    )
    found = zoo_trials.rhos(*ours, theirs)
    assert [found[k] for k in ("targets", "bases", "groups")] == pytest.approx([-1, 1, -1])


def test_the_trials_of_other_zoos_say_of_ours_what_its_own_table_says():
    table = pd.read_csv(zoo_trials.TABLE)
    course = table[table["zoo"] == "course"].pivot(index="T", columns="scores", values="rho")
    own = pd.read_csv(lmd.ROOT / "data/results/course/agreement.csv")
    own = own.pivot(index="T", columns="kind", values="rho").loc[course.index]
    np.testing.assert_allclose(course["pairs"], own["pair"], atol=0.002)
    np.testing.assert_allclose(course["groups"], own["group"], atol=0.002)


def test_twelve_models_stand_for_the_published_twelve_and_one_for_chance():
    after = {name: entry["after"] for name, entry in MANIFEST["models"].items()}
    assert {a for a in after.values() if a} == PUBLISHED and len(after) == 13
    assert [name for name in after if not after[name]] == ["bert-seed"]


def test_all_weights_together_take_at_most_25_megabytes():
    files = [path for path in ZOO.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 25e6
    assert {path.suffix for path in files} <= {".json", ".safetensors", ".md"}


@pytest.mark.parametrize("name", NAMES)
def test_a_model_is_half_precision_on_disk_and_float32_in_memory(name):
    from transformers import AutoModel, AutoTokenizer

    with safe_open(ZOO / name / "model.safetensors", framework="numpy") as weights:
        assert {weights.get_slice(key).get_dtype() for key in weights.keys()} == {"F16"}
    model, tokenizer = lmd.load_model(ZOO / name), lmd.load_tokenizer(ZOO / name)
    assert {str(p.dtype) for p in model.parameters()} == {"torch.float32"}
    assert type(AutoModel.from_pretrained(ZOO / name, local_files_only=True)) is type(model)
    assert len(AutoTokenizer.from_pretrained(ZOO / name, local_files_only=True)) == len(tokenizer)
    vectors = lmd.embed(["The cat sat.", "Aristotle"], model, tokenizer=tokenizer, max_length=None)
    assert vectors.shape == (2, model.config.hidden_size) and np.isfinite(vectors).all()


def test_architectures_are_those_of_the_originals():
    found = {n: json.loads((ZOO / n / "config.json").read_text())["model_type"] for n in NAMES}
    assert found == {
        "bert": "bert", "bert-seed": "bert", "mbert": "bert", "distilbert": "distilbert",
        "distilmbert": "distilbert", "distilroberta": "roberta", "roberta": "roberta",
        "xlmr": "xlm-roberta", "longformer": "longformer", "xlnet": "xlnet",
        "electra": "electra", "albert": "albert", "deberta": "deberta",
    }  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_a_model_has_learned(name):
    found = record(name)["held_out"]
    assert found["loss"] < found["unigram"] - 1.5
    if name == "electra":
        assert found["accuracy"] > found["majority"] + 0.005


@pytest.mark.parametrize("name", NAMES)
def test_the_card_tells_what_the_record_holds(name):
    card, made = (ZOO / name / "README.md").read_text(), record(name)
    for part in (
        f"{made['held_out']['loss']:.3f}", f"{made['held_out']['unigram']:.3f}", made["date"],
        f"{made['recipe']['steps']:,}", f"seed {made['recipe']['seed']}", "make zoo",
    ):  # fmt: skip
        assert part in card, part


def test_the_multilingual_models_have_a_copy_of_every_ordinary_token():
    for name in ("mbert", "xlmr", "distilmbert"):
        tokenizer = lmd.load_tokenizer(ZOO / name)
        vocabulary, special = tokenizer.get_vocab(), set(tokenizer.all_special_tokens)
        words = [t for t in vocabulary if t not in special and not t.startswith("\ue000")]
        assert all("\ue000" + word in vocabulary for word in words)
        assert len(vocabulary) == 2 * len(words) + len(special)
        text = "The philosopher wrote: «αβγ», 12 km, naïve."
        ids = tokenizer(text)["input_ids"]
        assert not any(t.startswith("\ue000") for t in tokenizer.convert_ids_to_tokens(ids))


def test_every_piece_of_a_unigram_vocabulary_can_occur():
    for name in ("albert", "xlmr", "xlnet"):
        tokenizer = lmd.load_tokenizer(ZOO / name)
        special = set(tokenizer.all_special_tokens) | {"<eod>", "<eop>"}
        ordinary = (t for t in tokenizer.get_vocab() if t not in special and t[0] != "\ue000")
        pieces = [t.lstrip("▁") for t in ordinary]
        normalize = tokenizer.backend_tokenizer.normalizer.normalize_str
        assert [p for p in pieces if normalize(p) != p] == []


# --- what they depend on, as committed -----------------------------------------------------------

HEIRS = {
    "distilbert": "bert",
    "distilmbert": "mbert",
    "distilroberta": "roberta",
    "longformer": "roberta",
}
LANGUAGES = {"mbert": "bert", "distilmbert": "distilbert", "xlmr": "roberta"}


@pytest.fixture(scope="module")
def squares():
    """{T: test R², basis on rows and target on columns} of the twelve and the controls."""
    scores = lmd.read_results("course", "scores")
    pairs = scores[(scores.split == "test") & ~scores.basis.str.contains("+", regex=False)]
    return {
        T: rows.pivot(index="basis", columns="target", values="r2")
        for T, rows in pairs.groupby("T")
    }


def test_a_models_best_basis_is_its_teacher_student_or_heir(squares):
    models = [name for name in NAMES if name != "bert-seed"]
    for T, square in squares.items():
        best = square.loc[models, models].idxmax()
        for heir, teacher in HEIRS.items():
            assert best[heir] == teacher, T
            assert best[teacher] in [h for h, t in HEIRS.items() if t == teacher], T


def test_a_model_of_two_languages_is_harder_to_predict_than_its_counterpart(squares):
    """From bases that are kin of neither."""
    for T, square in squares.items():
        for many, one in LANGUAGES.items():
            kin = {many, one} | {x for pair in HEIRS.items() if {many, one} & {*pair} for x in pair}
            others = [name for name in NAMES if name not in kin | {"bert-seed"}]
            assert square.loc[others, many].mean() < square.loc[others, one].mean(), (T, many)


def test_a_twin_of_another_seed_tells_far_more_than_an_untrained_one(squares):
    for square in squares.values():
        assert square.loc["bert-random", "bert"] < 0.3 < square.loc["bert-seed", "bert"]


# --- how they are trained ------------------------------------------------------------------------


def notebook(folder, name, **values):
    """Start A1_pretrain_zoo in a clone; its process."""
    parameters = folder / "build" / f"{name}.yaml"
    parameters.parent.mkdir(exist_ok=True)
    parameters.write_text(yaml.safe_dump({"profile": "smoke", "zoo": "build/zoo"} | TINY | values))
    command = [sys.executable, "tools/run_notebook.py", "notebooks/A1_pretrain_zoo.ipynb"]
    return subprocess.Popen(
        [*command, str(parameters), f"build/notebooks/{name}.ipynb"],
        cwd=folder,
        env=environment(PYTHONPATH=str(folder), OMP_NUM_THREADS="1", MKL_NUM_THREADS="1"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def finish(process):
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 0, output
    return output


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A clone with documents of which only the train ones lack a certain letter."""
    folder = clone(tmp_path_factory.mktemp("zoo") / "copy")
    sys.path.insert(0, str(ROOT / "tools"))
    import tiny_models

    texts = tiny_models.articles(6)
    splits = ["train"] * 4 + ["validation", "test"]
    texts = [t if s == "train" else t.replace("e", "Ж") for t, s in zip(texts, splits, strict=True)]
    path = folder / "build" / "smoke" / "documents.parquet"
    path.parent.mkdir(parents=True)
    frame = pd.DataFrame({"doc_id": range(6), "split": splits, "text": texts})
    frame.to_parquet(path)
    return folder


@pytest.mark.notebook
def test_only_train_documents_are_learned_from(folder):
    finish(notebook(folder, "seen", train=["mbert", "albert"]))
    documents = pd.read_parquet(folder / "build/smoke/documents.parquet").set_index("split")["text"]
    hashes = {
        s: {hashlib.sha256(t.encode()).hexdigest() for t in documents[[s]]}
        for s in set(documents.index)
    }
    for name in ("mbert", "albert"):
        made = json.loads((folder / "build/zoo" / name / "record.json").read_text())
        assert set(made["recipe"]["train_documents"]) == hashes["train"]
        vocabulary = (folder / "build/zoo" / name / "tokenizer.json").read_text()
        assert not any(letter in vocabulary for letter in ("Ж", "ж", "\\u0416", "\\u0436"))


@pytest.mark.notebook
def test_a_run_that_is_killed_goes_on_and_ends_with_the_same_weights(folder):
    values = {"train": ["bert-seed", "electra"], "steps": 40}
    finish(notebook(folder, "whole", **values, zoo="build/whole"))
    shutil.copytree(folder / "build/whole/bert-seed", folder / "build/cut/bert-seed")
    process = notebook(folder, "cut", **values, zoo="build/cut")
    work = folder / "build/cut/.work/electra"
    for _ in range(6000):
        if any(work.glob("checkpoint-*/trainer_state.json")) or process.poll() is not None:
            break
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert not (folder / "build/cut/electra").exists(), "it was too fast to be cut"
    assert any(work.glob("checkpoint-*"))
    shutil.copytree(folder / "build/cut", folder / "build/stale")
    (work / "checkpoint-999").mkdir()  # one that was not written to its end
    finish(notebook(folder, "cut", **values, zoo="build/cut"))
    assert not work.exists()
    files = [folder / "build" / run / "electra" / "model.safetensors" for run in ("whole", "cut")]
    assert files[0].read_bytes() == files[1].read_bytes()
    curves = [json.loads((f.parent / "record.json").read_text())["curve"] for f in files]
    assert curves[0] == curves[1] and len(curves[0]) == 40
    # Another recipe does not go on from what a cut run left: its teacher is another, too.
    shutil.rmtree(folder / "build/stale/bert-seed")
    finish(notebook(folder, "stale", **values | {"steps": 4}, zoo="build/stale"))
    made = json.loads((folder / "build/stale/electra/record.json").read_text())
    assert [step for step, _ in made["curve"]] == [1, 2, 3, 4]


@pytest.mark.notebook
def test_a_finished_model_is_left_alone_and_another_recipe_trains_anew(folder):
    finish(notebook(folder, "first", train=["bert"], zoo="build/again"))
    file = folder / "build/again/bert/model.safetensors"
    before = file.stat().st_mtime_ns
    finish(notebook(folder, "again", train=["bert"], zoo="build/again"))
    assert file.stat().st_mtime_ns == before
    finish(notebook(folder, "other", train=["bert"], zoo="build/again", seed=1))
    assert file.stat().st_mtime_ns != before
    shutil.rmtree(folder / "build/again")


@pytest.mark.notebook
def test_a_student_without_its_teacher_is_refused_in_one_line(folder):
    process = notebook(folder, "alone", train=["distilroberta"], zoo="build/alone")
    output, _ = process.communicate(timeout=600)
    assert process.returncode != 0
    assert "distilroberta needs its teacher roberta: train that first" in output
    assert not (folder / "build/alone/distilroberta").exists()


@pytest.mark.notebook
def test_no_document_outside_the_train_split_of_course_was_learned_from(tmp_path):
    """The splits are made again from the corpus, by 01_corpus, and held against the records."""
    folder = clone(tmp_path / "copy", "models")
    (folder / "build/params.yaml").write_text("{}\n")
    command = [sys.executable, "tools/run_notebook.py", "notebooks/01_corpus.ipynb"]
    subprocess.run(
        [*command, "build/params.yaml", "build/notebooks/01_corpus.ipynb"],
        cwd=folder,
        env=environment(PYTHONPATH=str(folder)),
        check=True,
        capture_output=True,
    )
    documents = pd.read_parquet(folder / "build/course/documents.parquet")
    documents["sha256"] = [hashlib.sha256(t.encode()).hexdigest() for t in documents["text"]]
    seen = {s: set(rows) for s, rows in documents.groupby("split")["sha256"]}
    for name in NAMES:
        learned = set(record(name)["recipe"]["train_documents"])
        assert learned == seen["train"] and not learned & (seen["validation"] | seen["test"])
