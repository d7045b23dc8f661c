"""What lies on disk between the notebooks: whole or absent, named safely, read back as written."""

import os
import re

import numpy as np
import pandas as pd
import pytest
import zarr
from hypothesis import given
from hypothesis import strategies as st

import lmd_utils as lmd

NAMES = ["allenai/longformer-base-4096", "../../etc/passwd", "/etc/x", "a b+c", "..a", "日本"]


@pytest.fixture
def root(tmp_path, monkeypatch):
    monkeypatch.setattr(lmd, "ROOT", tmp_path)
    return tmp_path


# --- atomic --------------------------------------------------------------------------------------


def fill(path, kind, text):
    """Make a file, or a folder with one file, that holds `text`."""
    if kind == "folder":
        path.mkdir()
        path = path / "part"
    path.write_text(text)


def content(path):
    return (path / "part" if path.is_dir() else path).read_text()


@pytest.mark.parametrize("kind", ["file", "folder"])
@pytest.mark.parametrize("before", [False, True])
def test_atomic_makes_and_replaces(tmp_path, kind, before):
    path = tmp_path / "deep" / "down" / "result"
    if before:
        path.parent.mkdir(parents=True)
        fill(path, kind, "old")
    with lmd.atomic(path) as temporary:
        assert temporary.parent == path.parent and temporary != path
        fill(temporary, kind, "new")
        assert not before or content(path) == "old"
    assert content(path) == "new" and os.listdir(path.parent) == ["result"]


@pytest.mark.parametrize("kind", ["file", "folder"])
@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_atomic_keeps_the_old_content_when_writing_fails(tmp_path, kind, before, error):
    path = tmp_path / "result"
    if before:
        fill(path, kind, "old")
    with pytest.raises(error), lmd.atomic(path) as temporary:
        fill(temporary, kind, "half")
        raise error
    assert os.listdir(tmp_path) == ["result"] * before
    assert not before or content(path) == "old"


def test_atomic_with_nothing_written_is_an_error_and_keeps_the_old(tmp_path):
    path = tmp_path / "result"
    fill(path, "file", "old")
    with pytest.raises(OSError), lmd.atomic(path):
        pass
    assert content(path) == "old" and os.listdir(tmp_path) == ["result"]


@pytest.mark.parametrize("failing", [1, 2])
def test_a_folder_swap_that_breaks_off_never_leaves_neither(tmp_path, monkeypatch, failing):
    """Old or new, one of them is whole on the disk after each step of the swap."""
    path, replace, calls = tmp_path / "result", os.replace, []
    fill(path, "folder", "old")

    def breaks(source, target):
        calls.append(source)
        if len(calls) == failing:
            raise OSError("planted")
        replace(source, target)

    monkeypatch.setattr(os, "replace", breaks)
    with pytest.raises(OSError, match="planted"), lmd.atomic(path) as temporary:
        fill(temporary, "folder", "new")
    assert {content(p) for p in tmp_path.iterdir()} & {"old", "new"}


# --- names and hashes ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, cleaned",
    [
        ("allenai/longformer-base-4096", "allenai--longformer-base-4096"),
        ("minilm-layer2", "minilm-layer2"),
        ("a b+c", "a_b_c"),
        ("../x", "--x"),
    ],
)
def test_clean_name(name, cleaned):
    assert lmd.clean_name(name) == cleaned


@pytest.mark.parametrize("name", ["", ".", ".."])
def test_a_name_that_leaves_nothing_is_refused(name):
    with pytest.raises(ValueError, match="give it a name"):
        lmd.clean_name(name)


@given(st.text(min_size=1).filter(lambda name: name.strip("./")))
def test_every_name_becomes_one_part_of_a_path(name):
    cleaned = lmd.clean_name(name)
    assert re.fullmatch(r"[\w\-][\w.\-]*", cleaned) and lmd.clean_name(cleaned) == cleaned


