"""embed and what it rests on: tokenizers, model loading, limits, padding, layers, refusals."""

import inspect
import json
import os
import pickle
import random
import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Regex, Tokenizer, normalizers
from transformers import AutoModel

import lmd_utils as lmd

ENCODERS = [
    "albert-base-v2",
    "bert-base-multilingual-cased",
    "bert-base-uncased",
    "deberta-base",
    "distilbert-base-multilingual-cased",
    "distilbert-base-uncased",
    "distilroberta-base",
    "electra-base-discriminator",
    "longformer-base-4096",
    "roberta-base",
    "xlm-roberta-base",
    "xlnet-base-cased",
]
ALL = [*ENCODERS, "gpt2"]
# Most tokens of each tiny model, special tokens included; None: relative positions, no limit.
LIMITS = dict.fromkeys(ALL, 128) | {
    "roberta-base": 64,
    "distilroberta-base": 64,
    "xlm-roberta-base": 64,
    "xlnet-base-cased": None,
}
TEXTS = [
    "Hi",
    "Anarchism is a political philosophy that considers the state undesirable, unnecessary and harmful.",
    "the of and",
    "In 1985, 4.56 % of the albedo of the Earth was measured by a satellite; the rest is an estimate.",
    "a",
    "Alabama is a state in the south of the United States",
    "It is not known who first wrote of it.",
    "Achilles was a hero of the Trojan War , the central character and the greatest warrior of the Iliad",
]
ODD_TEXTS = [
    "Café naïve, Ångström, São Paulo",
    "12,345.67 in 1985-86 at 10:30",
    "two  spaces,   three\tand a tab \n and a line",
    " leading and trailing ",
    "日本語と中文 mixed with English",
    "Москва and Αθήνα",
    "x != y . . . al-ain £4.56 don't “quoted” ``quoted''",
    "hello😀 e\u0301 ﬁ Ⅷ",
]


@pytest.fixture(scope="module")
def loaded(tiny_models):
    """name -> (module, tokenizer), loaded once."""
    return cache(
        lambda name: (lmd.load_model(tiny_models / name), lmd.load_tokenizer(tiny_models / name))
    )


def embed(texts, model_and_tokenizer, **options):
    model, tokenizer = model_and_tokenizer
    return lmd.embed(
        texts, model, tokenizer=tokenizer, **{"max_length": 32, "progress": False} | options
    )


def alone(folder, text, max_length=32):
    """The oracle: every layer's mean [L, d] of one text, unpadded, through transformers and tokenizers only."""
    raw = Tokenizer.from_file(str(folder / "tokenizer.json"))
    raw.encode_special_tokens = True
    raw.enable_truncation(max_length)
    encoding = raw.encode(text)
    inputs = {"input_ids": encoding.ids, "attention_mask": [1] * len(encoding.ids)}
    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    if model.config.model_type in ("albert", "bert", "electra", "xlnet"):
        inputs["token_type_ids"] = encoding.type_ids
    with torch.no_grad():
        states = model(
            **{k: torch.tensor([v]) for k, v in inputs.items()}, output_hidden_states=True
        )
    torch.testing.assert_close(states.hidden_states[-1], states.last_hidden_state)
    return torch.stack([hidden[0].mean(dim=0) for hidden in states.hidden_states]).numpy()


def seen(model, call):
    """What `call` gives to `model`: the list of its keyword arguments, batch by batch."""
    batches = []
    hook = model.register_forward_pre_hook(
        lambda _, args, kwargs: batches.append(kwargs), with_kwargs=True
    )
    try:
        call()
    finally:
        hook.remove()
    return batches


def ids_seen(model_and_tokenizer, text, **options):
    (batch,) = seen(model_and_tokenizer[0], lambda: embed([text], model_and_tokenizer, **options))
    return batch["input_ids"][batch["attention_mask"].bool()].tolist()


def copy_of(tiny_models, name, tmp_path):
    return Path(shutil.copytree(tiny_models / name, tmp_path / name))


def edit_json(path, **changes):
    """Set keys of a JSON file; a value of None removes the key."""
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in content.items() if v is not None}))


# --- every architecture -------------------------------------------------------------------------


def test_every_architecture_of_the_paper_is_tried(tiny_models):
    assert sorted(path.parent.name for path in tiny_models.glob("[!.]*/config.json")) == sorted(ALL)


@pytest.mark.parametrize("name", ALL)
def test_a_batch_equals_each_text_alone_at_every_layer(tiny_models, loaded, name):
    """H01, H02, H03: padding, template and mask do not change a text's mean; rows keep their order."""
    expected = np.stack([alone(tiny_models / name, text) for text in TEXTS], axis=1)
    found = embed(TEXTS, loaded(name), layer=[0, 1, 2], batch_size=7)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, atol=1e-5)
    np.testing.assert_allclose(embed(TEXTS, loaded(name)), expected[-1], atol=1e-5)
    assert np.ptp(expected[-1], axis=0).min() > 1e-2, (
        "the texts should differ, or the test shows nothing"
    )


@pytest.mark.parametrize("name", ALL)
def test_h01_batch_size_order_and_extra_padding(loaded, rng, name):
    expected = embed(TEXTS, loaded(name), batch_size=1)
    assert expected.shape == (len(TEXTS), loaded(name)[0].config.hidden_size)
    for batch_size in (2, 7):
        np.testing.assert_allclose(
            embed(TEXTS, loaded(name), batch_size=batch_size), expected, atol=1e-5
        )
    shuffled = rng.permutation(len(TEXTS))
    found = embed([TEXTS[i] for i in shuffled], loaded(name), batch_size=3)
    np.testing.assert_allclose(found, expected[shuffled], atol=1e-5)
    beside_a_long_text = embed(["Hi", "word " * 60], loaded(name), max_length=60)[0]
    np.testing.assert_allclose(beside_a_long_text, expected[0], atol=1e-5)


