"""Make tiny seeded checkpoints of the paper's twelve architectures, and of GPT-2.

    python tools/tiny_models.py OUTDIR

Each folder holds what its namesake on the hub holds: config.json, model.safetensors with the
weights of the pre-training class (head included, sometimes without a pooler), and a tokenizer of
the same kind, template and file layout, trained on a few articles of gensim's Wikipedia sample.
The weights are random: the folders exercise code, they say nothing about language.

The same versions give the same bytes. A finished folder carries `.complete`; a second run that
would make the same bytes does nothing.
"""

import bz2
import collections
import hashlib
import io
import itertools
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import sentencepiece
import tokenizers
import torch
import transformers
from gensim.corpora.wikicorpus import extract_pages, filter_wiki
from gensim.test.utils import datapath
from safetensors.torch import load_file, save_file
from sentencepiece import sentencepiece_model_pb2
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

SAMPLE = "enwiki-latest-pages-articles1.xml-p000000010p000030302-shortened.bz2"
ARTICLES = 8
VOCABULARY = 1200
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
WORLD = "日本語 中文 Ελλάδα Москва Ñandú čeština العربية 한국어"  # what a multilingual vocabulary must also hold

transformers.logging.disable_progress_bar()

# Attention has to matter in a model this small, so that a padded position that leaks is seen.
COMMON = {"initializer_range": 0.2}


def articles(n=ARTICLES):
    """The first `n` articles of the sample (redirects left out), markup removed."""
    with bz2.open(datapath(SAMPLE)) as file:
        texts = (filter_wiki(text) for _, text, _ in extract_pages(file, ("0",)))
        return list(itertools.islice((text for text in texts if len(text) > 2000), n))


def bert_tokenizer(texts, lowercase, size=VOCABULARY, least=1):
    """WordPiece with [CLS] text [SEP]; characters seen fewer than `least` times are unknown."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]", max_input_chars_per_word=100))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    normalized = (tokenizer.normalizer.normalize_str(text) for text in texts)
    seen = collections.Counter(itertools.chain.from_iterable(normalized))
    letters = sorted(letter for letter in seen if seen[letter] >= least and not letter.isspace())
    # The trainer numbers the ##letters in the order of a hash table unless they are listed.
    trainer = trainers.WordPieceTrainer(
        vocab_size=size + 2 * len(letters),
        special_tokens=special + letters + ["##" + letter for letter in letters],
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    vocab = tokenizer.get_vocab()
    fresh = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]", max_input_chars_per_word=100))
    fresh.normalizer, fresh.pre_tokenizer = tokenizer.normalizer, tokenizer.pre_tokenizer
    fresh.decoder = decoders.WordPiece()
    fresh.add_special_tokens(special)
    fresh.post_processor = processors.TemplateProcessing(
        single="[CLS]:0 $A:0 [SEP]:0",
        pair="[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1",
        special_tokens=[(token, vocab[token]) for token in ("[CLS]", "[SEP]")],
    )
    lines = "".join(f"{token}\n" for token in sorted(vocab, key=vocab.get))
    return fresh, {"vocab.txt": lines}


def byte_level_tokenizer(texts, special, template, size=VOCABULARY):
    """Byte-level BPE; `template` is "roberta", "deberta" or None; `special` are the first ids, the mask the last."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    first = [token for token in special if "mask" not in token.lower()]
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=size, special_tokens=first, initial_alphabet=BYTES, show_progress=False
        ),
    )
    model = json.loads(tokenizer.to_str())["model"]
    vocab, merges = model["vocab"], [tuple(merge) for merge in model["merges"]]
    for token in special:
        vocab.setdefault(token, len(vocab))
    tokenizer = Tokenizer(models.BPE(vocab, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(t, lstrip="mask" in t.lower(), normalized=False) for t in special]
    )
    if template == "roberta":
        tokenizer.post_processor = processors.RobertaProcessing(
            ("</s>", vocab["</s>"]),
            ("<s>", vocab["<s>"]),
            trim_offsets=True,
            add_prefix_space=False,
        )
    elif template == "deberta":
        tokenizer.post_processor = processors.TemplateProcessing(
            single="[CLS]:0 $A:0 [SEP]:0",
            pair="[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1",
            special_tokens=[(token, vocab[token]) for token in ("[CLS]", "[SEP]")],
        )
    else:
        tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    return tokenizer, {
        "vocab.json": json.dumps(vocab, ensure_ascii=False),
        "merges.txt": "#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in merges),
    }


