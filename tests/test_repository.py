"""The repository as a whole: pins, commands of the README, profiles, hygiene of what is committed."""

import ast
import json
import re
import subprocess
import sys
import textwrap
import tomllib

import check_notebooks
import parameters
import pytest
import readme_results
import yaml
from clone import environment
from conftest import ROOT

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
PROFILES = sorted(p.stem for p in (ROOT / "notebooks" / "profiles").glob("*.yaml"))
PAGES = ["README.md", "CONTRIBUTING.md", "data/DATASETS.md", "figures/FIGURES.md"]
PAGES += ["notebooks/README.md"]
PAGES = [ROOT / page for page in PAGES if (ROOT / page).exists()]


def committed():
    """Files that git tracks or would track; every file of a copy without git."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        pytest.skip("not a git checkout")
    return [ROOT / name for name in done.stdout.splitlines() if (ROOT / name).is_file()]


def requirements(name):
    """Requirement lines of a file, without comments and options."""
    lines = [line.split("#")[0].strip() for line in (ROOT / name).read_text().splitlines()]
    return [line for line in lines if line and not line.startswith("-")]


@pytest.mark.parametrize("path", sorted(ROOT.glob("requirements*.txt")), ids=lambda p: p.name)
def test_every_requirement_is_pinned_exactly(path):
    names = requirements(path.name)
    assert names and all(
        re.fullmatch(r"[\w.\-]+==[\w.]+( --hash=sha256:[0-9a-f]{64})?", r) for r in names
    )
    assert len({r.split("==")[0].lower() for r in names}) == len(names)


def test_checkpoint_packages_have_hashes():
    for model in json.loads((ROOT / "data/checkpoints.json").read_text()).values():
        assert all("--hash=sha256:" in r for r in requirements(model["requirements"]))
        assert all(re.fullmatch(r"[0-9a-f]{64}", h) for h in model["files"].values())
        assert not [f for f in model["files"] if f.endswith((".py", ".bin", ".pkl", ".pt"))]


def test_conda_and_pip_cannot_drift():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    conda = [d for d in environment["dependencies"] if isinstance(d, str)]
    assert [d.split("=")[0] for d in conda] == ["python", "pip"]
    assert environment["dependencies"][-1] == {"pip": ["-r requirements.txt"]}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["project"]["dependencies"] == []
    assert all("==" in r for r in project["build-system"]["requires"])


def test_installed_versions_are_the_pinned_ones():
    from importlib.metadata import version

    for requirement in requirements("requirements.txt"):
        name, pinned = requirement.split("==")
        assert version(name).split("+")[0] == pinned, name


def imported(path):
    """Top-level names of the packages that a module or notebook imports."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".ipynb":
        cells = json.loads(text)["cells"]
        text = "\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "code")
    found = re.findall(r"^\s*(?:import|from) +([\w.]+)", text, re.MULTILINE)
    return {name.split(".")[0] for name in found}


def test_every_import_has_a_pin():
    packages = {"sklearn": "scikit-learn", "yaml": "PyYAML", "google": "protobuf"}
    packages |= {"sentence_transformers": "sentence-transformers", "bs4": "beautifulsoup4"}
    ours = {p.stem for p in ROOT.rglob("*.py") if "build" not in p.parts and ".venv" not in p.parts}
    sources = [
        ROOT / "lmd_utils.py",
        *NOTEBOOKS,
        *ROOT.glob("tools/*.py"),
        *ROOT.glob("tests/*.py"),
    ]
    names = set().union(*map(imported, sources)) - ours - set(sys.stdlib_module_names)
    files = ("requirements.txt", "requirements-bench.txt", "requirements-site.txt")
    pinned = {r.split("==")[0].lower() for file in files for r in requirements(file)}
    assert {packages.get(n, n).lower() for n in names} - pinned == set()


def makefile_targets():
    text = (ROOT / "Makefile").read_text()
    return set(re.search(r"^\.PHONY: (.*)$", text, re.MULTILINE)[1].split())


def makefile_variables():
    """What the command line may set."""
    text = (ROOT / "Makefile").read_text()
    return set(re.findall(r"^(\w+) \?=", text, re.MULTILINE))


