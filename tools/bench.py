"""Time and memory of the decomposition and of embedding, beside other ways to the same numbers.

    python tools/bench.py full|small [folder with sentence-transformers [part ...]]   # make bench

Parts are solver, memory, embedding, bfloat16 and scale, each a table of data/results/bench; all of
them when none is named.  The first also draws figures/bench/bench.{pdf,png}, the last measures
nothing: it works out the paper's run from the tables of the others.  With `small`, which is for
trying the script, the folders are named bench-small.  What measures runs in a process of its own.  Seconds are those of the clock, or with OMP_NUM_THREADS=1 those of the
processor, which other work on the machine moves less; the tables say which.  Compared are:

ours       Moments of all models, pair_scores and group_scores on held-out rows
authors    the algorithm of the paper's code, from its description: for each fit, the float32
           covariance of the stacked arrays (torch.cov), torch.linalg.solve, prediction, score
ridge      scikit-learn's Ridge, float64, solver "cholesky", a fit each, score
floor      N D² + D³ operations, the symmetric update and one inverse, at the highest rate of
           float64 matrix products (torch or numpy) measured in the same run

All fits of a kind cost the same with the last two, so that at larger sizes some are timed and
counted for all: the column `timed` says how many of `fits`.
"""

import datetime
import gc
import json
import os
import platform
import resource
import shutil
import subprocess
import sys
import time
from importlib.metadata import version
from itertools import permutations
from pathlib import Path
from statistics import median

import numpy as np
import pandas as pd

import lmd_utils as lmd

ALPHA = 1.0e-6
RUNS = 3
BFLOAT16 = "lmd.embed, bfloat16"
SIZES = {
    # (sweep, models, dimensions of each, train rows); a tenth as many rows are held out
    "full": [("size", 12, 768, 20_000)]
    + [("N", 12, 192, n) for n in (2_500, 5_000, 10_000, 20_000)]
    + [("D", 12, d, 5_000) for d in (48, 96, 192, 384)]
    + [("K", k, 192, 5_000) for k in (3, 6, 12, 24)],
    "small": [("size", 3, 32, 600), ("N", 3, 16, 200), ("N", 3, 16, 400), ("D", 3, 8, 300)]
    + [("D", 3, 16, 300), ("K", 2, 16, 300), ("K", 4, 16, 300)],
}
STREAMS = {"full": (12, 768, (20_000, 128_000)), "small": (3, 32, (500, 2_000))}
TEXTS = {"full": 512, "small": 16}
LENGTHS = (16, 32, 64, 128)  # T of the texts, as many of each
# folder under build/models: texts of it for each of a smaller one, blocks, dimensions
EMBEDDERS = {"all-MiniLM-L6-v2": (1, 6, 384), "all-mpnet-base-v2": (4, 12, 768)}
# for bfloat16: T, the first models of data/zoo, most train and test rows
HALVES = {"full": (32, 12, 3_000, 400), "small": (16, 2, 150, 50)}
PAPER_LENGTHS, PAPER_ROWS = (16, 32, 64, 128, 256, 512), 128_000 + 2 * 12_800
# blocks of the paper's twelve models, 768 dimensions each (ALBERT computes its one block twelve times)
PAPER_BLOCKS = (
    {"longformer": 12} | {f"base-{i}": 12 for i in range(8)} | {f"distil-{i}": 6 for i in range(3)}
)
ONE = os.environ.get("OMP_NUM_THREADS") == "1"
clock = time.process_time if ONE else time.perf_counter


