"""What goes into a paper: LaTeX tables, captions, alternative text, a statement, one archive.

    python tools/publish.py tables RUN     # figures/RUN/tables/*.tex
    python tools/publish.py statement RUN  # build/RUN/REPRODUCIBILITY.md
    python tools/publish.py bundle RUN     # both, and build/RUN/lmd-RUN.zip

Equal results give equal bytes; the statement holds the times of the notebooks and the machine that
wrote it. Captions and alternative texts are those of figures/FIGURES.md.
"""

import hashlib
import json
import os
import platform
import re
import subprocess
import sys
import zipfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pandas as pd
from lock import to_the_end
from parameters import ROOT, all_declared, clean_name

import lmd_utils as lmd

LIST = ROOT / "figures" / "FIGURES.md"
MOST_ROWS = 60  # of a table of a further notebook that is printed whole
WIDEST = 130  # characters of its longest row: what a page holds in the smallest size
SMALL = "†"  # n < 3p
LATEX = {"²": r"\textsuperscript{2}", SMALL: r"\textsuperscript{\dag}", "–": "--", "−": "$-$"} | {
    "Δ": r"$\Delta$",
    "ρ": r"$\rho$",
    "α": r"$\alpha$",
    "≥": r"$\ge$",
    "≤": r"$\le$",
}


# --- figures -------------------------------------------------------------------------------------


def listed():
    """FIGURES.md as {name: {field: text}}; <T> in a name stands for three digits."""
    parts = re.split(r"^## `(.+)`$", LIST.read_text(encoding="utf-8"), flags=re.M)[1:]
    fields = (dict(re.findall(r"^- ([A-Z][a-z ]+): (.+)$", part, re.M)) for part in parts[1::2])
    return dict(zip(parts[::2], fields, strict=True))


def entry(stem, figures):
    """The fields of the figure `stem`, such as pairs_T016; {} for one that is not listed."""
    for name, fields in figures.items():
        if re.fullmatch(re.escape(name).replace("<T>", r"\d{3,}"), stem):
            return fields
    return {}


def drawn(run):
    """[(stem, fields of FIGURES.md)] of the figures that are there, in the order of the list."""
    figures = listed()
    order = list(figures)
    stems = sorted(p.stem for p in (ROOT / "figures" / run).glob("*.pdf"))
    found = [(stem, entry(stem, figures)) for stem in stems]
    return sorted(
        found, key=lambda f: (order.index(re.sub(r"_T\d+$", "_T<T>", f[0])) if f[1] else 999, f[0])
    )


def plain(text):
    """Markdown of a caption as plain text."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    return re.sub(r"[`*]", "", text)


def latex(text):
    """Plain text with LaTeX's special characters escaped."""
    for sign in "\\{}":
        text = text.replace(sign, {"\\": "\0"}.get(sign, "\\" + sign))
    text = re.sub(r"([&%$#_])", r"\\\1", text).replace("\0", r"\textbackslash{}")
    text = text.replace("~", r"\textasciitilde{}").replace("^", r"\textasciicircum{}")
    text = text.replace("<", r"\textless{}").replace(">", r"\textgreater{}")
    for sign, command in LATEX.items():
        text = text.replace(sign, command)
    return text


# --- tables --------------------------------------------------------------------------------------


def cells(table):
    """The table as text: three decimals, whole numbers with separators, – for what is not there."""
    forms = {"f": "{:.3f}", "i": "{:,}", "u": "{:,}"}  # by kind of column

    def column(values):
        form = forms.get(values.dtype.kind, "{}")
        return ["–" if pd.isna(v) else form.format(v) for v in values]

    return pd.DataFrame({c: column(table[c]) for c in table}, table.index, dtype=object)


def square(scores, names, T):
    """Test R² of each model (column) on each other (row) at one T, as text."""
    rows = scores[(scores["T"] == T) & scores["kind"].isin(["pair", "control"])]
    rows = rows[rows["basis"].isin(names)]
    test, train = (
        rows[rows["split"] == s].set_index(["basis", "target"]) for s in ("test", "train")
    )
    shown = test["r2"].map(lambda r2: "–" if pd.isna(r2) else f"{r2:.3f}")
    few = train["n"] < 3 * train["p"]
    shown += few.reindex(shown.index, fill_value=False).map({True: SMALL, False: ""})
    table = shown.unstack().reindex(index=names, columns=names).fillna("–")
    return table.rename_axis(index="basis \\ target", columns=None)


