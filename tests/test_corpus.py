"""01_corpus: sources, splits, cutting, and what it refuses.

The notebook's own code cells run here, in this process and in a root of their own; one test runs
the notebook through papermill.
"""

import json
import re
import shutil

import matplotlib
import matplotlib.pyplot as plt
import nbformat
import numpy as np
import pandas as pd
import pytest
from conftest import ROOT
from hypothesis import given
from hypothesis import strategies as st

import lmd_utils as lmd

NOTEBOOK = ROOT / "notebooks" / "01_corpus.ipynb"
CODE = {c["id"]: c["source"] for c in nbformat.read(NOTEBOOK, 4).cells if c["cell_type"] == "code"}
SMALL = {"profile": "t", "lengths": [8, 16], "n_train": 40, "n_validation": 10, "n_test": 10}
ODD = "If x != y . . . then al-ain costs £4.56 , says the café ; see [SEP] and </s> "


@pytest.fixture
def root(tmp_path, monkeypatch):
    """An empty repository root that lmd_utils and the notebook take for their own."""
    matplotlib.use("Agg")
    style = tmp_path / "notebooks" / "lmd.mplstyle"
    style.parent.mkdir()
    shutil.copy(ROOT / "notebooks" / "lmd.mplstyle", style)
    monkeypatch.setattr(lmd, "ROOT", tmp_path)
    return tmp_path


@pytest.fixture
def run(root, tiny_models, monkeypatch):
    def run(figures=False, **parameters):
        """Namespace of the notebook after all its code cells ran with `parameters`."""
        if not figures:
            monkeypatch.setattr(lmd, "save_figure", lambda *_: None)
        space = {"display": lambda *_: None}
        given = {"tokenizer": str(tiny_models / "bert-base-uncased"), **SMALL, **parameters}
        for name, source in CODE.items():
            exec(compile(source, name, "exec"), space)
            if name == "parameters":
                assert set(given) <= set(space)
                space.update(given)
        return space

    yield run
    plt.close("all")


def documents(n=30):
    """`n` documents of several lengths, each with the text of H07 in it."""
    rng = np.random.default_rng(1)
    words = "The river flows north Ärger of Paris 1,024 km 20% naïve (old) it’s".split()
    return [
        " ".join(rng.choice(words, size)) + f" {ODD}{i}."
        for i, size in enumerate(rng.integers(30, 200, n))
    ]


def read(root, T=16):
    return lmd.load_sequences(root / "build" / "t" / "sequences" / f"T{T:03d}.parquet")


def write(path, texts):
    """Write `texts` as the kind of file that the suffix of `path` says; returns its path as text."""
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    elif path.suffix == ".parquet":
        path.parent.mkdir(exist_ok=True)
        pd.DataFrame({"text": texts}).to_parquet(path)
    else:
        path.write_text("\n".join(texts), encoding="utf-8")
    return str(path)


# --- sources ---


def test_every_kind_of_file_gives_the_same_sequences(root, run):
    texts = documents()
    run(corpus=write(root / "lines.txt", texts))
    frame, record = read(root)
    assert set(frame["split"]) == {"train", "validation", "test"}
    (root / "blocks.txt").write_bytes("\r\n\r\n".join(texts).encode("utf-8-sig"))
    write(root / "rows.jsonl", texts)
    write(root / "rows.parquet", texts)
    write(root / "dataset" / "train.parquet", texts)
    for corpus in ("blocks.txt", "rows.jsonl", "rows.parquet", f"hub:{root / 'dataset'}"):
        run(corpus=corpus)
        other, its_record = read(root)
        assert other.equals(frame), corpus
        assert its_record["corpus_sha256"] == record["corpus_sha256"]


def test_blocks_keep_their_lines_and_empty_documents_are_counted(root, run, capsys):
    texts = documents(12)
    lines = [f"{a}\n{b}" for a, b in zip(texts[::2], texts[1::2], strict=True)]
    space = run(corpus=write(root / "blocks.txt", ["\n\n".join(lines)]), n_train=1)
    assert list(space["texts"].values()) == [line.strip() for line in lines]
    capsys.readouterr()
    space = run(corpus=write(root / "rows.jsonl", [*texts, "", "  \n", None]))
    assert len(space["texts"]) == 12
    assert "3 empty documents dropped" in capsys.readouterr().out