def test_documents_lie_beside_the_sequences(root):
    assert lmd.documents_path("run") == root / "build/run/documents.parquet"
    assert lmd.documents_path("run").parent == lmd.sequences_path("run", 8).parent.parent


@pytest.mark.parametrize("name", NAMES)
def test_paths_stay_in_their_folder_whatever_the_name(root, name):
    build = root / "build"
    assert lmd.sequences_path(name, 16).resolve().parts[-2:] == ("sequences", "T016.parquet")
    assert lmd.sequences_path(name, 16).resolve().parent.parent.parent == build
    for path in (lmd.embeddings_path("run", 8, name), lmd.embeddings_path(name, 8, "model")):
        assert path.resolve().parents[3] == build
        assert path.parts[-3:-1] == ("embeddings", "T008") and path.suffix == ".zarr"


def test_two_models_have_two_paths():
    assert len({lmd.embeddings_path("run", T, n) for T in (8, 16) for n in ("a", "b")}) == 4


def test_content_hash_sees_bytes_and_names_and_nothing_else(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    for folder, names in ((first, "ab"), (second, "ba")):
        (folder / "sub").mkdir(parents=True)
        for name in names:
            (folder / "sub" / name).write_text(name * 9)
    same = lmd.content_hash(first)
    assert re.fullmatch("[0-9a-f]{64}", same) and lmd.content_hash(second) == same
    os.utime(second / "sub" / "a", (0, 0))
    assert lmd.content_hash(second) == same
    (second / "sub" / "a").write_text("a" * 8 + "b")
    assert lmd.content_hash(second) != same
    (first / "sub" / "a").rename(first / "sub" / "c")
    assert lmd.content_hash(first) != same


def test_content_hash_of_moved_bytes_differs(tmp_path):
    """ab + c and a + bc are the same bytes in a row."""
    for folder, parts in (("one", ("ab", "c")), ("two", ("a", "bc"))):
        (tmp_path / folder).mkdir()
        for name, part in zip("xy", parts, strict=True):
            (tmp_path / folder / name).write_text(part)
    assert lmd.content_hash(tmp_path / "one") != lmd.content_hash(tmp_path / "two")


def test_content_hash_of_a_file_is_sha256_and_of_chosen_files_only_theirs(tmp_path):
    (tmp_path / "abc").write_text("abc")
    known = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert lmd.content_hash(tmp_path / "abc") == known
    chosen = lmd.content_hash(tmp_path, ["a*"])
    (tmp_path / "b").write_text("other")
    assert lmd.content_hash(tmp_path, ["a*"]) == chosen != lmd.content_hash(tmp_path)
    with pytest.raises(FileNotFoundError, match="no file matches c"):
        lmd.content_hash(tmp_path, ["c*"])


# --- tables --------------------------------------------------------------------------------------


def test_results_come_back_with_nine_decimals(root):
    table = pd.DataFrame(
        {"T": [8, 16], "basis": ["1", "007"], "target": ["a+b", "c"], "r2": [1 / 3, np.nan]}
    )
    lmd.write_results("org/run", "scores", table)
    path = root / "data/results/org--run/scores.csv"
    assert path.read_bytes() == b"T,basis,target,r2\n8,1,a+b,0.333333333\n16,007,c,\n"
    back = lmd.read_results("org/run", "scores")
    assert back["T"].tolist() == [8, 16] and back["basis"].tolist() == ["1", "007"]
    np.testing.assert_allclose(back["r2"], table["r2"], atol=5e-10)
    before = path.read_bytes()
    lmd.write_results("org/run", "scores", table)
    assert path.read_bytes() == before and os.listdir(path.parent) == ["scores.csv"]


def test_names_of_models_are_text_even_when_they_look_like_numbers(root):
    lmd.write_results("run", "models", pd.DataFrame({"T": [8], "name": ["100"], "dim": [32]}))
    assert lmd.read_results("run", "models")["name"].tolist() == ["100"]


def test_a_missing_table_is_named(root):
    with pytest.raises(FileNotFoundError, match=r"data/results/mine/scores.csv.*'mine'") as error:
        lmd.read_results("mine", "scores")
    assert "\n" not in str(error.value)


# --- sequences -----------------------------------------------------------------------------------


def sequences(*texts):
    n = len(texts)
    return pd.DataFrame(
        {"seq_id": range(n), "doc_id": [7] * n, "split": ["train"] * n, "text": texts}
    )


def test_sequences_and_their_record_come_back(tmp_path):
    path, frame = tmp_path / "T008.parquet", sequences("one", "é \u2028 two\n", "日本")
    lmd.save_sequences(path, frame.assign(more=1), {"T": 8, "corpus": "mine"})
    back, record = lmd.load_sequences(path)
    pd.testing.assert_frame_equal(back, frame)
    assert re.fullmatch("[0-9a-f]{64}", record.pop("sequences_sha256"))
    assert record == {"T": 8, "corpus": "mine"}


def test_the_hash_of_sequences_is_of_their_texts_in_order(tmp_path):
    def of(*texts, **record):
        lmd.save_sequences(tmp_path / "x", sequences(*texts), record)
        return lmd.load_sequences(tmp_path / "x")[1]["sequences_sha256"]

    known = of("one", "two")
    assert of("one", "two", T=8) == known
    assert len({known, of("one", "twO"), of("two", "one"), of("onetwo"), of("one", "two", "")}) == 5


def test_missing_sequences_name_the_notebook(tmp_path):
    with pytest.raises(FileNotFoundError, match="01_corpus"):
        lmd.load_sequences(tmp_path / "T008.parquet")


# --- embeddings ----------------------------------------------------------------------------------


def test_embeddings_with_a_lost_chunk_are_refused(tmp_path):
    path = tmp_path / "m.zarr"
    array = zarr.create_array(str(path), shape=(10, 4), chunks=(4, 4), dtype="float32")
    array[:] = np.arange(1, 41).reshape(10, 4)
    array.attrs.update({"record": {"T": 8}})
    opened = lmd.open_embeddings(path)
    np.testing.assert_array_equal(opened[:], array[:])
    assert opened.attrs["record"] == {"T": 8}
    chunk = next(p for p in sorted((path / "c").rglob("*")) if p.is_file())
    chunk.unlink()
    with pytest.raises(ValueError, match="2 of 3 chunks.*02_embeddings") as error:
        lmd.open_embeddings(path)
    assert "\n" not in str(error.value)


def test_vectors_made_from_other_sequences_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(lmd, "ROOT", tmp_path)
    path = lmd.embeddings_path("run", 8, "m")
    path.parent.mkdir(parents=True)
    lmd.save_sequences(lmd.sequences_path("run", 8), sequences("one", "two"), {"T": 8})
    record = lmd.load_sequences(lmd.sequences_path("run", 8))[1]
    array = zarr.create_array(str(path), shape=(2, 4), chunks=(2, 4), dtype="float32")
    array[:] = np.arange(1, 9).reshape(2, 4)
    array.attrs["record"] = {"sequences_sha256": record["sequences_sha256"]}
    frame, arrays = lmd.open_vectors("run", 8, ["m"])
    assert list(frame["text"]) == ["one", "two"]
    np.testing.assert_array_equal(arrays["m"][:], np.arange(1, 9).reshape(2, 4))
    array.attrs["record"] = {"sequences_sha256": "0"}
    with pytest.raises(ValueError, match="m, T = 8: made from other sequences; run 02_embeddings"):
        lmd.open_vectors("run", 8, ["m"])
    array.attrs["record"] = {"sequences_sha256": record["sequences_sha256"]}
    array.resize((1, 4))  # a row is missing
    with pytest.raises(ValueError, match="made from other sequences"):
        lmd.open_vectors("run", 8, ["m"])


def test_missing_embeddings_name_the_notebook(tmp_path):
    with pytest.raises(FileNotFoundError, match="02_embeddings"):
        lmd.open_embeddings(tmp_path / "m.zarr")
