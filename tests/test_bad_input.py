"""The table of odd and bad inputs in CONTRIBUTING.md: each row is tried, and must say what the table says.

    PYTHONPATH=.:tools python tests/test_bad_input.py    # writes the table anew; read the difference before you commit it

An input that can be used gives the right result, and the row says what was compared. Any other gives one
line: what is wrong, where, what to do.
"""

import io
import json
import os
import re
import shutil
import warnings
from contextlib import redirect_stdout
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
import nbformat
import numpy as np
import pandas as pd
import parameters
import pytest
from conftest import ROOT

import lmd_utils as lmd

PAGE = ROOT / "CONTRIBUTING.md"
BEGIN, END = "<!-- bad input -->\n", "<!-- end of bad input -->"
CODE = {
    name: [
        (c["id"], c["source"])
        for c in nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", 4).cells
        if c["cell_type"] == "code"
    ]
    for name in ("01_corpus", "02_embeddings")
}
ROWS = {}


def row(where, what):
    """Register a function that tries an input and returns what the user sees."""

    def register(function):
        assert (where, what) not in ROWS
        ROWS[where, what] = function
        return function

    return register


def one_line(error):
    text = str(error.args[0] if isinstance(error, KeyError) else error)
    assert text and "\n" not in text, text
    return text


class World:
    """A folder of one trial, and the steps of the pipeline on it."""

    def __init__(self, folder, tiny):
        self.folder, self.tiny = folder, tiny

    def model(self, name="bert-base-uncased", to="model"):
        """A copy of a tiny checkpoint."""
        return Path(shutil.copytree(self.tiny / name, self.folder / to, dirs_exist_ok=True))

    def file(self, name, content):
        data = content.encode() if isinstance(content, str) else content
        (self.folder / name).write_bytes(data)
        return str(self.folder / name)

    def make(self, **given):
        """What `make reproduce` says of its choices before it runs anything; "accepted" if it would run."""
        try:
            _, _, values = parameters.read({"PROFILE": "smoke", "CALLER": str(self.folder)} | given)
            parameters.check_sources(values)
        except (ValueError, OSError) as error:
            return one_line(error)
        return values

    def execute(self, notebook, **given):
        """(namespace, printed text) of a notebook's code with these parameters; matplotlib draws nothing."""
        space = {"display": lambda *_: None}
        with redirect_stdout(io.StringIO()) as out:
            for name, source in CODE[notebook]:
                exec(compile(source, name, "exec"), space)
                if name == "parameters":
                    assert set(given) <= set(space)
                    space.update(given)
        plt.close("all")
        return space, out.getvalue()

    def corpus(self, corpus, texts=None, **given):
        """What 01_corpus says; with `texts`, the comparison of its documents with them."""
        small = {
            "profile": "t",
            "lengths": [8, 16],
            "n_train": 40,
            "n_validation": 10,
            "n_test": 10,
        }
        small |= {"tokenizer": str(self.tiny / "bert-base-uncased"), "corpus": corpus} | given
        try:
            space, out = self.execute("01_corpus", **small)
        except (ValueError, OSError) as error:
            return one_line(error)
        if texts is not None:
            assert list(space["texts"].values()) == texts
            return f"the {len(texts)} documents that were written"
        return space, out

    def embed(self, folder, texts=("a state in the south", "Hi"), **given):
        """What 02_embeddings' steps say of a model, or its vectors."""
        options = {"max_length": None} | given
        try:
            found = lmd.find_model(str(folder))
            lmd.load_tokenizer(found)
            return lmd.embed(list(texts), str(folder), **options)
        except (ValueError, OSError) as error:
            return one_line(error)


def text(n=30, seed=1):
    rng = np.random.default_rng(seed)
    words = "The river flows north of Paris 1,024 km 20% naïve (old) it’s".split()
    return [
        " ".join(rng.choice(words, size)) + f" {i}."
        for i, size in enumerate(rng.integers(30, 90, n))
    ]


# --- the command line ----------------------------------------------------------------------------

