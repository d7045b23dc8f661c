"""SCHEDULER: shards and moments made by Dask workers are those of one process, whatever becomes of a worker."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from contextlib import closing
from functools import lru_cache
from pathlib import Path

import pandas as pd
import parameters
import pytest
import run_notebook
import yaml
from clone import environment
from conftest import ROOT

import lmd_utils as lmd

SMOKE = ("bert-base-uncased", "roberta-base", "albert-base-v2")
ROWS = {"train": 150, "validation": 20, "test": 22}

# --- two processes and a worker that is killed -----------------------------------------------------

# Runs the notebooks' own cells in a repository of its own, in small shards and parts: once in this
# process, then on two workers, one of which is killed when something of it is there.
DRIVER = """
import json, multiprocessing, os, shutil, signal, time
from pathlib import Path
import numpy as np, pandas as pd, yaml
import lmd_utils as lmd

root = Path.cwd()
assert lmd.ROOT == root
values = yaml.safe_load((root / "notebooks/profiles/smoke.yaml").read_text()) | {"profile": "smoke"}
log = {"workers": [], "left": []}


def cells(name, until, scheduler, **small):
    found = json.loads((root / "notebooks" / f"{name}.ipynb").read_text())["cells"]
    found = [c for c in found if c["cell_type"] == "code"]
    names = {"__name__": "__main__"}
    for cell in found[: [c["id"] for c in found].index(until) + 1]:
        exec("".join(cell["source"]), names)
        if cell["id"] == "parameters":
            names |= {k: v for k, v in values.items() if k in names} | {"scheduler": scheduler}
        names |= small
    return names, {c["id"]: "".join(c["source"]) for c in found}


def slowly(function, seconds):
    # so that work is left when a worker is killed
    def slow(*given):
        time.sleep(seconds)
        return function(*given)

    return slow


def kill(more):
    workers = multiprocessing.active_children()
    log["workers"] += [w.pid for w in workers]
    log["left"].append(more)
    os.kill(workers[0].pid, signal.SIGKILL)


def embed(scheduler):
    names, source = cells("02_embeddings", "embed-all", "", SHARD=32)
    if scheduler:
        names["scheduler"], names["embed_shard"] = scheduler, slowly(names["embed_shard"], 0.1)
    assert len(names["tasks"]) == 36, names["tasks"]
    write, begun = names["write_shard"], []

    def write_shard(*shard):
        write(*shard)
        begun.append(shard)
        if scheduler and len(begun) == 5:
            kill(36 - len(begun))

    names["write_shard"] = write_shard
    before = dict(os.environ)
    for cell in ("embed-where", "embed-run"):
        exec(source[cell], names)
    log["environment"] = dict(os.environ) == before
    folder = root / "build/smoke/embeddings"
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def moments(scheduler):
    names, source = cells("03_decomposition", "split-moments", scheduler, PART=40)
    if scheduler:
        names["part"] = slowly(names["part"], 0.3)
    exec(source["moments-where"], names)
    each = names["each"]

    def killing(tasks):
        tasks = list(tasks)
        for i, found in enumerate(each(tasks), 1):
            if scheduler and i == 1:
                kill(len(tasks) - i)
            yield found

    names["each"] = killing
    found = names["split_moments"](8)
    names["workers"].close()
    scores = lmd.group_scores(found["train"], found), lmd.pair_scores(found["train"], found)
    return found, scores


if __name__ == "__main__":
    alone = embed("")
    shutil.rmtree(root / "build/smoke/embeddings")
    log["same bytes"] = alone == embed("local:2") and len(alone) > 36
    models = pd.DataFrame(values["models"]).assign(role="model")
    lmd.write_results("smoke", "models", models)
    ours, theirs = moments(""), moments("local:2")
    for split, m in ours[0].items():
        other = theirs[0][split]
        assert m.n == other.n
        np.testing.assert_allclose(other.mean, m.mean, rtol=1e-12, atol=1e-15)
        np.testing.assert_allclose(other.cov, m.cov, rtol=0, atol=1e-12 * abs(m.cov).max())
        np.testing.assert_allclose(theirs[1][0][split], ours[1][0][split], rtol=0, atol=1e-9)
        np.testing.assert_allclose(theirs[1][1][split], ours[1][1][split], rtol=0, atol=1e-9)
    log["rows"] = {split: m.n for split, m in ours[0].items()}
    print(json.dumps(log))
