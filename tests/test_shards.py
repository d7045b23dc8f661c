"""02_embeddings keeps its rows in shards: what is whole is kept, what is not is made again, to the byte."""

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

import lmd_utils as lmd

NOTEBOOK = Path(__file__).resolve().parent.parent / "notebooks" / "02_embeddings.ipynb"
T = 8
ROWS = 10
CELLS = "setup parameters derived load record done report embed-pass write networks"
PARAMETERS = f"""
profile, lengths, batch_size, device = "shards", [{T}], 3, "cpu"
models = [
    {{"name": "bert", "source": "models/bert"}},
    {{"name": "bert-1", "source": "models/bert", "layer": 1}},
    {{"name": "roberta", "source": "models/roberta"}},
]
"""


def run(root, until):
    """The notebook's own cells in a repository at `root`, with shards of 4 rows; its names."""
    lmd.ROOT, names = root, {}
    cells = {c["id"]: "".join(c["source"]) for c in json.loads(NOTEBOOK.read_text())["cells"]}
    wanted = CELLS.split()
    for name in wanted[: wanted.index(until) + 1]:
        exec(cells[name], names)
        if name == "parameters":
            exec(PARAMETERS, names)
    return names


def make(root, **replaced):
    """Run the notebook; (names, shards it made): (models, T, first row, last row + 1)."""
    names = run(root, "networks")
    names |= {"SHARD": 4} | {k: f(names) for k, f in replaced.items()}
    cells = {c["id"]: "".join(c["source"]) for c in json.loads(NOTEBOOK.read_text())["cells"]}
    for name in ("embed-all", "embed-where", "embed-run"):
        exec(cells[name], names)
    return names, names["tasks"]


def content(root):
    """{relative name: bytes} of all that 02 keeps."""
    folder = root / "build" / "shards" / "embeddings"
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def chunk(root, name, k):
    return root / f"build/shards/embeddings/T{T:03d}/{name}.zarr/c/{k}/0"


def write_sequences(root, changed=None):
    texts = [f"the state of Alabama and {'of the ' * (i % 4)}number {i}" for i in range(ROWS)]
    texts[0] = changed or texts[0]
    frame = pd.DataFrame({"text": texts, "seq_id": range(ROWS), "doc_id": 0, "split": "train"})
    lmd.save_sequences(
        root / f"build/shards/sequences/T{T:03d}.parquet", frame, {"corpus_sha256": "0"}
    )
    return texts


@pytest.fixture
def root(tiny_models, tmp_path, monkeypatch):
    monkeypatch.setattr(lmd, "ROOT", tmp_path)
    for name, source in {"bert": "bert-base-uncased", "roberta": "roberta-base"}.items():
        shutil.copytree(tiny_models / source, tmp_path / "models" / name)
    write_sequences(tmp_path)
    return tmp_path


@pytest.fixture
def before(root):
    """Content of an undisturbed run that is gone again."""
    make(root)
    found = content(root)
    shutil.rmtree(root / "build" / "shards" / "embeddings")
    return found


BERT = ("bert", "bert-1")
SHARDS = [(0, 4), (4, 8), (8, 10)]
ALL = [(m, T, *shard) for m in (BERT, ("roberta",)) for shard in SHARDS]


