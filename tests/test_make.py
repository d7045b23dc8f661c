"""The pipeline through make, in a copy of the repository, on tiny models."""

import json
import os
import re
import shutil
import stat
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import kill_matrix
import nbformat
import pandas as pd
import parameters
import pytest
import tiny_models as tiny
from clone import changes, clone, environment, make
from conftest import ROOT
from nbformat.v4 import new_code_cell, new_notebook

import lmd_utils as lmd

pytestmark = pytest.mark.pipeline

STORY = ["00_overview", "01_corpus", "02_embeddings", "03_decomposition", "04_figures"]
STORY += ["05_how_sure", "06_structure"]
PAPER = [name for name in tiny.CHECKPOINTS if name != "gpt2"]


@pytest.fixture(scope="module")
def copy(tmp_path_factory, tiny_models):
    return clone(tmp_path_factory.mktemp("pipeline") / "copy", "models", "tiny")


def begun(lines):
    """Names of the notebooks that a run of make has begun to execute."""
    return [line.removesuffix(" ...") for line in lines if line.endswith(" ...")]


@pytest.fixture(scope="module")
def meanwhile():
    """What other calls of make said while `smoke` ran, {name: (status, lines)}, and what it left."""
    return {}


@pytest.fixture(scope="module")
def no_network(tmp_path_factory):
    """A folder whose sitecustomize refuses, and notes, any use of the network beyond this machine."""
    folder = tmp_path_factory.mktemp("no-network")
    shutil.copy(ROOT / "tests" / "no_network.py", folder / "sitecustomize.py")
    return folder


@pytest.fixture(scope="module")
def smoke(copy, meanwhile, no_network):
    process = kill_matrix.start(copy, "-j4", "smoke", f"PYTHONPATH={copy}:{no_network}")
    while not begun(kill_matrix.lines(process)):
        assert process.poll() is None, kill_matrix.lines(process)
        time.sleep(0.1)
    meanwhile["same"] = make(copy, "reproduce", PROFILE="smoke")
    meanwhile["clean"] = make(copy, "clean")
    meanwhile["other"] = make(copy, "parameters", PROFILE="smoke", RUN="other")
    meanwhile["running"] = process.poll() is None
    status, lines = kill_matrix.finish(process)
    assert status == 0, "\n".join(lines)
    assert sorted(begun(lines)) == STORY
    meanwhile["products"] = kill_matrix.products(copy)  # later tests change values
    return copy


def test_two_runs_at_once(smoke, meanwhile):
    """The same run again, and make clean, are refused; a run of another name is not."""
    assert meanwhile["running"]
    for name in ("same", "clean"):
        status, lines = meanwhile[name]
        (line,) = [line for line in lines if not line.startswith("make")]
        assert status != 0 and line.startswith("lock: build/smoke is in use by process ")
    assert meanwhile["other"] == (0, [])
    assert (smoke / "build/other/params/01_corpus.yaml").is_file()


def test_no_run_after_set_up_uses_the_network(smoke, no_network):
    """Case H15: neither make's programs nor the kernels connect, or look a name up, beyond this machine."""
    watched = (no_network / "watched").read_text()
    assert "run_notebook.py notebooks/02" in watched and "ipykernel_launcher" in watched
    assert not (no_network / "attempts").exists(), (no_network / "attempts").read_text()