def test_a_repeated_document_is_dropped_where_it_could_stand_in_two_splits(root, run, capsys):
    texts = documents()
    corpus = write(root / "rows.jsonl", [*texts, *texts[:5], texts[0] + " "])
    space = run(corpus=corpus)
    assert list(space["texts"].values()) == [*texts, texts[0] + " "], "letter by letter"
    assert "Warning: 5 documents dropped that repeat an earlier one" in capsys.readouterr().out
    space = run(corpus=corpus, split_by="position")
    assert list(space["texts"].values()) == [*texts, *texts[:5], texts[0] + " "]


def test_wikipedia_sample_is_clean(root, run):
    space = run(corpus="gensim-enwiki", max_documents=12)
    assert (space["table"]["after"] == 0).all() and (space["table"]["before"] > 0).sum() >= 10
    assert len(space["articles"]) == 106 and len(space["texts"]) == 12
    assert not any(re.search(r"''|\{\{|\[\[|\ufffc|  ", text) for text in space["articles"])
    frame, _ = read(root)
    assert frame.groupby("doc_id")["split"].nunique().max() == 1


def test_templates(run):
    space = {}
    for name in ("setup", "templates", "shown", "expand"):
        exec(CODE[name], space)
    for wikitext, text in {
        "{{convert|20|to|25|C|F}}": "20 to 25 °C",
        "{{lang|el|{{big|λόγος}}}}": "λόγος",
        "{{As of|2015}} and {{as of|2010|lc=y}}": "As of 2015 and as of 2010",
        "{{nowrap|the [[Pays (France)|pays]]}}{{citation needed|date=May 2016}}": "the pays",
        "a<ref name=x/>b<ref>c</ref>d<!-- e -->f": "abdf",
        "[[File:a.jpg|thumb|A [[cat]].]]g": "g",
        "<math>x</math> {{coord|1|2}}": "\ufffc \ufffc",
        "{{convert}} {{nowrap}}": "\ufffc \ufffc",
    }.items():
        assert space["expand"](wikitext) == text


# --- cutting ---


def test_spans_are_literal_and_of_exactly_T_tokens(root, run):
    """Cases H07, H08: the source is sliced, and a special token in it is text."""
    texts = documents()
    space = run(corpus=write(root / "lines.txt", texts))
    frame, record = read(root)
    assert all(text in texts[d] for d, text in frame[["doc_id", "text"]].to_numpy())
    codes = space["backend"].encode_batch(list(frame["text"]), add_special_tokens=False)
    assert {len(code.ids) for code in codes} == {16}
    joined = " ".join(space["text_of"](d, *ends) for d in range(30) for ends in space["cut"][8][d])
    for odd in ("x != y", ". . .", "al-ain", "£4.56"):
        assert odd in joined
    assert record["sequences"] == "spans" and record["T"] == 16
    assert frame["seq_id"].tolist() == list(range(len(frame)))


def test_decoded_is_lower_cased_and_not_literal(root, run):
    texts = documents()
    space = run(corpus=write(root / "lines.txt", texts), sequences="decoded")
    frame, record = read(root)
    ids = {d: space["backend"].encode(texts[d], add_special_tokens=False).ids for d in range(30)}
    for d, text in frame[["doc_id", "text"]].to_numpy():
        starts = range(0, len(ids[d]) - 15, 16)
        assert text in [space["decoded"](ids[d][i : i + 16]) for i in starts]
    assert record["sequences"] == "decoded"
    assert all(text == text.lower() for text in frame["text"].str.replace("[UNK]", "[unk]"))
    assert not all(text in texts[d] for d, text in frame[["doc_id", "text"]].to_numpy())