for choice in (
    {"PROFILE": "smok"}, {"PROFILE": "a b"}, {"RUN": "../x"}, {"RUN": "a b"}, {"RUN": "models"},
    {"RUN": "course"}, {"SET": "alpha"}, {"SET": "alhpa=1.0"}, {"SET": "alpha=1e-3"},
    {"SET": "alpha=-1.0"}, {"SET": "alpha=.nan"}, {"SET": "seed=x"}, {"SET": "seed=-1"},
    {"SET": "batch_size=0"}, {"SET": "n_test=0"}, {"SET": "lengths=[0]"}, {"SET": "lengths=[-8]"},
    {"SET": "lengths=[8.5]"}, {"SET": "lengths=[8,8]"}, {"SET": "lengths=[]"},
    {"SET": "test_share=0"}, {"SET": "test_share=0.9"}, {"SET": "pooling=max"},
    {"SET": "pooling=padded_mean"}, {"SET": "corpus_revision=main"}, {"SET": "tokenizer_revision=main"},
    {"SET": "device=tpu"}, {"SET": "tokenizer="}, {"SET": "tokenizer=build/nowhere"}, {"SET": "corpus=notes.docx"},
    {"SET": "max_documents=-1"},
    {"MODELS": "build/tiny/gpt2"}, {"MODELS": "build/tiny/gpt2 build/tiny/gpt2"},
    {"MODELS": "a=build/tiny/gpt2 A=build/tiny/roberta-base"},
    {"MODELS": "../x=build/tiny/gpt2 y=build/tiny/gpt2"}, {"MODELS": "a/b/c=build/tiny/gpt2 y=build/tiny/gpt2"},
    {"MODELS": "..=build/tiny/gpt2 y=build/tiny/gpt2"}, {"MODELS": "=build/tiny/gpt2 y=build/tiny/gpt2"},
    {"MODELS": "x= y=build/tiny/gpt2"},
    {"MODELS": "a+b=build/tiny/gpt2 y=build/tiny/gpt2"}, {"MODELS": "./nowhere build/tiny/gpt2"},
    {"MODELS": "build/tiny build/tiny/gpt2"}, {"MODELS": "'build/tiny/gpt2"},
    {"CORPUS": "nowhere.txt"}, {"CORPUS": "."}, {"CORPUS": "hub:a b"},
    {"SCHEDULER": "local:0"}, {"SCHEDULER": "tcp://host"},
):  # fmt: skip
    ((key, value),) = choice.items()
    quoted = f'{key}="{value}"' if re.search(r"[ ']", value) else f"{key}={value}"

    @row("command", f"`{quoted}`")
    def refused(world, choice=choice):
        return world.make(**choice)


@row("command", "a local folder in a profile with `revision: main`")
def _(world):
    models = [{"name": "a", "source": "build/tiny/gpt2", "revision": "main"}]
    values = parameters.load_profile("smoke") | {"models": models}
    with pytest.raises(ValueError) as error:
        parameters.check_revisions("profile mine", values)
    return one_line(error.value)


@row("command", '`MODELS="\'my models/a\' b="x;y\'s""`: folders with a space, a quote, a semicolon')
def _(world):
    world.model(to="my models/a")
    world.model(to="x;y's")
    values = world.make(MODELS="'my models/a' b=\"x;y's\"")
    found = [(m["name"], Path(m["source"]).relative_to(world.folder)) for m in values["models"]]
    assert found == [("a", Path("my models/a")), ("b", Path("x;y's"))]
    return "the folders `my models/a` and `x;y's`"


@row("command", '`CORPUS="it\'s: a [draft].txt"`: a file with spaces, a quote, a colon, brackets')
def _(world):
    path = world.file("it's: a [draft].txt", "\n".join(text()))
    values = world.make(CORPUS="it's: a [draft].txt")
    assert values["corpus"] == path
    return world.corpus(values["corpus"], text())


# --- text ----------------------------------------------------------------------------------------


def rows_of(texts):
    return "".join(json.dumps({"text": t}) + "\n" for t in texts)


def as_parquet(world, frame, name="rows.parquet"):
    pd.DataFrame(frame).to_parquet(world.folder / name)
    return str(world.folder / name)