def rows(models, dim, count, block=4096):
    """Blocks {name: float32 [<=block, dim]} of correlated models whose variances span 1e6 (made up)."""
    fixed, rng = np.random.default_rng(7), np.random.default_rng(count)
    decay, maps = np.geomspace(1, 1e-3, dim).astype(np.float32), []
    for _ in range(models):
        turn = np.linalg.qr(fixed.normal(size=(dim, dim)))[0].astype(np.float32)
        mixing = fixed.normal(size=(dim, dim)).astype(np.float32) / np.float32(np.sqrt(dim))
        mean = fixed.normal(size=dim).astype(np.float32)
        maps.append(((mixing * decay) @ turn, 0.5 * decay[:, None] * turn, mean))
    for start in range(0, count, block):
        shape = (min(block, count - start), dim)
        shared = rng.standard_normal(shape, np.float32)
        yield {
            f"m{k:02d}": shared @ signal + rng.standard_normal(shape, np.float32) @ own + mean
            for k, (signal, own, mean) in enumerate(maps)
        }


def arrays(models, dim, count):
    whole = {f"m{k:02d}": np.empty((count, dim), np.float32) for k in range(models)}
    at = 0
    for block in rows(models, dim, count):
        for name, part in block.items():
            whole[name][at : at + len(part)] = part
        at += len(part)
    return whole


def rate(size):
    """Float64 operations a second of the faster library, best of three products of each."""
    import torch

    a = np.random.default_rng(0).normal(size=(size, size))
    b, best = torch.from_numpy(a), np.inf
    for product in (lambda: a @ a, lambda: b @ b) * 3:
        start = clock()
        product()
        best = min(best, clock() - start)
    return 2 * size**3 / best


def ours(train, test):
    fitted, scored = lmd.Moments.from_arrays(train), lmd.Moments.from_arrays(test)
    groups, pairs = (s(fitted, scored, ALPHA) for s in (lmd.group_scores, lmd.pair_scores))
    return {(None, t): groups[t] for t in groups.index} | pairs.stack().dropna().to_dict()


def authors(train, test, basis, target):
    """One fit as the description of the paper's code has it, all in float32."""
    import torch

    x, held = (torch.cat([torch.from_numpy(a[k]) for k in basis], 1) for a in (train, test))
    y, p = torch.from_numpy(train[target]), x.shape[1]
    c = torch.cov(torch.cat([x, y], 1).T)
    weights = torch.linalg.solve(c[:p, :p] + ALPHA * torch.eye(p), c[:p, p:])
    bias = y.mean(0) - x.mean(0) @ weights
    truth = torch.from_numpy(test[target])
    ssr = (truth - held @ weights - bias).square().sum()
    return 1 - float(ssr / (truth - truth.mean(0)).square().sum())


def ridge(train, test, basis, target):
    from sklearn.linear_model import Ridge
    from sklearn.metrics import r2_score

    x, held = (np.concatenate([a[k] for k in basis], 1, dtype=np.float64) for a in (train, test))
    model = Ridge(alpha=ALPHA * (len(x) - 1), solver="cholesky", copy_X=False)
    found = model.fit(x, train[target].astype(np.float64)).predict(held)
    return r2_score(test[target], found, multioutput="variance_weighted")


