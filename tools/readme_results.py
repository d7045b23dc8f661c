"""Write the result tables of README.md, and what it says of speed, from data/results, between marks.

    python tools/readme_results.py        # rewrites the block
    python tools/readme_results.py check  # exits 1 when the block is not what the tables say

The rest of the page is left as it is.
"""

import re
import sys
from pathlib import Path

import pandas as pd

ROOT = Path(__file__).resolve().parent.parent
START, END = "<!-- results: from data/results -->", "<!-- end of results -->"
BENCH_START, BENCH_END = "<!-- bench: from data/results/bench -->", "<!-- end of bench -->"
SCALE_START, SCALE_END = "<!-- scale: from data/results/bench -->", "<!-- end of scale -->"
BFLOAT16 = "lmd.embed, bfloat16"  # as tools/bench.py calls it
T = 128  # of the tables by model
YARDSTICKS = {
    ("bert-seed", "bert"): "another seed",
    ("bert-random", "bert"): "untrained",
    ("roberta-random", "roberta"): "untrained",
}


def markdown(table: pd.DataFrame, corner: str) -> str:
    """A DataFrame as a Markdown table; numbers with a fraction have three decimals."""
    text = [pd.api.types.is_string_dtype(kind) for kind in table.dtypes]
    rows = [[corner, *map(str, table.columns)], ["---"] + ["---" if t else "--:" for t in text]]
    for label, values in table.astype(object).iterrows():
        cells = (
            "" if pd.isna(v) else f"{v:.3f}" if isinstance(v, float) else str(v) for v in values
        )
        rows.append([str(label), *cells])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def read(profile: str, name: str) -> pd.DataFrame:
    return pd.read_csv(ROOT / "data" / "results" / profile / f"{name}.csv")


def by_length(scores: pd.DataFrame) -> pd.DataFrame:
    """Per T, means over the models: pairs on test, groups on train, adjusted, validation and test."""
    test = scores[(scores["kind"] == "pair") & (scores["split"] == "test")]
    table = test.groupby("T")["r2"].mean().to_frame("pairs, test")
    group = scores[scores["kind"] == "group"]
    train = group[group["split"] == "train"].groupby("T")
    means = group.pivot_table(index="T", columns="split", values="r2", aggfunc="mean")
    table["groups, train"], table["adjusted"] = means["train"], train["r2_adjusted"].mean()
    table["validation"], table["test"] = means["validation"], means["test"]
    return table


def by_target(scores: pd.DataFrame, names: list[str]) -> pd.DataFrame:
    """Per target, on test at T: the best single basis, its R², and the R² of all others together."""
    test = scores[(scores["split"] == "test") & (scores["T"] == T)]
    pairs = test[test["kind"] == "pair"].reset_index(drop=True)
    best = pairs.loc[pairs.groupby("target")["r2"].idxmax()].set_index("target")
    table = best[["basis", "r2"]].set_axis(["best basis", "its R²"], axis=1)
    table["all eleven others"] = test[test["kind"] == "group"].set_index("target")["r2"]
    return table.loc[names]


def yardsticks(scores: pd.DataFrame) -> pd.DataFrame:
    """Test R² at T of the twins on the models that they are twins of."""
    test = scores[(scores["split"] == "test") & (scores["T"] == T)].set_index(["basis", "target"])
    rows = {
        f"{b} explains {t}": (what, test.loc[(b, t), "r2"]) for (b, t), what in YARDSTICKS.items()
    }
    return pd.DataFrame.from_dict(rows, orient="index", columns=["twin", "R²"])


def agreement(table: pd.DataFrame) -> pd.DataFrame:
    """Per kind and T: Spearman's rho of our test scores and the published ones, with its interval."""
    table = table.sort_values(["kind", "T"], ascending=[False, True])
    shown = ["T", "n", "rho", "ci_low", "ci_high"]
    table = table.set_index(table["kind"].map("{}s".format))[shown]
    return table.rename(columns={"rho": "Spearman's rho", "ci_low": "from", "ci_high": "to"})


def layers(scores: pd.DataFrame, names: list[str]) -> pd.DataFrame:
    """Of profile checkpoints: test R² of each target (column) on each basis (row), and on all trained ones."""
    test = scores[(scores["split"] == "test") & (scores["T"] == T)]
    joint = test["basis"].str.contains("+", regex=False)
    table = test[~joint].pivot(index="basis", columns="target", values="r2")
    table = table.reindex(index=names, columns=names)
    table.loc["*all other trained layers*"] = test[joint].set_index("target")["r2"]
    return table


