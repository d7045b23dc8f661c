"""Stop the smoke pipeline at many moments, run the same command again, compare every product.

    python tests/kill_matrix.py [kill|interrupt|disk ...]     # all three, if none is named

kill: SIGKILL to make's whole process group; interrupt: SIGINT to it, as Ctrl-C does; disk: a
file system (a small tmpfs, in a mount namespace of its own) that is full. Each trial begins with
the notebooks before its own done, as they are in an undisturbed run at that moment. Before the
figures, the command is one for the scores, and its products are compared (the figures follow from
them). The table of trials is printed and written to data/results/reliability/<kind>.csv.
"""

import csv
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from clone import clone, environment
from conftest import ROOT

STORY = ["00_overview", "01_corpus", "02_embeddings", "03_decomposition", "04_figures"]
STORY += ["05_how_sure", "06_structure"]
# Shares of a notebook's time at which it is stopped.
KILLS = {0: [0.5, 0.9], 1: [0.1, 0.6, 0.8, 0.9, 0.97], 2: [0.1, 0.5, 0.65, 0.8, 0.9, 0.97]} | {
    3: [0.3, 0.6, 0.8, 0.95],
    4: [0.2, 0.4, 0.6, 0.8, 0.95],
    5: [0.5, 0.9],
    6: [0.5, 0.9],
}
INTERRUPTS = {0: [0.3], 1: [0.8], 2: [0.2, 0.8], 3: [0.9], 4: [0.7]}
LATER = re.compile(
    "figures/smoke/(?!corpus_|decomposition_)|00_overview|04_figures|agreement|how_sure|structure"
)
FREE = [0, 100, 400, 900, 1500, 4000]  # kB
SCORES = ["data/results/smoke/scores.csv", "PROFILE=smoke"]
SETTINGS = {}  # of the environment of every make
TABLE = ROOT / "data" / "results" / "reliability"


def start(folder, *arguments):
    """make in a clone, as the leader of a process group; `lines` reads what it says."""
    command = ["make", *arguments, f"VENV={sys.prefix}", "READY=requirements.txt"]
    log = tempfile.NamedTemporaryFile("w+", prefix="lmd-make-", suffix=".log", encoding="utf-8")
    process = subprocess.Popen(
        command, cwd=folder, env=environment(PWD=str(folder)) | SETTINGS, stdout=log, stderr=log,
        start_new_session=True,
    )  # fmt: skip
    process.log = log
    return process


def lines(process):
    process.log.flush()
    return Path(process.log.name).read_text(encoding="utf-8").splitlines()


def finish(process, timeout=1200):
    """(status, lines) of a make that `start` began, once it has ended."""
    try:
        return process.wait(timeout), lines(process)
    finally:
        process.log.close()


def run(folder, *arguments):
    return finish(start(folder, *arguments))


def stop(process, number=signal.SIGKILL):
    """Send a signal to make's process group; (status, lines) once make has ended."""
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:
        pass
    return finish(process)


def whole(outputs):
    """Outputs of a cell, with the pieces in which one stream may arrive put together."""
    joined = []
    for output in outputs:
        stream = output["output_type"] == "stream"
        output = output | {"text": "".join(output["text"])} if stream else output
        if joined and stream and output["name"] == joined[-1].get("name"):
            joined[-1]["text"] += output["text"]
        else:
            joined.append(output)
    return joined


def products(folder, run="smoke"):
    """{name: digest} of all that a run leaves: bytes of tables, figures and texts, values of arrays, printed outputs."""
    import zarr

    found = {}
    for part in (f"data/results/{run}", f"figures/{run}", f"build/{run}/sequences"):
        files = [f for f in (folder / part).glob("*") if f.is_file()]
        found |= {str(f.relative_to(folder)): f.read_bytes() for f in files}
    documents = folder / "build" / run / "documents.parquet"
    if documents.is_file():
        found["documents"] = documents.read_bytes()
    for path in (folder / "build" / run / "embeddings").glob("T*/*"):
        array = zarr.open_array(str(path), mode="r")
        record = json.dumps(array.attrs["record"], sort_keys=True).encode()
        found[str(path.relative_to(folder))] = record + array[:].tobytes()
    for path in (folder / "build" / run / "notebooks").glob("*"):
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        shown = [whole(cell.get("outputs", [])) for cell in cells]
        found[str(path.relative_to(folder))] = json.dumps(shown, sort_keys=True).encode()
    return {name: hashlib.sha256(data).hexdigest() for name, data in sorted(found.items())}


def differing(found, expected):
    """Names of products that are absent, new or other than expected."""
    return sorted(n for n in {*found, *expected} if found.get(n) != expected.get(n))


def copy(source, target):
    """The tree as it is, times included."""
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target, symlinks=True)
    return target


def undisturbed(folder):
    """Run the pipeline notebook by notebook; [tree before each], seconds of each, products at the end."""
    tree = folder / "whole"
    tree.mkdir(parents=True)
    clone(tree, "tiny")
    before, seconds = [], []
    for i, name in enumerate(STORY):
        before.append(copy(tree, folder / f"before{i}"))
        begin = time.monotonic()
        status, told = run(tree, f"build/smoke/notebooks/{name}.ipynb", "PROFILE=smoke")
        assert status == 0, told
        seconds.append(time.monotonic() - begin)
        print(f"undisturbed: {name} in {seconds[-1]:.1f} s", flush=True)
    status, told = run(tree, "smoke")
    assert status == 0, told
    return before, seconds, products(tree)


