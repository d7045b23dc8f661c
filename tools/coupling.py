"""Train and measure the models of 07_embedding_coupling; tables go to data/results/coupling.

    python tools/coupling.py                       # all, two at a time and one thread each; `make coupling`
    python tools/coupling.py train MODEL           # one, e.g. english/coupled/0
    python tools/coupling.py measure MODEL         # after the coupled models of its text are trained
    python tools/coupling.py work train|measure    # what another such process does not do now
    python tools/coupling.py publish               # one of them in half precision, to data/extras/rembert
    python tools/coupling.py trial [STEPS]         # seconds a step of each variant, and of A1's bert

Reads build/PROFILE/documents.parquet (01_corpus) and the tokenizers of data/zoo. COUPLING_SET="key=value
..." changes SETTINGS; the work then goes to build/coupling-custom and the tables to data/results/coupling-custom.
What is finished with the same recipe is not made again; a training that was cut goes on from its last
checkpoint, to the same bytes.
"""

import contextlib
import hashlib
import inspect
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

if __name__ == "__main__":  # one thread each: the sums are then the same on any number of cores
    os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import pandas as pd
import publish_zoo
import torch
import transformers
from lock import attempt
from parameters import check_type, nearest, parse_set
from pretraining import (
    Lines,
    Objective,
    bare,
    checkpoint_of,
    head,
    look_at_neighbours,
    masked_loss,
    second_language,
    spans,
    wrapping,
)
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import lmd_utils as lmd

SETTINGS = {
    "profile": "course",  # whose documents are read
    "seeds": 3,
    "steps": 1000,  # batches of a training, the same for all
    "hidden_size": 64,
    "layers": 4,
    "batch_tokens": 2048,
    "learning_rate": 2.0e-3,  # at its peak
    "masked_share": 0.25,  # of tokens
    "english_share": 0.5,  # of the sequences of a model of two languages
    "span_tokens": 64,  # of the texts that are measured on, special tokens included
    "fit_spans": 48,  # of each train document, in a row
    "held_out_batches": 24,  # for the loss
    "texts": ["english", "bilingual"],
    "variants": [],  # all
}
BOUNDS = {  # least and most of a setting; 128 positions
    "seeds": (1, 1000), "steps": (1, 10**7), "hidden_size": (16, 4096), "layers": (1, 64),
    "batch_tokens": (64, 10**7), "learning_rate": (1e-9, 1.0), "masked_share": (0.01, 0.99),
    "english_share": (0.0, 1.0), "span_tokens": (8, 128), "fit_spans": (2, 10**6), "held_out_batches": (1, 10**6),
}  # fmt: skip
# E_in and E_out in multiples of the hidden size, tied or not, saved input parameters moved into depth or not
VARIANTS = {
    "coupled": (1, 1, True, False),
    "decoupled": (1, 1, False, False),
    "small-in": (0.5, 1, False, False),
    "small-out": (1, 0.5, False, False),  # the reverse of small-in
    "small-both": (0.5, 0.5, False, False),
    "out-2x": (0.5, 2, False, False),
    "out-4x": (0.5, 4, False, False),
    "deep": (0.5, 1, False, True),
}
TOKENIZERS = {"english": "data/zoo/bert", "bilingual": "data/zoo/mbert"}
PUBLISHED = "english/out-4x/0"  # small input, large output: the nearest to RemBERT
CARD = """# rembert

A small RemBERT, after `google/rembert`: input embedding {e_in}, output embedding {e_out}, {blocks} blocks of width
{hidden_size}. Trained from nothing for teaching (notebooks/07_embedding_coupling.ipynb), and of no use for anything else.

| | |
|---|---|
| data | train documents of the English Wikipedia sample in gensim 4.4.0, as for the models of data/zoo |
| objective | masked language model |
| size | {pretraining:,} parameters at pre-training, {finetuning:,} without the output side; float16 on disk |
| steps | {steps:,} batches of {batch_tokens:,} tokens, seed {seed} |
| held-out loss | {loss_english:.3f} nats a target on validation documents |
| trained with | one thread, torch {torch}, transformers {transformers} |
| command | `make coupling` |

Weights: MIT, as the code. The text that it was trained on is under CC BY-SA 3.0 and GFDL. No document of the
validation or test split was used for vocabulary or weights.
"""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
BLOCK = 8  # spans in a row that go to the same side when an article is split for a probe


class Tied(transformers.RemBertForMaskedLM):
    """RemBERT with one matrix for both embeddings, which the class of the library does not offer."""

    _tied_weights_keys = {
        "cls.predictions.decoder.weight": "rembert.embeddings.word_embeddings.weight"
    }