for name, content, what in (
    ("nowhere.jsonl", None, "a file that is not there"),
    ("empty.txt", "", "an empty .txt"),
    ("blank.txt", " \n \n\t\n", "a .txt of white space"),
    ("empty.jsonl", "", "an empty .jsonl"),
    ("blank.jsonl", rows_of(["", " ", None]), "a .jsonl whose documents are all blank"),
    ("cut.jsonl", rows_of(text())[:-9], "a .jsonl that was cut"),
    ("broken.jsonl", '{"text": "a"}\nnot json\n', "a .jsonl with a line that is no JSON"),
    ("list.jsonl", '["a"]\n["b"]\n', "a .jsonl of lists"),
    ("field.jsonl", '{"title": "a", "body": "b"}\n', "a .jsonl without the field `text`"),
    ("number.jsonl", '{"text": 3}\n', "a .jsonl whose `text` is a number"),
    ("mixed.jsonl", '{"text": "a"}\n{"text": 3}\n', "a .jsonl whose `text` is now text, now a number"),
    ("nul.txt", "a\0b\n", "a .txt with a NUL"),
    ("nul.jsonl", rows_of([*text(), "a\0b"]), "a .jsonl with a NUL in a text"),
    ("latin.txt", "café".encode("latin-1"), "a .txt in Latin-1"),
    ("latin.jsonl", '{"text": "café"}\n'.encode("latin-1"), "a .jsonl in Latin-1"),
    ("wide.txt", "a text".encode("utf-16"), "a .txt in UTF-16"),
    ("cut.parquet", b"PAR1 and no more", "a .parquet that was cut"),
    ("text.parquet", "\n".join(text()), "a text file named .parquet"),
    ("two.txt", "\n".join(text(2)), "fewer documents than splits"),
    ("short.txt", "\n".join([f"No {i}." for i in range(30)] + text(1)), "a split whose documents are all shorter than T"),
):  # fmt: skip

    @row("text", what)
    def _(world, name=name, content=content):
        return world.corpus(world.file(name, content) if content is not None else name)


@row("text", "a .parquet without the column `text`")
def _(world):
    return world.corpus(as_parquet(world, {"body": text()}))


@row("text", "a .parquet with no row")
def _(world):
    return world.corpus(as_parquet(world, {"text": pd.Series([], dtype=str)}))


@row("text", "`SET=text_field=body`")
def _(world):
    return world.corpus(as_parquet(world, {"body": text(), "text": 0}), text(), text_field="body")


@row("text", "Windows line ends and a byte order mark")
def _(world):
    path = world.file("windows.txt", "\r\n".join(text()).encode("utf-8-sig"))
    return world.corpus(path, text())


@row("text", "a .jsonl with Windows line ends")
def _(world):
    return world.corpus(world.file("windows.jsonl", rows_of(text()).replace("\n", "\r\n")), text())


@row("text", "a .jsonl with a byte order mark")
def _(world):
    return world.corpus(world.file("mark.jsonl", rows_of(text()).encode("utf-8-sig")), text())


@row("text", "blank documents, a missing value and a row without `text` among others")
def _(world):
    path = world.file("rows.jsonl", rows_of([*text(), "", " \n", None]) + '{"title": "a"}\n')
    space, out = world.corpus(path)
    assert list(space["texts"].values()) == text()
    return re.search(r"\d+ documents.*dropped", out)[0]


@row("text", "documents that appear more than once")
def _(world):
    space, out = world.corpus(world.file("rows.jsonl", rows_of([*text(), *text()[:7]])))
    assert list(space["texts"].values()) == text()
    return re.search(r"Warning: \d+ documents dropped.*", out)[0]


@row("text", "a path with glob characters, `a*[b]?.parquet`")
def _(world):
    as_parquet(world, {"text": ["another file"]}, "a_b_.parquet")
    return world.corpus(as_parquet(world, {"text": text()}, "a*[b]?.parquet"), text())


@row("text", "a path with `::`, `a::b.jsonl`")
def _(world):
    return world.corpus(world.file("a::b.jsonl", rows_of(text())), text())


@row("text", "`n_train` above what there is")
def _(world):
    _, out = world.corpus(world.file("rows.jsonl", rows_of(text())), n_train=10_000)
    return re.sub(r"all \d+", "all N", re.search("Warning: T = 16, train: .*", out)[0])


@row("text", "T above every document, `SET=lengths=[100000]`")
def _(world):
    return world.corpus(world.file("rows.jsonl", rows_of(text())), lengths=[100_000])


@row("text", "a document of 10 MB, one word of 30,000 letters")
def _(world):
    big = "The river flows north of Paris. " * 330_000
    path = world.file("big.txt", "\n".join([*text(), big, "x" * 30_000]))
    space, _ = world.corpus(path, split_by="position")
    frame = space["frames"][16]
    assert all(len(code.ids) == 16 for code in space["backend"].encode_batch(
        list(frame["text"]), add_special_tokens=False))  # fmt: skip
    return "sequences of exactly T tokens"