def resumed(tree, expected, command):
    """Run the command again; what is wrong with what it leaves, '' if nothing."""
    status, told = run(tree, *command)
    if status:
        return f"status {status}: {told[-3:]}"
    names = differing(products(tree), expected)
    if "smoke" not in command:  # then neither 00 nor 04 runs
        names = [name for name in names if not LATER.search(name)]
    if names:
        return f"differs: {names}"
    left = [p for part in ("build", "data", "figures") for p in (tree / part).rglob(".*")]
    if left := [p.name for p in left if p.name.endswith((".tmp", ".old", ".tmp.ipynb"))]:
        return f"left behind: {left}"
    status, told = run(tree, *command)
    return (
        ""
        if status == 0 and not any(" ..." in line for line in told)
        else f"not up to date: {told}"
    )


def underway(told):
    begun = [line.removesuffix(" ...") for line in told if line.endswith(" ...")]
    done = {line.split(" done in ")[0] for line in told if " done in " in line}
    return ", ".join(name for name in begun if name not in done) or "between notebooks"


def stopped(folder, kind, before, seconds, expected):
    """Rows of the table: the pipeline stopped by a signal at each moment, then run again."""
    moments = {"kill": KILLS, "interrupt": INTERRUPTS}[kind]
    number = {"kill": signal.SIGKILL, "interrupt": signal.SIGINT}[kind]
    for i, shares in moments.items():
        for share in shares:
            jobs = ["-j4"] * (round(share * 100) % 20 == 0)
            command = [*jobs, *(SCORES if i in (1, 2, 3) else ["smoke"])]
            tree = copy(before[i], folder / "trial")
            process = start(tree, *command)
            time.sleep(share * seconds[i])
            status, told = stop(process, number)
            trace = [line for line in told if line.startswith("Traceback")]
            wrong = resumed(tree, expected, command)
            yield {
                "moment": f"{share:.0%} of {STORY[i]}",
                "command": " ".join(["make", *command]),
                "underway": underway(told),
                "status": status,
                "last_line": ([x for x in told if not x.startswith("make")] or [""])[-1],
                "result": wrong or ("traceback" if trace else "identical" if status else "not hit"),
            }


def starved(folder, before, expected):
    """Rows of the table: the pipeline on a file system that is full, then run again with room."""
    disk = folder / "disk"
    for i, free in enumerate(FREE):
        disk.mkdir(exist_ok=True)
        mount = ["mount", "-t", "tmpfs", "-o", "size=400m", "tmpfs", str(disk)]
        subprocess.run(mount, check=True)
        try:
            tree = copy(before[1 if free else 0], disk / "trial")
            ballast = disk / "ballast"
            room = shutil.disk_usage(disk).free - free * 1000
            with open(ballast, "wb") as file:
                file.write(bytes(room))
            status, told = run(tree, *["-j4"] * (i % 2), "smoke") if free else run(tree, "smoke")
            ballast.unlink()
            wrong = resumed(tree, expected, ["smoke"])
        finally:
            subprocess.run(["umount", "-l", str(disk)], check=True)
        said = [line for line in told if not line.startswith("make")]
        clear = status != 0 and "the disk is full" in "\n".join(said)
        yield {
            "moment": f"{free} kB free",
            "command": "make smoke",
            "underway": underway(told),
            "status": status,
            "last_line": (said or told or [""])[-1],
            "result": wrong or ("identical" if clear else "no clear message"),
        }


def table(kind, trials):
    """Print and write the rows of a table; how many trials went wrong."""
    rows = []
    for row in trials:
        rows.append(row)
        print(f"{kind}: " + "; ".join(map(str, row.values())), flush=True)
    TABLE.mkdir(parents=True, exist_ok=True)
    with open(TABLE / f"{kind}.csv", "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    wrong = [row for row in rows if row["result"] != "identical"]
    print(f"{kind}: {len(rows)} trials, {len(rows) - len(wrong)} identical after it", flush=True)
    return len(wrong)


def main():
    kinds = [a for a in sys.argv[1:] if a in ("kill", "interrupt", "disk")]
    if others := set(sys.argv[1:]) - {*kinds}:
        sys.exit(f"usage: python tests/kill_matrix.py [kill|interrupt|disk ...], not {others}")
    SETTINGS["OMP_NUM_THREADS"] = "1"  # the trials share the processor with whatever else runs
    # mounting a tmpfs takes root, and a namespace of its own leaves no mount behind
    own = ["unshare", "-m"] if shutil.which("unshare") else ["false"]
    if "LMD_NAMESPACE" not in os.environ and subprocess.run([*own, "true"]).returncode == 0:
        os.environ["LMD_NAMESPACE"] = "own"
        os.execvp(own[0], [*own, sys.executable, *sys.argv])
    with tempfile.TemporaryDirectory(prefix="lmd-kills-") as folder:
        folder = Path(folder)
        before, seconds, expected = undisturbed(folder)
        failed = 0
        for kind in kinds or ["kill", "interrupt", "disk"]:
            if kind != "disk":
                failed += table(kind, stopped(folder, kind, before, seconds, expected))
            elif "LMD_NAMESPACE" in os.environ:
                failed += table(kind, starved(folder, before, expected))
            else:
                print("disk: not tried; to mount a tmpfs takes root on Linux")
    sys.exit(f"{failed} trials went wrong" if failed else 0)


if __name__ == "__main__":
    main()
