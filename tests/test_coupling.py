"""Training and measuring the models of 07_embedding_coupling in small, and the notebook on such tables."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import coupling
import numpy as np
import pandas as pd
import parameters
import pretraining
import pytest
import tiny_models
import torch
import transformers
from clone import environment
from conftest import ROOT

import lmd_utils as lmd

NOTEBOOK = ROOT / "notebooks" / "07_embedding_coupling.ipynb"
SMALL = {
    "profile": "tiny", "seeds": 2, "steps": 8, "hidden_size": 16, "layers": 2, "batch_tokens": 256,
    "fit_spans": 6, "held_out_batches": 1, "texts": ["bilingual"], "variants": ["coupled", "small-both"],
}  # fmt: skip
SET = " ".join(
    f"{key}={json.dumps(value)}".replace('"', "").replace(" ", "") for key, value in SMALL.items()
)

CUT = """
import pathlib, sys, time
import coupling, lmd_utils, torch

lmd_utils.ROOT, calls, loss = pathlib.Path(sys.argv[1]), [], coupling.masked_loss

def stops(model, batch):
    calls.append(1)
    while len(calls) > 5:  # in the sixth step, after a checkpoint
        time.sleep(1)
    return loss(model, batch)

coupling.masked_loss = stops
torch.set_num_threads(1)
settings, home, _ = coupling.settings_of(sys.argv[2])
coupling.train(sys.argv[3], settings, home)
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A folder that stands for the repository: documents, tokenizers, style."""
    root = tmp_path_factory.mktemp("coupling")
    for name in ("data", "notebooks", "tools", "lmd_utils.py"):
        (root / name).symlink_to(ROOT / name) if name != "data" else (root / name).mkdir()
    (root / "data" / "zoo").symlink_to(ROOT / "data" / "zoo")
    path = root / "build" / "tiny" / "documents.parquet"
    path.parent.mkdir(parents=True)
    splits = ["train"] * 3 + ["validation", "validation", "test"]
    texts = [text[:14000] for text in tiny_models.articles(6)]
    pd.DataFrame({"doc_id": range(6), "split": splits, "text": texts}).to_parquet(path)
    return root


@pytest.fixture(scope="module")
def trained(root):
    """Settings, folder and names of four small models, trained and measured, with their tables written."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lmd, "ROOT", root)
        torch.set_num_threads(1)
        settings, home, results = coupling.settings_of(SET)
        assert results == "coupling-custom" and home == root / "build" / "coupling-custom"
        for job in (coupling.train, coupling.measure):
            for name in coupling.names(settings):
                job(name, settings, home)
        coupling.write_tables(settings, home, "coupling")
        yield settings, home, coupling.names(settings)


def test_a_training_that_is_killed_ends_with_the_same_bytes(root, trained):
    settings, home, _ = trained
    name = "bilingual/coupled/0"
    whole = (home / name / "model.safetensors").read_bytes()
    curve = json.loads((home / name / "record.json").read_text())["curve"]
    (home / name / "record.json").unlink()
    environ = environment(
        PYTHONPATH=os.pathsep.join([str(ROOT), str(ROOT / "tools")]), OMP_NUM_THREADS="1"
    )
    process = subprocess.Popen([sys.executable, "-c", CUT, str(root), SET, name], env=environ)
    work = home / ".work" / name.replace("/", "-")
    for _ in range(6000):
        if any(work.glob("checkpoint-4/trainer_state.json")) or process.poll() is not None:
            break
        time.sleep(0.1)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert any(work.glob("checkpoint-*")) and not (home / name / "record.json").exists()
    coupling.train(name, settings, home)
    assert (home / name / "model.safetensors").read_bytes() == whole and not work.exists()
    assert json.loads((home / name / "record.json").read_text())["curve"] == curve


def test_what_is_finished_is_left_alone_and_another_recipe_is_not(trained):
    settings, home, names = trained
    files = [home / names[1] / file for file in ("model.safetensors", "measures.json")]
    before = [file.stat().st_mtime_ns for file in files]
    coupling.train(names[1], settings, home)
    coupling.measure(names[1], settings, home)
    assert [file.stat().st_mtime_ns for file in files] == before
    wanted = coupling.recipe(names[1], settings | {"steps": 9})
    assert coupling.finished(home / names[1], wanted, "record.json") is None