@pytest.mark.parametrize("name", ["gpt2", "xlnet-base-cased"])
def test_h02_padding_side_does_not_matter(tiny_models, loaded, name):
    texts = ["Hi", TEXTS[1] * 2]
    alone_ = np.stack([alone(tiny_models / name, text)[-1] for text in texts])
    for side in ("left", "right"):
        tokenizer = lmd.load_tokenizer(tiny_models / name)
        tokenizer.padding_side = side
        found = embed(texts, (loaded(name)[0], tokenizer))
        np.testing.assert_allclose(found, alone_, atol=1e-4)
        assert tokenizer.padding_side == side


def test_h03_a_model_without_a_pad_token_keeps_its_vocabulary(loaded):
    model, tokenizer = loaded("gpt2")
    before = tokenizer.get_vocab()
    found = embed(["Hi", TEXTS[3]], (model, tokenizer))
    assert tokenizer.pad_token is None
    assert tokenizer.get_vocab() == before
    assert model.get_input_embeddings().num_embeddings == len(before)
    np.testing.assert_allclose(found[:1], embed(["Hi"], (model, tokenizer)), atol=1e-5)
    np.testing.assert_allclose(found[1:], embed([TEXTS[3]], (model, tokenizer)), atol=1e-5)


# --- limits -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in ALL if LIMITS[name]])
def test_h04_a_long_text_is_cut_at_what_the_model_can_take(loaded, name):
    text = "the state of Alabama and " * 1000
    template = ids_seen(loaded(name), "of")
    ids = ids_seen(loaded(name), text, max_length=None)
    assert len(ids) == LIMITS[name]
    if name != "gpt2":
        assert (ids[0], ids[-1]) == (template[0], template[-1])
    unlimited = embed([text], loaded(name), max_length=None)
    assert np.isfinite(unlimited).all()
    for max_length in (LIMITS[name], 500, 10**30):
        np.testing.assert_array_equal(embed([text], loaded(name), max_length=max_length), unlimited)
    assert not np.allclose(
        embed([text], loaded(name), max_length=LIMITS[name] - 1), unlimited, atol=1e-5
    )


def test_h04_relative_positions_have_no_limit(tiny_models, loaded):
    text = "the state of Alabama and " * 60
    raw = (
        Tokenizer.from_file(str(tiny_models / "xlnet-base-cased" / "tokenizer.json"))
        .encode(text)
        .ids
    )
    assert len(raw) > 300
    assert ids_seen(loaded("xlnet-base-cased"), text, max_length=None) == raw
    assert len(ids_seen(loaded("xlnet-base-cased"), text, max_length=200)) == 200


@pytest.mark.parametrize(
    "name", ["roberta-base", "bert-base-uncased", "longformer-base-4096", "gpt2"]
)
def test_h04_a_tokenizer_without_a_limit_does_not_lift_the_models(tiny_models, tmp_path, name):
    folder = copy_of(tiny_models, name, tmp_path)
    edit_json(folder / "tokenizer_config.json", model_max_length=None)
    assert lmd.load_tokenizer(folder).model_max_length > 10**29
    both = lmd.load_model(folder), lmd.load_tokenizer(folder)
    assert len(ids_seen(both, "word " * 5000, max_length=None)) == LIMITS[name]


def test_h05_longformer_lengths_around_its_window(tiny_models, loaded):
    """Window 8: the states that come back line up with the mask, and no token is global."""
    words = [
        "the",
        "of",
        "and",
        "in",
        "to",
        "is",
        "was",
        "for",
        "as",
        "that",
        "the",
        "of",
        "and",
        "in",
        "to",
    ]
    texts = [" ".join(words[: n - 2]) for n in (3, 8, 9, 17)]
    both = loaded("longformer-base-4096")
    assert [len(ids_seen(both, text)) for text in texts] == [3, 8, 9, 17]
    expected = np.stack(
        [alone(tiny_models / "longformer-base-4096", text) for text in texts], axis=1
    )
    for batch_size in (1, 2, 4):
        found = embed(texts, both, layer=[0, 1, 2], batch_size=batch_size)
        np.testing.assert_allclose(found, expected, atol=1e-5)
    found = embed([*texts, "word " * 100], both, max_length=100)[:4]
    np.testing.assert_allclose(found, expected[-1], atol=1e-5)
    for batch in seen(both[0], lambda: embed(texts, both)):
        assert batch.get("global_attention_mask") is None
        assert batch["attention_mask"].max() == 1


# --- precision and refusals ----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["bert-base-uncased", "deberta-base"])
def test_h06_a_bfloat16_checkpoint_is_run_in_float32(tiny_models, tmp_path, name):
    half = AutoModel.from_pretrained(tiny_models / name).to(torch.bfloat16).eval()
    folder = copy_of(tiny_models, name, tmp_path)
    (folder / "model.safetensors").unlink()
    half.save_pretrained(folder)
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"

    model, tokenizer = lmd.load_model(folder), lmd.load_tokenizer(folder)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    for key, value in half.state_dict().items():
        torch.testing.assert_close(model.state_dict()[key], value.float(), rtol=0, atol=0)
    expected = np.stack([alone(folder, text)[-1] for text in TEXTS])
    np.testing.assert_allclose(embed(TEXTS, (model, tokenizer)), expected, atol=1e-5)
    np.testing.assert_allclose(lmd.embed(TEXTS, str(folder), max_length=32), expected, atol=1e-5)
    np.testing.assert_allclose(embed(TEXTS, (half, tokenizer)), expected, atol=1e-5)
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}, (
        "the caller's module stays as it was"
    )