def test_make_alone_prints_help_with_every_target():
    done = subprocess.run(["make", "-s"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    listed = set(re.findall(r"^  make ([\w-]+) ", done.stdout, re.MULTILINE))
    assert listed == makefile_targets() - {"parameters"}
    assert all(profile in done.stdout for profile in PROFILES)


def test_make_knows_what_the_tables_and_the_appendices_are_made_from():
    """The tables print those of 05 and 06, too; 08 and 10 read the zoo, and the documents of 01."""
    command = ["make", "-p", "-q", "help", f"VENV={sys.prefix}", "READY=requirements.txt"]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True)
    needed = dict(re.findall(r"^(\S+): (.*)$", done.stdout, re.MULTILINE))
    folder = "build/course/notebooks/"
    tables = needed["figures/course/tables/all.tex"].split()
    for name in ("04_figures", "05_how_sure", "06_structure"):
        assert f"{folder}{name}.ipynb" in tables
    made_from = needed[f"{folder}07_embedding_coupling.ipynb"].split(" | ")[0].split()
    tables = {p.relative_to(ROOT).as_posix() for p in ROOT.glob("data/results/coupling/*.csv")}
    assert tables | {"tools/coupling.py", "tools/pretraining.py"} <= {*made_from} and tables
    for name in ("07_embedding_coupling", "08_solutions", "10_your_models"):
        made_from = needed[f"{folder}{name}.ipynb"].split(" | ")[0].split()
        assert {"data/zoo/MANIFEST.json", f"{folder}01_corpus.ipynb"} <= {*made_from}


@pytest.mark.parametrize(
    "goal, given, held",
    [
        ("coupling", [], "coupling"),
        ("coupling", ["COUPLING_SET=steps=3"], "coupling-custom"),
        ("zoo", ["ZOO_SET=steps=3"], "zoo-custom"),
        ("reproduce", ["RUN=mine"], "mine"),
        ("params", [], ""),
    ],
)
def test_make_holds_the_folder_that_a_goal_writes(goal, given, held):
    command = ["make", "-p", "-q", goal, f"VENV={sys.prefix}", "READY=requirements.txt", *given]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True)
    assert (
        re.findall(r"^LOCKS := (.*)$", done.stdout, re.MULTILINE)[-1] == held
    )  # after its sub-makes


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_commands_of_the_pages_exist(page):
    """Every `make …` of a page names targets of the Makefile and profiles that are there."""
    text = page.read_text(encoding="utf-8")
    lines = re.findall(r"^ {4}(.*)", text, re.MULTILINE) + re.findall(r"`([^`\n]+)`", text)
    for block in re.findall(r"^```\w*\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        lines += block.splitlines()
    lines = [line.strip().removeprefix("$ ") for line in lines]
    commands = [line.split("#")[0] for line in lines if line.startswith("make ")]
    for command in commands:
        bare = re.sub(r"""\w+=("[^"]*"|'[^']*'|\S*)""", "", command)
        for word in bare.split()[1:]:
            file = word.startswith(("-", "build/", "data/"))
            assert file or word in makefile_targets(), f"{page.name}: {command}"
        for variable in re.findall(r"(\w+)=", re.sub(r'"[^"]*"', "", command)):
            assert variable in makefile_variables(), f"{page.name}: {command}"
        for profile in re.findall(r"PROFILE=([\w.]+)", command):
            assert profile in {*PROFILES, "name"}, f"{page.name}: {command}"


def test_the_readme_shows_the_two_commands():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "make reproduce" in text and "make test" in text


def test_the_tables_of_the_readme_are_those_of_the_results():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for block in (readme_results.block, readme_results.bench_block, readme_results.scale_block):
        assert block() in text, block.__name__


def test_the_python_of_the_readme_runs(tiny_models):
    """As written, with tiny models for its folders and short texts."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    snippets = re.findall(
        r"^ {4}import lmd_utils as lmd\b.*\n(?:(?: {4}.*)?\n)+", text, re.MULTILINE
    )
    assert snippets
    names = {"a": "bert-base-uncased", "b": "distilroberta-base"}
    for snippet in snippets:
        code = re.sub(
            r"folder/([ab])\b", lambda m: str(tiny_models / names[m[1]]), textwrap.dedent(snippet)
        )
        assert "folder/" not in code
        given = {"texts": [f"{i} of {i * i % 97}" for i in range(300)]}
        for statement in ast.parse(code).body:
            if isinstance(statement, ast.Expr):
                table = eval(compile(ast.Expression(statement.value), "README.md", "eval"), given)  # noqa: S307
                assert table.shape == (2, 2) and table.notna().to_numpy().sum() == 2
            else:
                exec(compile(ast.Module([statement], []), "README.md", "exec"), given)
        assert given["train"].n == 240 and given["test"].n == 60


def test_files_that_pages_link_to_exist():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            assert ":" in target or (page.parent / target).exists(), f"{page.name}: {target}"


@pytest.mark.parametrize("profile", PROFILES)
def test_profile_is_valid_and_whole(profile):
    _, literals = parameters.all_declared()
    values = parameters.load_profile(profile)
    parameters.check(profile, values, literals)
    assert set(values) == set(literals) - {"profile"}


def test_paper_profiles_are_the_paper():
    paper, corrected = (parameters.load_profile(n) for n in ("paper", "paper_corrected"))
    assert len(paper["models"]) == 12 and paper["models"] == corrected["models"]
    assert paper["lengths"] == [16, 32, 64, 128, 256, 512]
    assert [paper[k] for k in ("n_train", "n_validation", "n_test", "alpha")] == [
        128000,
        12800,
        12800,
        1e-6,
    ]
    differ = {k: (paper[k], corrected[k]) for k in paper if paper[k] != corrected[k]}
    assert differ == {
        "pooling": ("padded_mean", "mean"),
        "sequences": ("decoded", "spans"),
        "selection": ("first", "sampled"),
        "split_by": ("position", "shuffled"),
    }
    for model in paper["models"]:
        assert re.fullmatch(r"[0-9a-f]{40}", model.get("revision", "0" * 40))


def test_notebooks_hold_the_default_profile():
    notebooks, literals = parameters.all_declared()
    for stem, declared in notebooks.items():
        for name, value in declared.items():
            assert value == literals[name], f"{stem}: {name} differs between notebooks"
    assert literals.pop("profile") == "course"
    assert literals == parameters.load_profile("course")


def test_the_appendix_trains_nothing_unless_told_to():
    literals = parameters.appendices()["A1_pretrain_zoo"]
    assert [literals[k] for k in ("profile", "zoo", "train")] == ["course", "data/zoo", []]


def test_the_default_profile_is_the_twelve_in_the_order_of_the_paper():
    course, paper = (parameters.load_profile(name) for name in ("course", "paper"))
    twelve = [m for m in course["models"] if m.get("role") != "control"]
    assert [m["after"] for m in twelve] == [m["name"] for m in paper["models"]]
    assert all(m["source"] == f"data/zoo/{m['name']}" for m in twelve)
    assert [m["name"] for m in course["models"][12:]] == [
        "bert-seed",
        "bert-random",
        "roberta-random",
    ]
    other = parameters.load_profile("checkpoints")
    differ = {k for k in course if course[k] != other[k]}
    assert differ == {"models", "keep_documents"}, "the sequences must be the same"


def test_every_model_of_the_zoo_is_listed_and_whole():
    manifest = json.loads((ROOT / "data/zoo/MANIFEST.json").read_text())
    assert {name: m["after"] for name, m in manifest["models"].items()} == parameters.zoo_models()
    for name in parameters.zoo_models():
        parameters.verify_zoo(ROOT / "data" / "zoo" / name)


def test_there_are_notebooks():
    assert [p.name[:2] for p in NOTEBOOKS][:5] == ["00", "01", "02", "03", "04"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_notebook_hygiene(path):
    assert list(check_notebooks.problems(path)) == []


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_links_between_notebooks_exist(path):
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    text = "\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "markdown")
    links = re.findall(r"\]\(([\w./]+\.(?:ipynb|md))\)", text)
    assert links and all((path.parent / link).exists() for link in links), links
    assert path.name not in links


def test_no_machine_path_in_what_is_committed():
    kinds = {".py", ".md", ".yml", ".yaml", ".txt", ".toml", ".sh", ".json", ".cff", ".csv", ""}
    for path in committed():
        if path.suffix in kinds and path.parent.name != "tests":
            found = check_notebooks.LOCAL.search(path.read_text(encoding="utf-8", errors="replace"))
            assert not found, f"{path.relative_to(ROOT)}: {found[0]}"


def test_nothing_large_or_made_is_committed():
    for path in committed():
        name = path.relative_to(ROOT).as_posix()
        assert path.stat().st_size < 5_000_000, name
        assert not name.startswith(("build/", ".venv/")), name