@given(st.lists(st.integers(1, 5), max_size=40), st.integers(1, 9))
def test_starts(sizes, T):
    """Spans begin and end with a word, do not overlap, and none that fits in a gap is missed."""
    space = {}
    exec(CODE["cut"][CODE["cut"].index("def starts") : CODE["cut"].index("assert list")], space)
    word_ids = [word for word, size in enumerate(sizes) for _ in range(size)]
    edges = set(np.cumsum([0, *sizes]).tolist())
    found = list(space["starts"](word_ids, T))
    assert all({i, i + T} <= edges for i in found)
    assert all(b - a >= T for a, b in zip(found, found[1:], strict=False))
    ends = [0, *(i + T for i in found)]
    for end, start in zip(ends, [*found, len(word_ids) + 1], strict=True):
        assert not any({i, i + T} <= edges for i in range(end, start) if i + T <= start)


def test_a_very_long_document_does_not_warn(root, run, capfd, recwarn):
    texts = documents(9) + [" ".join(documents(9) * 40), "x" * 3000]
    run(corpus=write(root / "rows.parquet", texts), split_by="position")
    assert "oken indices" not in capfd.readouterr().err
    assert not [w for w in recwarn if "sequence length" in str(w.message)]


def test_no_text_of_a_piece_is_held_before_it_is_drawn(root, run):
    space = run(corpus=write(root / "rows.parquet", documents()))
    assert {ends.dtype for cut in space["cut"].values() for ends in cut.values()} == {
        np.dtype("i4")
    }
    assert not space["token_ids"]
    space = run(corpus=str(root / "rows.parquet"), sequences="decoded")
    assert {ids.dtype for ids in space["token_ids"].values()} == {np.dtype("i4")}


# --- splits and selection ---


def test_no_document_is_in_two_splits_at_any_T(root, run):
    space = run(corpus=write(root / "rows.parquet", documents()))
    seen = pd.concat([read(root, T)[0] for T in (8, 16)])
    assert seen.groupby("doc_id")["split"].nunique().max() == 1
    tokens = pd.Series(space["tokens"])
    share = tokens.groupby(pd.Series(space["split_of"])).sum() / tokens.sum()
    largest = tokens.max() / tokens.sum()
    assert 0.1 <= share["validation"] <= 0.1 + largest and 0.1 <= share["test"] <= 0.1 + largest


def test_the_seed_decides(root, run):
    corpus = write(root / "rows.parquet", documents())
    contents = []
    for seed in (0, 0, 1):
        run(corpus=corpus, seed=seed)
        contents.append((root / "build" / "t" / "sequences" / "T016.parquet").read_bytes())
    assert contents[0] == contents[1] != contents[2]


def test_position_and_first_as_the_authors_do(root, run, capsys):
    texts = documents(40)
    given = {"split_by": "position", "selection": "first", "n_validation": 5, "n_test": 5}
    space = run(corpus=write(root / "rows.parquet", texts), **given, n_train=20)
    frame, _ = read(root)
    splits = frame.groupby("split")["doc_id"]
    assert splits.min().to_dict() == {"validation": 0, "test": 4, "train": 8}
    train = frame[frame["split"] == "train"]
    cut = space["cut"][16]
    first = [space["text_of"](d, *ends) for d in sorted(cut) if d >= 8 for ends in cut[d]][:20]
    assert train["text"].tolist() == first
    assert max(space["texts"]) < 20, "read no further than needed"
    full = run(corpus=write(root / "rows.parquet", texts), **given | {"selection": "sampled"})
    assert len(full["texts"]) == 40


def test_too_few_sequences_are_all_taken_and_none_is_an_error(root, run, capsys):
    corpus = write(root / "rows.parquet", documents())
    run(corpus=corpus, n_train=10_000)
    assert re.search(
        r"Warning: T = 16, train: all \d+ sequences taken, 10,000 were asked for",
        capsys.readouterr().out,
    )
    with pytest.raises(ValueError, match="no train sequence of T = 5000 among its .* smaller T"):
        run(corpus=corpus, lengths=[5000])
    with pytest.raises(ValueError, match="no train sequence .* 0 documents: give more"):
        run(corpus=write(root / "two.txt", documents(2)))


def test_results_table(root, run):
    run(figures=True, corpus=write(root / "rows.parquet", documents()))
    table = pd.read_csv(root / "data" / "results" / "t" / "corpus.csv")
    assert list(table) == ["T", "split", "documents", "sequences", "tokens", "characters"]
    assert len(table) == 6 and (table["tokens"] == table["T"] * table["sequences"]).all()
    for suffix in ("pdf", "png"):
        assert (root / "figures" / "t" / f"corpus_documents.{suffix}").stat().st_size > 1000