@pytest.mark.parametrize("name", ENCODERS)
def test_h06_bfloat16_only_when_asked(loaded, name):
    exact = embed(TEXTS, loaded(name))
    rough = embed(TEXTS, loaded(name), dtype="bfloat16")
    assert rough.dtype == np.float32
    assert 1e-4 < np.abs(rough - exact).max() < 0.1
    assert {p.dtype for p in loaded(name)[0].parameters()} == {torch.float32}
    with pytest.raises(ValueError, match="float8"):
        embed(TEXTS, loaded(name), dtype="float8")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_h06_non_finite_rows_are_named(tiny_models, value):
    model, tokenizer = (
        f(tiny_models / "roberta-base") for f in (lmd.load_model, lmd.load_tokenizer)
    )
    with torch.no_grad():
        model.get_input_embeddings().weight[tokenizer.convert_tokens_to_ids("Ġand")] = value
    texts = ["the state", "cats and dogs", "of the", "this and that"]
    with pytest.raises(ValueError, match=r"finite") as error:
        embed(texts, (model, tokenizer))
    assert "row 1, 3" in str(error.value)
    assert embed(texts[::2], (model, tokenizer)).shape == (2, 32)


def test_h10_blank_texts_are_refused_by_row_and_no_text_is_no_row(loaded):
    for name in ("bert-base-uncased", "gpt2"):
        with pytest.raises(ValueError, match="0, 1, 2") as error:
            embed(["", "  ", "\n", "a"], loaded(name))
        assert "3" not in str(error.value).replace("3 of 4", "")
        with pytest.raises(ValueError, match=r"\b1\b"):
            embed(["a", None], loaded(name))


@pytest.mark.parametrize("name", ALL)
def test_h10_no_text_gives_no_row(loaded, name):
    dim = loaded(name)[0].config.hidden_size
    assert embed([], loaded(name)).shape == (0, dim)
    assert embed([], loaded(name)).dtype == np.float32
    assert embed([], loaded(name), layer=[1, 2]).shape == (2, 0, dim)


def test_a_single_string_is_not_a_list_of_texts(loaded):
    """Else every letter would be a text."""
    for text in ("word", "one text", ""):
        with pytest.raises(TypeError, match="list of texts"):
            embed(text, loaded("bert-base-uncased"))


@pytest.mark.parametrize("name", ["bert-base-uncased", "roberta-base", "xlnet-base-cased"])
def test_a_length_that_special_tokens_would_fill_is_refused(loaded, name):
    """Each text would be [CLS] [SEP], and all vectors equal."""
    for max_length in (0, 1, 2):
        with pytest.raises(ValueError, match="no room for text|1 or more") as error:
            embed(TEXTS, loaded(name), max_length=max_length)
        assert str(max_length) in str(error.value) and "\n" not in str(error.value)
    assert len(ids_seen(loaded(name), "the of", max_length=3)) == 3


def test_one_token_is_a_length_where_there_are_no_special_ones(loaded):
    assert len(ids_seen(loaded("gpt2"), "the of", max_length=1)) == 1
    with pytest.raises(ValueError, match="1 or more"):
        embed(TEXTS, loaded("gpt2"), max_length=0)


# --- batches -------------------------------------------------------------------------------------


def test_long_texts_go_in_smaller_batches(loaded, monkeypatch):
    """Never more texts than batch_size, nor more tokens, padding included, than BATCH_TOKENS."""
    both = loaded("bert-base-uncased")
    expected = embed(TEXTS, both)
    monkeypatch.setattr(lmd, "BATCH_TOKENS", (0, 40))
    batches = seen(both[0], lambda: embed(TEXTS, both, batch_size=3))
    sizes = [tuple(batch["input_ids"].shape) for batch in batches]
    assert sum(n for n, _ in sizes) == len(TEXTS) and {n for n, _ in sizes} == {1, 2, 3}
    assert all(n == 1 or n * width <= 40 for n, width in sizes)
    np.testing.assert_allclose(embed(TEXTS, both, batch_size=3), expected, atol=1e-5)


def test_a_batch_that_memory_does_not_hold_is_tried_at_half_its_size(loaded):
    model, tokenizer = loaded("bert-base-uncased")
    expected, tried = embed(TEXTS, (model, tokenizer)), []

    def small(_, args, kwargs):
        tried.append(len(kwargs["input_ids"]))
        if tried[-1] > room:
            raise torch.OutOfMemoryError("no memory")

    hook = model.register_forward_pre_hook(small, with_kwargs=True)
    try:
        room = 2
        np.testing.assert_allclose(embed(TEXTS, (model, tokenizer)), expected, atol=1e-5)
        assert tried[:3] == [8, 4, 2] and sum(n for n in tried if n <= 2) == len(TEXTS)
        room = 0
        with pytest.raises(torch.OutOfMemoryError, match="no memory"):
            embed(TEXTS, (model, tokenizer))
    finally:
        hook.remove()


def test_tokens_that_are_there_already_are_not_made_again(loaded, monkeypatch):
    for name in ("xlnet-base-cased", "bert-base-uncased", "gpt2"):
        both = loaded(name)
        expected, tokens = embed(TEXTS, both), lmd.tokenize(TEXTS, both[1], 32)
        with monkeypatch.context() as patch:
            patch.setattr(lmd, "tokenize", None)
            np.testing.assert_array_equal(embed(TEXTS, both, tokens=tokens), expected)
        for texts, wrong in ((TEXTS[:-1], tokens), (TEXTS + ["more"], tokens)):
            with pytest.raises(ValueError, match="tokens are not those of these texts"):
                embed(texts, both, tokens=wrong)
        with pytest.raises(ValueError, match="cut at what the model takes"):
            embed(TEXTS, both, tokens=tokens, max_length=8)


@pytest.mark.parametrize("name", ALL)
def test_tokens_are_those_of_a_call_of_the_tokenizer(loaded, name):
    tokenizer = loaded(name)[1]
    for side in ("left", "right"):
        for limit in (None, 7):
            tokenizer.truncation_side = side
            expected = tokenizer(
                ODD_TEXTS + TEXTS, split_special_tokens=True, truncation=limit is not None,
                max_length=limit, return_attention_mask=True,
            )  # fmt: skip
            assert lmd.tokenize(ODD_TEXTS + TEXTS, tokenizer, limit) == dict(expected)