def test_a_recipe_knows_texts_tokenizer_and_settings(root, trained, tmp_path, monkeypatch):
    """One character of a train text, or a setting, asks for another training; of a test text, for other measures."""
    settings, home, names = trained
    monkeypatch.setattr(lmd, "ROOT", root)
    texts = coupling.documents(settings)
    assert coupling.is_done("train", names[1], settings, home)
    assert coupling.is_done("measure", names[1], settings, home)
    for split, redone in (("train", (False, True)), ("test", (True, False))):
        other = texts | {split: [text + "." for text in texts[split]]}
        with monkeypatch.context() as patch:
            patch.setattr(coupling, "documents", lambda settings, other=other: other)
            done = [coupling.is_done(job, names[1], settings, home) for job in ("train", "measure")]
        assert done == [redone[0], redone[1]], split
    for key in ("steps", "learning_rate", "english_share"):
        assert not coupling.is_done("train", names[1], settings | {key: settings[key] / 2}, home)
    assert not coupling.is_done("measure", names[1], settings | {"span_tokens": 32}, home)
    for file in coupling.TOKENIZER_FILES:
        folder = tmp_path / file
        shutil.copytree(root / coupling.TOKENIZERS["bilingual"], folder)
        (folder / file).write_text((folder / file).read_text() + " ")
        with monkeypatch.context() as patch:
            patch.setitem(coupling.TOKENIZERS, "bilingual", folder)
            assert not coupling.is_done("train", names[1], settings, home), file


def test_one_model_is_published_as_the_zoo_is(root, trained, tmp_path, monkeypatch):
    settings, home, names = trained
    monkeypatch.setattr(lmd, "ROOT", root)
    monkeypatch.setattr(coupling, "PUBLISHED", names[1])
    with pytest.raises(ValueError, match="COUPLING_SET do not replace"):
        coupling.publish(settings, home, "coupling-custom")
    with pytest.raises(ValueError, match="is not trained; train it first"):
        coupling.publish(settings | {"steps": 9}, home, "coupling")
    assert not (root / "data/extras").exists()
    said = coupling.publish(settings, home, "coupling")
    assert said.startswith("data/extras: 1 model, ") and str(root) not in said
    monkeypatch.setattr(parameters, "ROOT", root)
    folder = root / "data/extras/rembert"
    parameters.verify_zoo(folder)
    model, tokenizer = lmd.load_model(folder), lmd.load_tokenizer(folder)
    assert lmd.embed(["The cat sat."], model, tokenizer=tokenizer, max_length=None).shape == (1, 16)
    assert {str(v.dtype) for v in coupling.load_file(folder / "model.safetensors").values()} == {
        "torch.float16"
    }
    whole = json.loads((home / names[1] / "measures.json").read_text())["losses"]["loss_english"]
    shipped = json.loads((folder / "record.json").read_text())["loss_english"]
    assert (
        abs(shipped - whole) < 0.01 and f"{shipped:.3f} nats" in (folder / "README.md").read_text()
    )
    (folder / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="git checkout -- data/extras"):
        parameters.verify_zoo(folder)
    shutil.rmtree(root / "data/extras")


@pytest.mark.parametrize(
    "job, message",
    [
        (["work", "foo"], "work: 'foo' is neither train nor measure"),
        (
            ["train", "english/dep/0"],
            "unknown model 'english/dep/0'; did you mean 'english/deep/0'?",
        ),
        (["measure", "english/deep/0"], "english/deep/0 is not trained; train it first"),
        (["trial", "x"], "trial: 'x' is no number of steps"),
    ],
)
def test_a_wrong_argument_is_one_line(root, monkeypatch, job, message):
    """In a repository where nothing is trained but the tiny models of this file."""
    monkeypatch.setattr(lmd, "ROOT", root)
    monkeypatch.setattr(coupling, "SETTINGS", coupling.SETTINGS | {"profile": "tiny"})
    monkeypatch.setattr(sys, "argv", ["coupling.py", *job])
    monkeypatch.setattr(coupling.signal, "signal", lambda *args: None)
    monkeypatch.delenv("COUPLING_SET", raising=False)
    with pytest.raises(SystemExit, match="^coupling: ") as error:
        coupling.main()
    assert message in str(error.value) and "\n" not in str(error.value)