def on_all(scores, names, T):
    """R² of each model on all the others at one T: train, adjusted, validation, test; n and p."""
    rows = scores[(scores["T"] == T) & scores["kind"].isin(["group", "control"])]
    # of two models, all the others are one
    rows = rows[(rows["kind"] == "group") | ~rows["basis"].isin(names)]
    table = rows.pivot(index="target", columns="split", values="r2")
    train = rows[rows["split"] == "train"].set_index("target")
    table = table.assign(adjusted=train["r2_adjusted"])[["train", "adjusted", "validation", "test"]]
    shown = cells(table).assign(n=train["n"].map("{:,}".format), p=train["p"].map("{:,}".format))
    few = train.index[train["n"] < 3 * train["p"]]
    shown.loc[few, "test"] += SMALL
    return shown.reindex([name for name in names if name in shown.index]).rename_axis(columns=None)


def tables(run):
    """{name: (caption, table of text)} of data/results/<run>: all that fits on a page."""
    paths = {p.stem: p for p in sorted((ROOT / "data" / "results" / run).glob("*.csv"))}
    found = {name: lmd.read_results(run, name) for name in paths}
    if "scores" not in found or "models" not in found:
        raise ValueError(f"data/results/{run} has no scores.csv and models.csv: run make reproduce")
    scores, models = found.pop("scores"), found.pop("models")
    models = models[models["T"] == models["T"].max()]
    names = list(models.sort_values("role", ascending=False, kind="stable")["name"])
    made = {}
    if "corpus" in found:
        shown = found.pop("corpus").set_index("T")
        made["corpus"] = ("Documents and sequences of each length T, by split.", cells(shown))
    columns = [c for c in ("role", "after", "layer", "dim", "unknown_rate") if c in models]
    made["models"] = (
        "The models: what each stands for, its layer (−1: the last), its dimensions and the share of "
        "unknown tokens at the longest T.",
        cells(models.set_index("name")[columns].dropna(axis=1, how="all")),
    )
    for T in sorted(scores["T"].unique()):
        few = f" {SMALL}: fewer than three train rows a dimension."
        for stem, table, of in (
            ("pairs", square(scores, names, T), "each model (column) on each other one (row)"),
            ("groups", on_all(scores, names, T), "each model on all the others together"),
        ):
            what = "Test R²" if stem == "pairs" else "R²"
            mark = few if table.map(lambda v: SMALL in v).any(axis=None) else ""
            made[f"{stem}_T{T:03d}"] = (f"{what} of {of}, T = {T}.{mark}", table)
    if "agreement" in found:
        made["agreement"] = (
            "Spearman's rho of our test R² and the published ones, with its 95 % interval.",
            cells(found.pop("agreement").set_index("T")),
        )
    for name, table in found.items():  # of further notebooks
        shown = cells(table.set_index(table.columns[0]))
        wide = shown.reset_index().astype(str).map(len).sum(axis=1).max()
        if len(table) <= MOST_ROWS and table.shape[1] <= 12 and wide <= WIDEST:
            made[name] = (f"The table {name}.csv.", shown)
    return made


def write_tables(run):
    """Write figures/<run>/tables/*.tex, each a tabular, and all.tex, which shows them all."""
    folder, pages, found = ROOT / "figures" / run / "tables", [], tables(run)
    for name, (caption, table) in found.items():
        texts = table.reset_index()
        texts = texts.map(lambda v: latex(str(v))).set_axis(
            [latex(str(c)) for c in texts.columns], axis=1
        )
        numbers = table.map(lambda v: bool(re.match(r"[-−–]?[\d.,]*" + SMALL + "?$", v))).all()
        form = "l" + "".join("r" if right else "l" for right in numbers)
        text = texts.to_latex(index=False, escape=False, column_format=form)
        with lmd.atomic(folder / f"{name}.tex") as temporary:
            temporary.write_text(text, encoding="utf-8")
        size = r"\scriptsize" if table.shape[1] > 8 else r"\small"
        pages.append(
            f"\\begin{{table}}\n\\centering{size}\n\\caption{{{latex(caption)}}}\n"
            f"\\label{{tab:{name}}}\n\\input{{tables/{name}}}\n\\end{{table}}\n"
        )
    head = "% Needs \\usepackage{booktabs}. Tables of run " + run + ", by make figures.\n\n"
    for path in folder.glob("*.tex"):
        if path.stem not in {*found, "all"}:
            path.unlink()
    with lmd.atomic(folder / "all.tex") as temporary:
        temporary.write_text(head + "\n".join(pages), encoding="utf-8")


# --- the statement -------------------------------------------------------------------------------


def git(*arguments):
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else ""


def source_lines():
    """Which commit the code is of, and whether it was changed since."""
    commit = git("rev-parse", "HEAD")
    if not commit:
        return ["Code: not a git checkout."]
    code = ["lmd_utils.py", "notebooks", "tools", "Makefile", "requirements.txt", "data/zoo"]
    code.append("data/extras")
    changed = git("status", "--porcelain", "--", *code).splitlines()
    more = f", with {len(changed)} changed files of code, models or profiles" if changed else ""
    return [f"Code: commit `{commit}`{more}."]


