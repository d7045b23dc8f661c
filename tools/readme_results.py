"""Write the result tables of README.md from data/results/checkpoints, between its two marks.

    python tools/readme_results.py        # rewrites the block
    python tools/readme_results.py check  # exits 1 when the block is not what the tables say

The rest of the page is left as it is.
"""

import sys
from pathlib import Path

import pandas as pd

ROOT = Path(__file__).resolve().parent.parent
START, END = "<!-- results: from data/results/checkpoints -->", "<!-- end of results -->"


def markdown(table: pd.DataFrame, corner: str) -> str:
    """A DataFrame of numbers as a Markdown table, three decimals."""
    rows = [[corner, *map(str, table.columns)], ["---"] + ["--:"] * table.shape[1]]
    for label, values in table.iterrows():
        rows.append([str(label), *("" if pd.isna(v) else f"{v:.3f}" for v in values)])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def pair_table(scores: pd.DataFrame, names: list[str], T: int) -> pd.DataFrame:
    """Test R² of each target (column) on each basis (row), and on all other models together."""
    test = scores[(scores["split"] == "test") & (scores["T"] == T)]
    joint = test["basis"].str.contains("+", regex=False)
    order = [name for name in names if name in set(test["target"])]
    table = test[~joint].pivot(index="basis", columns="target", values="r2")
    table = table.reindex(index=order, columns=order)
    table.loc["*all other trained layers*"] = test[joint].set_index("target")["r2"]
    return table


def group_table(scores: pd.DataFrame) -> pd.DataFrame:
    """Group correlation (mean over targets) per T: train, adjusted, validation, test."""
    group = scores[scores["kind"] == "group"]
    table = group.pivot_table(index="T", columns="split", values="r2", aggfunc="mean")
    train = group[group["split"] == "train"]
    table["adjusted"] = train.groupby("T")["r2_adjusted"].mean()
    return table[["train", "adjusted", "validation", "test"]]


def block() -> str:
    results = ROOT / "data" / "results" / "checkpoints"
    scores = pd.read_csv(results / "scores.csv")
    names = list(pd.read_csv(results / "models.csv")["name"].unique())
    longest = scores["T"].max()
    corpus = pd.read_csv(results / "corpus.csv").set_index(["T", "split"])
    test = corpus.loc[(longest, "test")]
    fit = scores[(scores["kind"] == "group") & (scores["split"] == "train")].iloc[0]
    return "\n\n".join(
        [
            START,
            f"R² on {test['sequences']} test sequences of T = {longest} tokens from {test['documents']} "
            "articles that no fit has seen. Rows (basis) explain columns (target); `minilm-random` has "
            "random weights.",
            markdown(pair_table(scores, names, longest), "basis \\ target"),
            "Mean over the three trained layers, each explained by the other two, from "
            f"n = {fit['n']:,} train sequences and p = {fit['p']} dimensions of the two:",
            markdown(group_table(scores), "T"),
            END,
        ]
    )


def main():
    readme = ROOT / "README.md"
    text = readme.read_text(encoding="utf-8")
    if text.count(START) != 1 or text.count(END) != 1:
        sys.exit(f"README.md must hold the marks {START} and {END} once each")
    new = text[: text.index(START)] + block() + text[text.index(END) + len(END) :]
    if sys.argv[1:] == ["check"]:
        sys.exit(
            0
            if new == text
            else "README.md: its tables differ from data/results/checkpoints; run python tools/readme_results.py"
        )
    readme.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    main()