def unigram_tokenizer(texts, kind, size=VOCABULARY, coverage=None):
    """SentencePiece Unigram with the special tokens, normalizer and template of `kind`."""
    before, after = {
        "xlm-roberta": (["<s>", "<pad>", "</s>", "<unk>"], ["<mask>"]),
        "xlnet": (
            ["<unk>", "<s>", "</s>", "<cls>", "<sep>", "<pad>", "<mask>", "<eod>", "<eop>"],
            [],
        ),
        "albert": (["<pad>", "<unk>", "[CLS]", "[SEP]", "[MASK]"], []),
    }[kind]
    fold = [normalizers.Replace("``", '"'), normalizers.Replace("''", '"')]
    fold += [normalizers.NFKD(), normalizers.StripAccents()]
    fold += [normalizers.Lowercase()] if kind == "albert" else []
    fold = normalizers.Sequence(fold if kind != "xlm-roberta" else [])
    lines = (fold.normalize_str(line) for text in texts for line in text.splitlines())
    blob = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=(line for line in lines if line.strip()),
        model_writer=blob,
        model_type="unigram",
        vocab_size=size,
        character_coverage=coverage or (0.9995 if kind != "xlm-roberta" else 1.0),
        num_threads=1,
        minloglevel=2,
    )
    proto = sentencepiece_model_pb2.ModelProto.FromString(blob.getvalue())
    pieces = [(piece.piece, piece.score) for piece in proto.pieces if piece.type == piece.NORMAL]
    vocab = [(token, 0.0) for token in before] + pieces + [(token, 0.0) for token in after]
    ids = {token: i for i, (token, _) in enumerate(vocab)}

    tokenizer = Tokenizer(models.Unigram(vocab, unk_id=ids["<unk>"], byte_fallback=False))
    precompiled = normalizers.Precompiled(proto.normalizer_spec.precompiled_charsmap)
    tokenizer.normalizer = (
        precompiled if kind == "xlm-roberta" else normalizers.Sequence([fold, precompiled])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(prepend_scheme="always")]
    )
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    tokenizer.add_special_tokens(
        [AddedToken(t, lstrip="mask" in t.lower(), normalized=False) for t in before + after]
    )
    single, pair, named = {
        "xlm-roberta": ("<s> $A </s>", "<s> $A </s> </s> $B </s>", ["<s>", "</s>"]),
        "xlnet": ("$A:0 <sep>:0 <cls>:2", "$A:0 <sep>:0 $B:1 <sep>:1 <cls>:2", ["<sep>", "<cls>"]),
        "albert": ("[CLS]:0 $A:0 [SEP]:0", "[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1", ["[CLS]", "[SEP]"]),
    }[kind]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=single, pair=pair, special_tokens=[(token, ids[token]) for token in named]
    )
    return tokenizer, {}


ROBERTA_SPECIAL = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
DEBERTA_SPECIAL = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]"]
TOKENIZERS = {
    "bert-uncased": lambda texts: bert_tokenizer(texts, lowercase=True),
    "bert-cased": lambda texts: bert_tokenizer([*texts, WORLD], lowercase=False),
    "roberta": lambda texts: byte_level_tokenizer(texts, ROBERTA_SPECIAL, "roberta"),
    "deberta": lambda texts: byte_level_tokenizer(texts, DEBERTA_SPECIAL, "deberta"),
    "gpt2": lambda texts: byte_level_tokenizer(texts, ["<|endoftext|>"], None),
    "xlm-roberta": lambda texts: unigram_tokenizer([*texts, WORLD], "xlm-roberta"),
    "xlnet": lambda texts: unigram_tokenizer(texts, "xlnet"),
    "albert": lambda texts: unigram_tokenizer(texts, "albert"),
}


def usual(hidden, positions, **more):
    return {
        "hidden_size": hidden,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 2 * hidden,
        "max_position_embeddings": positions,
        **more,
    }


def distilbert(hidden):
    return {
        "dim": hidden,
        "n_layers": 2,
        "n_heads": 2,
        "hidden_dim": 2 * hidden,
        "max_position_embeddings": 128,
    }