def machine_lines():
    """The machine that wrote the statement; no name of a host, no path."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    can = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if can else os.cpu_count()
    try:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    except (ValueError, OSError, AttributeError):
        memory = float("nan")
    return [
        f"- processor: {names[0] if names else platform.processor() or platform.machine()}, "
        f"{cores} cores, {memory:.0f} GiB of memory",
        f"- system: {platform.system()} on {platform.machine()}, Python {platform.python_version()}",
    ]


def package_lines():
    """Version of each pinned package as it is installed; a difference from its pin is said."""
    lines = (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines()
    for line in sorted(line.split("#")[0].strip() for line in lines):
        name, _, pin = line.partition("==")
        if pin:
            try:
                found = version(name)
            except PackageNotFoundError:
                found = "not installed"
            told = "" if found.split("+")[0] == pin else f" (pinned: {pin})"
            yield f"- {name} {found}{told}"


def local(value):
    """A parameter's value without the folders of one machine, and the name of no other one."""
    if isinstance(value, list):
        return [local(v) for v in value]
    if isinstance(value, dict):
        return {k: local(v) for k, v in value.items()}
    if isinstance(value, str) and value.startswith("tcp://"):
        return "tcp"
    return Path(value).name if isinstance(value, str) and value.startswith(("/", "~")) else value


def executed(run):
    """{notebook: papermill's record} of the executed notebooks of a run, in the order of their start."""
    found = {}
    for path in (ROOT / "build" / run / "notebooks").glob("*.ipynb"):
        metadata = json.loads(path.read_text(encoding="utf-8"))["metadata"]
        found[path.stem] = metadata["papermill"] | {
            "python": metadata.get("language_info", {}).get("version", "")
        }
    return dict(sorted(found.items(), key=lambda item: (item[1]["start_time"], item[0])))


def markdown(table):
    """A table of text as Markdown, with its index."""
    table = table.reset_index()
    rows = [[str(c) for c in table.columns], ["---"] * table.shape[1], *table.to_numpy().tolist()]
    return "\n".join("| " + " | ".join(map(str, row)) + " |" for row in rows)


def records(run):
    """How the vectors were made: {field: values} over the records of a run's embeddings."""
    found = {}
    for path in sorted((ROOT / "build" / run / "embeddings").glob("T*/*.zarr/zarr.json")):
        record = json.loads(path.read_text(encoding="utf-8"))["attributes"].get("record", {})
        for key in ("device", "dtype", "pooling", "shard", "batches", "versions"):
            if key in record:
                found.setdefault(key, set()).add(json.dumps(record[key]))
    return found


def statement(run):
    """The reproducibility statement of a run, as Markdown."""
    notebooks = executed(run)
    if not notebooks:
        raise ValueError(f"build/{run}/notebooks is empty: run make reproduce first")
    of_the_run, parameters = all_declared()[0], {}
    for name, record in notebooks.items():
        parameters |= record["parameters"] if name in of_the_run else {}
    times = pd.DataFrame(
        [
            [name, r["start_time"][:19].replace("T", " "), f"{r['duration']:.0f}", r["python"]]
            for name, r in notebooks.items()
        ],
        columns=["notebook", "started (UTC)", "seconds", "Python"],
    ).set_index("notebook")
    models = lmd.read_results(run, "models")
    sequences = models.drop_duplicates("T").set_index("T")[["sequences_sha256"]]
    of = models.drop_duplicates("name").set_index("name")
    hashes = [c for c in ("model_sha256", "tokenizer_sha256") if c in of]
    of = of[["source"]].map(local).join(of[hashes].map(lambda h: str(h)[:16]))
    results = {p.name: p for p in sorted((ROOT / "data" / "results" / run).glob("*.csv"))}
    figures = sorted((ROOT / "figures" / run).glob("*.p[dn][fg]"))
    sums = [f"{p.name}\0{hashlib.sha256(p.read_bytes()).hexdigest()}" for p in figures]
    pages = [
        f"# Reproducibility of the run `{run}`",
        "Written by `make bundle` from the run's own records. The same command on the same code, "
        "inputs and packages gives the same tables; another processor may change digits after the "
        "third decimal.",
        "\n".join(source_lines()),
        "## Parameters",
        "\n".join(
            f"- {k}: `{json.dumps(local(v), ensure_ascii=False)}`"
            for k, v in sorted(parameters.items())
        ),
        "## Inputs",
        f"Corpus, SHA-256 of its documents: `{models['corpus_sha256'].iloc[0]}`. Sequences:",
        markdown(sequences),
        "Models, first 16 digits of the SHA-256 (whole in models.csv); the code that embeds: "
        f"`{models['code_sha256'].iloc[0][:16]}`:",
        markdown(of),
        "## Times",
        markdown(times),
        f"Sum of the notebooks' times: {sum(r['duration'] for r in notebooks.values()):.0f} seconds "
        "(some ran side by side; a vector that was there already was not made again).",
        "## How the vectors were made",
        "\n".join(f"- {k}: {', '.join(sorted(v))}" for k, v in sorted(records(run).items()))
        or "No record is there.",
        "## Machine",
        "On which this statement was written; the notebooks do not record theirs:",
        "\n".join(machine_lines()),
        "## Packages",
        "\n".join(package_lines()),
        "## Results",
        "\n".join(
            f"- {name}: SHA-256 `{hashlib.sha256(p.read_bytes()).hexdigest()}`"
            for name, p in results.items()
        ),
        f"{len(figures)} figure files; SHA-256 of their names and sums: "
        f"`{hashlib.sha256(chr(10).join(sums).encode()).hexdigest()}`.",
    ]
    return "\n\n".join(pages) + "\n"