def sampled(fit, train, test, most):
    """Seconds of all fits and {fit: R²}, from `most` of each kind; and how many fits were timed."""
    names, seconds, found = list(train), 0.0, {}
    groups = [(tuple(k for k in names if k != t), t) for t in names]
    pairs = [((b,), t) for b, t in permutations(names, 2)]
    for kind, few in ((groups, max(1, most // 4)), (pairs, most)):
        chosen = kind[:: max(1, len(kind) // few)][:few]
        start = clock()
        for basis, target in chosen:
            key = (basis[0] if kind is pairs else None, target)
            found[key] = fit(train, test, basis, target)
        seconds += (clock() - start) * len(kind) / len(chosen)
    return seconds, found


def solver(size):
    """Every method at every size of `SIZES`, in turn, RUNS times over."""
    table, warm = [], arrays(2, 4, 20)
    for method in (authors, ridge):  # what the first call loads is not timed
        sampled(method, warm, warm, 1)
    ours(warm, warm)
    for sweep, models, dim, n in SIZES[size]:
        whole = arrays(models, dim, n + n // 10)
        train, test = ({k: a[s] for k, a in whole.items()} for s in (slice(n), slice(n, None)))
        D, most = models * dim, 4 if models * dim > 2000 else 12
        for run in range(RUNS):
            best = rate(min(4096, max(D, 256)))
            start = clock()
            scores = ours(train, test)
            seconds = {"ours": (clock() - start, scores)}
            seconds |= {f.__name__: sampled(f, train, test, most) for f in (authors, ridge)}
            best = max(best, rate(min(4096, max(D, 256))))
            seconds["floor"] = ((n * D**2 + D**3) / best, {})
            exact = seconds["ridge"][1]
            for method, (taken, found) in seconds.items():
                both = [abs(found[key] - exact[key]) for key in found if key in exact]
                table.append(
                    {"sweep": sweep, "run": run, "K": models, "d": dim, "D": D, "n": n}
                    | {"held_out": n // 10, "method": method, "fits": models * models}
                    | {"timed": len(found), "seconds": taken, "gflops_float64": best / 1e9}
                    | {"r2_difference": max(both, default=np.nan), "load": os.getloadavg()[0]}
                )
            say = ", ".join(f"{m} {s:.3g} s" for m, (s, _) in seconds.items())
            print(f"{sweep}: {models} x {dim}, N = {n}: {say}", file=sys.stderr, flush=True)
        del whole, train, test
        gc.collect()
    return table


def memory(size, n):
    """Peak memory of all fits, the embeddings of n texts and a tenth held out streaming from zarr."""
    import zarr

    models, dim, _ = STREAMS[size]
    folder = lmd.ROOT / "build" / "bench" / f"stream-{os.getpid()}"
    try:
        stored = []
        for part, count in (("train", n), ("test", n // 10)):
            options = {"shape": (count, dim), "chunks": (4096, dim), "dtype": "float32"}
            names = [f"m{k:02d}" for k in range(models)]
            stored.append({k: zarr.create_array(folder / part / k, **options) for k in names})
            at = 0
            for block in rows(models, dim, count):
                for name, values in block.items():
                    stored[-1][name][at : at + len(values)] = values
                at += len(values)
        del block, values
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        start = clock()
        ours(*stored)
        taken = clock() - start
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # KiB on Linux, bytes on macOS
    unit = 2**30 if sys.platform == "darwin" else 2**20
    row = {"K": models, "d": dim, "n": n, "held_out": n // 10, "seconds": taken}
    row |= {
        "disk_gib": 1.1 * n * models * dim * 4 / 2**30,
        "square_gib": (models * dim) ** 2 / 2**27,
    }
    return [row | {"peak_gib": peak / unit, "before_gib": before / unit}]


def embedding(size):
    """Every embedder that is there: MiniLM, and MPNet where set-up has fetched it."""
    return [
        row
        for name, (share, *_) in EMBEDDERS.items()
        if (lmd.ROOT / "build" / "models" / name / ".complete").exists()
        for row in embedder(lmd.ROOT / "build" / "models" / name, TEXTS[size] // share)
    ]


def embedder(folder, count):
    """lmd.embed, in float32 and bfloat16, and sentence-transformers' encode: same texts and batch size, in turn."""
    from sentence_transformers import SentenceTransformer

    texts = [t for T in LENGTHS for t in texts_of(T)[: count // len(LENGTHS)]]
    texts = [texts[i] for i in np.random.default_rng(0).permutation(len(texts))]
    model, tokenizer = lmd.load_model(folder), lmd.load_tokenizer(folder)
    theirs = SentenceTransformer(str(folder), device="cpu")
    options = {"tokenizer": tokenizer, "max_length": 512, "batch_size": 32, "progress": False}
    ways = {
        "lmd.embed": lambda: lmd.embed(texts, model, **options),
        "sentence-transformers": lambda: theirs.encode(
            texts, batch_size=32, show_progress_bar=False
        ),
        BFLOAT16: lambda: lmd.embed(texts, model, dtype="bfloat16", **options),
    }
    first = [way() for way in ways.values()]
    difference, table = float(np.abs(first[0] - first[1]).max()), []
    if difference > 1e-3:
        sys.exit(f"bench: the two embeddings differ by {difference}: not the same computation")
    for run in range(RUNS):
        for method, way in ways.items():
            start = clock()
            way()
            taken = clock() - start
            table.append(
                {"model": folder.name, "run": run, "method": method, "texts": len(texts)}
                | {"batch_size": 32, "seconds": taken, "texts_per_second": len(texts) / taken}
                | {"largest_difference": difference, "load": os.getloadavg()[0]}
                | {"bfloat16_units": bfloat16_units()}
            )
    return table


def bfloat16_units():
    """Whether the processor multiplies bfloat16 numbers itself (AVX512-BF16 or AMX)."""
    path = Path("/proc/cpuinfo")
    flags = path.read_text().split() if path.exists() else []
    return "avx512_bf16" in flags or "amx_bf16" in flags


def bfloat16(size):
    """Test R² of every pair and group fit on vectors made in float32 and in bfloat16."""
    T, count, n_train, n_test = HALVES[size]
    names = list(json.loads((lmd.ROOT / "data/zoo/MANIFEST.json").read_text())["models"])[:count]
    frame = lmd.load_sequences(lmd.sequences_path("course", T))[0]
    of = frame.groupby("split")["text"]
    texts = [*of.get_group("train")[:n_train], *of.get_group("test")[:n_test]]
    n_train = min(n_train, (frame["split"] == "train").sum())
    minilm = lmd.ROOT / "build" / "models" / "all-MiniLM-L6-v2"
    scores, options = {}, {"max_length": None, "batch_size": 128, "progress": False}
    for dtype in ("float32", "bfloat16"):
        zoo = {
            k: lmd.embed(texts, lmd.ROOT / "data/zoo" / k, dtype=dtype, **options) for k in names
        }
        layers = lmd.embed(texts, minilm, layer=[2, 4, 6], dtype=dtype, **options)
        sets = {"zoo": zoo, "MiniLM": {f"layer{k}": v for k, v in zip((2, 4, 6), layers)}}
        for of, vectors in sets.items():
            parts = slice(n_train), slice(n_train, None)
            found = ours(*({k: v[part] for k, v in vectors.items()} for part in parts))
            for fit, r2 in found.items():
                scores.setdefault((of, *fit), {})[f"r2_{dtype}"] = r2
    return [
        {"models": of, "T": T, "n": int(n_train), "kind": "pair" if basis else "group"}
        | {"basis": basis or "all others", "target": target}
        | r2
        | {"difference": r2["r2_bfloat16"] - r2["r2_float32"]}
        for (of, basis, target), r2 in scores.items()
    ]


# --- what a large run takes ---------------------------------------------------------------------


def forward(blocks, dim, tokens):
    """Operations of one text of so many tokens: 2 for each weight of a block, 12 dim² of them, and
    token; and 4 dim for each pair of tokens, in the two products of attention."""
    return blocks * (24 * dim**2 * tokens + 4 * dim * tokens**2)


def tokens_of(T, model=""):
    """Tokens that a model computes on for a text of T: two special ones more, 512 at most; Longformer
    fills its window of 512."""
    return 512 if model == "longformer" else min(T + 2, 512)


def scale(solver, memory, embedding):
    """Work, hours, disk and memory of the paper's run and of a hundred models, at the rates measured."""
    wide = embedding[embedding["method"] == "lmd.embed"]
    wide = wide[wide["model"] == max(wide["model"].unique(), key=lambda m: EMBEDDERS[m][2])]
    _, blocks, dim = EMBEDDERS[wide["model"].iloc[0]]
    per_text = np.mean([forward(blocks, dim, tokens_of(T)) for T in LENGTHS])
    speed = [
        t["cores"].iloc[0] if t["clock"].iloc[0].startswith("processor") else 1
        for t in (wide, solver)
    ]
    rate = per_text * wide["texts_per_second"].median() * speed[0]
    size = solver[solver["sweep"] == "size"]
    seconds = size.pivot(index="run", columns="method", values="seconds")
    over_floor = median(seconds["ours"] / seconds["floor"])
    rate64 = 1e9 * size["gflops_float64"].median() * speed[1]
    streamed = memory.sort_values("n").iloc[-1]
    squares = streamed["peak_gib"] / streamed["square_gib"] + 1  # a third split

    settings = {
        "the paper": PAPER_BLOCKS,
        "a hundred models": {f"base-{i}": 12 for i in range(100)},
    }
    rows = []
    for name, models in settings.items():
        K, D = len(models), 768 * len(models)
        work = PAPER_ROWS * sum(
            forward(blocks, 768, tokens_of(T, model))
            for model, blocks in models.items()
            for T in PAPER_LENGTHS
        )
        fits = len(PAPER_LENGTHS) * (PAPER_ROWS * D**2 + D**3)
        rows.append(
            {
                "run": name,
                "models": K,
                "D": D,
                "sequences": PAPER_ROWS,
                "lengths": len(PAPER_LENGTHS),
            }
            | {
                "embed_pflop": work / 1e15,
                "gflops_float32": rate / 1e9,
                "rate_of": wide["model"].iloc[0],
            }
            | {"embed_hours": work / rate / 3600, "disk_gb": PAPER_ROWS * D * 4 * 6 / 1e9}
            | {"fit_pflop": fits / 1e15, "gflops_float64": rate64 / 1e9, "over_floor": over_floor}
            | {"fit_hours": over_floor * fits / rate64 / 3600}
            | {"square_gib": D**2 / 2**27, "squares": squares, "memory_gib": squares * D**2 / 2**27}
            | {k: wide[k].iloc[0] for k in ("date", "processor", "cores")}
        )
    return pd.DataFrame(rows)


def texts_of(T):
    return lmd.load_sequences(lmd.sequences_path("course", T))[0]["text"].tolist()


def machine():
    """What the figures depend on; no name of a host, no path."""
    lines = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    names = [line.split(":", 1)[1].strip() for line in lines.splitlines() if "model name" in line]
    packages = ["torch", "numpy", "scipy", "scikit-learn", "transformers"]
    known = {name: version(name) for name in packages}
    return {
        "date": datetime.date.today().isoformat(),
        "processor": names[0] if names else platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "clock": "processor, one thread" if ONE else "wall",
        "python": platform.python_version(),
    } | {name.replace("-", "_"): v for name, v in known.items()}


def figure(table):
    """Time against N, D and K, the median of the runs: one line per method."""
    import matplotlib as mpl

    mpl.use("agg")
    import matplotlib.pyplot as plt

    plt.style.use(lmd.ROOT / "notebooks" / "lmd.mplstyle")
    drawn, axes = plt.subplots(1, 3, figsize=(6.8, 2.4), sharey=True)
    labels = {"ours": "ours", "authors": "authors' algorithm", "ridge": "scikit-learn's Ridge"}
    labels |= {"floor": "floor"}
    names = {"n": "N, train rows", "D": "D, dimensions in all", "K": "K, models"}
    for ax, (sweep, column) in zip(axes, {"N": "n", "D": "D", "K": "K"}.items(), strict=True):
        part = table[table["sweep"] == sweep]
        lines = part.groupby(["method", column])["seconds"].median().unstack(0)
        for (name, label), style in zip(labels.items(), plt.rcParams["axes.prop_cycle"]):
            ax.loglog(lines.index, lines[name], **style, label=label)
        ax.set_xticks(lines.index, lines.index)
        ax.minorticks_off()
        fixed = [f"{k} = {part[k].iloc[0]:,}" for k in ("K", "d", "n") if part[k].nunique() == 1]
        ax.set(xlabel=names[column], title=", ".join(fixed).replace("n =", "N ="))
        ax.grid(axis="y")
    axes[0].set_ylabel("seconds, all pairs and groups")
    drawn.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return drawn


def part(name, size, packages=None, *more):
    """Run one part in a process of its own and give its rows back."""
    paths = [str(lmd.ROOT), *filter(None, [packages])]
    command = [sys.executable, __file__, size, "--part", name, *map(str, more)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, cwd=lmd.ROOT)
    if done.returncode:
        sys.exit(f"bench: part {name} failed")
    return pd.DataFrame(json.loads(done.stdout.splitlines()[-1])).assign(**machine())


def main(size, packages=None, *only):
    if size not in SIZES:
        sys.exit(f"bench: SIZE is one of {', '.join(SIZES)}, not {size!r}")
    if unknown := set(only) - set(PARTS):
        sys.exit(f"bench: no part {min(unknown)!r}; parts are {', '.join(PARTS)}")
    run, only = "bench" if size == "full" else f"bench-{size}", only or PARTS
    tables = {name: part(name, size) for name in ("solver", "bfloat16") if name in only}
    if "memory" in only:
        tables["memory"] = pd.concat([part("memory", size, None, n) for n in STREAMS[size][2]])
    if packages and "embedding" in only:
        tables["embedding"] = part("embedding", size, packages)
        tables["embedding"]["sentence_transformers"] = next(
            p.name.split("-")[1].removesuffix(".dist")
            for p in Path(packages).glob("sentence_transformers-*.dist-info")
        )
    for name, table in tables.items():
        lmd.write_results(run, name, table)
    if "scale" in only and packages:
        measured = (lmd.read_results(run, name) for name in ("solver", "memory", "embedding"))
        tables["scale"] = scale(*measured)
        lmd.write_results(run, "scale", tables["scale"])
    for name, table in tables.items():
        print(f"\n{name}")
        REPORTS[name](table)
    if "solver" in tables:
        lmd.save_figure(figure(tables["solver"]), run, "bench")


def report_solver(table):
    whole = table[table["sweep"] == "size"]
    seconds = whole.pivot(index="run", columns="method", values="seconds")
    print(seconds.describe().loc[["min", "50%", "max"]].round(2).to_string())
    for name in ("authors", "ridge"):
        print(f"{name} / ours: {median(seconds[name] / seconds['ours']):.1f}")
    print(f"ours / floor: {median(seconds['ours'] / seconds['floor']):.2f}")


def report_memory(table):
    print(table[["n", "peak_gib", "square_gib", "seconds"]].round(2).to_string(index=False))


def report_embedding(table):
    speed = table.pivot(index=["model", "run"], columns="method", values="texts_per_second")
    print(speed.round(1).to_string())


def report_bfloat16(table):
    apart = table.assign(difference=table["difference"].abs())
    apart = apart.groupby(["models", "kind"])["difference"].agg(["max", "mean"])
    print(apart.map("{:.1e}".format).to_string())


def report_scale(table):
    shown = [
        "run",
        "embed_pflop",
        "embed_hours",
        "disk_gb",
        "fit_hours",
        "square_gib",
        "memory_gib",
    ]
    print(table[shown].round(1).to_string(index=False))


REPORTS = {"solver": report_solver, "memory": report_memory, "embedding": report_embedding}
REPORTS |= {"bfloat16": report_bfloat16, "scale": report_scale}
PARTS = tuple(REPORTS)


if __name__ == "__main__":
    if "--part" in sys.argv:
        size, _, name, *more = sys.argv[1:]
        print(json.dumps(globals()[name](size, *map(int, more))))
    else:
        main(*sys.argv[1:])