@row("text", "Greek, Russian, Arabic, Japanese, emoji")
def _(world):
    scripts = ["Η Αθήνα είναι η πρωτεύουσα της Ελλάδας. ", "Москва — столица России. "]
    scripts += ["القاهرة هي عاصمة مصر. ", "東京は日本の首都です。", "😀 👩‍👩‍👧 🇪🇺 "]
    texts = [(s * 40).strip() for s in scripts for _ in range(6)]
    texts = [f"{t} {i}" for i, t in enumerate(texts)]
    space, _ = world.corpus(world.file("rows.jsonl", rows_of(texts)), lengths=[8])
    frame = space["frames"][8]
    assert all(t in texts[d] for d, t in frame[["doc_id", "text"]].to_numpy())
    return "literal spans of exactly T tokens"


# --- models --------------------------------------------------------------------------------------


def rewritten(folder, change):
    """The weights of a folder after `change` of their {name: tensor}."""
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    save_file(change(weights), folder / "model.safetensors", {"format": "pt"})
    return folder


def config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return folder


@row("model", "a folder without config.json")
def _(world):
    (world.folder / "model").mkdir()
    return world.embed(world.folder / "model")


@row("model", "a folder with a revision, in a notebook run by hand")
def _(world):
    with pytest.raises(ValueError) as error:
        lmd.find_model(str(world.model()), "main")
    return one_line(error.value)


@row("model", "a config.json that is no JSON")
def _(world):
    (world.model() / "config.json").write_text("{")
    return world.embed(world.folder / "model")


@row("model", "a config.json without model_type")
def _(world):
    (world.model() / "config.json").write_text("{}")
    return world.embed(world.folder / "model")


@row("model", "a config.json of an unknown architecture")
def _(world):
    return world.embed(config(world.model(), model_type="unheard-of"))


@row("model", "an architecture that brings its own code")
def _(world):
    folder = config(
        world.model(), model_type="own", auto_map={"AutoModel": "own.Own", "AutoConfig": "own.C"}
    )
    (folder / "own.py").write_text("raise SystemExit('it ran')\n")
    return world.embed(folder)


@row("model", "a folder without a tokenizer")
def _(world):
    folder = world.model()
    for file in (f for p in lmd.TOKENIZER_FILES for f in folder.glob(p)):
        file.unlink()
    return world.embed(folder)


@row("model", "a tokenizer.json that is no JSON")
def _(world):
    (world.model() / "tokenizer.json").write_text("{")
    return world.embed(world.folder / "model")


@row("model", "a tokenizer with more pieces than the network has embeddings")
def _(world):
    def fewer(weights):
        key = next(k for k in weights if k.endswith("word_embeddings.weight"))
        return weights | {key: weights[key][:100].clone()}

    return world.embed(config(rewritten(world.model(), fewer), vocab_size=100))


@row("model", "a tokenizer with fewer pieces than the network has embeddings")
def _(world):
    import torch

    def more(weights):
        key = next(k for k in weights if k.endswith("word_embeddings.weight"))
        return weights | {key: torch.cat([weights[key], weights[key][:7]])}

    folder = rewritten(world.model(), more)
    size = json.loads((folder / "config.json").read_text())["vocab_size"]
    found = world.embed(config(folder, vocab_size=size + 7))
    np.testing.assert_array_equal(found, world.embed(world.tiny / "bert-base-uncased"))
    return "the vectors of the network without them"


@row("model", "no safetensors, but pytorch_model.bin")
def _(world):
    import torch
    from safetensors.torch import load_file

    folder = world.model()
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    return world.embed(folder)


@row("model", "safetensors that were cut")
def _(world):
    file = world.model() / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    return world.embed(world.folder / "model")


@row("model", "an empty model.safetensors")
def _(world):
    (world.model() / "model.safetensors").write_bytes(b"")
    return world.embed(world.folder / "model")


@row("model", "a weight that is missing")
def _(world):
    def less(weights):
        return {k: v for k, v in weights.items() if "layer.0.output.dense.weight" not in k}

    return world.embed(rewritten(world.model(), less))


@row("model", "weights that are not a number")
def _(world):
    def spoilt(weights):
        key = next(k for k in weights if k.endswith("layer.0.output.dense.weight"))
        weights[key][0, 0] = float("nan")
        return weights

    return world.embed(rewritten(world.model(), spoilt))


