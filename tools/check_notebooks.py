"""Hygiene of the committed notebooks: one line per fault, non-zero status when there is one.

    python tools/check_notebooks.py [NOTEBOOK ...]   # all of notebooks/ when none is named

A notebook is committed as one clean run of the default profile left it: counts 1..N, outputs
kept, nothing in them that another machine or minute would print differently. All open alike.
"""

import json
import re
import sys
from pathlib import Path

from parameters import ROOT, declared

MOST_LINES = 30  # of a code cell
USUAL_LINES = 25  # of nine code cells in ten
OPENING = (
    (r"# (\d|A)\d · \S.*", "a title `# NN · Title`"),
    (r"\*\*Question\.\*\* \S.*", "`**Question.** …`"),
    (r"\*\*You will be able to\*\* \S.*", "`**You will be able to** …`, one sentence"),
    (r"\| \| \|\n\|[ :-]+\|[ :-]+\|", "a table with an empty header"),
    (r"\| time \| \S.*\|", "the row time"),
    (r"\| reads \| \S.*\|", "the row reads"),
    (r"\| writes \| \S.*\|", "the row writes"),
    (r"\| previous / next \| \S.*\|", "the row previous / next"),
)
LOCAL = re.compile(
    r"(?<![\w.:/])/(?:home|Users|root|work|tmp|var|opt|private)/\w[\w./-]*|\b[A-Z]:\\\\?\w+\\"
)
FLEETING = re.compile(r"\b0x[0-9a-f]{6,}|\d(?:it|s)/(?:it|s)\]?|\d%\|")


def text_of(output):
    """All text of an output that nbval or a reader would see."""
    parts = [output.get("text", "")]
    parts += [v for k, v in output.get("data", {}).items() if k.startswith("text/")]
    return "\n".join("".join(p) for p in parts)


def opening_problems(cells):
    """One line for each part of the common opening that is missing or out of its place."""
    kinds = ["parameters" in c["metadata"].get("tags", []) or c["cell_type"] for c in cells[:4]]
    if kinds != ["markdown", "code", "markdown", True]:
        yield "does not open with Markdown, the set-up cell, Markdown and the parameters cell"
        return
    text, at = "".join(cells[0]["source"]), 0
    for i, (pattern, what) in enumerate(OPENING):
        found = re.compile(f"^{pattern}$", re.MULTILINE).search(text, at)
        if not found or (i == 0 and found.start() > 0):
            yield f"the opening lacks {what}, or has it out of order"
        at = found.end() if found else at
    lines = "".join(cells[2]["source"]).strip().splitlines()
    if lines[0].strip() != "## Parameters" or not any(line.strip() for line in lines[1:]):
        yield "the parameters cell does not follow `## Parameters` and a sentence"


def problems(path):
    """One line for each fault of the notebook at `path`."""
    notebook = json.loads(Path(path).read_text(encoding="utf-8"))
    cells = notebook["cells"]
    code = [c for c in cells if c["cell_type"] == "code" and "".join(c["source"]).strip()]
    markdown = [c for c in cells if c["cell_type"] == "markdown"]
    tags = [tag for c in cells for tag in c["metadata"].get("tags", [])]
    ids = [c.get("id") for c in cells]

    counts = [c.get("execution_count") for c in code]
    if counts != list(range(1, len(code) + 1)):
        yield f"execution counts are not 1..{len(code)}: run it through `make notebooks`"
    if not any(c.get("outputs") for c in code):
        yield "outputs are stripped: run it through `make notebooks`"
    if any(c["cell_type"] == "code" and not "".join(c["source"]).strip() for c in cells):
        yield "an empty code cell"
    if notebook["metadata"].get("kernelspec", {}).get("name") != "python3":
        yield "the kernelspec is not python3"
    if None in ids or len(set(ids)) < len(ids):
        yield "cell ids are missing or repeated"
    if len(markdown) < len(code):
        yield f"{len(markdown)} Markdown cells for {len(code)} code cells"
    if tags.count("parameters") != 1:
        yield f"{tags.count('parameters')} cells are tagged parameters, not one"
    if "injected-parameters" in tags or any(
        "papermill" in o["metadata"] for o in [notebook, *cells]
    ):
        yield "traces of papermill: injected parameters or metadata"
    try:
        declared(path)
    except ValueError as error:
        yield str(error)
    yield from opening_problems(cells)
    lengths = sorted(len("".join(c["source"]).splitlines()) for c in code)
    if lengths and lengths[(9 * len(lengths) - 1) // 10] > USUAL_LINES:
        yield f"more than one code cell in ten is longer than {USUAL_LINES} lines"
    for cell in code:
        here = f"cell {cell.get('id')}"
        lines = len("".join(cell["source"]).splitlines())
        if lines > MOST_LINES:
            yield f"{here} has {lines} lines of code, more than {MOST_LINES}"
        for output in cell.get("outputs", []):
            if output["output_type"] == "error":
                yield f"{here}: an error is committed"
            if output.get("name") == "stderr":
                yield f"{here}: text on stderr is committed"
            for pattern, what in (
                (LOCAL, "a path of one machine"),
                (FLEETING, "a timing, bar or address"),
            ):
                if found := pattern.search(text_of(output)):
                    yield f"{here}: {what} is committed: {found[0]}"
    for cell in cells:
        if found := LOCAL.search("".join(cell["source"])):
            yield f"cell {cell.get('id')}: a path of one machine: {found[0]}"


def main():
    paths = [Path(a) for a in sys.argv[1:]] or sorted((ROOT / "notebooks").glob("*.ipynb"))
    faults = [f"{path.name}: {fault}" for path in paths for fault in problems(path)]
    if not paths:
        faults = ["no notebook to check"]
    print(*faults, sep="\n", end="\n" if faults else "")
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()