# --- tokenizers ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL)
def test_h08_special_tokens_come_from_the_template_alone(loaded, name):
    model, tokenizer = loaded(name)
    template = ids_seen((model, tokenizer), "see and")
    specials = set(tokenizer.all_special_ids) - {tokenizer.unk_token_id if name != "gpt2" else None}
    assert specials
    spelled = " ".join(tokenizer.all_special_tokens)
    for text in ("see [SEP] and </s>", f"see {spelled} and", "<|endoftext|>see[CLS]and<cls>"):
        ids = ids_seen((model, tokenizer), text, max_length=128)
        assert {i: ids.count(i) for i in specials} == {i: template.count(i) for i in specials}


@pytest.mark.parametrize(
    "name, begin, end",
    [
        ("bert-base-uncased", ["[CLS]"], ["[SEP]"]),
        ("bert-base-multilingual-cased", ["[CLS]"], ["[SEP]"]),
        ("distilbert-base-uncased", ["[CLS]"], ["[SEP]"]),
        ("distilbert-base-multilingual-cased", ["[CLS]"], ["[SEP]"]),
        ("electra-base-discriminator", ["[CLS]"], ["[SEP]"]),
        ("albert-base-v2", ["[CLS]"], ["[SEP]"]),
        ("deberta-base", ["[CLS]"], ["[SEP]"]),
        ("roberta-base", ["<s>"], ["</s>"]),
        ("distilroberta-base", ["<s>"], ["</s>"]),
        ("longformer-base-4096", ["<s>"], ["</s>"]),
        ("xlm-roberta-base", ["<s>"], ["</s>"]),
        ("xlnet-base-cased", [], ["<sep>", "<cls>"]),
        ("gpt2", [], []),
    ],
)
def test_h08_the_template_is_the_architectures_own(loaded, name, begin, end):
    model, tokenizer = loaded(name)
    tokens = tokenizer.convert_ids_to_tokens(ids_seen((model, tokenizer), "of the"))
    assert tokens[: len(begin)] == begin
    assert tokens[len(tokens) - len(end) :] == end
    inner = tokens[len(begin) : len(tokens) - len(end)]
    assert "".join(inner).replace("Ġ", " ").replace("▁", " ").strip() in ("of the", "ofthe")


def test_h09_long_words_collapse_in_wordpiece_and_not_in_bpe(loaded):
    """More than 100 characters are one [UNK] to WordPiece: equal vectors, and countable as unknown."""
    words = ["Hello" * 21, "World" * 21]
    bert = loaded("bert-base-uncased")
    cls, unk, sep = (bert[1].convert_tokens_to_ids(t) for t in ("[CLS]", "[UNK]", "[SEP]"))
    assert [ids_seen(bert, word) for word in words] == [[cls, unk, sep]] * 2
    assert lmd.tokenize(words, bert[1])["input_ids"] == [[cls, unk, sep]] * 2
    a, b = embed(words, bert)
    np.testing.assert_allclose(a, b, atol=1e-6)
    a, b = embed(words, loaded("roberta-base"))
    assert np.abs(a - b).max() > 1e-2
    assert ids_seen(bert, "hello😀").count(unk) == 1
    roberta = loaded("roberta-base")
    assert roberta[1].unk_token_id not in ids_seen(roberta, "hello😀")


@pytest.mark.parametrize("name", ALL)
def test_h11_ids_are_those_of_the_shipped_tokenizer_json(tiny_models, loaded, name):
    raw = Tokenizer.from_file(str(tiny_models / name / "tokenizer.json"))
    tokenizer = loaded(name)[1]
    assert tokenizer.get_vocab() == raw.get_vocab()
    expected = [raw.encode(text).ids for text in ODD_TEXTS + TEXTS]
    assert lmd.tokenize(ODD_TEXTS + TEXTS, tokenizer)["input_ids"] == expected
    for text in ODD_TEXTS:
        assert ids_seen(loaded(name), text, max_length=None) == raw.encode(text).ids[: LIMITS[name]]


@pytest.mark.parametrize(
    "name", ["xlnet-base-cased", "albert-base-v2", "xlm-roberta-base", "roberta-base"]
)
def test_h11_rules_that_only_tokenizer_json_states_are_kept(tiny_models, tmp_path, name):
    """A class that rebuilds the tokenizer from its vocabulary would lose this normalizer."""
    folder = copy_of(tiny_models, name, tmp_path)
    raw = Tokenizer.from_file(str(folder / "tokenizer.json"))
    before = raw.encode("the state").ids
    own = [
        normalizers.Replace(Regex("state"), "and"),
        *([raw.normalizer] if raw.normalizer else []),
    ]
    raw.normalizer = normalizers.Sequence(own)
    raw.save(str(folder / "tokenizer.json"))
    expected = raw.encode("the state").ids
    assert expected != before
    assert lmd.tokenize(["the state"], lmd.load_tokenizer(folder))["input_ids"] == [expected]


def test_h11_casing_follows_tokenizer_json(tiny_models, tmp_path):
    """Without do_lower_case in tokenizer_config.json the class would lower-case a cased model's text."""
    folder = copy_of(tiny_models, "bert-base-multilingual-cased", tmp_path)
    (folder / "tokenizer_config.json").write_text("{}")
    raw = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert lmd.tokenize(ODD_TEXTS, lmd.load_tokenizer(folder))["input_ids"] == [
        raw.encode(t).ids for t in ODD_TEXTS
    ]


@pytest.mark.parametrize(
    "name", ["bert-base-uncased", "bert-base-multilingual-cased", "deberta-base", "roberta-base"]
)
def test_h11_a_folder_with_vocabulary_files_only(tiny_models, tmp_path, name):
    """deberta-base is published without a tokenizer.json."""
    folder = copy_of(tiny_models, name, tmp_path)
    raw = Tokenizer.from_file(str(folder / "tokenizer.json"))
    (folder / "tokenizer.json").unlink()
    found = lmd.tokenize(ODD_TEXTS, lmd.load_tokenizer(folder))["input_ids"]
    assert found == [raw.encode(text).ids for text in ODD_TEXTS]