@pytest.mark.parametrize(
    "call, refused",
    [
        ("socket.create_connection(('192.0.2.1', 80), 5)", True),
        ("socket.create_connection(('hub.example.org', 443), 5)", True),
        ("urllib.request.urlopen('http://hub.example.org', timeout=5)", True),
        ("socket.gethostbyname('hub.example.org')", True),
        ("socket.socket(type=socket.SOCK_DGRAM).sendto(b'x', ('192.0.2.1', 53))", True),
        ("socket.create_server(('127.0.0.1', 0)).getsockname()", False),
        (
            "s = socket.create_server(('127.0.0.1', 0)); socket.create_connection(s.getsockname())",
            False,
        ),
        ("socket.socketpair()", False),
    ],
)
def test_the_guard_of_the_network_sees_what_it_must(no_network, tmp_path, call, refused):
    """Else the test before this one could not fail."""
    shutil.copy(no_network / "sitecustomize.py", tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", f"import socket, urllib.request\n{call}"],
        env=environment(PYTHONPATH=str(tmp_path)), capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert ("no network in this test" in done.stderr) is refused is (tmp_path / "attempts").exists()
    assert refused or done.returncode == 0, done.stderr


def test_smoke_makes_every_artefact(smoke):
    assert sorted(p.name for p in (smoke / "build/smoke/notebooks").iterdir()) == [
        f"{n}.ipynb" for n in STORY
    ]
    assert sorted(p.name for p in (smoke / "build/smoke/sequences").iterdir()) == [
        "T008.parquet",
        "T016.parquet",
    ]
    assert len(list((smoke / "build/smoke/embeddings").glob("T*/*.zarr"))) == 6
    figures = smoke / "figures" / "smoke"
    assert (
        {p.stem for p in figures.glob("*.pdf")} == {p.stem for p in figures.glob("*.png")} != set()
    )
    assert not list(figures.glob("published_*")), "no tiny model stands for a published one"
    scores = pd.read_csv(smoke / "data/results/smoke/scores.csv")
    assert set(scores["kind"]) == {"pair", "group"} and set(scores["T"]) == {8, 16}
    assert set(scores["split"]) == {"train", "validation", "test"}
    assert len(scores) == 2 * 3 * (6 + 3)
    for table in ("corpus.csv", "models.csv"):
        assert len(pd.read_csv(smoke / "data/results/smoke" / table)) == 6


def test_the_tree_stays_clean(smoke):
    assert changes(smoke) == ""


def test_a_run_is_published_and_verified(smoke):
    """The site, the archive, and the comparison of the run with another one."""
    for goal, file in (("html", "html/results.html"), ("bundle", "lmd-smoke.zip")):
        status, lines = make(smoke, goal, PROFILE="smoke")
        assert status == 0 and begun(lines) == [], "\n".join(lines)
        assert (smoke / "build/smoke" / file).is_file()
    shutil.copytree(smoke / "data/results/smoke", smoke / "data/results/before")
    assert make(smoke, "verify", PROFILE="smoke", AGAINST="before")[0] == 0
    table = pd.read_csv(smoke / "data/results/before/scores.csv")
    table.loc[0, "r2"] += 0.001
    table.to_csv(smoke / "data/results/before/scores.csv", index=False)
    status, lines = make(smoke, "verify", PROFILE="smoke", AGAINST="before")
    assert status != 0 and any("verify: 1 values of smoke are not as" in line for line in lines)
    shutil.rmtree(smoke / "data/results/before")
    status, lines = make(smoke, "verify", PROFILE="smoke")
    assert status != 0 and any("no table of smoke is committed" in line for line in lines)
    assert changes(smoke) == ""


def test_a_second_run_does_nothing(smoke):
    files = {
        p: p.stat().st_mtime_ns
        for p in smoke.rglob("*")
        if p.is_file() and not {".git", ".locks"} & {*p.parts}
    }
    status, lines = make(smoke, "reproduce", PROFILE="smoke")
    assert status == 0 and begun(lines) == [] and len(lines) == 1
    assert files == {p: p.stat().st_mtime_ns for p in files}


@contextmanager
def edited(path, old, new):
    """A file of the copy with `old` replaced by `new`, for a while; make does not see the way back."""
    text, stat = path.read_text(encoding="utf-8"), path.stat()
    assert old in text, f"{path.name} has no {old!r}"
    path.write_text(text.replace(old, new, 1), encoding="utf-8")
    try:
        yield
    finally:
        path.write_text(text, encoding="utf-8")
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def test_a_changed_style_runs_no_model(smoke):
    with edited(smoke / "notebooks/lmd.mplstyle", "\n", "\n# wider\n"):
        status, lines = make(smoke, "-j2", "reproduce", PROFILE="smoke")
    assert status == 0, "\n".join(lines)
    assert sorted(begun(lines)) == [name for name in STORY if name != "02_embeddings"]


def test_changed_prose_of_a_notebook_runs_that_notebook_alone(smoke):
    with edited(smoke / "notebooks/01_corpus.ipynb", "**Question.**", "**The question.**"):
        status, lines = make(smoke, "reproduce", PROFILE="smoke")
        assert status == 0 and begun(lines) == ["01_corpus"], "\n".join(lines)
        assert begun(make(smoke, "reproduce", PROFILE="smoke")[1]) == []


def test_a_changed_value_runs_only_what_depends_on_it(smoke):
    with edited(smoke / "notebooks/profiles/smoke.yaml", "alpha: 1.0e-6", "alpha: 1.0e-3"):
        status, lines = make(smoke, "reproduce", PROFILE="smoke")
    assert status == 0 and begun(lines) == STORY[3:]
    assert set(pd.read_csv(smoke / "data/results/smoke/scores.csv")["alpha"]) == {1e-3}


def test_a_changed_model_is_embedded_anew_and_only_it(smoke):
    files = [*smoke.glob("build/smoke/embeddings/T*/*.zarr/zarr.json")]
    before = {p: p.stat().st_mtime_ns for p in files}
    assert len(before) == 6
    profile, entry = smoke / "notebooks/profiles/smoke.yaml", "source: build/tiny/albert-base-v2"
    with edited(profile, entry, entry + ", layer: 1"):
        status, lines = make(smoke, "reproduce", PROFILE="smoke")
    assert status == 0, "\n".join(lines)
    assert begun(lines) == STORY[2:]
    changed = {p.parent.name for p in files if p.stat().st_mtime_ns != before[p]}
    assert changed == {"tiny-albert.zarr"}
    models = pd.read_csv(smoke / "data/results/smoke/models.csv")
    assert set(models.loc[models["name"] == "tiny-albert", "layer"]) == {1}


@pytest.fixture(scope="module")
def killed(smoke, tmp_path_factory):
    """A copy whose run up to the scores was killed in each notebook and begun again; how many were."""
    copy = clone(tmp_path_factory.mktemp("killed") / "copy", "tiny")
    goal, build = ["-j4", "data/results/smoke/scores.csv", "PROFILE=smoke"], copy / "build/smoke"
    moments = [
        lambda lines: any((build / "sequences").glob("*T008.parquet")),
        lambda lines: any((build / "embeddings").glob("T*/*")),
        lambda lines: "03_decomposition ..." in lines,
    ]
    for moment in moments:
        process = kill_matrix.start(copy, *goal)
        while not moment(kill_matrix.lines(process)):
            assert process.poll() is None, kill_matrix.lines(process)
            time.sleep(0.02)
        kill_matrix.stop(process)
    status, lines = kill_matrix.run(copy, *goal)
    assert status == 0, "\n".join(lines)
    return copy, len(moments)


def test_a_run_that_was_killed_goes_on_to_the_same_results(meanwhile, killed):
    """`make kills` has many more moments, the figures, Ctrl-C and full disks."""
    copy, kills = killed
    found, expected = kill_matrix.products(copy), meanwhile["products"]
    wanted = {n for n in expected if not kill_matrix.LATER.search(n)}
    assert kills == 3 and len(wanted) == 3 + 2 + 4 + 1 + 6 + 3
    assert {n: found.get(n) for n in wanted} == {n: expected[n] for n in wanted}
    left = [p.name for p in copy.glob("[bdf]*/smoke/**/.*")]
    assert not [name for name in left if re.search(r"\.(tmp|old|tmp\.ipynb)$", name)]


def test_a_failing_notebook_is_kept_aside_and_made_again_once_repaired(smoke):
    notebook = smoke / "notebooks/00_overview.ipynb"
    executed = smoke / "build/smoke/notebooks/00_overview.ipynb"
    text = notebook.read_text()
    broken = json.loads(text)
    [cell for cell in broken["cells"] if cell["cell_type"] == "code"][2]["source"] = [
        "raise RuntimeError('planted')"
    ]
    assert executed.exists()
    with edited(notebook, text, json.dumps(broken)):
        status, lines = make(smoke, "build/smoke/notebooks/00_overview.ipynb", PROFILE="smoke")
    assert status != 0 and not executed.exists()
    line = next(line for line in lines if line.startswith("00_overview.ipynb failed"))
    assert (
        line
        == "00_overview.ipynb failed: RuntimeError: planted; see build/smoke/failed/00_overview.ipynb"
    )
    assert all(later.startswith("make") for later in lines[lines.index(line) + 1 :])
    kept = json.loads((smoke / "build/smoke/failed/00_overview.ipynb").read_text())
    assert "planted" in json.dumps([c.get("outputs") for c in kept["cells"]])

    status, lines = make(smoke, "build/smoke/notebooks/00_overview.ipynb", PROFILE="smoke")
    assert status == 0 and begun(lines) == ["00_overview"] and executed.exists()


@pytest.fixture(scope="module")
def documents():
    """Paragraphs of a few encyclopedia articles, as documents."""
    paragraphs = [line.strip() for text in tiny.articles() for line in text.splitlines()]
    return [p for p in paragraphs if len(p) > 200]


SMALL = "n_train=300 n_validation=40 n_test=40 validation_share=0.2 test_share=0.2 tokenizer=build/tiny/bert-base-uncased"


@pytest.mark.parametrize(
    "profile, lengths, pooling, whole",
    [("paper", [8, 16], "padded_mean", True), ("paper_corrected", [8], "mean", False)],
)
def test_every_architecture_of_the_paper_on_a_parquet_corpus(
    copy, documents, tmp_path, profile, lengths, pooling, whole
):
    """Both profiles of the paper on twelve folders: the authors' choices, and this project's."""
    assert len(PAPER) == 12
    pd.DataFrame({"text": documents}).to_parquet(tmp_path / "corpus.parquet")
    settings = {
        "PROFILE": profile,
        "MODELS": " ".join(f"build/tiny/{name}" for name in PAPER),
        "CORPUS": tmp_path / "corpus.parquet",
        "RUN": f"twelve-{profile}",
    }
    settings["SET"] = f"lengths={lengths}".replace(" ", "") + f" {SMALL}"
    target = f"data/results/twelve-{profile}/scores.csv"
    status, lines = make(copy, "reproduce" if whole else target, **settings)
    expected = STORY if whole else STORY[1:4]
    assert status == 0 and begun(lines) == expected, "\n".join(lines)
    scores = pd.read_csv(copy / f"data/results/twelve-{profile}/scores.csv")
    assert set(scores["target"]) == set(PAPER) and set(scores["pooling"]) == {pooling}
    assert len(scores) == len(lengths) * 3 * (12 * 11 + 12)
    assert scores["r2"].notna().all() and (scores["r2"] <= 1).all()
    assert changes(copy) == ""


def test_own_models_and_text_from_another_folder(copy, documents, tmp_path):
    """Two folders under their own names, and a .txt file, both relative to where make was called."""
    (tmp_path / "own.txt").write_text("\n".join(documents), encoding="utf-8")
    for name in ("roberta-base", "gpt2"):
        shutil.copytree(ROOT / "build/tiny" / name, tmp_path / "models" / name)
    given = {
        "MODELS": "mine=models/roberta-base ./models/gpt2",
        "CORPUS": "own.txt",
        "CALLER": tmp_path,
    }
    status, lines = make(
        copy, "data/results/custom/scores.csv", SET=f"lengths=[8] {SMALL}", **given
    )
    assert status == 0 and begun(lines) == STORY[1:4], "\n".join(lines)
    scores = pd.read_csv(copy / "data/results/custom/scores.csv")
    assert set(scores["target"]) == {"mine", "gpt2"}
    assert len(scores) == 3 * (2 + 2), "of two models, a group is a pair: each has its own row"


@pytest.mark.parametrize("profile", ["paper", "paper_corrected"])
def test_a_hub_profile_says_what_it_needs_and_stops_when_the_hub_is_out_of_reach(copy, profile):
    status, lines = make(copy, "reproduce", PROFILE=profile)
    assert status != 0 and begun(lines) == []
    assert any("12 models, about 6.0 GB of weights" in line for line in lines)
    told = [line for line in lines if not line.startswith("make")]
    assert told[-1].startswith("parameters: the model hub cannot be reached")


@pytest.mark.parametrize(
    "given, fetched",
    [
        ("PROFILE=course", {"all-MiniLM-L6-v2"}),
        ("PROFILE=checkpoints", {"all-MiniLM-L6-v2"}),
        ("PROFILE=checkpoints_large", {"all-MiniLM-L6-v2", "all-mpnet-base-v2"}),
        ("PROFILE=smoke", {"tiny"}),
        ("PROFILE=paper", set()),
        ("PROFILE=my_large", set()),
        ("PROFILE=paper MODELS=a/x,b=build/tiny/gpt2", {"tiny"}),
        ("PROFILE=checkpoints_large MODELS=a/x,a/y", {"all-MiniLM-L6-v2"}),
        ("PROFILE=paper MODELS=a/x,build/models/all-mpnet-base-v2", {"all-mpnet-base-v2"}),
        ("PROFILE=paper SET=tokenizer=build/models/all-MiniLM-L6-v2", {"all-MiniLM-L6-v2"}),
    ],
)
def test_only_the_checkpoints_that_are_named_are_fetched(tmp_path, given, fetched):
    for name in ("Makefile", "requirements.txt", "tools/tiny_models.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    profiles = Path(shutil.copytree(ROOT / "notebooks/profiles", tmp_path / "notebooks/profiles"))
    # a name and a comment decide nothing
    shutil.copy(profiles / "paper.yaml", profiles / "my_large.yaml")
    with open(profiles / "my_large.yaml", "a") as file:
        file.write("# not build/models/all-mpnet-base-v2\n")
    given = dict(item.split("=", 1) for item in given.replace(",", "\x00").split())
    given = {k: v.replace("\x00", " ") for k, v in given.items()}
    status, lines = make(tmp_path, "-n", "parameters", **given)
    assert status == 0, "\n".join(lines)
    found = {name for line in lines for name in re.findall(r"setup: fetching ([\w-]+)", line)}
    found |= {"tiny" for line in lines if "tiny_models.py" in line}
    assert found == fetched


def test_a_bad_value_is_one_line(copy):
    status, lines = make(copy, "reproduce", SET="alpha=1e-3")
    assert status != 0
    assert [line for line in lines if not line.startswith("make")] == [
        "parameters: SET: alpha: '1e-3' is text, a number is needed; write 1.0e-3"
    ]


def test_a_damaged_checkpoint_is_one_line(copy):
    file = copy / "build/models/all-MiniLM-L6-v2/config.json"
    data = file.read_bytes()
    file.unlink()  # it may be a link to the original
    file.write_bytes(data.replace(b"384", b"385"))
    status, lines = make(copy, "reproduce")
    file.write_bytes(data)
    assert status != 0 and begun(lines) == []
    (line,) = [line for line in lines if not line.startswith("make")]
    assert "all-MiniLM-L6-v2/config.json: SHA-256 is" in line and line.endswith(
        "and run make again"
    )


# --- the zoo, with a stand-in for its notebook ------------------------------------------------------

PRETRAIN = """
import os, shutil
import lmd_utils as lmd

assert os.environ["OMP_NUM_THREADS"] == os.environ["MKL_NUM_THREADS"] == "1"
assert lmd.documents_path(profile).is_file()
teachers = {"distilbert": "bert", "distilmbert": "mbert", "distilroberta": "roberta", "longformer": "roberta"}
for name in train:
    folder, teacher = lmd.ROOT / zoo / name, teachers.get(name)
    assert not teacher or (lmd.ROOT / zoo / teacher / "record.json").is_file()
    if name == "electra" and (lmd.ROOT / "broken").exists():
        raise RuntimeError("planted")
    if (folder / "record.json").exists():
        continue
    with lmd.atomic(folder) as temporary:
        shutil.copytree(lmd.ROOT / "data" / "zoo" / "bert", temporary)
"""


@pytest.fixture(scope="module")
def zoo(tmp_path_factory, tiny_models):
    """A copy whose A1_pretrain_zoo copies what is in data/zoo; (copy, make zoo in it: status, lines)."""
    copy = clone(tmp_path_factory.mktemp("zoo") / "copy", "tiny")
    literals = "profile = 'course'\nzoo = 'data/zoo'\ntrain = []\nsteps = 30"
    cells = [new_code_cell(literals, metadata={"tags": ["parameters"]}), new_code_cell(PRETRAIN)]
    nbformat.write(new_notebook(cells=cells), copy / "notebooks/A1_pretrain_zoo.ipynb")
    return copy, lambda **given: make(
        copy, "zoo", **{"ZOO_PROFILE": "smoke", "ZOO_SET": "steps=3"} | given
    )


def test_a_failed_zoo_is_not_published_and_goes_on_where_it_was(zoo):
    copy, make_zoo = zoo
    (copy / "broken").touch()
    shutil.rmtree(copy / "data/zoo/albert")  # what is there, or not, is no reason not to train
    status, lines = make_zoo()
    assert status != 0 and not (copy / "build/zoo-custom/published").exists()
    subprocess.run(["git", "checkout", "-q", "--", "data/zoo"], cwd=copy, check=True)
    (copy / "broken").unlink()
    done = {line.split()[1] for line in lines if " done in " in line and line.startswith("A1_")}
    failed = [line for line in lines if " failed: " in line]
    assert failed and all(line.startswith("A1_pretrain_zoo.ipynb ") for line in failed)

    status, lines = make_zoo()
    assert status == 0, "\n".join(lines)
    again = begun(lines)
    assert {f"A1_pretrain_zoo {name}" for name in parameters.zoo_models()} - {
        f"A1_pretrain_zoo {name}" for name in done
    } == set(again)
    for student, teacher in (("distilbert", "bert"), ("longformer", "roberta")):
        names = [line.split()[1] for line in lines if line.startswith("A1_")]
        assert (
            student not in names or teacher in done or names.index(teacher) < names.index(student)
        )
    assert lines[-1].startswith("build/zoo-custom/published: 13 models")
    assert lines[-1].endswith(" MB; 79 files changed")
    lmd.load_tokenizer(copy / "build/zoo-custom/published/bert")
    assert changes(copy).split() == ["M", "notebooks/A1_pretrain_zoo.ipynb"]


def test_a_zoo_that_is_there_is_not_trained_again(zoo):
    copy, make_zoo = zoo
    for path in (copy / "notebooks").glob("*.ipynb"):
        os.utime(path)  # as a checkout does
    status, lines = make_zoo()
    assert status == 0 and [name for name in begun(lines) if name != "01_corpus"] == []
    assert lines[-1].endswith("; nothing changed")
    status, lines = make_zoo()
    assert status == 0 and len(lines) == 1, "\n".join(lines)
    (copy / "build/zoo-custom/models/bert/record.json").unlink()
    status, lines = make_zoo()
    assert begun(lines) == ["A1_pretrain_zoo bert", "A1_pretrain_zoo distilbert"]


def test_bad_parameters_of_the_zoo_are_one_line(zoo):
    status, lines = zoo[1](ZOO_SET="stps=3")
    assert status != 0
    assert [line for line in lines if not line.startswith("make")] == [
        "parameters: ZOO_SET: unknown parameter 'stps'; did you mean 'steps'?"
    ]


@pytest.mark.parametrize(
    "given, target",
    [
        ({}, "build/zoo/models data/zoo"),
        ({"ZOO_SET": "steps=3"}, "build/zoo-custom/models build/zoo-custom/published"),
        ({"ZOO_PROFILE": "smoke"}, "build/zoo-custom/models build/zoo-custom/published"),
        ({"ZOO_PROFILE": "smoke", "ZOO": "x"}, "build/zoo-custom/models x"),
    ],
)
def test_only_the_zoos_own_settings_replace_the_committed_models(zoo, given, target):
    settings = [
        f"{k}={v}" for k, v in ({"VENV": sys.prefix, "READY": "requirements.txt"} | given).items()
    ]
    done = subprocess.run(
        ["make", "-p", "-q", "help", *settings],
        cwd=zoo[0], env=environment(), capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    found = dict(re.findall(r"^(ZOO|ZOO_BUILD) :?\??= (.*)$", done.stdout, re.MULTILINE))
    assert f"{found['ZOO_BUILD']}/models {found['ZOO']}" == target


@pytest.mark.parametrize("target", ["reproduce", "test"])
def test_no_other_target_trains(zoo, target):
    status, lines = make(zoo[0], "-n", target)
    assert status == 0 and not [line for line in lines if "ZOO" in line or "/A1_bert" in line]
    assert target == "test" or any("A1_pretrain_zoo.ipynb build/course" in line for line in lines)


# --- set-up, with a stand-in for Python and pip ---------------------------------------------------

STAND_IN = """#!/bin/sh
case "$*" in "tools/lock.py --once"*) shift 4; exec "$@" ;; esac
echo "$(basename "$0") $*" >> {log}
case "$*" in
  "-c import sys"*) exit {unsupported} ;;
  "-m venv"*) for last; do :; done; mkdir -p "$last/bin"; cp "$0" "$last/bin/python"; touch "$last/pyvenv.cfg" ;;
  "-m pip install"*) test ! -e {broken} ;;
esac
"""


@pytest.fixture
def setup(tmp_path):
    """Run `make .venv/...` of a copy with a stand-in for Python; (status, lines, calls of the stand-in)."""
    for name in ("Makefile", "requirements.txt"):
        shutil.copy(ROOT / name, tmp_path)
    log, broken = tmp_path / "calls", tmp_path / "broken"

    def run(unsupported=0, breaks=False, python=None):
        log.write_text("")
        broken.touch() if breaks else broken.unlink(missing_ok=True)
        stand_in = tmp_path / "python3.11"
        stand_in.write_text(STAND_IN.format(log=log, broken=broken, unsupported=unsupported))
        stand_in.chmod(stand_in.stat().st_mode | stat.S_IEXEC)
        command = [
            "make",
            "setup",
            f"PYTHON={python or stand_in}",
            f"VENV={tmp_path}/env",
            "MINILM=requirements.txt",
        ]
        done = subprocess.run(
            command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=60
        )
        return done.returncode, (done.stdout + done.stderr).splitlines(), log.read_text()

    return run


@pytest.mark.parametrize("python", [None, "no-such-python", "/nowhere/python3"])
def test_an_unsupported_or_missing_python_is_one_line(setup, python):
    status, lines, calls = setup(unsupported=1, python=python)
    assert status != 0 and "venv" not in calls
    (line,) = [line for line in lines if not line.startswith("make")]
    assert "3.11, 3.12 or 3.13" in line and "make setup PYTHON=" in line


def test_set_up_happens_once_and_follows_the_pins(setup, tmp_path):
    status, _, calls = setup()
    assert status == 0 and "-m venv" in calls and "-m pip install" in calls
    assert setup()[0] == 0 and setup()[2] == ""
    os.utime(tmp_path / "requirements.txt")
    assert setup()[2] == ""
    with open(tmp_path / "requirements.txt", "a") as file:
        file.write("# another pin\n")
    status, _, calls = setup()
    assert status == 0 and "-m venv" not in calls and "-m pip install" in calls


def test_an_interrupted_set_up_is_not_taken_for_done(setup):
    assert setup(breaks=True)[0] != 0
    status, _, calls = setup()
    assert status == 0 and "-m venv --clear" in calls and "-m pip install" in calls
    assert setup()[2] == ""