def block() -> str:
    scores, models = read("course", "scores"), read("course", "models")
    names = list(models.loc[models["role"] == "model", "name"].unique())
    test = read("course", "corpus").set_index(["T", "split"]).loc[(T, "test")]
    fit = scores[(scores["kind"] == "group") & (scores["split"] == "train")].iloc[0]
    real = read("checkpoints", "scores"), list(read("checkpoints", "models")["name"].unique())
    on = f"{test['sequences']} test sequences of T = {T} tokens from {test['documents']} articles"
    return "\n\n".join(
        [
            START,
            f"Means over the {len(names)} models, each explained by one other (pairs) and by all others "
            f"(groups), from n = {fit['n']:,} train sequences and, in a group, p = {fit['p']} dimensions:",
            markdown(by_length(scores), "T"),
            f"R² on {on} that neither a fit nor the training of the models has seen:",
            markdown(by_target(scores, names), "target"),
            "The yardsticks, on the same sequences:",
            markdown(yardsticks(scores), "twin and model"),
            "Rank agreement of our test R² with the published ones:",
            markdown(agreement(read("course", "agreement")), "scores"),
            "The same for zoos of other recipes, in one column for each kind of score (*targets* and *bases*: "
            "means over the columns and rows of the pairs; losses in nats, on held-out text):",
            markdown(trials(read("zoo", "trials")), "zoo"),
            f"A real pre-trained model (profile `checkpoints`): test R² at T = {T} of layers of "
            "all-MiniLM-L6-v2, rows (basis) explain columns (target); `minilm-random` has random weights.",
            markdown(layers(*real), "basis \\ target"),
            END,
        ]
    )


def trials(table: pd.DataFrame) -> pd.DataFrame:
    """Per zoo and T, what it was trained with and its rhos with the published scores."""
    recipe = ["zoo", "hidden_size", "learning_rate", "documents", "bert_steps", "bert_loss", "T"]
    wide = table.pivot(index=recipe, columns="scores", values="rho").reset_index()
    wide = wide[[*recipe, "pairs", "targets", "bases", "groups"]].set_index("zoo")
    wide = wide.loc[table["zoo"].unique()]
    wide["learning_rate"] = wide["learning_rate"].astype(str)
    return wide.rename(columns=lambda name: name.replace("_", " "))


def seconds(value: float) -> str:
    return f"{value:.3g} s" if value < 1000 else f"{value:,.0f} s"


def solver_text(solver: pd.DataFrame) -> str:
    """What the runs at the paper's size say: medians of seconds, and of ratios within a run."""
    whole = solver[solver["sweep"] == "size"]
    at, taken = whole.iloc[0], whole.pivot(index="run", columns="method", values="seconds")
    ratio, middle = taken.div(taken["ours"], axis=0).median(), taken.median()
    timed = whole[whole["run"] == 0].set_index("method")["timed"]
    apart = whole.groupby("method")["r2_difference"].max()
    return (
        f"All {at['K']} group and {at['fits'] - at['K']} pair fits of {at['K']} models x {at['d']} dimensions "
        f"on n = {at['n']:,} rows, scored on {at['held_out']:,} others, in float64: {seconds(middle['ours'])}. "
        f"The authors' algorithm (float32, a covariance and a solution for each fit) takes "
        f"{seconds(middle['authors'])}, {ratio['authors']:.1f} times as long, and scikit-learn's `Ridge` "
        f"(float64) {seconds(middle['ridge'])}, {ratio['ridge']:.1f} times; of these two, {timed['authors']} and "
        f"{timed['ridge']} fits were timed and counted for all {at['fits']}. "
        f"We take {1 / ratio['floor']:.2f} times the floor, which is ND² + D³ operations at the highest rate of float64 "
        f"products in the same run ({at['gflops_float64']:.0f} GFLOP/s). R² differs from `Ridge`'s by at most "
        f"{max(apart['ours'], 1e-9):.0e}, that of the authors' algorithm by {apart['authors']:.0e}."
    )


def embedding_text(embedding: pd.DataFrame) -> str:
    """Texts a second, per model; ratios are medians of those within a run."""
    said = []
    for model, runs in embedding.groupby("model", sort=False):
        speed = runs.pivot(index="run", columns="method", values="texts_per_second")
        rate = {method: f"{value:.0f}" for method, value in speed.median().items()}
        said.append(
            f"Embedding with {model}, same texts and batch size: {rate['lmd.embed']} texts a second, "
            f"sentence-transformers' `encode` {rate['sentence-transformers']}"
        )
        if BFLOAT16 in speed:
            ratio = (speed[BFLOAT16] / speed["lmd.embed"]).median()
            units = "has" if runs["bfloat16_units"].iloc[0] else "does not have"
            said[-1] += (
                f'; with `dtype="bfloat16"`, {ratio:.2f} times the float32 rate, on a processor that {units} '
                "instructions for it"
            )
    return ". ".join(said) + "."