def test_a_folder_without_a_tokenizer_is_named(tiny_models, tmp_path):
    folder = tmp_path / "bare"
    folder.mkdir()
    shutil.copy(tiny_models / "roberta-base" / "config.json", folder)
    with pytest.raises(ValueError, match="bare") as error:
        lmd.load_tokenizer(folder)
    assert "\n" not in str(error.value)


def test_tokens_are_cut_inside_the_template(loaded):
    _, tokenizer = loaded("bert-base-uncased")
    whole, cut = (lmd.tokenize([TEXTS[1]], tokenizer, n)["input_ids"][0] for n in (None, 6))
    assert len(whole) > 6
    assert cut == whole[:5] + whole[-1:]
    assert lmd.tokenize([TEXTS[1]], tokenizer, 6)["attention_mask"] == [[1] * 6]


PRECISIONS = [torch.backends.cuda.matmul, torch.backends.cudnn.conv]
PRECISIONS += [torch.backends.mkldnn.matmul, torch.backends.mkldnn.conv]


@pytest.fixture
def tf32():
    """A caller who has allowed TF32 everywhere; and what must come back."""
    before = [operation.fp32_precision for operation in PRECISIONS]
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.conv.fp32_precision = "tf32"
    yield lambda: [operation.fp32_precision for operation in PRECISIONS]
    torch.set_float32_matmul_precision("highest")
    for operation, precision in zip(PRECISIONS, before, strict=True):
        operation.fp32_precision = precision


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_s2_float32_products_are_float32_in_a_forward_pass_and_then_as_the_caller_had_them(
    loaded, tf32, dtype
):
    allowed, during = tf32(), []
    assert allowed[:2] == ["tf32", "tf32"]
    pair = loaded("bert-base-uncased")
    hook = pair[0].register_forward_hook(lambda *_: during.append(tf32()))
    try:
        embed(TEXTS[:3], pair, dtype=dtype, batch_size=1)
        with pytest.raises(ValueError, match="not finite"), torch.no_grad():
            weight = pair[0].embeddings.LayerNorm.weight
            saved = weight.clone()
            weight.fill_(float("nan"))
            embed(TEXTS[:1], pair)
    finally:
        hook.remove()
        with torch.no_grad():
            weight.copy_(saved)
    assert during == [["ieee"] * 4] * 4 and tf32() == allowed
    assert torch.get_float32_matmul_precision() == "high"


def test_s2_two_callers_at_once_leave_the_setting_as_it_was(loaded, tf32):
    """The first one to end must not give TF32 back to the other."""
    allowed, during, inside = tf32(), [], threading.Barrier(2, timeout=60)
    pairs = [loaded(name) for name in ("bert-base-uncased", "roberta-base")]
    first, second = (pair[0] for pair in pairs)
    ended = threading.Event()

    def early(*_):
        inside.wait()

    def late(*_):
        inside.wait()
        assert ended.wait(60)
        during.append(tf32())

    hooks = [first.register_forward_hook(early), second.register_forward_hook(late)]
    try:
        with ThreadPoolExecutor(2) as pool:
            one, other = (pool.submit(embed, TEXTS[:1], pair) for pair in pairs)
            one.result()
            ended.set()
            other.result()
    finally:
        for hook in hooks:
            hook.remove()
    assert during == [["ieee"] * 4] and tf32() == allowed


def test_s1_token_types_go_only_to_models_that_take_them(tiny_models, loaded):
    model, tokenizer = loaded("distilbert-base-uncased")
    assert "token_type_ids" in tokenizer(["a"])
    (batch,) = seen(model, lambda: embed(["of the"], (model, tokenizer)))
    assert "token_type_ids" not in batch
    np.testing.assert_allclose(
        embed(["of the"], (model, tokenizer))[0],
        alone(tiny_models / "distilbert-base-uncased", "of the")[-1],
        atol=1e-5,
    )
    (batch,) = seen(
        loaded("bert-base-uncased")[0], lambda: embed(["of the"], loaded("bert-base-uncased"))
    )
    assert batch["token_type_ids"].tolist() == [[0, 0, 0, 0]]
    (batch,) = seen(
        loaded("xlnet-base-cased")[0], lambda: embed(["of the"], loaded("xlnet-base-cased"))
    )
    assert batch["token_type_ids"][0].tolist() == [0] * (batch["input_ids"].shape[1] - 1) + [2]


# --- layers, pooling, modules --------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    ["bert-base-uncased", "gpt2", "xlnet-base-cased", "albert-base-v2", "longformer-base-4096"],
)
def test_layer_k_is_hidden_state_k(tiny_models, loaded, name):
    expected = np.stack([alone(tiny_models / name, text) for text in TEXTS[:3]], axis=1)
    for k in (0, 1, 2):
        np.testing.assert_allclose(embed(TEXTS[:3], loaded(name), layer=k), expected[k], atol=1e-5)
    np.testing.assert_array_equal(
        embed(TEXTS[:3], loaded(name), layer=-1), embed(TEXTS[:3], loaded(name), layer=2)
    )
    both = embed(TEXTS[:3], loaded(name), layer=[2, 1])
    assert both.shape == (2, 3, loaded(name)[0].config.hidden_size)
    np.testing.assert_allclose(both, expected[[2, 1]], atol=1e-5)
    assert embed(TEXTS[:3], loaded(name), layer=[1]).shape[0] == 1


def test_several_layers_take_one_pass(loaded):
    both = loaded("bert-base-uncased")
    assert len(seen(both[0], lambda: embed(TEXTS, both, layer=[0, 1, 2], batch_size=8))) == 1


def test_layers_may_be_integers_of_numpy(loaded):
    both = loaded("bert-base-uncased")
    for kind in (np.int64, np.int32, np.uint8):
        np.testing.assert_array_equal(
            embed(TEXTS, both, layer=kind(1)), embed(TEXTS, both, layer=1)
        )
    many = embed(TEXTS, both, layer=np.array([0, 2]))
    np.testing.assert_array_equal(many, embed(TEXTS, both, layer=[0, 2]))


