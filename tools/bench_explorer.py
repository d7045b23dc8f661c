"""Time from a change of a control of 09_explorer to its answer, into data/results/bench/explorer.csv.

    python tools/bench_explorer.py    # after make reproduce, when the machine has nothing else to do

The notebook's cells run in this process; a change is what a browser would send, and the clock stops
when the new headline, picture and texts are there. What a browser takes to show them is not in it.
"""

import itertools
import os
import time

import matplotlib
import nbformat
import numpy as np
import pandas as pd
from bench import machine
from parameters import ROOT

import lmd_utils as lmd

TIMES = 20  # changes of each control


def milliseconds(control, values):
    """Wall-clock time of each of TIMES changes of a control that goes round `values`."""
    taken = []
    for value in itertools.islice(itertools.cycle(values), TIMES):
        begin = time.perf_counter()
        control.value = value
        taken.append(1000 * (time.perf_counter() - begin))
    return taken


def main():
    matplotlib.use("agg")
    space = {"__name__": "__main__"}
    for cell in nbformat.read(ROOT / "notebooks" / "09_explorer.ipynb", as_version=4).cells:
        if cell.cell_type == "code":
            exec(compile(cell.source, cell.id, "exec"), space)
    names, lengths, controls = space["names"], space["lengths"], space["controls"]
    every = {name: [name] for name in names}
    rounds = {
        "target": names[2:] + names[:1],
        "basis": [*list(every.values())[2:5], names[1:], names[1:4]],
        "alpha": [1.0, 1e-3, 1e-6],
        "T": [*lengths],
        "split": ["train", "validation", "test"],
    }
    planted = {
        "n": [400, 20],
        "shared": [1, 2, 3],
        "noise": [1.0, 0.1],
        "angle": [10, 80],
        "scale": [1, 5],
    }
    rows = []
    for basis in ([names[1]], names[1:]):
        controls["target"].value, controls["basis"].value = names[0], basis
        for name, values in rounds.items():
            taken = milliseconds(controls[name], values)
            rows.append(["this run", name, len(basis), np.median(taken), max(taken)])
    for name, values in planted.items():
        taken = milliseconds(space["planting"][name], values)
        rows.append(["planted data", name, 1, np.median(taken), max(taken)])
    table = pd.DataFrame(rows, columns=["tab", "control", "basis_models", "median_ms", "most_ms"])
    print(table.round(0).to_string(index=False))
    lmd.write_results(
        "bench",
        "explorer",
        table.assign(
            changes=TIMES, load=os.getloadavg()[0], nice=os.nice(0), **machine() | {"clock": "wall"}
        ),
    )


if __name__ == "__main__":
    main()