@row("model", "weights in float16")
def _(world):
    folder = rewritten(world.model(), lambda weights: {k: v.half() for k, v in weights.items()})
    found, full = (
        world.embed(config(folder, dtype="float16")),
        world.embed(world.tiny / "bert-base-uncased"),
    )
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, full, atol=5e-3)
    return "float32 vectors, within 0.005 of the float32 checkpoint's"


@row("model", "a sequence longer than the model takes")
def _(world):
    long = "the state of the art " * 500
    model, tokenizer = (
        f(world.tiny / "roberta-base") for f in (lmd.load_model, lmd.load_tokenizer)
    )
    ids = lmd.tokenize([long], tokenizer, 64)["input_ids"][0]
    assert len(ids) == 64 == lmd.max_tokens(model, tokenizer)
    found = world.embed(world.tiny / "roberta-base", [long])
    np.testing.assert_array_equal(
        found, world.embed(world.tiny / "roberta-base", [long], max_length=64)
    )
    return "its first 64 tokens, the model's limit; `models.csv` has the share that was cut"


@row("model", "`max_length` that special tokens fill")
def _(world):
    return world.embed(world.tiny / "bert-base-uncased", max_length=2)


@row("model", "`max_length=0`")
def _(world):
    return world.embed(world.tiny / "bert-base-uncased", max_length=0)


@row("model", "a layer that the model does not have")
def _(world):
    return world.embed(world.tiny / "bert-base-uncased", layer=9)


@row("model", "blank texts given to `embed`")
def _(world):
    return world.embed(world.tiny / "bert-base-uncased", ["", "  ", "\n", "a"])


@row("model", "texts in Greek, Arabic, Japanese, emoji")
def _(world):
    texts = ["Η Αθήνα", "القاهرة", "東京は日本", "😀👩‍👩‍👧"]
    for name in ("bert-base-uncased", "roberta-base", "xlnet-base-cased", "gpt2"):
        found = world.embed(world.tiny / name, texts)
        alone = [world.embed(world.tiny / name, [t])[0] for t in texts]
        np.testing.assert_allclose(found, alone, atol=1e-5)
    return "each text's own vector, whatever stands beside it; `models.csv` has the share of unknown tokens"


@row("model", "a hub id, without a network")
def _(world):
    return world.embed("no-such-organisation/no-such-model")


@row("model", "a name that is neither folder nor hub id, `build/x`, `../x`")
def _(world):
    return " / ".join(world.embed(name) for name in ("build/x", "../x"))


# --- numbers -------------------------------------------------------------------------------------


def fitted(arrays, basis, alpha=1e-6):
    moments = lmd.Moments.from_arrays(arrays)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            fit = lmd.fit(moments, "y", basis, alpha=alpha)
            return fit, fit.score(moments), [one_line(w.message) for w in caught]
        except (ValueError, KeyError) as error:
            return one_line(error)


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape)


@row("numbers", "fewer rows than dimensions (N = 50, p = 80)")
def _(world):
    x, y = normal(1, 50, 80), normal(2, 50, 3)
    fit, _, told = fitted({"x": x, "y": y}, ["x"], alpha=0.0)
    least = np.linalg.lstsq(x - x.mean(0), y - y.mean(0))[0].T
    np.testing.assert_allclose(fit.weights["x"], least, atol=1e-8)
    return f"the solution of least norm, and a warning: {told[0]}"


@row("numbers", "constant and duplicate dimensions")
def _(world):
    a, y = normal(1, 200, 6), normal(2, 200, 3)
    x = np.column_stack([a, a[:, :2], np.full(200, 7.0)])
    fit, r2, _ = fitted({"x": x, "y": y}, ["x"], alpha=0.0)
    assert fit.rank == 6
    np.testing.assert_allclose(r2, fitted({"x": a, "y": y}, ["x"], alpha=0.0)[1], atol=1e-9)
    return "the R² without them, and their number is missing from the rank"


@row("numbers", "one model under two names")
def _(world):
    x = normal(1, 200, 6)
    assert abs(fitted({"x": x, "y": x.copy()}, ["x"], alpha=0.0)[1] - 1) < 1e-9
    return "R² = 1 between the two"


@row("numbers", "a model whose vectors do not vary")
def _(world):
    return fitted({"x": normal(1, 40, 2), "y": np.full((40, 3), 0.5)}, ["x"])