@pytest.mark.parametrize("layer", [3, -2, [1, 7]])
def test_a_layer_that_does_not_exist_is_named(loaded, layer):
    wrong = layer if isinstance(layer, int) else 7
    with pytest.raises(ValueError, match=rf"{wrong}\b.*\b2\b"):
        embed(TEXTS, loaded("bert-base-uncased"), layer=layer)


@pytest.mark.parametrize("name", ALL)
def test_padded_mean_divides_by_max_length(loaded, name):
    """As the authors' code: the sum over the text's tokens, over T."""
    mean = embed(TEXTS, loaded(name), max_length=32)
    tokens = [len(ids_seen(loaded(name), text, max_length=32)) for text in TEXTS]
    assert len(set(tokens)) > 3
    expected = mean * np.array(tokens)[:, None] / 32
    for batch_size in (1, 3, 8):
        found = embed(
            TEXTS, loaded(name), max_length=32, pooling="padded_mean", batch_size=batch_size
        )
        np.testing.assert_allclose(found, expected, atol=1e-5)


def test_an_unknown_pooling_is_refused(loaded):
    with pytest.raises(ValueError, match="median"):
        embed(TEXTS, loaded("bert-base-uncased"), pooling="median")


def test_a_folder_a_path_and_a_module_give_the_same(tiny_models, loaded):
    expected = embed(TEXTS, loaded("electra-base-discriminator"))
    folder = tiny_models / "electra-base-discriminator"
    for source in (folder, str(folder)):
        np.testing.assert_array_equal(
            lmd.embed(TEXTS, source, max_length=32, progress=False), expected
        )
    with pytest.raises(ValueError, match="tokenizer"):
        lmd.embed(TEXTS, loaded("electra-base-discriminator")[0], max_length=32)


def test_texts_may_be_any_sequence(loaded):
    expected = embed(TEXTS, loaded("bert-base-uncased"))
    np.testing.assert_array_equal(embed(tuple(TEXTS), loaded("bert-base-uncased")), expected)
    np.testing.assert_array_equal(
        embed(np.array(TEXTS, dtype=object), loaded("bert-base-uncased")), expected
    )


@pytest.mark.parametrize("training", [True, False])
def test_the_modules_mode_is_put_back(tiny_models, loaded, training):
    """Dropout stays off while embedding, and the caller's mode survives an error too."""
    expected = embed(TEXTS, loaded("bert-base-uncased"))
    model, tokenizer = (
        lmd.load_model(tiny_models / "bert-base-uncased"),
        loaded("bert-base-uncased")[1],
    )
    assert not model.training
    model.train(training)
    np.testing.assert_array_equal(embed(TEXTS, (model, tokenizer)), expected)
    assert model.training is training
    with torch.no_grad():
        model.get_input_embeddings().weight.fill_(float("nan"))
    with pytest.raises(ValueError):
        embed(TEXTS, (model, tokenizer))
    assert model.training is training


def test_parts_that_were_frozen_in_eval_mode_stay_so(tiny_models, loaded):
    model = lmd.load_model(tiny_models / "bert-base-uncased").train()
    model.embeddings.eval()
    before = [module.training for module in model.modules()]
    embed(TEXTS, (model, loaded("bert-base-uncased")[1]))
    assert [module.training for module in model.modules()] == before


def test_no_global_seed_is_disturbed(tiny_models):
    def states():
        numpy_state = np.random.get_state()  # noqa: NPY002
        return torch.get_rng_state().tolist(), numpy_state[1].tolist(), random.getstate()

    before = states()
    lmd.load_model(tiny_models / "bert-base-uncased", seed=3)
    lmd.load_model(tiny_models / "roberta-base")
    lmd.embed(TEXTS, tiny_models / "bert-base-uncased", max_length=32)
    assert states() == before


def test_loading_and_embedding_are_quiet(tiny_models):
    """A report or a bar would land in the notebooks' committed outputs, with a path in it."""
    program = (
        "import sys, lmd_utils as lmd\n"
        "print(lmd.embed(['the of'] * 2, sys.argv[1], max_length=8, progress=True).shape)"
    )
    found = subprocess.run(
        [sys.executable, "-c", program, str(tiny_models / "roberta-base")],
        env={k: v for k, v in os.environ.items() if k != "TQDM_DISABLE"},
        cwd=lmd.ROOT,
        capture_output=True,
        text=True,
    )
    assert (found.stdout, found.stderr) == ("(2, 32)\n", "")


def test_the_bar_goes_to_the_terminal_that_lmd_progress_names(tiny_models, tmp_path):
    program = (
        "import sys, lmd_utils as lmd\n"
        "lmd.embed(['the of'] * 3, sys.argv[1], max_length=8, progress=sys.argv[2] == 'on')"
    )
    terminal = tmp_path / "terminal"
    terminal.touch()
    for wanted in ("off", "on"):
        found = subprocess.run(
            [sys.executable, "-c", program, str(tiny_models / "roberta-base"), wanted],
            env=os.environ | {"LMD_PROGRESS": str(terminal)},
            cwd=lmd.ROOT,
            capture_output=True,
            text=True,
        )
        assert (found.returncode, found.stdout, found.stderr) == (0, "", "")
        assert ("3/3" in terminal.read_text()) == (wanted == "on")


# --- encoder-decoder models -----------------------------------------------------------------------


def t5(vocabulary):
    config = transformers.T5Config(
        vocab_size=vocabulary, d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2
    )
    return transformers.T5ForConditionalGeneration(config)


def bart(vocabulary):
    layers = {f"{part}_{key}": value for part in ("encoder", "decoder") for key, value in
              (("layers", 2), ("attention_heads", 2), ("ffn_dim", 64))}  # fmt: skip
    config = transformers.BartConfig(
        vocab_size=vocabulary, d_model=32, max_position_embeddings=48, **layers
    )
    return transformers.BartForConditionalGeneration(config)


