"""What the notebooks and tools that pre-train have in common; A1_pretrain_zoo explains the objectives.

The code of the functions that A1_pretrain_zoo lists in SHARED is hashed into the recipes of the models
of data/zoo: a change of one of these asks for new models.
"""

import ast
import contextlib
import json
import os
import shutil
import textwrap
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as F
from transformers import Trainer, TrainerCallback

MARK = "\ue000"  # a private-use character
DRAWN = "generator.safetensors"  # in a checkpoint: states of torch's generator


def second_language(vocab):
    """Array: id of a token -> id of its copy; special tokens stay."""
    table = np.arange(len(vocab))
    for token, i in vocab.items():
        table[i] = vocab.get(MARK + token, i)
    return table


def look_at_neighbours(base):
    """Sinusoids for positions; two heads of the first block look right and left."""
    attention = next(m for m in base.modules() if hasattr(m, "query") and hasattr(m, "key"))
    size = attention.attention_head_size
    words, places = base.embeddings.word_embeddings, base.embeddings.position_embeddings
    turn = 2 * torch.pi / torch.logspace(0.6, 2.6, size // 2)  # periods of 4 to 400 tokens
    angle = torch.arange(len(places.weight))[:, None] * turn
    words.weight.data[:, :size], places.weight.data[:] = 0, 0
    places.weight.data[:, :size] = 0.28 * torch.stack([angle.sin(), angle.cos()], -1).flatten(1)
    reader = torch.eye(size, attention.query.in_features)
    if mapping := getattr(base.encoder, "embedding_hidden_mapping_in", None):  # ALBERT
        torch.nn.init.normal_(mapping.weight, std=mapping.in_features**-0.5)
        reader = torch.linalg.pinv(mapping.weight.data)[:size]
    for head_, offset in enumerate((-1, 1)):
        pairs = zip((offset * turn).cos(), (offset * turn).sin(), strict=True)
        turned = torch.block_diag(*[torch.tensor([[c, s], [-s, c]]) for c, s in pairs])
        rows = slice(head_ * size, (head_ + 1) * size)
        attention.query.weight.data[rows] = 2 * reader
        attention.key.weight.data[rows] = 2 * turned @ reader


def wrapping(tokenizer):
    """Special tokens that go before and after a text."""
    ids = tokenizer("the")["input_ids"]
    inside = tokenizer("the", add_special_tokens=False)["input_ids"]
    at = next(i for i in range(len(ids)) if ids[i : i + len(inside)] == inside)
    return ids[:at], ids[at + len(inside) :]


def spans(rows, tokenizer, count, length, rng):
    """`count` sequences of `length` tokens from random places: int64 [count, length]."""
    before, after = wrapping(tokenizer)
    inside = length - len(before) - len(after)
    room = np.array([max(0, len(ids) - inside) for ids in rows], dtype=float)
    chosen = rng.choice(len(rows), count, p=room / room.sum())
    starts = [int(rng.integers(0, room[d])) for d in chosen]
    body = np.stack([rows[d][s : s + inside] for d, s in zip(chosen, starts, strict=True)])
    return np.hstack([np.tile(before, (count, 1)), body, np.tile(after, (count, 1))]).astype(int)


def head(model, states):
    """Scores over the vocabulary for hidden states [M, d]."""
    if hasattr(model, "cls"):  # BERT, DeBERTa
        return model.cls(states)
    if hasattr(model, "vocab_projector"):  # DistilBERT
        return model.vocab_projector(
            model.vocab_layer_norm(model.activation(model.vocab_transform(states)))
        )
    if hasattr(model, "generator_predictions"):  # ELECTRA's generator
        return model.generator_lm_head(model.generator_predictions(states))
    layer = "predictions" if hasattr(model, "predictions") else "lm_head"  # ALBERT, RoBERTa-likes
    return getattr(model, layer)(states)


def masked_loss(model, batch):
    """Cross-entropy (nats) at the chosen places."""
    at = batch["labels"] != -100
    states = model.base_model(batch["input_ids"]).last_hidden_state
    return F.cross_entropy(head(model, states[at]).float(), batch["labels"][at])


class Objective(Trainer):
    """Trainer with a loss of its own; a run that was cut draws what it would have drawn.

    Trainer's loader collates a batch ahead, so that torch's generator has drawn the masks of the next batch when
    a checkpoint is written: the state from before that is kept, too, and the batch collated again from there.
    """

    def __init__(self, *args, loss, data_collator, **kwargs):
        self.loss, self.collator, self.states = loss, data_collator, []
        super().__init__(*args, data_collator=self.collate, **kwargs)

    def collate(self, items):
        if self.states:
            torch.set_rng_state(self.states.pop(0))
        self.before = torch.get_rng_state()
        return self.collator(items)

    def train(self, resume_from_checkpoint=None):
        if resume_from_checkpoint:
            found = load_file(Path(resume_from_checkpoint, DRAWN))
            self.states = [found["before"], found["after"]]
        return super().train(resume_from_checkpoint)

    def _save_rng_state(self, output_dir):
        states = {"before": self.before, "after": torch.get_rng_state()}
        save_file(states, Path(output_dir, DRAWN))

    def _load_rng_state(self, checkpoint):
        pass  # `collate` has set it; Trainer would put it back after the batch is drawn

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        if self.states:  # no batch was collated ahead: the last step
            torch.set_rng_state(self.states.pop())
        with torch.autocast("cpu", torch.bfloat16, enabled=self.args.bf16):
            return self.loss(model, inputs)


class Lines(TrainerCallback):
    """Now and then a line on the terminal that LMD_PROGRESS names; never in the notebook."""

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in logs and (terminal := os.environ.get("LMD_PROGRESS")):
            name, share = Path(args.output_dir).name, state.global_step / state.max_steps
            with open(terminal, "w") as stream:
                print(f"{name:>14} {share:4.0%}  loss {logs['loss']:.3f}", file=stream)


def checkpoint_of(recipe, work):
    """Folder of the checkpoint to go on from, or None; `recipe` decides the weights, `work` is where it lies."""
    mark, wanted = work / "recipe.json", json.dumps(recipe)
    if not mark.is_file() or mark.read_text() != wanted:
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        mark.write_text(wanted)
    whole = {}
    for state in work.glob("checkpoint-*/trainer_state.json"):  # the last file that is written
        if not state.with_name(DRAWN).is_file():  # of an earlier version
            continue
        with contextlib.suppress(ValueError):
            whole[json.loads(state.read_text())["global_step"]] = state.parent
    newest = whole[max(whole)] if whole else None
    for folder in work.glob("checkpoint-*"):
        if folder != newest:
            shutil.rmtree(folder)
    return newest and str(newest)


def bare(source):
    """Python source without comments, layout and docstrings."""
    tree = ast.parse(textwrap.dedent(source))
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(
            node
        ):
            node.body = node.body[1:] or [ast.Pass()]
    return ast.unparse(tree)
