"""Derive the students' notebooks from notebooks/08_solutions.ipynb, or mark some that were handed in.

    python tools/make_exercises.py                      # notebooks/exercises/TOPIC.ipynb
    python tools/make_exercises.py --grade FILE.ipynb …  # answers, run in a fresh notebook of their topic

The metadata of a cell of 08_solutions say what it is: exercise = {topic, name, part}. Marking runs
the code that was handed in: do it where that may do no harm.
"""

import re
import sys
import tempfile
from pathlib import Path

import nbformat
from parameters import ROOT
from run_notebook import prepare_environment

import lmd_utils as lmd

SOURCE = ROOT / "notebooks" / "08_solutions.ipynb"
TARGET = ROOT / "notebooks" / "exercises"
HOW = """\
Open this notebook with `make lab`; nothing has to be run before, and no internet connection is needed. \
The cells right below load what is needed and hold the machinery of the checks: run them and go on. \
Write each answer into the cell that holds `...` and run the check below it, which is folded away in \
JupyterLab: it may give the answer away, so leave it shut. It says *not answered yet*, *not right yet* \
and what is off, or *correct*, and never stops the notebook. Before you hand it in: *Restart kernel and \
run all cells*. If you are stuck or done, you find the solutions in \
[08 · Exercises and their solutions](../08_solutions.ipynb)."""
LONGEST = 600  # seconds that a cell of an answer may take
FOLDED = {"hint": "Hint", "lesson": "What it teaches (for when you are done)"}


def about(cell):
    """The entry `exercise` of a cell's metadata, or {}."""
    return cell.metadata.get("exercise", {})


def topics(source):
    """Names of the topics, in order."""
    return list(dict.fromkeys(about(c)["topic"] for c in source.cells if about(c).get("topic")))


def solutions(source):
    """{exercise: code of its solution}."""
    found = [
        c for c in source.cells if c.cell_type == "code" and about(c).get("part") == "solution"
    ]
    return {about(c)["name"]: c.source for c in found}


def for_student(cell, topic, all_topics):
    """A copy of a cell without outputs, its links and headings as the folder exercises/ needs them."""
    part, text = about(cell)["part"], cell.source
    if cell.cell_type == "code":
        new = nbformat.v4.new_code_cell(text)
    else:
        text = re.sub(r"\]\((?=[\w.]+\.(?:ipynb|md)\))", "](../", text)
        if part == "intro":
            others = [f"[{t}]({t}.ipynb)" if t != topic else t for t in all_topics]
            text = f"{text.removeprefix('#')}\n\n{HOW}\n\nTopics: {', '.join(others)}."
        if part in FOLDED:
            text = re.sub(r"^\*\*.*?\*\* ", "", text)
            text = f"<details><summary>{FOLDED[part]}</summary>\n\n{text}\n\n</details>"
        new = nbformat.v4.new_markdown_cell(text)
    metadata = {"exercise": dict(about(cell))}
    if part == "check" or cell.id.startswith("check-"):
        metadata["jupyter"] = {"source_hidden": True}
    new.id, new.metadata = cell.id, nbformat.from_dict(metadata)
    return new


def student_notebook(source, topic):
    """The notebook of one topic: no solutions, the hint before the cell to fill in, no outputs."""
    every, own, last = [], [], []
    for cell in source.cells:
        part = about(cell).get("part")
        if part in ("every", "last"):
            (every if part == "every" else last).append(cell)
        elif about(cell).get("topic") == topic and part != "solution":
            own.append(cell)
    for i, cell in enumerate(own):
        if about(cell)["part"] == "hint":
            own[i - 1], own[i] = own[i], own[i - 1]
    cells = [own[0], *every, *own[1:], *last]
    notebook = nbformat.v4.new_notebook(
        cells=[for_student(c, topic, topics(source)) for c in cells]
    )
    notebook.metadata = nbformat.from_dict(
        {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        }
    )
    return notebook


def all_notebooks(source):
    """{file name: text} of notebooks/exercises."""
    return {
        f"{t}.ipynb": nbformat.writes(student_notebook(source, t)) + "\n" for t in topics(source)
    }


def filled(notebook, answers):
    """`notebook` with {exercise: code} in the place of the skeletons."""
    for cell in notebook.cells:
        if about(cell).get("part") == "skeleton":
            cell.source = answers.get(about(cell)["name"], cell.source)
    return notebook


def answers_of(submitted):
    """{exercise: code} of a notebook: the answer's cell, and cells added since the check before it."""
    answers, code = {}, []
    for cell in submitted.cells:
        if cell.cell_type != "code":
            continue
        part = about(cell).get("part", "skeleton")
        if part == "skeleton":
            code.append(cell.source)
        elif part == "check":
            answers[about(cell)["name"]], code = "\n\n".join(code), []
    return answers


def grade(path):
    """Lines that the checks print of a notebook that was handed in; ValueError when it is none."""
    from nbclient.exceptions import CellTimeoutError, DeadKernelError
    from nbconvert.preprocessors import ExecutePreprocessor

    try:
        answers = answers_of(nbformat.read(path, as_version=4))
    except (OSError, ValueError, AttributeError, KeyError) as error:
        raise ValueError(f"{path}: cannot be read as a notebook ({type(error).__name__})") from None
    source = nbformat.read(SOURCE, as_version=4)
    named = {about(c).get("name"): about(c).get("topic") for c in source.cells}
    found = [named[name] for name in answers if name in named]
    if not found:
        raise ValueError(f"{path}: has no exercise of notebooks/exercises")
    fresh = filled(student_notebook(source, found[0]), answers)
    with tempfile.TemporaryDirectory() as scratch:
        prepare_environment(scratch, {})
        runner = ExecutePreprocessor(kernel_name="python3", allow_errors=True, timeout=LONGEST)
        try:
            runner.preprocess(fresh, {"metadata": {"path": str(TARGET)}})
        except CellTimeoutError:
            raise ValueError(f"{path}: a cell takes longer than {LONGEST} seconds") from None
        except DeadKernelError:
            raise ValueError(f"{path}: its code ends the kernel") from None
    said = [c for c in fresh.cells if about(c).get("part") in ("check", "last") and "outputs" in c]
    text = "".join(o.text for c in said for o in c.outputs if o.get("name") == "stdout")
    return text.splitlines()


def main():
    match sys.argv[1:]:
        case []:
            made = all_notebooks(nbformat.read(SOURCE, as_version=4))
            for name, text in made.items():
                with lmd.atomic(TARGET / name) as temporary:
                    temporary.write_text(text, encoding="utf-8")
            for path in TARGET.glob("*.ipynb"):
                if path.name not in made:
                    path.unlink()
            print(f"{len(made)} notebooks in {TARGET.relative_to(ROOT)}")
        case ["--grade", *paths] if paths:
            refused = []
            for path in map(Path, paths):
                try:
                    for line in grade(path):
                        print(f"{path.name}: {line}", flush=True)
                except ValueError as error:
                    refused.append(str(error))
            if refused:
                sys.exit("make_exercises: " + "\nmake_exercises: ".join(refused))
        case _:
            sys.exit("usage: python tools/make_exercises.py [--grade FILE.ipynb …]")


if __name__ == "__main__":
    main()