@pytest.mark.parametrize(
    "make, tokenizer, limit", [(t5, "xlm-roberta-base", 64), (bart, "roberta-base", 48)]
)
def test_of_an_encoder_decoder_model_the_encoder_is_read(
    tiny_models, tmp_path, make, tokenizer, limit
):
    raw = Tokenizer.from_file(str(tiny_models / tokenizer / "tokenizer.json"))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        whole = make(raw.get_vocab_size()).eval()
    whole.save_pretrained(tmp_path)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny_models / tokenizer / file, tmp_path)

    found = lmd.embed(TEXTS, tmp_path, max_length=None, layer=[0, 1, 2], progress=False)
    assert found.shape == (3, len(TEXTS), 32)
    raw.enable_truncation(limit)
    for i, text in enumerate([*TEXTS[:3], TEXTS[3] * 9]):
        ids = torch.tensor([raw.encode(text).ids])
        with torch.no_grad():
            states = whole.get_encoder()(input_ids=ids, output_hidden_states=True).hidden_states
        expected = torch.stack([hidden[0].mean(dim=0) for hidden in states]).numpy()
        alone = lmd.embed([text], tmp_path, max_length=None, layer=[0, 1, 2], progress=False)
        np.testing.assert_allclose(alone[:, 0], expected, atol=1e-5)
        if i < 3:
            np.testing.assert_allclose(found[:, i], alone[:, 0], atol=1e-5)


# --- weights -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL)
def test_weights_are_those_of_the_file(tiny_models, loaded, name):
    """Under the published names too: a head's prefix, LayerNorm.gamma, an extra position_ids."""
    published = {
        key.replace("gamma", "weight").replace("beta", "bias"): value
        for key, value in load_file(tiny_models / name / "model.safetensors").items()
    }
    model = loaded(name)[0]
    prefix = {"xlnet-base-cased": "transformer.", "gpt2": "transformer."}.get(
        name, f"{model.config.model_type}."
    )
    prefix = {"xlm-roberta-base": "roberta."}.get(name, prefix)
    compared = 0
    for key, value in model.state_dict().items():
        if "pooler" not in key and not key.endswith(("position_ids", "token_type_ids")):
            torch.testing.assert_close(value, published[prefix + key], rtol=0, atol=0)
            compared += 1
    assert compared > 20
    assert not model.training


def test_a_missing_encoder_weight_is_an_error(tiny_models, tmp_path):
    folder = copy_of(tiny_models, "bert-base-uncased", tmp_path)
    weights = load_file(folder / "model.safetensors")
    del weights["bert.encoder.layer.1.attention.self.query.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        ValueError, match=r"encoder\.layer\.1\.attention\.self\.query\.weight"
    ) as error:
        lmd.load_model(folder)
    assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match="query"):
        lmd.embed(TEXTS, folder, max_length=32)


def test_a_missing_pooler_is_no_error(tiny_models, loaded, tmp_path):
    folder = copy_of(tiny_models, "bert-base-uncased", tmp_path)
    weights = load_file(folder / "model.safetensors")
    without = {key: value for key, value in weights.items() if "pooler" not in key}
    assert len(without) < len(weights)
    save_file(without, folder / "model.safetensors", metadata={"format": "pt"})
    np.testing.assert_array_equal(
        lmd.embed(TEXTS, folder, max_length=32), embed(TEXTS, loaded("bert-base-uncased"))
    )


def test_a_weight_of_another_shape_is_an_error(tiny_models, tmp_path):
    folder = copy_of(tiny_models, "roberta-base", tmp_path)
    weights = load_file(folder / "model.safetensors")
    key = "roberta.encoder.layer.0.output.dense.weight"
    weights[key] = weights[key][:, :-1].contiguous()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"encoder\.layer\.0\.output\.dense\.weight") as error:
        lmd.load_model(folder)
    assert "\n" not in str(error.value)


def test_a_truncated_weight_file_is_an_error_that_names_the_folder(tiny_models, tmp_path):
    folder = copy_of(tiny_models, "roberta-base", tmp_path)
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match="roberta-base") as error:
        lmd.load_model(folder)
    assert "\n" not in str(error.value)


def test_random_initialisation_reads_the_config_alone_and_obeys_its_seed(tiny_models, tmp_path):
    folder = tmp_path / "bare"
    folder.mkdir()
    shutil.copy(tiny_models / "bert-base-uncased" / "config.json", folder)
    first, again, other = (lmd.load_model(folder, seed=seed).state_dict() for seed in (0, 0, 1))
    trained = lmd.load_model(tiny_models / "bert-base-uncased").state_dict()
    key = "encoder.layer.0.attention.self.query.weight"
    assert torch.equal(first[key], again[key])
    assert not torch.allclose(first[key], other[key])
    assert not torch.allclose(first[key], trained[key])
    assert abs(first[key].std().item() - 0.2) < 0.02, "the architecture's own initializer_range"
    assert not lmd.load_model(folder, seed=0).training


def test_loading_is_float32_and_offers_no_other(tiny_models):
    assert "dtype" not in inspect.signature(lmd.load_model).parameters
    for seed in (None, 0):
        model = lmd.load_model(tiny_models / "bert-base-uncased", seed=seed)
        assert {p.dtype for p in model.parameters()} == {torch.float32}


@pytest.fixture
def bin_only(tiny_models, tmp_path):
    folder = copy_of(tiny_models, "bert-base-uncased", tmp_path)
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    return folder


def test_s3_a_bin_checkpoint_needs_permission(bin_only, loaded):
    for attempt in (
        lambda: lmd.find_model(str(bin_only)),
        lambda: lmd.load_model(bin_only),
        lambda: lmd.embed(TEXTS, bin_only, max_length=32),
    ):
        with pytest.raises(ValueError, match="safetensors") as error:
            attempt()
        assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match="allow_bin"):
        lmd.find_model(str(bin_only))

    assert lmd.find_model(str(bin_only), allow_bin=True) == bin_only
    model = lmd.load_model(bin_only, allow_bin=True)
    found = embed(TEXTS, (model, lmd.load_tokenizer(bin_only)))
    np.testing.assert_array_equal(found, embed(TEXTS, loaded("bert-base-uncased")))


