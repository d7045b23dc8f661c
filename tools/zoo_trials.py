"""How well zoos of other recipes rank the scores as the published table does.

    python tools/zoo_trials.py NAME=FOLDER ...   # course=data/zoo wide=build/zoo-custom/models

Each FOLDER holds the twelve models, as `make zoo` leaves them. They embed the sequences of the run
`course` (so that has to be there), are fitted to one another as in 03_decomposition, and Spearman's
rho with the published test R² is taken of all pairs, of the means by target (columns) and by basis
(rows), and of the groups. Writes data/results/zoo/trials.csv: NAMEs given are put in or replaced,
others stay. Some minutes a zoo; the folders are not checked against a list.
"""

import argparse
import json
import os
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pandas as pd
import torch
from lock import to_the_end
from parameters import ROOT, zoo_models

import lmd_utils as lmd

LENGTHS = (16, 128)
TABLE = ROOT / "data" / "results" / "zoo" / "trials.csv"


def published(T: int, after: dict) -> tuple[pd.DataFrame, pd.Series]:
    """Published test R² at T under our names: pairs (basis on rows), and groups."""
    table = pd.read_csv(ROOT / "data" / "published" / "zhang2022_r2.csv")
    table = table[(table["T"] == T) & (table["split"] == "test")]
    names = {theirs: ours for ours, theirs in after.items()}
    table = table.assign(basis=table["basis"].map(names), target=table["target"].map(names))
    pairs = table[table["kind"] == "pair"].pivot(index="basis", columns="target", values="r2")
    return pairs, table[table["kind"] == "group"].set_index("target")["r2"]


def rhos(pairs: pd.DataFrame, groups: pd.Series, theirs: tuple) -> dict[str, float]:
    """Spearman's rho of our test R² with theirs; squares have NaN on their diagonal."""
    square, of_groups = theirs
    square, of_groups = square.loc[pairs.index, pairs.columns], of_groups[groups.index]
    return {
        "pairs": pairs.stack().corr(square.stack(), method="spearman"),
        "targets": pairs.mean().corr(square.mean(), method="spearman"),
        "bases": pairs.mean(axis=1).corr(square.mean(axis=1), method="spearman"),
        "groups": groups.corr(of_groups, method="spearman"),
    }


def scores(folder: Path, names: list[str], T: int) -> tuple[pd.DataFrame, pd.Series]:
    """Test R² of all pairs and groups of the models in a folder, on the sequences of `course`."""
    frame, _ = lmd.load_sequences(lmd.sequences_path("course", T))
    texts = frame["text"].tolist()
    # loading changes settings of the process, and is no work for several threads
    networks = [(lmd.load_model(folder / k), lmd.load_tokenizer(folder / k)) for k in names]

    def vectors(network):
        model, tokenizer = network
        options = {"max_length": None, "batch_size": 128, "progress": False}
        return lmd.embed(texts, model, tokenizer=tokenizer, **options)

    one_core_each = {"initializer": torch.set_num_threads, "initargs": (1,)}
    with ThreadPoolExecutor(os.cpu_count() or 1, **one_core_each) as pool:
        arrays = dict(zip(names, pool.map(vectors, networks), strict=True))
    train, test = (
        lmd.Moments.from_arrays({k: a[(frame["split"] == s).to_numpy()] for k, a in arrays.items()})
        for s in ("train", "test")
    )
    return lmd.pair_scores(train, test), lmd.group_scores(train, test)


def rows(zoo: str, folder: Path, after: dict) -> list[dict]:
    """Rows of the table: what the zoo was trained with, as bert's record says, and its rhos."""
    record = json.loads((folder / "bert" / "record.json").read_text(encoding="utf-8"))
    recipe = record["recipe"]
    of = {"zoo": zoo, "hidden_size": recipe["hidden_size"], "bert_steps": recipe["steps"]}
    of |= {"learning_rate": recipe["learning_rate"]}
    of |= {"documents": len(recipe["train_documents"]), "bert_loss": record["held_out"]["loss"]}
    return [
        of | {"T": T, "scores": kind, "rho": rho}
        for T in LENGTHS
        for kind, rho in rhos(*scores(folder, list(after), T), published(T, after)).items()
    ]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("zoos", nargs="+", metavar="NAME=FOLDER")
    given = parser.parse_args().zoos
    if wrong := [words for words in given if not re.fullmatch("[^=]+=[^=]+", words)]:
        parser.error(f"{wrong[0]!r} is no NAME=FOLDER")
    zoos = dict(words.split("=") for words in given)
    after = {name: theirs for name, theirs in zoo_models().items() if theirs}
    for folder in map(Path, zoos.values()):
        if missing := [name for name in after if not (folder / name / "record.json").is_file()]:
            sys.exit(f"zoo_trials: {folder} has no trained {', '.join(missing)}: see `make zoo`")
    tables = {}
    if TABLE.is_file():
        tables = dict(list(pd.read_csv(TABLE).groupby("zoo", sort=False)))
    for zoo, folder in zoos.items():  # each is written when it is done, in the place that it had
        tables[zoo] = pd.DataFrame(rows(zoo, Path(folder), after))
        print(zoo, tables[zoo].pivot(index="T", columns="scores", values="rho").round(3), sep="\n")
        lmd.write_results("zoo", "trials", pd.concat(tables.values(), ignore_index=True))


if __name__ == "__main__":
    to_the_end(main, "zoo_trials")