UNCASED = {"do_lower_case": True, "model_max_length": 128}
CASED = {"do_lower_case": False, "model_max_length": 128}
ROBERTA = {
    "type_vocab_size": 1,
    "layer_norm_eps": 1e-5,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
}
DEBERTA = {
    "relative_attention": True,
    "max_relative_positions": -1,
    "position_biased_input": False,
    "pos_att_type": "c2p|p2c",
    "layer_norm_eps": 1e-7,
    "type_vocab_size": 0,
}
XLNET = {
    "d_model": 32,
    "n_layer": 2,
    "n_head": 2,
    "d_inner": 64,
    "pad_token_id": 5,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GPT2 = {
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 2,
    "n_positions": 128,
    "bos_token_id": 0,
    "eos_token_id": 0,
}

# name: (pre-training class, tokenizer, config, tokenizer_config.json). RoBERTa's 66 positions are 64 tokens.
CHECKPOINTS = {
    "bert-base-uncased": ("BertForPreTraining", "bert-uncased", usual(32, 128), UNCASED),
    "bert-base-multilingual-cased": ("BertForPreTraining", "bert-cased", usual(24, 128), CASED),
    "distilbert-base-uncased": ("DistilBertForMaskedLM", "bert-uncased", distilbert(32), UNCASED),
    "distilbert-base-multilingual-cased": (
        "DistilBertForMaskedLM",
        "bert-cased",
        distilbert(24),
        CASED,
    ),
    "electra-base-discriminator": (
        "ElectraForPreTraining",
        "bert-uncased",
        usual(24, 128, embedding_size=16),
        UNCASED,
    ),
    "longformer-base-4096": (
        "LongformerForMaskedLM",
        "roberta",
        usual(16, 130, attention_window=[8, 8], sep_token_id=2, **ROBERTA),
        {"model_max_length": 128},
    ),
    "deberta-base": (
        "DebertaForMaskedLM",
        "deberta",
        usual(32, 128, **DEBERTA),
        {"do_lower_case": False},
    ),
    "roberta-base": (
        "RobertaForMaskedLM",
        "roberta",
        usual(32, 66, **ROBERTA),
        {"model_max_length": 64},
    ),
    "distilroberta-base": (
        "RobertaForMaskedLM",
        "roberta",
        usual(16, 66, **ROBERTA),
        {"model_max_length": 64},
    ),
    "xlm-roberta-base": (
        "XLMRobertaForMaskedLM",
        "xlm-roberta",
        usual(24, 66, **ROBERTA),
        {"model_max_length": 64},
    ),
    "xlnet-base-cased": ("XLNetLMHeadModel", "xlnet", XLNET, {}),
    "albert-base-v2": (
        "AlbertForPreTraining",
        "albert",
        usual(24, 128, embedding_size=16),
        UNCASED,
    ),
    "gpt2": ("GPT2LMHeadModel", "gpt2", GPT2, {"model_max_length": 128}),
}


def rename_as_published(name, path):
    """Two names that the published files carry and that a loader has to know."""
    weights = load_file(path)
    if name == "bert-base-uncased":
        weights = {
            key.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
                "LayerNorm.bias", "LayerNorm.beta"
            ): tensor
            for key, tensor in weights.items()
        }
    elif name == "roberta-base":
        weights["roberta.embeddings.position_ids"] = torch.arange(66)[None]
    else:
        return
    save_file(weights, path, metadata={"format": "pt"})


def save_checkpoint(folder, name, tokenizer, files, seed):
    """Write the checkpoint `name` with `tokenizer` and its vocabulary `files` into `folder`."""
    class_name, _, settings, tokenizer_config = CHECKPOINTS[name]
    model_class = getattr(transformers, class_name)
    config = model_class.config_class(vocab_size=tokenizer.get_vocab_size(), **COMMON, **settings)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config).eval()
        # A fresh model starts with zero biases and unit norms; trained ones do not.
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 1:
                    parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    rename_as_published(name, folder / "model.safetensors")
    tokenizer.save(str(folder / "tokenizer.json"))
    for file, text in files.items():
        (folder / file).write_text(text, encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config, indent=2) + "\n")


def stamp():
    """What decides the bytes: this file and the versions of what it calls."""
    versions = {m.__name__: m.__version__ for m in (sentencepiece, tokenizers, torch, transformers)}
    return (
        json.dumps(
            {"tool": hashlib.sha256(Path(__file__).read_bytes()).hexdigest(), **versions}, indent=2
        )
        + "\n"
    )


def build(outdir):
    """Make every checkpoint under `outdir` (a path), unless the same bytes are there already."""
    outdir = Path(outdir)
    complete = outdir / ".complete"
    if complete.is_file() and complete.read_text() == stamp():
        return outdir
    outdir.mkdir(parents=True, exist_ok=True)
    complete.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(prefix=".making-", dir=outdir) as temporary:
        texts = articles()
        trained = {kind: train(texts) for kind, train in TOKENIZERS.items()}
        for i, (name, (_, kind, _, _)) in enumerate(CHECKPOINTS.items()):
            folder = Path(temporary, name)
            save_checkpoint(folder, name, *trained[kind], seed=1000 + i)
            if (outdir / name).exists():
                shutil.rmtree(outdir / name)
            folder.rename(outdir / name)
        (Path(temporary) / "stamp").write_text(stamp())
        os.replace(Path(temporary) / "stamp", complete)
    return outdir


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python tools/tiny_models.py OUTDIR")
    build(sys.argv[1])
