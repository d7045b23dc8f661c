"""Execute one notebook with papermill.

    python tools/run_notebook.py NOTEBOOK PARAMETERS.yaml OUTPUT.ipynb [LABEL]

LABEL follows the notebook's name in what is printed, where one notebook runs several times. OUTPUT
appears only after every cell has run, and an earlier one is gone by then; a notebook that fails is
kept, with its error, in the folder `failed` beside OUTPUT's, and named in the last line. The kernel
is this interpreter, whatever kernelspecs are installed, and its working directory is the notebook's.
"""

import json
import logging
import os
import shutil
import signal
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import yaml
from lock import to_the_end
from parameters import ROOT, declared, hint, hub_sources, nearest, sweep


def prepare_environment(scratch, values):
    """Settings that the kernel inherits."""
    spec = Path(scratch, "kernels", "python3", "kernel.json")
    spec.parent.mkdir(parents=True)
    argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    # a kernel that is told to end while it answers prints tracebacks of its sockets
    silent = {"loggers": {"tornado.general": {"level": "CRITICAL"}}}
    argv += ["--log-level=CRITICAL", f"--IPKernelApp.logging_config={silent}"]
    spec.write_text(json.dumps({"argv": argv, "display_name": "Python 3", "language": "python"}))
    before = {"JUPYTER_PATH": scratch, "PYTHONPATH": str(ROOT)}
    for name, value in before.items():
        os.environ[name] = os.pathsep.join(filter(None, [value, os.environ.get(name)]))
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.environ["PYTHONWARNINGS"] = "ignore::DeprecationWarning,ignore::FutureWarning"
    if not any(hub_sources(values)):
        os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    if sys.stderr.isatty():
        os.environ["LMD_PROGRESS"] = os.ttyname(sys.stderr.fileno())


def stop(signum, frame):
    raise KeyboardInterrupt


def without_widgets(notebook):
    """A notebook (JSON) without widgets: with no kernel they show nothing, and pages would fetch scripts for them."""
    view = "application/vnd.jupyter.widget-view+json"
    for cell in notebook["cells"]:
        if "outputs" in cell:
            cell["outputs"] = [o for o in cell["outputs"] if view not in o.get("data", {})]
    notebook["metadata"].pop("widgets", None)
    return notebook


def run(notebook, values, output, label, begin):
    """Execute `notebook` with `values` into `output`; SystemExit with one line when a cell fails."""
    import papermill

    logging.getLogger("papermill").setLevel(logging.ERROR)
    # a task that Ctrl-C has cut short is no news
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)
    output.parent.mkdir(parents=True, exist_ok=True)
    output.unlink(missing_ok=True)
    # what died last was not yet dead for make
    sweep((declared(notebook) | values).get("profile", ""), output.parent.parent)
    temporary = output.with_name(f".{output.stem}.{os.getpid()}.tmp.ipynb")
    try:
        papermill.execute_notebook(
            str(notebook),
            str(temporary),
            parameters=values,
            kernel_name="python3",
            language="python",
            progress_bar=False,
            cwd=str(notebook.parent),
        )
        executed = without_widgets(json.loads(temporary.read_text(encoding="utf-8")))
        temporary.write_text(json.dumps(executed, indent=1, ensure_ascii=False), encoding="utf-8")
        os.utime(temporary, (begin, begin))  # what was edited while it ran is newer
        os.replace(temporary, output)
        for cell in executed["cells"]:
            for line in (x for o in cell.get("outputs", []) for x in o.get("text", [])):
                if line.startswith("Warning: "):
                    print(f"{notebook.stem}{label}: {line.rstrip()}\n", end="", flush=True)
    except Exception as error:
        kept, see = output.parent.parent / "failed" / output.name, ""
        with suppress(OSError):  # a full disk has no room for the folder
            kept.parent.mkdir(parents=True, exist_ok=True)
            os.replace(temporary, kept)
            see = f"; see {os.path.relpath(kept, ROOT)}"
        reason = (
            f"{getattr(error, 'ename', type(error).__name__)}: {getattr(error, 'evalue', error)}"
        )
        reason = (reason.strip().splitlines() or ["no message"])[0]
        sys.exit(f"{notebook.name}{label} failed: {reason}{hint(reason)}{see}")
    finally:
        temporary.unlink(missing_ok=True)


def main():
    if len(sys.argv) not in (4, 5):
        sys.exit(
            "usage: python tools/run_notebook.py NOTEBOOK PARAMETERS.yaml OUTPUT.ipynb [LABEL]"
        )
    notebook, parameters, output = (Path(a).resolve() for a in sys.argv[1:4])
    label = "".join(f" {word}" for word in sys.argv[4:])
    values, literals = yaml.safe_load(parameters.read_text(encoding="utf-8")), declared(notebook)
    for name in values:
        if name not in literals:
            sys.exit(f"{notebook.name}: unknown parameter {name!r}{nearest(name, list(literals))}")
    if "scheduler" in literals and (scheduler := os.environ.get("SCHEDULER", "").strip()):
        values["scheduler"] = scheduler  # not of the parameter file: the results are the same
    signal.signal(signal.SIGTERM, stop)
    begin = time.time()
    print(f"{notebook.stem}{label} ...\n", end="", flush=True)  # one write: make -j mixes lines
    scratch = ""
    try:
        scratch = tempfile.mkdtemp(prefix="lmd-")
        prepare_environment(scratch, values)
        run(notebook, values, output, label, begin)
    except OSError as error:
        sys.exit(f"{notebook.name}{label} failed: {error}{hint(str(error))}")
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    (output.parent.parent / "failed" / output.name).unlink(missing_ok=True)
    print(f"{notebook.stem}{label} done in {time.time() - begin:.0f} s\n", end="", flush=True)


if __name__ == "__main__":
    given = sys.argv[1:] or ["run_notebook"]
    to_the_end(main, " ".join([Path(given[0]).name, *given[3:]]))