"""


def lives(pid):
    """Whether a process runs; a zombie, which only waits to be counted, does not."""
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False


def gone(pids, seconds=10):
    end = time.monotonic() + seconds
    while any(map(lives, pids)) and time.monotonic() < end:
        time.sleep(0.1)
    return not any(map(lives, pids))


@pytest.fixture(scope="module")
def root(tiny_models, tmp_path_factory):
    """The smoke pipeline after 01: its models, notebooks and short sequences in a folder of their own."""
    root = tmp_path_factory.mktemp("scheduler")
    shutil.copy(ROOT / "lmd_utils.py", root)
    shutil.copytree(ROOT / "notebooks", root / "notebooks")
    for name in SMOKE:
        shutil.copytree(tiny_models / name, root / "build" / "tiny" / name)
    for T in (8, 16):
        texts = [f"the state of {'north ' * (i % 3)}number {i * i % 97}" for i in range(192)]
        frame = pd.DataFrame({"text": texts, "seq_id": range(192), "doc_id": 0})
        frame["split"] = [split for split, n in ROWS.items() for _ in range(n)]
        path = root / f"build/smoke/sequences/T{T:03d}.parquet"
        lmd.save_sequences(path, frame, {"corpus_sha256": "0"})
    return root


def start(root, program, **options):
    (root / "driver.py").write_text(program)
    settings = environment(PYTHONPATH=str(root), HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1")
    return subprocess.Popen(
        [sys.executable, "driver.py"], cwd=root, env=settings, stdout=subprocess.PIPE, text=True, **options
    )  # fmt: skip


def test_two_workers_one_of_them_killed_give_what_one_process_gives(root):
    """02 and 03 of the smoke pipeline: the same bytes of every array, moments to 1e-12."""
    process = start(root, DRIVER, stderr=subprocess.PIPE)
    out, told = process.communicate(timeout=300)
    assert process.returncode == 0, told
    log = json.loads(out.splitlines()[-1])
    assert log["same bytes"] and log["rows"] == ROWS and log["environment"]
    assert len(log["left"]) == 2 and min(log["left"]) > 0, "a worker is killed while work is left"
    assert len(set(log["workers"])) == 4 and gone(log["workers"])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_no_worker_outlives_the_notebook(root, number):
    (root / "build").mkdir(exist_ok=True)
    program = """
        import multiprocessing, signal, time
        import lmd_utils as lmd

        if __name__ == "__main__":
            signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
            with lmd.dask_map(time.sleep, "local:2") as each:
                print(*[w.pid for w in multiprocessing.active_children()], flush=True)
                list(each([60, 60]))
    """
    process = start(root, textwrap.dedent(program), stderr=subprocess.DEVNULL)
    workers = [int(pid) for pid in process.stdout.readline().split()]
    assert len(workers) == 2 and all(map(lives, workers))
    process.send_signal(number)
    assert gone([process.pid, *workers], 15)
    process.communicate()


# --- a cluster that is there already ---------------------------------------------------------------


@pytest.fixture(scope="module")
def cluster():
    """A scheduler at an address, and two workers that are threads of this process."""
    from distributed import LocalCluster

    (ROOT / "build").mkdir(exist_ok=True)
    options = {"n_workers": 2, "threads_per_worker": 1, "processes": False, "protocol": "tcp"}
    with LocalCluster(**options, host="127.0.0.1", dashboard_address=None) as cluster:
        yield cluster


def test_results_come_in_the_order_of_the_tasks_and_the_cluster_forgets_them(cluster):
    def late(k):
        time.sleep(0.05 * (k % 3 == 0))
        return k, threading.get_ident()

    with lmd.dask_map(late, cluster.scheduler_address) as each:
        found = list(each(range(12)))
    assert [k for k, _ in found] == list(range(12)) and len({who for _, who in found}) == 2
    workers = [worker.plugins for worker in cluster.workers.values()]
    assert not any(name.startswith("lmd-") for plugins in workers for name in plugins)
    assert not list((ROOT / "build").glob(".workers-*"))


def test_a_cache_is_sent_empty_and_lasts(cluster):
    calls = []

    lock = threading.Lock()

    @lru_cache(maxsize=2)
    def cached(k):
        with lock:
            calls.append(k)
        return len(calls)

    def task(k):
        return cached(k), cached.cache_info().maxsize

    cached(1), cached(2)
    with lock, lmd.dask_map(task, cluster.scheduler_address) as each:
        found = list(each([5] * 8))
    assert set(found) == {(3, 2)}, (
        "made once on each worker, after the two calls that it was sent with"
    )
    assert calls == [1, 2]


def test_an_error_of_a_task_is_the_callers(cluster):
    def fails(k):
        raise ValueError(f"shard {k}")

    with pytest.raises(ValueError, match="^shard 0$"):
        with lmd.dask_map(fails, cluster.scheduler_address) as each:
            list(each(range(3)))


def test_a_worker_of_another_version_or_folder_is_refused(cluster, monkeypatch, tmp_path):
    monkeypatch.setattr(lmd, "_same", lambda: {"torch": threading.current_thread().name})
    with pytest.raises(RuntimeError, match=r"^a worker has torch \S+, not MainThread: start the"):
        with lmd.dask_map(abs, cluster.scheduler_address) as each:
            list(each([1]))
    monkeypatch.undo()
    with pytest.raises(RuntimeError, match=f"does not see {tmp_path}/not: it must be one folder"):
        lmd._on_worker(lmd._same(), str(tmp_path / "not" / "there"), abs, 1)


def test_a_function_that_workers_cannot_load_is_one_line(cluster):
    class Unloadable:
        def __reduce__(self):
            return exec, ("raise ImportError('no such module')",)

    unloadable = Unloadable()
    with pytest.raises(RuntimeError, match=r"are to run \(ImportError\('no such module'\)\)"):
        with lmd.dask_map(lambda task: unloadable, cluster.scheduler_address):
            pass
    left = [name for name in cluster.scheduler.worker_plugins if name.startswith("lmd-")]
    assert not left, "a worker that comes later is not asked to load it"


@pytest.mark.parametrize("greeting", [b"", b"SSH-2.0-OpenSSH_9.6\r\n", b"\x10" + 23 * b"\0"])
def test_an_address_where_another_program_listens_is_one_line(monkeypatch, greeting):
    monkeypatch.setattr(lmd, "GREETING", 1)
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        address = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        served = []
        threading.Thread(
            target=lambda: (served.append(server.accept()[0]), served[0].sendall(greeting))
        ).start()
        with pytest.raises(
            ConnectionError, match=rf"^no Dask scheduler answers at {address} \(\w+\)$"
        ):
            with lmd.dask_map(abs, address):
                pass
        served[0].close()


# --- what may be written ---------------------------------------------------------------------------

BAD = [
    "local",
    "local:",
    "local:0",
    "local:-1",
    "local:x",
    "local:1.5",
    "local:100",
    "local:4 ",
    "tcp://",
]
BAD += [
    "tcp://host",
    "tcp://host:",
    "tcp://host:x",
    "tcp://host:99999",
    "tcp://:8786",
    "tcp://host:1/x",
]
BAD += ["host:8786", "http://host:8786", "8786", "distributed"]


@pytest.mark.parametrize("value", BAD)
def test_a_value_that_is_no_scheduler_is_one_line(value):
    with pytest.raises(ValueError, match="is not local:N") as error:
        parameters.check("SET", {"scheduler": value}, {"scheduler": ""})
    assert repr(value) in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "value", ["", "local:1", "local:99", "tcp://host:8786", "tcp://10.0.0.7:1", "tcp://[::1]:8786"]
)
def test_a_value_that_may_be_one_passes(value):
    parameters.check("SET", {"scheduler": value}, {"scheduler": ""})


def write(scheduler, tmp_path, **settings):
    """tools/parameters.py write, with SCHEDULER as make exports it; (status, what it says)."""
    given = environment(PROFILE="smoke", RUN="smoke", SCHEDULER=scheduler, **settings)
    program = (
        "import parameters, sys; parameters.write = lambda *given: print(given[2]['scheduler'])\n"
    )
    program += "sys.argv[1:] = ['write']; parameters.main()"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT / "tools", env=given, capture_output=True, text=True, timeout=60
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


def test_nobody_at_the_address_is_said_before_anything_runs(tiny_models, tmp_path):
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        port = server.getsockname()[1]
        assert write(f"tcp://127.0.0.1:{port}", tmp_path) == (0, "\n"), "no part of the parameters"
    status, said = write(f"tcp://127.0.0.1:{port}", tmp_path)
    assert status == 1 and said.count("\n") == 1
    assert said.startswith(f"parameters: SCHEDULER: nobody listens at tcp://127.0.0.1:{port} (")
    status, said = write("local:0", tmp_path)
    assert status == 1 and said.startswith("parameters: SCHEDULER: 'local:0' is not local:N")


@pytest.mark.parametrize("notebook, taken", [("02_embeddings", True), ("01_corpus", False)])
def test_scheduler_reaches_the_notebooks_that_take_it(notebook, taken, tmp_path, monkeypatch):
    file, given = tmp_path / "values.yaml", []
    file.write_text(yaml.safe_dump({"profile": "smoke"}))
    path = ROOT / "notebooks" / f"{notebook}.ipynb"
    monkeypatch.setenv("SCHEDULER", "local:3")
    monkeypatch.setattr(
        sys, "argv", ["run_notebook.py", str(path), str(file), str(tmp_path / "out.ipynb")]
    )
    monkeypatch.setattr(run_notebook, "run", lambda *values: given.append(values[1]))
    for name in ("JUPYTER_PATH", "PYTHONPATH", "TOKENIZERS_PARALLELISM", "PYTHONWARNINGS"):
        monkeypatch.setenv(name, os.environ.get(name, ""))
    before = signal.getsignal(signal.SIGTERM)
    run_notebook.main()
    signal.signal(signal.SIGTERM, before)
    assert given == [{"profile": "smoke"} | ({"scheduler": "local:3"} if taken else {})]