def bfloat16_text() -> str:
    """How far R² is from that of float32 vectors, where it was measured."""
    try:
        change = read("bench", "bfloat16")
    except FileNotFoundError:
        return ""
    change = change.assign(difference=change["difference"].abs())
    said = [
        f"{len(rows)} {kind} fits of {models} {rows['difference'].max():.1e} at most and "
        f"{rows['difference'].mean():.1e} on average"
        for (models, kind), rows in change.groupby(["models", "kind"])
    ]
    return f" Test R² on vectors made in bfloat16 differs: {'; '.join(said)} (T = {change['T'].iloc[0]})."


def scale_block() -> str:
    """What the paper's run and a hundred models take, as tools/bench.py works it out."""
    try:
        table = read("bench", "scale")
    except FileNotFoundError:
        return "\n\n".join([SCALE_START, "Not measured on this tree yet.", SCALE_END])
    first, columns = table.iloc[0], table.set_index("run")
    shown = pd.DataFrame(
        {
            "models": columns["models"].map("{:,}".format),
            "D": columns["D"].map("{:,}".format),
            "embedding": columns["embed_pflop"].map("{:,.0f} PFLOP".format),
            "hours": columns["embed_hours"].map("{:,.0f}".format),
            "disk": columns["disk_gb"].map("{:,.0f} GB".format),
            "fits": columns["fit_pflop"].map("{:,.1f} PFLOP".format),
            "hours of fits": columns["fit_hours"].map("{:,.1f}".format),
            "a D x D matrix": columns["square_gib"].map("{:,.1f} GiB".format),
            "memory": columns["memory_gib"].map("{:,.0f} GiB".format),
        }
    )
    return "\n\n".join(
        [
            SCALE_START,
            f"Of {first['sequences']:,} sequences, each at {first['lengths']} lengths up to T = 512, on one machine like the "
            f"one that was measured ({first['cores']} cores of {first['processor']}, {first['date']}):",
            markdown(shown, "run"),
            f"Estimated so: a text of t tokens costs a block of d dimensions 24 d² t + 4 d t² operations, two for each of "
            f"its 12 d² weights and token, and attention; t is T + 2, at most 512, and 512 for Longformer, which fills its "
            f"window; what DeBERTa and XLNet add for positions is left out, and a hundred models are BERT's size. They run "
            f"at {first['gflops_float32']:.0f} GFLOP/s, which is what `lmd.embed` reached with {first['rate_of']} in "
            f"`make bench`. A length's fits are ND² + D³ operations, taken {first['over_floor']:.2f} times at "
            f"{first['gflops_float64']:.0f} GFLOP/s, as measured for twelve models; their memory is {first['squares']:.1f} "
            f"matrices of D x D, the measured peak and one more for the third split. Hours fall with the number of such "
            f"machines that compute, memory of the fits does not.",
            SCALE_END,
        ]
    )


def bench_block() -> str:
    try:
        solver, memory, embedding = (read("bench", k) for k in ("solver", "memory", "embedding"))
    except FileNotFoundError:
        return "\n\n".join([BENCH_START, "Not measured on this tree yet.", BENCH_END])
    peaks = " and ".join(f"{m.peak_gib:.1f} GiB at n = {m.n:,}" for m in memory.itertuples())
    where = solver.iloc[0]
    return "\n\n".join(
        [
            BENCH_START,
            solver_text(solver),
            f"Peak memory of the same, embeddings streaming from disk: {peaks}; one D x D matrix has "
            f"{memory['square_gib'].iloc[0]:.2f} GiB.",
            embedding_text(embedding) + bfloat16_text(),
            f"Medians of {solver['run'].max() + 1} runs, ratios within a run, on {where['cores']} cores of "
            f"{where['processor']}, {where['date']}, clock: {where['clock']}, load {solver['load'].min():.1f} to "
            f"{solver['load'].max():.1f}; torch {where['torch']}, numpy {where['numpy']}, "
            f"scikit-learn {where['scikit_learn']}.",
            BENCH_END,
        ]
    )


def main():
    readme = ROOT / "README.md"
    text = readme.read_text(encoding="utf-8")
    new = text
    blocks = ((START, END, block), (BENCH_START, BENCH_END, bench_block))
    for start, end, write in (*blocks, (SCALE_START, SCALE_END, scale_block)):
        between = re.compile(f"{start.split(' from ')[0]} from [^>]*-->.*?{end}", re.DOTALL)
        if len(between.findall(text)) != 1:
            sys.exit(f"README.md must hold the marks {start} and {end} once each")
        try:
            new = between.sub(lambda _, write=write: write(), new)
        except FileNotFoundError as error:
            sys.exit(f"readme_results: {error.filename} is not there; run make reproduce first")
    if sys.argv[1:] == ["check"]:
        sys.exit(
            0
            if new == text
            else "README.md: its tables differ from data/results; run python tools/readme_results.py"
        )
    readme.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    main()