def test_the_rows_are_the_sequences_and_a_second_run_makes_nothing(root):
    names, made = make(root)
    assert made == ALL
    texts = names["read_sequences"](T)[0]["text"].tolist()
    for name, source, layer in (
        ("bert", "bert", -1),
        ("bert-1", "bert", 1),
        ("roberta",) * 2 + (-1,),
    ):
        expected = lmd.embed(texts, root / "models" / source, max_length=None, layer=layer)
        array = lmd.open_embeddings(lmd.embeddings_path("shards", T, name))
        np.testing.assert_allclose(array[:], expected, atol=1e-5)
        total = sum(counts["tokens"] for counts in array.attrs["counts"].values())
        tokens = lmd.tokenize(texts, lmd.load_tokenizer(root / "models" / source))["input_ids"]
        assert total == sum(map(len, tokens))
    before = content(root)
    assert make(root)[1] == []
    assert content(root) == before


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGES = {
    "a byte flipped": flip,
    "its checksum flipped": lambda p: p.write_bytes(p.read_bytes()[:-1] + b"\x00"),
    "cut": lambda p: p.write_bytes(p.read_bytes()[:-7]),
    "empty": lambda p: p.write_bytes(b""),
    "missing": Path.unlink,
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_chunk_is_an_error_and_then_made_again(root, damage):
    make(root)
    before = content(root)
    damage(chunk(root, "bert-1", 1))
    assert content(root) != before
    with pytest.raises((ValueError, RuntimeError)):
        lmd.open_embeddings(lmd.embeddings_path("shards", T, "bert-1"))[:]
    assert make(root)[1] == [(("bert-1",), T, 4, 8)]
    assert content(root) == before


def test_damaged_metadata_makes_the_array_again(root):
    make(root)
    before = content(root)
    path = lmd.embeddings_path("shards", T, "roberta") / "zarr.json"
    path.write_bytes(path.read_bytes()[:50])
    assert make(root)[1] == ALL[3:]
    assert content(root) == before


def test_a_run_that_failed_goes_on_after_its_last_shard(root, before):

    def failing(names):
        embed_shard = names["embed_shard"]

        def shard(models, T, first, last):
            if (models, first) == (("roberta",), 4):
                raise OSError("disk full")
            return embed_shard(models, T, first, last)

        return shard

    with pytest.raises(OSError, match="disk full"):
        make(root, embed_shard=failing)
    assert make(root)[1] == ALL[4:]
    assert content(root) == before


def test_a_shard_that_cannot_be_written_stops_the_others(root):
    begun, threads = [], torch.get_num_threads()

    def slow(names):
        embed_shard = names["embed_shard"]

        def shard(*task):
            begun.append(task)
            time.sleep(0.5 * (len(begun) > 1))
            return embed_shard(*task)

        return shard

    def full(names):
        def write_shard(*given):
            raise OSError("disk full")

        return write_shard

    torch.set_num_threads(1)
    try:
        with pytest.raises(OSError, match="disk full"):
            make(root, embed_shard=slow, write_shard=full)
    finally:
        torch.set_num_threads(threads)
    assert len(begun) < len(ALL)


def test_a_killed_run_goes_on_after_its_last_shard(root, before):
    """SIGKILL between the counts of a shard and its rows; the same bytes as undisturbed."""
    program = (
        "import os, signal, sys\n"
        f"sys.path[:0] = [{str(Path(__file__).parent)!r}, {str(NOTEBOOK.parent.parent)!r}]\n"
        "from pathlib import Path\n"
        "import test_shards, zarr\n"
        "put, done = zarr.Array.__setitem__, []\n"
        "def killing(*given):\n"
        "    done.append(1)\n"
        "    if len(done) == 4: os.kill(os.getpid(), signal.SIGKILL)\n"
        "    put(*given)\n"
        "zarr.Array.__setitem__ = killing\n"
        "test_shards.make(Path(sys.argv[1]))\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(root)], capture_output=True)
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    assert sorted(p.name for p in chunk(root, "bert", 0).parent.parent.iterdir()) == ["0", "1"]
    assert make(root)[1] == [(("bert-1",), T, 4, 8), *ALL[2:]]
    assert content(root) == before


def test_a_model_overwritten_in_place_is_embedded_anew_and_only_it(root, tiny_models):
    make(root)
    shutil.copy(
        tiny_models / "distilroberta-base" / "config.json",
        root / "models" / "roberta" / "other.json",
    )
    assert make(root)[1] == [], "a file that no model reads changes nothing"
    weights = root / "models" / "roberta" / "model.safetensors"
    data = weights.read_bytes()
    weights.write_bytes(data[:-4] + b"\x00\x00\x00\x00")
    assert make(root)[1] == ALL[3:]


def test_a_changed_tokenizer_file_makes_its_models_anew(root):
    make(root)
    path = root / "models" / "bert" / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_max_length": 100}))
    assert make(root)[1] == ALL[:3]


def test_one_changed_character_of_the_text_makes_all_anew(root):
    names, _ = make(root)
    text = names["read_sequences"](T)[0]["text"][0]
    write_sequences(root, text[:-1] + "1")
    assert make(root)[1] == ALL
    assert make(root)[1] == []


@pytest.mark.parametrize("workers", [1, 3])
def test_the_number_of_workers_changes_no_byte(root, before, workers):
    threads = torch.get_num_threads()
    torch.set_num_threads(workers)
    try:
        make(root)
    finally:
        torch.set_num_threads(threads)
    assert content(root) == before


def test_an_error_names_the_models_the_length_and_where_to_count_from(root):
    names, _ = make(root)
    with torch.no_grad():
        names["load_network"]("bert")[0].embeddings.word_embeddings.weight.fill_(float("nan"))
    with pytest.raises(
        ValueError, match=r"^bert, bert-1, T = 8, rows counted from 4: 4 of 4 embed"
    ) as e:
        names["embed_shard"](BERT, T, 4, 8)
    assert "\n" not in str(e.value)
