"""Compare the tables of a run with those that are committed, and with the published scores.

    python tools/verify.py RUN          # data/results/RUN against the same files of git's HEAD
    python tools/verify.py RUN OTHER    # ... against data/results/OTHER

Prints a line for each column of numbers and each kind of other fault; the status is 1 when a value
is off by more than its tolerance, a row or table is missing, or a text differs. Rows are matched by
their keys, not by their place.

Against the published scores: rank agreement, from agreement.csv, for models that stand for
published ones (for information: other models are no reproduction); absolute differences for a run
that has the paper's own twelve. Those count against the tolerance PUBLISHED only in the run `paper`,
which makes the authors' choices.
"""

import io
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd

ROOT = Path(__file__).resolve().parent.parent
KEYS = ["T", "split", "kind", "basis", "target", "name"]
# What tells rows apart where those do not: the order of some tables is that of their scores, and of
# near ties another processor makes another order.
MORE = [
    "null",
    "arm",
    "order",
    "step",
    "axis",
    "method",
    "documents",
    "text",
    "pooling",
    "basis reads",
]
MORE += ["whose", "models", "n", "layer", "scale", "alpha"]
# Half a unit of the third decimal, as printed; of values above 1, as a share. Another processor may
# change what comes after.
TOLERANCE = 0.0005
# Of columns that are kept to three digits, or that rounding moves more: as a share.
LOOSE = {"condition": 0.02, "effective_rank": 0.002}
EXACT = ["alpha"]  # a setting, and a small one
# Hash of the code, not of anything it made: an edited comment changes it.
NOTES = ["code_sha256"]
# Mean absolute difference of R² from the published ones, for each kind and T: a choice of ours, since
# the paper's sequences are not known one by one.
PUBLISHED = 0.02
SHOWN = 10  # of the rows of a column that are off


class Fault(Exception):
    """What keeps the comparison from being made, in one line."""


def read(text: str) -> pd.DataFrame:
    names = dict.fromkeys(["basis", "target", "name"], str)
    return pd.read_csv(io.StringIO(text), dtype=names, keep_default_na=False, na_values=[""])


def tables_of(run: str) -> dict[str, pd.DataFrame]:
    """{file name: table} of data/results/<run>."""
    folder = ROOT / "data" / "results" / run
    found = {p.name: read(p.read_text(encoding="utf-8")) for p in sorted(folder.glob("*.csv"))}
    if not found:
        raise Fault(f"data/results/{run} has no table: run make reproduce first")
    return found


def committed(run: str) -> dict[str, pd.DataFrame]:
    """{file name: table} of data/results/<run> as git's HEAD has them."""

    def git(*arguments):
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or ["git failed"])[-1]
            raise Fault(f"{reason}; compare with another run: AGAINST=name")
        return done.stdout

    names = git("ls-tree", "--name-only", "HEAD", f"data/results/{run}/").splitlines()
    names = [name for name in names if name.endswith(".csv")]
    if not names:
        raise Fault(f"no table of {run} is committed; compare with another run: AGAINST=name")
    return {Path(name).name: read(git("show", f"HEAD:{name}")) for name in names}


def same_models(run: str, found: dict, other: str, expected: dict) -> None:
    """Refuse two runs without a model in common: all their rows would count as missing and new."""
    ours, theirs = (
        set(t["models.csv"]["name"]) if "models.csv" in t else set() for t in (found, expected)
    )
    if ours and theirs and not ours & theirs:
        raise Fault(
            f"{run} ({', '.join(sorted(ours))}) and {other} have no model in common;"
            " AGAINST is for two runs of the same models"
        )


def keyed(table: pd.DataFrame) -> pd.DataFrame:
    """The table indexed by what tells its rows apart; by their number where nothing does."""
    for names in (KEYS, KEYS + MORE):
        keys = [k for k in names if k in table]
        if keys and not table.duplicated(keys).any():
            return table.set_index(keys)
    return table.rename_axis("row")


def off(found: pd.Series, expected: pd.Series, name: str) -> tuple[pd.Series, pd.Series, float]:
    """(|difference|, whether it is too large, tolerance) of a column of numbers, row by row."""
    share = LOOSE.get(name, TOLERANCE)
    difference = (found - expected).abs()
    allowed = share * expected.abs() if name in LOOSE else share * expected.abs().clip(lower=1)
    bad = (difference > allowed) | (found.isna() != expected.isna())
    return difference, bad, share