@row("numbers", "vectors that are not a number")
def _(world):
    x = normal(1, 40, 2)
    x[7] = np.nan
    with pytest.raises(ValueError) as error:
        lmd.Moments.from_arrays({"x": x, "y": normal(2, 40, 2)})
    return one_line(error.value)


@row("numbers", "models with different numbers of rows")
def _(world):
    with pytest.raises(ValueError) as error:
        lmd.Moments.from_arrays({"x": normal(1, 40, 2), "y": normal(2, 41, 2)})
    return one_line(error.value)


@row("numbers", "one row")
def _(world):
    return fitted({"x": normal(1, 1, 2), "y": normal(2, 1, 2)}, ["x"])


for alpha in (-1.0, float("nan")):

    @row("numbers", f"`alpha={alpha}`")
    def _(world, alpha=alpha):
        return fitted({"x": normal(1, 40, 2), "y": normal(2, 40, 2)}, ["x"], alpha=alpha)


@row("numbers", "a target in its own basis, an unknown model")
def _(world):
    arrays = {"x": normal(1, 40, 2), "y": normal(2, 40, 2)}
    return " / ".join(fitted(arrays, basis) for basis in (["x", "y"], ["z"]))


@row("numbers", "models named `100`, `NA`, `None`")
def _(world):
    names = ["100", "NA", "None"]
    lmd.write_results("t", "models", pd.DataFrame({"name": names, "dim": [1, 2, 3]}))
    assert lmd.read_results("t", "models")["name"].tolist() == names
    return "their names"


# --- the table -----------------------------------------------------------------------------------


@pytest.fixture
def world(tmp_path, tiny_models, monkeypatch):
    matplotlib.use("Agg")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    root = tmp_path / "root"
    (root / "notebooks").mkdir(parents=True)
    shutil.copy(ROOT / "notebooks" / "lmd.mplstyle", root / "notebooks")
    monkeypatch.setattr(lmd, "ROOT", root)
    monkeypatch.setattr(lmd, "save_figure", lambda *_: None)
    monkeypatch.chdir(root)
    folder = tmp_path / "mine"
    folder.mkdir()
    return World(folder, tiny_models)


def outcome(key, world):
    """What the user sees, with the trial's folder as `…`."""
    said = ROWS[key](world)
    assert isinstance(said, str), f"accepted: {said}"
    said = said.replace(str(world.folder), "…").replace(str(ROOT), "…").replace("|", "\\|")
    return " ".join(said.split())


def table():
    """{(where, what): what the user sees} of the page."""
    page = PAGE.read_text(encoding="utf-8")
    lines = page.split(BEGIN)[1].split(END)[0].strip().splitlines()[2:]
    cells = [re.split(r"(?<!\\)\|", line)[1:-1] for line in lines]
    return {(a.strip(), b.strip()): c.strip() for a, b, c in cells}


def test_the_table_has_every_row_once_and_at_least_forty():
    assert list(table()) == list(ROWS) and len(ROWS) >= 40


@pytest.mark.parametrize("key", ROWS, ids=[f"{a}: {b}" for a, b in ROWS])
def test_what_the_user_sees(world, key):
    assert outcome(key, world) == table()[key]


def main():
    """Write the table with what is seen now."""
    import tempfile

    os.environ["HF_ENDPOINT"] = "http://127.0.0.1:9"
    matplotlib.use("Agg")
    lmd.save_figure = lambda *_: None
    said = {}
    for key in ROWS:
        with tempfile.TemporaryDirectory() as folder:
            mine, lmd.ROOT = Path(folder, "mine"), Path(folder, "root")
            mine.mkdir()
            (lmd.ROOT / "notebooks").mkdir(parents=True)
            shutil.copy(ROOT / "notebooks" / "lmd.mplstyle", lmd.ROOT / "notebooks")
            os.chdir(lmd.ROOT)
            said[key] = outcome(key, World(mine, ROOT / "build" / "tiny"))
            os.chdir(ROOT)
    lines = ["| where | input | what you see |", "|---|---|---|"]
    lines += [f"| {where} | {what} | {seen} |" for (where, what), seen in said.items()]
    page = PAGE.read_text(encoding="utf-8")
    head, tail = page.split(BEGIN)[0], page.split(END)[1]
    PAGE.write_text(head + BEGIN + "\n".join(lines) + "\n" + END + tail, encoding="utf-8")


if __name__ == "__main__":
    main()