def write_statement(run):
    with lmd.atomic(ROOT / "build" / run / "REPRODUCIBILITY.md") as temporary:
        temporary.write_text(statement(run), encoding="utf-8")


# --- the bundle ----------------------------------------------------------------------------------


def captions(run):
    """(captions and alternative texts as Markdown, figures as LaTeX) of the figures that are there."""
    pages = [f"# Figures of the run `{run}`: captions and alternative texts"]
    floats = ["% Needs \\usepackage{graphicx}; alt= needs a graphicx that knows the key.\n"]
    for stem, fields in drawn(run):
        if not fields:
            raise ValueError(f"figures/{run}/{stem}.pdf is not listed in figures/FIGURES.md")
        caption, alt = fields["Caption"], fields["Alternative text"]
        pages += [f"## {stem}.pdf", caption, f"*Alternative text:* {alt}"]
        floats.append(
            f"\\begin{{figure}}\n\\centering\n\\includegraphics[width=\\linewidth,"
            f"alt={{{latex(plain(alt))}}}]{{figures/{stem}.pdf}}\n"
            f"\\caption{{{latex(plain(caption))}}}\n\\label{{fig:{stem}}}\n\\end{{figure}}\n"
        )
    return "\n\n".join(pages) + "\n", "\n".join(floats)


def bundle(run):
    """Write build/<run>/lmd-<run>.zip: figures, tables, captions, results, statement."""
    write_tables(run)
    write_statement(run)
    markdown_text, latex_text = captions(run)
    figures, folder = ROOT / "figures" / run, f"lmd-{run}"
    files = {f"figures/{p.name}": p.read_bytes() for p in figures.glob("*.pdf")}
    files |= {f"tables/{p.name}": p.read_bytes() for p in (figures / "tables").glob("*.tex")}
    results = ROOT / "data" / "results" / run
    files |= {f"results/{p.name}": p.read_bytes() for p in results.glob("*.csv")}
    files |= {
        "captions.md": markdown_text.encode(),
        "figures.tex": latex_text.encode(),
        "REPRODUCIBILITY.md": (ROOT / "build" / run / "REPRODUCIBILITY.md").read_bytes(),
        "LICENSE-TEXT": (ROOT / "LICENSE-TEXT").read_bytes(),
        "CITATION.cff": (ROOT / "CITATION.cff").read_bytes(),
    }
    path = ROOT / "build" / run / f"{folder}.zip"
    with lmd.atomic(path) as temporary, zipfile.ZipFile(temporary, "w") as archive:
        for name, data in sorted(files.items()):
            about = zipfile.ZipInfo(f"{folder}/{name}", (1980, 1, 1, 0, 0, 0))
            about.external_attr = 0o644 << 16
            archive.writestr(about, data, zipfile.ZIP_DEFLATED, 9)
    return path


def main():
    made = {"tables": write_tables, "statement": write_statement, "bundle": bundle}
    if len(sys.argv) != 3 or sys.argv[1] not in made or clean_name(sys.argv[2]) != sys.argv[2]:
        sys.exit(f"usage: python tools/publish.py {'|'.join(made)} RUN")
    try:
        path = made[sys.argv[1]](sys.argv[2])
    except (ValueError, OSError) as error:
        sys.exit(f"publish: {error}")
    if path:
        print(f"{path.relative_to(ROOT)}: figures, tables, captions, results, statement")


if __name__ == "__main__":
    to_the_end(main, "publish")