def compare(name: str, found: pd.DataFrame, expected: pd.DataFrame, skip=()):
    """Yield (column, rows, largest difference, tolerance, rows that are off, words for them).

    A tolerance of 0 is for text and whole numbers; `skip` has columns that are not compared.
    """
    a, b = keyed(found), keyed(expected)
    if list(a.index.names) != list(b.index.names):
        yield "rows", len(b), np.nan, 0, len(b), ["other keys"]
        return
    lost, new = b.index.difference(a.index), a.index.difference(b.index)
    if len(lost) or len(new):
        told = [f"missing: {row(b, i)}" for i in lost] + [f"new: {row(a, i)}" for i in new]
        yield "rows", len(b), np.nan, 0, len(told), told
    both = b.index.intersection(a.index)
    a, b = a.loc[both], b.loc[both]
    for column in [c for c in b if c not in skip]:
        if column not in a:
            yield column, len(b), np.nan, 0, len(b), ["missing column"]
            continue
        x, y = a[column], b[column]
        if (
            column not in EXACT
            and pd.api.types.is_float_dtype(y)
            or (y.isna().all() and x.isna().all())
        ):
            if not pd.api.types.is_numeric_dtype(x):
                yield column, len(b), np.nan, 0, len(b), ["no numbers"]
                continue
            difference, bad, share = off(x.astype(float), y.astype(float), column)
            largest = difference.max() if difference.notna().any() else 0.0
        else:
            bad, share, largest = (x != y) & ~(x.isna() & y.isna()), 0, np.nan
        told = [f"{row(b, i)}: {x[i]} instead of {y[i]}" for i in bad.index[bad]]
        yield column, len(b), largest, share, int(bad.sum()), told
    for column in [c for c in a if c not in b and c not in skip]:
        yield column, len(a), np.nan, 0, len(a), ["new column"]


def row(table: pd.DataFrame, at) -> str:
    at = at if isinstance(at, tuple) else (at,)
    return ", ".join(f"{k} {v}" for k, v in zip(table.index.names, at, strict=True))


def report(found: dict, expected: dict, skip=()) -> tuple[list[list[str]], list[str], int]:
    """(lines of the table, words for what is off, number of faults)."""
    lines, told, faults = [], [], 0
    for name, table in expected.items():
        if name not in found:
            lines.append([name, "", "", "", "", "MISSING"])
            faults += 1
            continue
        for column, rows, largest, share, bad, words in compare(name, found[name], table, skip):
            note = column in NOTES
            number = "" if np.isnan(largest) else f"{largest:.1e}"
            relative = " of the value" * (column in LOOSE)
            allowed = f"{share:g}{relative}" if share else "equal"
            state = "ok" if not bad else f"{bad} differ" if note else f"{bad} OFF"
            lines.append([name, column, str(rows), number, allowed, state])
            if bad and not note:
                faults += bad
                more = [f"... and {len(words) - SHOWN} more"] * (len(words) > SHOWN)
                told += [f"{name}, {column}: {w}" for w in words[:SHOWN] + more]
    for name in found.keys() - expected.keys():
        lines.append([name, "", str(len(found[name])), "", "", "not in the other: not compared"])
    return lines, told, faults


def against_published(run: str, found: dict) -> tuple[list[str], int]:
    """(lines on the published scores, number of faults)."""
    published = pd.read_csv(ROOT / "data" / "published" / "zhang2022_r2.csv")
    scores = found.get("scores.csv")
    if scores is None:
        return ["no scores.csv: nothing to hold against the published scores"], 0
    ours = scores[scores["kind"].isin(["pair", "group"])].copy()
    if set(ours["target"]) == set(published["target"]):
        ours["basis"] = ours["basis"].where(ours["kind"] == "pair", "")
        both = published.fillna({"basis": ""}).merge(
            ours, on=["T", "split", "kind", "basis", "target"], suffixes=("_published", "")
        )
        both["off"] = (both["r2"] - both["r2_published"]).abs()
        table = both.groupby(["kind", "T", "split"])["off"].agg(["size", "mean", "max"])
        bad = table["mean"] > PUBLISHED if run == "paper" else table["mean"] < 0
        table["state"] = np.where(bad, "OFF", "ok" if run == "paper" else "for information")
        head = "|R² - published R²|" + f", tolerance of the mean {PUBLISHED}" * (run == "paper")
        return [head, table.round(4).to_string()], int(bad.sum())
    agreement = found.get("agreement.csv")
    if agreement is None:
        return ["no model of this run stands for a published one"], 0
    head = "Spearman's rho with the published test R², for information: other models, other text"
    return [head, agreement.round(3).to_string(index=False)], 0


def aligned(lines: list[list[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def main():
    if len(sys.argv) not in (2, 3):
        sys.exit("usage: python tools/verify.py RUN [OTHER]")
    run, *other = sys.argv[1:]
    try:
        found = tables_of(run)
        expected = tables_of(other[0]) if other else committed(run)
        if other:
            same_models(run, found, other[0], expected)
    except Fault as error:
        sys.exit(f"verify: {error}")
    # the name of the run stands in its tables
    lines, told, faults = report(found, expected, ["profile"] if other else [])
    of = f"data/results/{other[0]}" if other else "the commit"
    print(f"data/results/{run} against {of}:")
    print(aligned([["table", "column", "rows", "largest difference", "tolerance", ""], *lines]))
    print(*told, sep="\n", end="\n" if told else "")
    lines, more = against_published(run, found)
    print("", *lines, sep="\n")
    if faults + more:
        sys.exit(f"verify: {faults + more} values of {run} are not as expected")
    print(f"\nverify: {run} is as expected")


if __name__ == "__main__":
    main()
