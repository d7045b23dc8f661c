"""Time and memory of the decomposition and of embedding, beside other ways to the same numbers.

    python tools/bench.py full|small [folder with sentence-transformers]   # make bench

Writes data/results/bench/{solver,memory,embedding}.csv and figures/bench/bench.{pdf,png}; with
`small`, which is for trying the script, the folders are named bench-small.  Each part runs in a
process of its own.  Seconds are those of the clock, or with OMP_NUM_THREADS=1 those of the
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
    """lmd.embed and sentence-transformers' encode on the same model, texts and batch size, in turn."""
    from sentence_transformers import SentenceTransformer

    folder = lmd.ROOT / "build" / "models" / "all-MiniLM-L6-v2"
    texts = [t for T in (16, 32, 64, 128) for t in texts_of(T)[: TEXTS[size] // 4]]
    texts = [texts[i] for i in np.random.default_rng(0).permutation(len(texts))]
    model, tokenizer = lmd.load_model(folder), lmd.load_tokenizer(folder)
    theirs = SentenceTransformer(str(folder), device="cpu")
    ways = {
        "lmd.embed": lambda: lmd.embed(
            texts, model, tokenizer=tokenizer, max_length=512, batch_size=32, progress=False
        ),
        "sentence-transformers": lambda: theirs.encode(
            texts, batch_size=32, show_progress_bar=False
        ),
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
            )
    return table


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


def main(size, packages=None):
    if size not in SIZES:
        sys.exit(f"bench: SIZE is one of {', '.join(SIZES)}, not {size!r}")
    run = "bench" if size == "full" else f"bench-{size}"
    tables = {"solver": part("solver", size)}
    tables["memory"] = pd.concat([part("memory", size, None, n) for n in STREAMS[size][2]])
    if packages:
        tables["embedding"] = part("embedding", size, packages)
        tables["embedding"]["sentence_transformers"] = next(
            p.name.split("-")[1].removesuffix(".dist")
            for p in Path(packages).glob("sentence_transformers-*.dist-info")
        )
    drawn = figure(tables["solver"])
    for name, table in tables.items():
        lmd.write_results(run, name, table)
    lmd.save_figure(drawn, run, "bench")
    whole = tables["solver"][tables["solver"]["sweep"] == "size"]
    seconds = whole.pivot(index="run", columns="method", values="seconds")
    print(seconds.describe().loc[["min", "50%", "max"]].round(2).to_string())
    for name in ("authors", "ridge"):
        print(f"{name} / ours: {median(seconds[name] / seconds['ours']):.1f}")
    print(f"ours / floor: {median(seconds['ours'] / seconds['floor']):.2f}")
    print(
        tables["memory"][["n", "peak_gib", "square_gib", "seconds"]].round(2).to_string(index=False)
    )
    if packages:
        speed = tables["embedding"].pivot(index="run", columns="method", values="texts_per_second")
        print(speed.round(1).to_string())


if __name__ == "__main__":
    if "--part" in sys.argv:
        size, _, name, *more = sys.argv[1:]
        print(json.dumps(globals()[name](size, *map(int, more))))
    else:
        main(*sys.argv[1:])