# --- refusals: one line that says what and what to do ---


def refused(run, **parameters):
    with pytest.raises((ValueError, FileNotFoundError)) as caught:
        run(**parameters)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_script_datasets_name_the_alternative(root, run):
    """Case H16."""
    (root / "old").mkdir()
    (root / "old" / "old.py").write_text("import datasets\n")
    for split_by in ("shuffled", "position"):
        message = refused(run, corpus=f"hub:{root / 'old'}", split_by=split_by)
        assert "refs/convert/parquet" in message and ".parquet file" in message


def test_a_hub_out_of_reach_is_one_line(run):
    message = refused(run, corpus="hub:wikicorpus", corpus_config="raw_en")
    assert "cannot read hub:wikicorpus" in message and "within reach" in message


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("absent.txt", None, "absent.txt.* no such file"),
        ("absent.jsonl", None, "absent.jsonl.* no such file"),
        ("text.docx", b"x", "docx.* is no .txt, .jsonl, .parquet or hub:"),
        ("empty.txt", b"", "empty.txt.* has no text"),
        ("blank.txt", b" \n \n\n", "blank.txt.* has no text"),
        ("empty.jsonl", b"", "empty.jsonl"),
        (
            "latin.txt",
            "caf\xe9 au lait".encode("latin-1"),
            "latin.txt is not UTF-8 .byte 3.*: save it",
        ),
        ("latin.jsonl", '{"text": "caf\xe9"}\n'.encode("latin-1"), "cannot read latin.jsonl"),
        (
            "field.jsonl",
            b'{"title": "a", "body": "b"}\n',
            "no 'text' but title, body: set text_field",
        ),
        ("number.jsonl", b'{"text": 3}\n', "'text' of row 0 is no text but 3"),
        ("broken.jsonl", b'{"text": "a"}\nnot json\n', "cannot read broken.jsonl"),
        ("broken.parquet", b"PAR0", "cannot read broken.parquet"),
    ],
)
def test_bad_files(root, run, name, content, expected):
    if content is not None:
        (root / name).write_bytes(content)
    assert re.search(expected, refused(run, corpus=name))


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        ({"sequences": "first"}, "sequences is 'first': write spans or decoded"),
        ({"selection": "last"}, "selection is 'last': write sampled or first"),
        ({"split_by": "first"}, "split_by is 'first': write shuffled or position"),
        ({"validation_share": 0.0}, "above 0"),
        ({"validation_share": 0.5, "test_share": 0.5}, "leave a share to train"),
        ({"lengths": [16, 16]}, "no length twice"),
        ({"n_test": 0}, "1 or more"),
        ({"tokenizer": "build/absent"}, "build/absent"),
    ],
)
def test_bad_parameters(root, run, parameters, expected):
    corpus = write(root / "lines.txt", documents(3))
    assert expected in refused(run, corpus=corpus, **parameters)


# --- the notebook as a notebook ---


def test_papermill_from_another_directory(root, run, tiny_models, monkeypatch):
    """Case H17: the working directory does not matter, and the kernel writes the same bytes."""
    papermill = pytest.importorskip("papermill")
    write(root / "lines.txt", documents())
    run(corpus="lines.txt")
    path = root / "build" / "t" / "sequences" / "T016.parquet"
    expected = path.read_bytes()
    path.unlink()
    shutil.copy(ROOT / "lmd_utils.py", root)
    monkeypatch.setenv("PYTHONPATH", str(root))
    elsewhere = root / "elsewhere"
    elsewhere.mkdir()
    papermill.execute_notebook(
        NOTEBOOK,
        elsewhere / "out.ipynb",
        {**SMALL, "corpus": "lines.txt", "tokenizer": str(tiny_models / "bert-base-uncased")},
        kernel_name="python3",
        progress_bar=False,
        cwd=elsewhere,
    )
    assert path.read_bytes() == expected
    assert not [p for p in elsewhere.iterdir() if p.name != "out.ipynb"]