class Batches(torch.utils.data.Dataset):
    """Item i: token ids of step i and a seed for its masks, of a generator of its own: a run that was cut sees what it would have seen."""

    def __init__(self, rows, tokenizer, settings, seed, copy=None):
        self.rows, self.tokenizer, self.settings, self.seed, self.copy = (
            rows,
            tokenizer,
            settings,
            seed,
            copy,
        )

    def __len__(self):
        return self.settings["steps"]

    def __getitem__(self, step):
        rng, tokens = np.random.default_rng([self.seed, step]), self.settings["batch_tokens"]
        length = 32 if step < 0.45 * len(self) else 64
        ids = spans(self.rows, self.tokenizer, tokens // length, length, rng)
        if self.copy is not None:
            foreign = rng.random(len(ids)) >= self.settings["english_share"]
            ids[foreign] = self.copy[ids[foreign]]
        return ids, int(rng.integers(2**31))


def block_parameters(width):
    """Parameters of one block: four projections, a feed-forward layer four times as wide, two norms."""
    return 4 * (width * width + width) + (8 * width * width + 5 * width) + 4 * width


def shape(variant, vocabulary, settings):
    """{e_in, e_out, tied, blocks} of a variant; `deep` spends on blocks what its smaller input saves, rounded down."""
    e_in, e_out, tied, deep = VARIANTS[variant]
    width, blocks = settings["hidden_size"], settings["layers"]
    e_in, e_out = int(e_in * width), int(e_out * width)
    if deep:
        blocks += int(vocabulary * (width - e_in) // block_parameters(width))
    return {"e_in": e_in, "e_out": e_out, "tied": tied, "blocks": blocks}


def level(base):
    """Exchange the map behind the input embedding for an orthogonal one, and let the hinted heads read through it.

    The hint inverts the map. A square one with normal entries may be nearly singular, a tall one is not: full
    input embeddings would then start with heads that blow up every change, and small ones would not.
    """
    mapping = base.encoder.embedding_hidden_mapping_in
    attention = base.encoder.layer[0].attention.self
    before = mapping.weight.data.double()
    torch.nn.init.orthogonal_(mapping.weight)
    turn = before @ mapping.weight.data.double().T
    hinted = slice(0, 2 * attention.attention_head_size)
    for projection in (attention.query, attention.key):
        read = projection.weight.data[hinted].double()
        projection.weight.data[hinted] = (read @ turn).float()


def build(variant, vocabulary, pad, settings):
    """An untrained network: RemBERT with the neighbour hint of A1_pretrain_zoo, equally strong for all inputs."""
    made, width = shape(variant, vocabulary, settings), settings["hidden_size"]
    config = transformers.RemBertConfig(
        vocab_size=vocabulary, hidden_size=width, num_hidden_layers=made["blocks"],
        num_attention_heads=4, intermediate_size=4 * width, input_embedding_size=made["e_in"],
        output_embedding_size=made["e_out"], max_position_embeddings=128, initializer_range=0.06,
        pad_token_id=pad, bos_token_id=None, eos_token_id=None, tie_word_embeddings=made["tied"],
    )  # fmt: skip
    model = (Tied if made["tied"] else transformers.RemBertForMaskedLM)(config)
    look_at_neighbours(model.base_model)
    level(model.base_model)
    return model


def documents(settings):
    """{split: texts} of the profile's documents."""
    path = lmd.documents_path(settings["profile"])
    if not path.is_file():
        raise ValueError(
            f"{path.relative_to(lmd.ROOT)} is not there: 01_corpus writes it, with keep_documents"
        )
    frame = pd.read_parquet(path)
    return {split: rows.tolist() for split, rows in frame.groupby("split")["text"]}


def token_rows(texts, tokenizer):
    """One array of ids for each text, without special tokens."""
    before, after = wrapping(tokenizer)
    ids = lmd.tokenize(texts, tokenizer)["input_ids"]
    return [np.array(row[len(before) : len(row) - len(after)]) for row in ids]


def collator(tokenizer, settings):
    """[(ids [B, T], seed)] -> inputs and labels; which ordinary tokens are masked, and by what, the seed decides."""
    special = torch.tensor(tokenizer.all_special_ids)
    mask = transformers.DataCollatorForLanguageModeling(
        tokenizer, mlm_probability=settings["masked_share"]
    )

    def collate(items):
        ids, seed = torch.as_tensor(items[0][0]), items[0][1]
        kept = torch.isin(ids, special)
        rows = [{"input_ids": i, "special_tokens_mask": k} for i, k in zip(ids, kept, strict=True)]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            batch = mask(rows)
        return {"input_ids": batch["input_ids"], "labels": batch["labels"]}

    return collate


def arguments(folder, settings, seed):
    """TrainingArguments as A1_pretrain_zoo's, in float32."""
    last = settings["steps"]
    return transformers.TrainingArguments(
        output_dir=str(folder), max_steps=last, per_device_train_batch_size=1, use_cpu=True,
        learning_rate=settings["learning_rate"], adam_beta2=0.98, weight_decay=0.01, max_grad_norm=1.0,
        lr_scheduler_type="warmup_stable_decay", warmup_steps=max(1, round(0.06 * last)),
        lr_scheduler_kwargs={"num_decay_steps": max(1, round(0.2 * last))},
        train_sampling_strategy="sequential", remove_unused_columns=False, seed=seed,
        logging_steps=max(1, last // 60), save_steps=min(500, max(1, last // 4)), save_total_limit=1,
        report_to="none", disable_tqdm=True,
    )  # fmt: skip


def digest(*parts):
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def sources(functions):
    return digest(*(bare(inspect.getsource(f)) for f in functions))


def recipe(name, settings):
    """All that decides the weights of a model, but for versions of packages and the processor."""
    text, variant, seed = name.split("/")
    keys = (
        "steps",
        "hidden_size",
        "layers",
        "batch_tokens",
        "learning_rate",
        "masked_share",
        "english_share",
    )
    files = (lmd.ROOT / TOKENIZERS[text] / file for file in TOKENIZER_FILES)
    return {"text": text, "variant": variant, "values": list(VARIANTS[variant]), "seed": int(seed)} | {
        key: settings[key] for key in keys
    } | {"tokenizer": [lmd.content_hash(file) for file in files],
         "documents": digest(*documents(settings)["train"]), "code": TRAINING_CODE}  # fmt: skip


def finished(folder, wanted, file):
    """The record in folder/file if it is of this recipe, and the weights it names are there; else None."""
    with contextlib.suppress(FileNotFoundError, ValueError, KeyError):
        record = json.loads((folder / file).read_text())
        weights = lmd.content_hash(folder / "model.safetensors")
        if (record["recipe"], record["weights_sha256"]) == (wanted, weights):
            return record


def start(name, settings):
    """Tokenizer, table of the second language or None, and untrained network of a model."""
    text, variant, seed = name.split("/")
    tokenizer = lmd.load_tokenizer(lmd.ROOT / TOKENIZERS[text])
    copy = second_language(tokenizer.get_vocab()) if text == "bilingual" else None
    torch.manual_seed(int(seed))
    return tokenizer, copy, build(variant, len(tokenizer), tokenizer.pad_token_id, settings)


TRAINING = [look_at_neighbours, wrapping, spans, head, masked_loss, second_language, Tied, Batches,
            block_parameters, shape, level, build, token_rows, collator, arguments, start]  # fmt: skip
TRAINING_CODE = sources(TRAINING)  # now: the file may be edited while it runs


def train(name, settings, home):
    """Train one model into home/NAME, a folder that MODELS=... takes, with record.json; nothing if it is there."""
    folder, work, wanted = (
        home / name,
        home / ".work" / name.replace("/", "-"),
        recipe(name, settings),
    )
    if record := finished(folder, wanted, "record.json"):
        return record
    tokenizer, copy, model = start(name, settings)
    seed, begin = wanted["seed"], time.time()
    rows = token_rows(documents(settings)["train"], tokenizer)
    trainer = Objective(
        model, arguments(work, settings, seed), loss=masked_loss, callbacks=[Lines()],
        train_dataset=Batches(rows, tokenizer, settings, seed, copy),
        data_collator=collator(tokenizer, settings),
    )  # fmt: skip
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train(resume_from_checkpoint=checkpoint_of(wanted, work))
    model.eval()
    record = {
        "recipe": wanted, **shape(wanted["variant"], len(tokenizer), settings),
        "pretraining": model.num_parameters(), "finetuning": model.base_model.num_parameters(),
        "curve": [(e["step"], round(e["loss"], 4)) for e in trainer.state.log_history if "loss" in e],
        "minutes": round((time.time() - begin) / 60, 2), "torch": torch.__version__,
        "transformers": transformers.__version__,
    }  # fmt: skip
    weights = {
        k: v
        for k, v in model.state_dict().items()
        if not (record["tied"] and "decoder.weight" in k)
    }
    folder.mkdir(parents=True, exist_ok=True)
    for file in TOKENIZER_FILES:
        shutil.copy(lmd.ROOT / TOKENIZERS[wanted["text"]] / file, folder)
    model.config.save_pretrained(folder)
    with lmd.atomic(folder / "model.safetensors") as path:
        save_file({k: v.contiguous() for k, v in weights.items()}, path, {"format": "pt"})
    record["weights_sha256"] = lmd.content_hash(folder / "model.safetensors")
    with lmd.atomic(folder / "record.json") as path:
        path.write_text(json.dumps(record, indent=1) + "\n")
    shutil.rmtree(work, ignore_errors=True)
    return record


# --- measures ------------------------------------------------------------------------------------


def held_out_batches(tokenizer, settings, copy=None):
    """Batches of validation documents, always the same places masked; `copy`: of their translation."""
    rows = token_rows(documents(settings)["validation"], tokenizer)
    rng, collate = np.random.default_rng(0), collator(tokenizer, settings)
    for seed in range(settings["held_out_batches"]):
        ids = spans(rows, tokenizer, 32, settings["span_tokens"], rng)
        yield collate([(ids if copy is None else copy[ids], seed)])


def held_out(model, tokenizer, settings, copy=None):
    """Masked cross-entropy (nats) on these batches."""
    batches = held_out_batches(tokenizer, settings, copy)
    with torch.inference_mode():
        return float(np.mean([float(masked_loss(model, batch)) for batch in batches]))


def unigram(tokenizer, settings, counts):
    """Cross-entropy (nats) of token frequencies, `counts` of the train documents, at the same places."""
    loss = -np.log((counts + 1.0) / (counts + 1.0).sum())
    labels = [batch["labels"].numpy() for batch in held_out_batches(tokenizer, settings)]
    return float(np.mean([loss[row[row != -100]].mean() for row in labels]))


def cut(texts, tokenizer, tokens, most=None):
    """Consecutive spans of `tokens` ids, special ones included: ids [N, tokens] and a frame document, place, characters.

    `most` spans of a document at most, from its middle.
    """
    before, after = wrapping(tokenizer)
    inside, ids, rows = tokens - len(before) - len(after), [], []
    for number, text in enumerate(texts):
        made = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        count = len(made["input_ids"]) // inside
        first = max(0, (count - most) // 2) if most else 0
        for place in range(first, min(count, first + most) if most else count):
            at = slice(place * inside, (place + 1) * inside)
            ids.append([*before, *made["input_ids"][at], *after])
            begin, end = made["offset_mapping"][at][0][0], made["offset_mapping"][at][-1][1]
            rows.append((number, place, end - begin))
    return np.array(ids), pd.DataFrame(rows, columns=["document", "place", "characters"])


def states(model, ids, tokenizer, batch=64):
    """Mean over the ordinary tokens of every layer: list of float32 [N, d]; layer 0 is what enters the first block."""
    before, after = map(len, wrapping(tokenizer))
    found = []
    with torch.inference_mode():
        for i in range(0, len(ids), batch):
            layers = model.base_model(
                torch.as_tensor(ids[i : i + batch]), output_hidden_states=True
            ).hidden_states
            found.append([h[:, before : h.shape[1] - after].mean(1).numpy() for h in layers])
    return [np.vstack(parts) for parts in zip(*found, strict=True)]


def classifier():
    return make_pipeline(StandardScaler(), LogisticRegression(max_iter=300))


def articles(frame):
    """bool masks (train, test) over spans for the probe of articles: blocks of spans in turn; short articles left out."""
    sizes = frame.groupby("document")["place"].transform("size")
    long = (sizes >= 4 * BLOCK).to_numpy()
    odd = (frame["place"] // BLOCK % 2).to_numpy(bool)
    return long & ~odd, long & odd


def article_probe(english, fake, frame):
    """Accuracy on held-out English spans, and of the same probe on Fake-English ones, as they are and centred.

    Centred: with the mean of the probe's own spans in the one language exchanged for that in the other, or
    the distance between the languages decides and not what they share. No labels of the other language are used.
    """
    train, test = articles(frame)
    label = frame["document"].to_numpy()
    probe = classifier().fit(english[train], label[train])
    found = {"article": probe.score(english[test], label[test])}
    if fake is not None:
        moved = fake[test] - fake[train].mean(0) + english[train].mean(0)
        found["article_transfer"] = probe.score(moved, label[test])
        found["article_transfer_raw"] = probe.score(fake[test], label[test])
    return found


def pairs(frame):
    """Index of each span whose successor follows it directly in the table."""
    return np.flatnonzero((frame["document"].diff(-1) == 0) & (frame["place"].diff(-1) == -1))


def order_probe(fit, fit_frame, test, test_frame):
    """Accuracy at telling which of two neighbouring spans comes first, from the difference of their vectors."""

    def differences(vectors, frame):
        at = pairs(frame)
        delta = vectors[at] - vectors[at + 1]
        return np.vstack([delta, -delta]), np.repeat([1, 0], len(at))

    x, y = differences(fit, fit_frame)
    probe = LogisticRegression(fit_intercept=False, max_iter=300).fit(x / x.std(0), y)
    held_out_x, held_out_y = differences(test, test_frame)
    return probe.score(held_out_x / x.std(0), held_out_y)


def regression(fit, y_fit, test, y_test):
    """R² of a ridge regression on new documents."""
    return make_pipeline(StandardScaler(), Ridge(1.0)).fit(fit, y_fit).score(test, y_test)


def retrieval(english, fake):
    """Share of English spans whose nearest Fake-English span (cosine, each language centred) is their translation."""
    a, b = (x - x.mean(0) for x in (english, fake))
    a, b = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in (a, b))
    return float(((a @ b.T).argmax(1) == np.arange(len(a))).mean())


def load(name, settings, home):
    """Tokenizer, second language and trained network; ValueError if it is not trained with this recipe."""
    if finished(home / name, recipe(name, settings), "record.json") is None:
        raise ValueError(f"{name} is not trained; train it first")
    tokenizer, copy, model = start(name, settings)
    missing, unexpected = model.load_state_dict(
        load_file(home / name / "model.safetensors"), strict=False
    )
    if unexpected or set(missing) - set(getattr(model, "_tied_weights_keys", None) or ()):
        raise ValueError(f"{name}: its weights are not those of its recipe; delete its folder")
    return tokenizer, copy, model.eval()


def measures(name, settings, home):
    """{losses: of held-out text, probes, lmd: columns of the tables} of a trained model."""
    tokenizer, copy, model = load(name, settings, home)
    texts = documents(settings)
    fit_ids, fit_frame = cut(
        texts["train"], tokenizer, settings["span_tokens"], settings["fit_spans"]
    )
    ids, frame = cut(texts["validation"] + texts["test"], tokenizer, settings["span_tokens"])
    counts = np.bincount(
        np.concatenate(lmd.tokenize(texts["train"], tokenizer)["input_ids"]),
        minlength=len(tokenizer),
    )
    common = np.log(counts + 1.0)  # how common a token is in the train documents
    fit_common, test_common = common[fit_ids].mean(1), common[ids].mean(1)
    tables = {"probes": [], "lmd": []}
    for network, net in {"trained": model, "untrained": start(name, settings)[2].eval()}.items():
        fit, test = states(net, fit_ids, tokenizer), states(net, ids, tokenizer)
        fake = states(net, copy[ids], tokenizer) if copy is not None else [None] * len(test)
        probes = []
        for layer, (a, b, c) in enumerate(zip(fit, test, fake, strict=True)):
            found = article_probe(b, c, frame)
            found["order"] = order_probe(a, fit_frame, b, frame)
            found["characters"] = regression(a, fit_frame["characters"], b, frame["characters"])
            found["frequency"] = regression(a, fit_common, b, test_common)
            if c is not None:
                found["retrieval"] = retrieval(b, c)
            probes += [(layer, measure, value) for measure, value in found.items()]
        probes = pd.DataFrame(probes, columns=["layer", "measure", "value"])
        tables["probes"].append(probes.assign(network=network))
        tables["lmd"].append(among_layers(fit, test).assign(network=network))
        if network == "trained":
            found = to_coupled(name, settings, home, fit, test, fit_ids, ids)
            tables["lmd"].append(found.assign(network=network))
    losses = {"loss_english": held_out(model, tokenizer, settings), "loss_fake": None}
    losses["unigram_english"] = unigram(tokenizer, settings, counts)
    if copy is not None:
        losses["loss_fake"] = held_out(model, tokenizer, settings, copy)
    joined = {table: pd.concat(parts, ignore_index=True) for table, parts in tables.items()}
    return {"losses": losses} | {table: frame.to_dict("list") for table, frame in joined.items()}


R2_COLUMNS = ["kind", "basis", "target", "r2"]


def among_layers(fit, test):
    """Held-out R² of each layer on each other one and on all others."""
    own = [f"layer{i}" for i in range(len(fit))]
    moments = [lmd.Moments.from_arrays(dict(zip(own, part, strict=True))) for part in (fit, test)]
    square = lmd.pair_scores(*moments)
    rows = [("layers", b, t, square.loc[b, t]) for b in own for t in own if b != t]
    rows += [("rest", "rest", t, r2) for t, r2 in lmd.group_scores(*moments).items()]
    return pd.DataFrame(rows, columns=R2_COLUMNS)


def to_coupled(name, settings, home, fit, test, fit_ids, ids):
    """Held-out R² of three layers on those of the coupled models of its text, and the other way."""
    text, variant, seed = name.split("/")
    rows = []
    for other in range(settings["seeds"]):
        reference = f"{text}/coupled/{other}"
        if reference == name:
            continue
        tokenizer, _, model = load(reference, settings, home)
        theirs = [states(model, x, tokenizer) for x in (fit_ids, ids)]
        for part, mine, its in depths(len(fit), len(theirs[0])):
            both = [
                lmd.Moments.from_arrays({"own": a[mine], "coupled": b[its]})
                for a, b in zip((fit, test), theirs, strict=True)
            ]
            scores = lmd.pair_scores(*both)
            kind = "coupled" if str(other) == seed else "coupled, other seed"
            rows.append((kind, f"coupled:{part}", f"own:{part}", scores.loc["coupled", "own"]))
            rows.append((kind, f"own:{part}", f"coupled:{part}", scores.loc["own", "coupled"]))
    return pd.DataFrame(rows, columns=R2_COLUMNS)


def depths(mine, theirs):
    """(first | middle | last, layer here, layer there) for two numbers of layers, layer 0 included."""
    return [("first", 0, 0), ("middle", mine // 2, theirs // 2), ("last", mine - 1, theirs - 1)]


MEASURING = [start, level, build, second_language, wrapping, spans, masked_loss, load, held_out_batches, held_out, unigram, cut, states, classifier, articles, article_probe, pairs, order_probe, regression, retrieval, measures,
             among_layers, to_coupled, depths]  # fmt: skip


MEASURING_CODE = sources(MEASURING)


def measured(name, settings, home):
    """What decides the tables of a model; ValueError if it, or a model that it is held against, is not trained."""
    text, weights = name.split("/")[0], []
    for needed in (name, *(f"{text}/coupled/{seed}" for seed in range(settings["seeds"]))):
        file = home / needed / "record.json"
        if not file.is_file():
            raise ValueError(f"{needed} is not trained; train it first")
        weights.append(json.loads(file.read_text())["weights_sha256"])
    keys = ("span_tokens", "fit_spans", "seeds", "held_out_batches")
    texts = documents(settings)
    held = digest(*texts["validation"], *texts["test"])
    return {"code": MEASURING_CODE, "block": BLOCK, "weights": weights, "documents": held} | {
        k: settings[k] for k in keys
    }


def measure(name, settings, home):
    """Write home/NAME/measures.json; nothing if it is there."""
    folder, wanted = home / name, measured(name, settings, home)
    if record := finished(folder, wanted, "measures.json"):
        return record
    found = measures(name, settings, home)
    weights = lmd.content_hash(folder / "model.safetensors")
    with lmd.atomic(folder / "measures.json") as path:
        path.write_text(json.dumps({"recipe": wanted, "weights_sha256": weights, **found}) + "\n")
    return json.loads((folder / "measures.json").read_text())


def names(settings):
    """All models, seed by seed, and the coupled ones first in each: what is cut short is whole for fewer seeds."""
    chosen = settings["variants"] or list(VARIANTS)
    return [
        f"{text}/{variant}/{seed}"
        for seed in range(settings["seeds"])
        for variant in sorted(chosen, key=lambda v: v != "coupled")
        for text in settings["texts"]
    ]


def write_tables(settings, home, results):
    """data/results/RESULTS/{models,curves,probes,lmd}.csv from the folders of all models."""
    models, curves, tables = [], [], {"probes": [], "lmd": []}
    for name in names(settings):
        record, (text, variant, seed) = (
            json.loads((home / name / "record.json").read_text()),
            name.split("/"),
        )
        key = {"text": text, "variant": variant, "seed": int(seed)}
        found = json.loads((home / name / "measures.json").read_text())
        fields = ("e_in", "e_out", "tied", "blocks", "pretraining", "finetuning")
        made = {f: record[f] for f in fields} | found["losses"]
        models.append(key | made | {"steps": record["recipe"]["steps"]})
        curves += [key | {"step": step, "loss": loss} for step, loss in record["curve"]]
        for table, rows in tables.items():
            frame = pd.DataFrame(found[table])
            rows.append(pd.concat([pd.DataFrame([key] * len(frame)), frame], axis=1))
    lmd.write_results(results, "models", pd.DataFrame(models))
    lmd.write_results(results, "curves", pd.DataFrame(curves))
    for table, rows in tables.items():
        lmd.write_results(results, table, pd.concat(rows, ignore_index=True))


def publish(settings, home, results):
    """Put one model, in half precision and with a card, into data/extras, as the zoo is published; what was done.

    ValueError for other settings than the committed ones, and for a model that is not trained with them.
    """
    if results != "coupling":
        raise ValueError("publish: models of COUPLING_SET do not replace what is in data/extras")
    tokenizer, _, model = load(PUBLISHED, settings, home)
    record = json.loads((home / PUBLISHED / "record.json").read_text())
    weights = {k: v.half() for k, v in load_file(home / PUBLISHED / "model.safetensors").items()}
    loss = held_out(model.half().float(), tokenizer, settings)  # of what is shipped
    with lmd.atomic(home / "extras" / "rembert") as folder:
        folder.mkdir(parents=True)
        for file in ("config.json", *TOKENIZER_FILES):
            shutil.copy(home / PUBLISHED / file, folder)
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
        record |= {
            "loss_english": loss,
            "weights_sha256": lmd.content_hash(folder / "model.safetensors"),
        }
        (folder / "record.json").write_text(json.dumps(record, indent=1) + "\n")
        card = CARD.format(**record["recipe"] | record)
        (folder / "README.md").write_text(card, encoding="utf-8")
    target = lmd.ROOT / "data" / "extras"
    done = publish_zoo.publish(home / "extras", target, {"rembert": "google/rembert"})
    return done.replace(f"{lmd.ROOT}{os.sep}", "")


# --- the command ---------------------------------------------------------------------------------


def settings_of(text):
    """(SETTINGS with the overrides of COUPLING_SET, folder under build/, name of the results)."""
    given = parse_set(text, "COUPLING_SET")
    for key, value in given.items():
        if key not in SETTINGS:
            raise ValueError(
                f"COUPLING_SET: unknown parameter {key!r}{nearest(key, list(SETTINGS))}"
            )
        check_type(f"COUPLING_SET: {key}", value, SETTINGS[key] or [""])
        low, high = BOUNDS.get(key, (None, None))
        if low is not None and not low <= value <= high:
            raise ValueError(f"COUPLING_SET: {key}: {value} is not from {low} to {high}")
    settings = SETTINGS | given
    for key, known in (("texts", TOKENIZERS), ("variants", VARIANTS)):
        if len({*settings[key]}) < len(settings[key]):
            raise ValueError(f"COUPLING_SET: {key}: one is named twice")
        for value in settings[key]:
            if value not in known:
                raise ValueError(
                    f"COUPLING_SET: {key}: unknown {value!r}{nearest(value, list(known))}"
                )
    if settings["variants"] and "coupled" not in settings["variants"]:
        raise ValueError(
            "COUPLING_SET: variants: 'coupled' is needed, the others are measured against it"
        )
    if settings["hidden_size"] % 16:
        raise ValueError(
            f"COUPLING_SET: hidden_size: {settings['hidden_size']} is no multiple of 16"
        )
    name = "coupling-custom" if given else "coupling"
    return settings, lmd.ROOT / "build" / name, name


def work(job, settings, home, chosen=None):
    """Do what neither is done nor another process does now; two such processes share all models.

    With `chosen`, that model alone, and ValueError while another process has it.
    """
    for name in [chosen] if chosen else names(settings):
        lock = attempt(home / ".locks" / f"{job}-{name.replace('/', '-')}")
        if lock is None:
            if chosen:
                raise ValueError(f"{job} {name}: another process does that now")
            continue
        begin = time.time()
        if not is_done(job, name, settings, home):
            {"train": train, "measure": measure}[job](name, settings, home)
            minutes = (time.time() - begin) / 60
            print(f"{job} {name}: {minutes:.1f} minutes\n", end="", flush=True)
        os.close(lock)


def is_done(job, name, settings, home):
    if job == "train":
        return finished(home / name, recipe(name, settings), "record.json") is not None
    return finished(home / name, measured(name, settings, home), "measures.json") is not None


def run_all(settings, home, results):
    """Every model, by two processes: first all trainings, then all measures, then the tables."""
    for job in ("train", "measure"):
        left = sum(not is_done(job, name, settings, home) for name in names(settings))
        print(f"{job}: {left} of {len(names(settings))} models to do", flush=True)
        command = [sys.executable, __file__, "work", job]
        workers = [  # they inherit make's lock
            subprocess.Popen(command, stdin=subprocess.DEVNULL, close_fds=False)
            for _ in range(min(2, left))
        ]
        try:
            failed = [worker.wait() for worker in workers]
        except BaseException:
            for worker in workers:
                worker.terminate()
            for worker in workers:
                worker.wait()
            raise
        if any(failed) or not all(is_done(job, name, settings, home) for name in names(settings)):
            raise ValueError(f"{job} has not ended; the same command goes on from what is finished")
    write_tables(settings, home, results)
    print(f"tables in data/results/{results}")
    if results == "coupling":
        print(publish(settings, home, results))


def trial(settings, home, steps=10):
    """Median seconds of a step of each variant at full size, the loss and the optimiser included."""
    from torch.optim import AdamW

    networks = {
        f"{text}/{variant}": start(f"{text}/{variant}/0", settings)
        for text in TOKENIZERS
        for variant in VARIANTS
    }
    tokenizer, copy, _ = networks["english/coupled"]
    width = settings["hidden_size"]
    config = transformers.BertConfig(
        vocab_size=len(tokenizer), hidden_size=width, intermediate_size=4 * width, num_attention_heads=4,
        num_hidden_layers=settings["layers"], max_position_embeddings=320, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    networks["A1's bert"] = (tokenizer, None, transformers.BertForMaskedLM(config))
    texts, took = documents(settings)["train"][:8], {}
    ready = {
        name: (collator(t, settings), Batches(token_rows(texts, t), t, settings, 0, copy), model,
               AdamW(model.parameters(), settings["learning_rate"]))
        for name, (t, copy, model) in networks.items()
    }  # fmt: skip
    for step in range(steps + 1):
        for name, (collate, batches, model, optimiser) in ready.items():
            begin = time.process_time()
            masked_loss(model, collate([batches[step]])).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimiser.step()
            optimiser.zero_grad()
            took.setdefault(name, []).append(time.process_time() - begin)
    seconds = pd.Series({name: np.median(values[1:]) for name, values in took.items()})
    table = pd.DataFrame({"seconds": seconds, "to bert": seconds / seconds["A1's bert"]})
    print(table.round(3).to_string())
    per_seed = seconds.drop("A1's bert").sum()
    minutes = per_seed * settings["steps"] * settings["seeds"] / 60
    print(f"{minutes:.0f} minutes of processor time for {settings['steps']} steps x {settings['seeds']} seeds, "
          f"{minutes / 2:.0f} minutes on two cores, if all sequences had 32 tokens")  # fmt: skip


def stop(number, frame):
    raise KeyboardInterrupt


def check_arguments(job, rest, settings):
    if job in ("train", "measure") and rest[0] not in names(settings):
        raise ValueError(f"{job}: unknown model {rest[0]!r}{nearest(rest[0], names(settings))}")
    if job == "work" and rest[0] not in ("train", "measure"):
        raise ValueError(f"work: {rest[0]!r} is neither train nor measure")
    if job == "trial" and rest and not (rest[0].isdecimal() and int(rest[0])):
        raise ValueError(f"trial: {rest[0]!r} is no number of steps")


def main():
    job, *rest = sys.argv[1:] or ["all"]
    takes = {"all": [0], "publish": [0], "train": [1], "measure": [1], "work": [1], "trial": [0, 1]}
    if len(rest) not in takes.get(job, []):
        sys.exit(__doc__.strip())
    signal.signal(signal.SIGTERM, stop)
    try:
        settings, home, results = settings_of(os.environ.get("COUPLING_SET", ""))
        check_arguments(job, rest, settings)
        torch.set_num_threads(1)
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        if job == "all":
            run_all(settings, home, results)
        elif job == "work":
            work(rest[0], settings, home)
        elif job == "publish":
            print(publish(settings, home, results))
        elif job == "trial":
            trial(settings, home, *map(int, rest))
        else:
            work(job, settings, home, rest[0])
    except (OSError, ValueError, SafetensorError) as error:
        sys.exit(f"coupling: {error}")
    except KeyboardInterrupt:
        said = "coupling: interrupted; the same command goes on from what is finished"
        sys.exit(130 if job == "work" else said)  # its parent says it


if __name__ == "__main__":
    main()