class Payload:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("kind", ["pickle", "torch"])
def test_s3_a_pickled_object_is_never_run(bin_only, tmp_path, kind):
    """Permission to read a .bin is no permission to run what is in it."""
    canary = tmp_path / "it-ran"
    pickle.loads(pickle.dumps(Payload(canary)))  # noqa: S301
    assert canary.exists(), "the payload works where it is unpickled"
    canary.unlink()
    payload = {"bert.embeddings.word_embeddings.weight": Payload(canary)}
    if kind == "pickle":
        (bin_only / "pytorch_model.bin").write_bytes(pickle.dumps(payload))
    else:
        torch.save(payload, bin_only / "pytorch_model.bin")
    with pytest.raises(ValueError, match="bert-base-uncased") as error:
        lmd.load_model(bin_only, allow_bin=True)
    assert "\n" not in str(error.value)
    assert not canary.exists()


def test_s3_safetensors_go_first(tiny_models, loaded, tmp_path):
    """A .bin beside them is not opened, even with permission."""
    folder = copy_of(tiny_models, "bert-base-uncased", tmp_path)
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Payload(tmp_path / "it-ran")))
    model = lmd.load_model(folder, allow_bin=True)
    np.testing.assert_array_equal(
        embed(TEXTS, (model, loaded("bert-base-uncased")[1])),
        embed(TEXTS, loaded("bert-base-uncased")),
    )
    assert not (tmp_path / "it-ran").exists()


def test_a_folder_that_is_no_model_is_named(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"empty.*config\.json"):
        lmd.find_model(str(tmp_path / "empty"))
    with pytest.raises(FileNotFoundError, match="no-such-folder"):
        lmd.find_model(str(tmp_path / "no-such-folder"))


# --- the list of SHA-256 sums beside a model ------------------------------------------------------


def manifest_of(folder):
    """Content of a MANIFEST.json that lists the one model in `folder`."""
    files = {f"{folder.name}/{p.name}": lmd.content_hash(p) for p in folder.iterdir()}
    return {"models": {folder.name: {"after": ""}}, "files": files}


@pytest.fixture
def shipped(tiny_models, tmp_path, monkeypatch):
    """A model of data/zoo in a repository of its own, with its list."""
    monkeypatch.setattr(lmd, "ROOT", tmp_path)
    folder = tmp_path / "data" / "zoo" / "bert"
    shutil.copytree(tiny_models / "bert-base-uncased", folder)
    (folder.parent / "MANIFEST.json").write_text(json.dumps(manifest_of(folder)))
    return folder


LOADERS = {
    "model": lmd.load_model,
    "random": lambda folder: lmd.load_model(folder, seed=0),
    "tokenizer": lmd.load_tokenizer,
}


def refusal(load, folder):
    """The one line in which `load` refuses the folder."""
    with pytest.raises(ValueError) as error:
        load(folder)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("load", LOADERS.values(), ids=LOADERS)
def test_a_damaged_file_of_the_zoo_is_refused_and_named(shipped, load):
    load(shipped)
    weights = shipped / "model.safetensors"
    data = weights.read_bytes()
    flipped = data[:-9] + bytes([data[-9] ^ 1]) + data[-8:]
    for damaged in (data[:-1], flipped):
        weights.write_bytes(damaged)
        line = refusal(load, shipped)
        assert line.startswith("data/zoo/bert/model.safetensors: SHA-256 is ")
        assert line.endswith("the file is damaged; `git checkout -- data/zoo/bert` restores it")
    weights.unlink()
    assert "data/zoo/bert/model.safetensors: is missing; `git checkout" in refusal(load, shipped)
    weights.write_bytes(data)
    (shipped / "added_tokens.json").write_text("{}")
    assert "added_tokens.json: is not listed in MANIFEST.json; delete it" in refusal(load, shipped)


def test_a_damaged_list_of_the_zoo_is_refused(shipped):
    manifest = shipped.parent / "MANIFEST.json"
    content = json.loads(manifest.read_text())
    manifest.write_bytes(manifest.read_bytes()[:-5])
    line = refusal(lmd.load_model, shipped)
    assert line.startswith("data/zoo/MANIFEST.json: is damaged (JSONDecodeError")
    assert line.endswith("; `git checkout -- data/zoo/MANIFEST.json` restores it")
    manifest.write_text("[]")
    assert "MANIFEST.json: is damaged (TypeError" in refusal(lmd.load_model, shipped)
    manifest.write_text(json.dumps(content | {"files": {}}))
    assert "is not listed in MANIFEST.json" in refusal(lmd.load_model, shipped)
    manifest.write_text(json.dumps(content | {"models": {}}))
    assert refusal(lmd.load_model, shipped) == (
        "data/zoo/MANIFEST.json: does not list bert; keep models of your own elsewhere"
    )
    manifest.unlink()
    assert refusal(lmd.load_model, shipped) == (
        "data/zoo/MANIFEST.json: is missing; `git checkout -- data/zoo/MANIFEST.json` restores it"
    )


@pytest.mark.parametrize(
    "text", ["{", "[1, 2]", '{"files": {"config.json": 1}}', '{"models": {}, "files": ["a"]}', None]
)
def test_a_manifest_of_another_kind_or_none_is_no_list_of_models(tiny_models, tmp_path, text):
    folder = copy_of(tiny_models, "bert-base-uncased", tmp_path)
    if text:
        (tmp_path / "MANIFEST.json").write_text(text)
    lmd.load_model(folder)
    lmd.load_tokenizer(folder)


def test_a_copy_of_the_zoo_elsewhere_is_checked_too(tiny_models, tmp_path):
    folder = copy_of(tiny_models, "bert-base-uncased", tmp_path)
    (tmp_path / "MANIFEST.json").write_text(json.dumps(manifest_of(folder)))
    lmd.load_model(folder)
    edit_json(folder / "config.json", layer_norm_eps=1e-3)
    assert refusal(lmd.load_model, folder).endswith(f"the file is damaged; copy {folder} anew")