class Draws(torch.nn.Module):
    """A model whose loss draws from torch's generator."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(3))


@pytest.mark.parametrize("at", range(1, 6))
def test_a_training_that_draws_goes_on_with_the_same_draws(tmp_path, at):
    """Masks drawn by the collator, a batch ahead, and numbers drawn by the loss; cut after each step but the last."""

    def trained(folder, resume=None):
        seen = []

        def loss(model, batch):
            seen.append((batch["mask"].tolist(), torch.rand(2).tolist()))
            return (model.weight * torch.rand(3)).sum()

        torch.manual_seed(5)
        arguments = transformers.TrainingArguments(
            output_dir=str(folder), max_steps=6, save_steps=1, per_device_train_batch_size=1, use_cpu=True,
            train_sampling_strategy="sequential", remove_unused_columns=False, report_to="none", disable_tqdm=True,
        )  # fmt: skip
        trainer = pretraining.Objective(
            Draws(), arguments, loss=loss, train_dataset=list(range(6)),
            data_collator=lambda items: {"item": torch.tensor(items), "mask": torch.rand(4)},
        )  # fmt: skip
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train(resume)
        return seen

    whole = trained(tmp_path)
    assert trained(tmp_path / "again", str(tmp_path / f"checkpoint-{at}")) == whole[at:]


def test_variants_have_the_sizes_that_their_names_say():
    settings = coupling.SETTINGS
    counts = {}
    for variant in coupling.VARIANTS:
        model = coupling.build(variant, 4000, 0, settings)
        made = coupling.shape(variant, 4000, settings)
        words, decoder = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        assert words.shape == (4000, made["e_in"]) and decoder.shape == (4000, made["e_out"])
        assert (words is decoder) == made["tied"] == (variant == "coupled")
        block = sum(p.numel() for p in model.base_model.encoder.layer[0].parameters())
        assert block == coupling.block_parameters(settings["hidden_size"])
        counts[variant] = model.base_model.num_parameters(), model.num_parameters()
    assert counts["decoupled"][1] - counts["coupled"][1] == 4000 * 64
    assert counts["decoupled"][0] == counts["coupled"][0] == counts["small-out"][0]
    gap = counts["coupled"][0] - counts["deep"][0]
    assert 0 <= gap < 2 * coupling.block_parameters(64), (
        "deep has at most the parameters of coupled"
    )
    assert counts["small-in"][0] == counts["out-4x"][0] < counts["deep"][0]


@pytest.mark.parametrize("variant", list(coupling.VARIANTS))
def test_the_hint_is_equally_strong_for_every_input(variant):
    """Two heads of the first block look one place to the left and right, through a map of condition 1."""
    torch.manual_seed(3)
    model = coupling.build(variant, 500, 0, coupling.SETTINGS)
    base = model.base_model
    assert torch.linalg.cond(base.encoder.embedding_hidden_mapping_in.weight) < 1.001
    queries = base.encoder.layer[0].attention.self.query.weight[:32]
    assert 0.2 < queries.pow(2).mean().sqrt() < 0.3
    model.set_attn_implementation("eager")
    ids = torch.arange(5, 37)[None]
    shares = base(ids, output_attentions=True).attentions[0][0].detach()
    looks = np.array([shares.diagonal(k, 1, 2).mean(1).numpy() for k in range(-3, 4)])
    assert (looks.argmax(0) - 3)[:2].tolist() == [1, -1]


def test_a_tied_matrix_stays_one_through_training(trained):
    settings, home, _ = trained
    model = coupling.load("bilingual/coupled/1", settings, home)[2]
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    saved = coupling.load_file(home / "bilingual/coupled/1/model.safetensors")
    assert not any("decoder.weight" in key for key in saved)
    fresh = coupling.start("bilingual/coupled/1", settings)[2]
    assert not torch.equal(
        fresh.get_output_embeddings().weight, model.get_output_embeddings().weight
    )


def test_batches_are_the_same_for_all_variants_and_half_of_them_translated(trained):
    settings, _, _ = trained
    tokenizer, copy, _ = coupling.start("bilingual/coupled/0", settings)
    rows = coupling.token_rows(coupling.documents(settings)["train"], tokenizer)
    wide = settings | {"batch_tokens": 8192, "steps": 2}
    plain = coupling.Batches(rows, tokenizer, wide, 0)[0][0]
    mixed = coupling.Batches(rows, tokenizer, wide, 0, copy)[0][0]
    foreign = (mixed != plain).any(1)
    np.testing.assert_array_equal(mixed[foreign], copy[plain[foreign]])
    assert 0.35 < foreign.mean() < 0.65 and plain.shape == (256, 32)


def test_spans_are_whole_pieces_of_the_text(trained):
    tokenizer = coupling.start("bilingual/coupled/0", trained[0])[0]
    text = " ".join(f"word{i} and" for i in range(200))
    ids, frame = coupling.cut([text, "short", text], tokenizer, 16, most=5)
    assert list(frame.document) == [0] * 5 + [2] * 5 and ids.shape == (10, 16)
    assert (np.diff(frame.place[:5]) == 1).all()
    whole = tokenizer(text, add_special_tokens=False)["input_ids"]
    first = frame.place[0] * 14
    assert ids[:5, 1:-1].ravel().tolist() == whole[first : first + 70]
    assert list(coupling.pairs(frame)) == [0, 1, 2, 3, 5, 6, 7, 8]


def test_probes_find_what_is_there_and_nothing_where_nothing_is(rng):
    frame = pd.DataFrame({"document": np.repeat(range(4), 64), "place": list(range(64)) * 4})
    train, test = coupling.articles(frame)
    assert not (train & test).any() and (train | test).all() and train.sum() == test.sum() == 128
    noise = rng.normal(size=(256, 8))
    marked = noise + 9 * np.eye(8)[frame.document]
    found = coupling.article_probe(marked, marked[:, ::-1], frame)
    assert found["article"] == 1 and found["article_transfer"] < 0.5
    found = coupling.article_probe(marked, marked + 20 * rng.normal(size=8), frame)
    assert found["article_transfer"] == 1 > found["article_transfer_raw"], "languages lie apart"
    assert coupling.article_probe(noise, None, frame)["article"] < 0.45
    rising = noise + frame.place.to_numpy()[:, None]
    assert coupling.order_probe(rising, frame, rising, frame) > 0.6
    assert (
        abs(coupling.order_probe(noise[:128], frame[:128], noise[128:], frame[128:]) - 0.5) < 0.15
    )
    assert coupling.regression(marked, frame.document, marked, frame.document) > 0.9
    turned = noise @ np.diag([1, 1, 1, 1, 2, 2, 2, 2]) + 5
    assert coupling.retrieval(noise, turned) > 0.9
    assert coupling.retrieval(noise, rng.normal(size=(256, 8))) < 0.1


def test_tables_hold_every_model_layer_and_measure(root, trained):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lmd, "ROOT", root)
        tables = {
            name: lmd.read_results("coupling", name)
            for name in ("models", "curves", "probes", "lmd")
        }
    assert list(tables["models"].variant) == ["coupled", "small-both"] * 2
    assert len(tables["curves"]) == 4 * 8
    unigram = tables["models"].unigram_english
    assert unigram.nunique() == 1 and 2 < unigram[0] < np.log(4000), "below a uniform guess"
    counts = tables["probes"].groupby(["variant", "seed", "network"]).size()
    assert (counts == 3 * 7).all() and len(counts) == 8
    for kind, rows in {"layers": 6, "rest": 3, "coupled": 6, "coupled, other seed": 6}.items():
        of_kind = tables["lmd"][tables["lmd"].kind == kind]
        networks = ["trained", "untrained"] if kind in ("layers", "rest") else ["trained"]
        variants = (
            ["small-both"] if kind == "coupled" else ["coupled", "small-both"]
        )  # not on itself
        counts = of_kind.groupby(["variant", "seed", "network"]).size()
        expected = [(v, seed, n) for v in variants for seed in (0, 1) for n in networks]
        assert list(counts.index) == expected and (counts == rows).all(), kind
    assert tables["lmd"].r2.max() <= 1


def test_layers_that_are_linear_in_one_another_have_r2_of_one(rng):
    fit, test = ([x, x @ turn, rng.normal(size=x.shape)] for x in (rng.normal(size=(400, 4)), rng.normal(size=(90, 4)))
                 for turn in [np.diag([1.0, 2, 3, 4])])  # fmt: skip
    found = coupling.among_layers(fit, test).set_index(["basis", "target"])["r2"]
    assert found["layer0", "layer1"] > 0.999 and found["rest", "layer1"] > 0.999
    assert abs(found["layer0", "layer2"]) < 0.1 and abs(found["rest", "layer2"]) < 0.15


@pytest.mark.parametrize(
    "text, message",
    [
        ("stpes=3", "unknown parameter 'stpes'; did you mean 'steps'?"),
        ("steps=0", "steps: 0 is not from 1 to 10000000"),
        ("span_tokens=200", "span_tokens: 200 is not from 8 to 128"),
        ("masked_share=1.5", "masked_share: 1.5 is not from 0.01 to 0.99"),
        ("learning_rate=-1.0", "learning_rate: -1.0 is not from"),
        ("batch_tokens=16", "batch_tokens: 16 is not from 64"),
        ("texts=[english,english]", "texts: one is named twice"),
        ("variants=[deep]", "'coupled' is needed"),
        ("variants=[coupled,dep]", "unknown 'dep'; did you mean 'deep'?"),
        ("hidden_size=20", "no multiple of 16"),
    ],
)
def test_a_wrong_setting_is_one_line(text, message):
    with pytest.raises(ValueError, match="COUPLING_SET") as error:
        coupling.settings_of(text)
    assert message in str(error.value)


def test_the_notebook_draws_and_judges_these_tables_and_skips_what_is_not_there(
    root, trained, capsys
):
    import matplotlib

    matplotlib.use("agg")
    cells = [c for c in json.loads(NOTEBOOK.read_text())["cells"] if c["cell_type"] == "code"]
    space, figures = {}, root / "figures" / "course"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lmd, "ROOT", root)
        for cell in cells:
            exec(compile("".join(cell["source"]), cell["id"], "exec"), space)  # our own notebook
        names = {p.name for p in figures.iterdir()}
        kinds = ("parameters", "loss", "probes", "transfer", "lmd")
        assert names == {f"coupling_{kind}.{end}" for kind in kinds for end in ("pdf", "png")}
        findings = space["findings"]
        said = {*findings.verdict}
        assert said <= {"cannot tell", "not learnt"}, "eight steps, and variants that are absent"
        capsys.readouterr()
        space["results"] = "nowhere"
        at = next(i for i, cell in enumerate(cells) if cell["id"] == "read")
        for cell in cells[at:]:
            exec(compile("".join(cell["source"]), cell["id"], "exec"), space)
        assert "No tables in data/results/nowhere: make coupling" in capsys.readouterr().out
    space["plt"].close("all")
    judge(space)
    space["plt"].rcdefaults()


def judge(space):
    """Verdicts on tables whose answer is known: the larger the output, the better; nothing else differs."""
    cells = {c["id"]: "".join(c["source"]) for c in json.loads(NOTEBOOK.read_text())["cells"]}
    keys = [
        (text, v, s)
        for text in ("english", "bilingual")
        for v in coupling.VARIANTS
        for s in range(3)
    ]
    rows = pd.DataFrame(keys, columns=["text", "variant", "seed"])
    grows = np.log2([coupling.VARIANTS[v][1] for v in rows.variant]) * rows.variant.isin(
        space["SERIES"]
    )
    wobble = np.array([0.01, 0.0, -0.01] * (len(rows) // 3))
    probes = pd.concat(
        rows.assign(layer=layer, measure=m, value=0.5 + 0.1 * grows * (layer == 4) + wobble)
        for layer in range(5)
        for m in ("article", "article_transfer", "retrieval")
    )
    own = rows.assign(r2=0.5 - 0.1 * grows + wobble)
    noise = np.random.default_rng(0).normal(size=len(rows))
    space |= {
        "there": True, "texts": ["english", "bilingual"],
        "models": rows.assign(loss_english=5 + 0.1 * noise, unigram_english=6.0, blocks=4),
        "networks": {"trained": [probes], "untrained": [probes.assign(value=0.3)]},
        "own": own, "own_untrained": own.assign(r2=0.9),
    }  # fmt: skip
    for name in ("values", "findings", "findings-table"):
        exec(compile(cells[name], name, "exec"), space)
    found = space["findings"].set_index(["finding", "measure"])
    assert (found.loc[[4, 5], "verdict"] == "agrees").all(), "the larger the output, the better"
    assert (found.loc[6, "verdict"] == "does not").all()
    assert (found.loc[[1, 2, 3], "verdict"] == "cannot tell").all(), "no difference, or noise"
    np.testing.assert_allclose(found.loc[4, "mean"], 0.1)
    np.testing.assert_allclose(found.loc[6, "mean"], -0.1)
    np.testing.assert_allclose(found["untrained"].dropna(), 0, atol=1e-9)
    np.testing.assert_allclose(found.loc[(1, "article"), "level"], 0.5)
    space["models"].loc[space["models"].variant == "out-2x", "loss_english"] = 6.1
    exec(compile(cells["findings-table"], "findings-table", "exec"), space)
    found = space["findings"].set_index(["finding", "measure"])["verdict"]
    assert (found.loc[[4, 5, 6]] == "not learnt").all() and "not learnt" not in set(
        found.loc[[1, 2, 3]]
    )
