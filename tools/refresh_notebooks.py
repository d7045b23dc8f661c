"""Put the outputs of executed notebooks into the committed ones.

    python tools/refresh_notebooks.py build/PROFILE/notebooks

Only a run of the profile whose values the notebooks hold is taken. Sources stay as they are; the
injected parameters, papermill's metadata and times of execution are left behind; counts are 1..N.
"""

import os
import sys
from pathlib import Path

import nbformat
from parameters import ROOT, declared


def refreshed(source, executed):
    """The notebook `source` with the outputs of `executed`; ValueError when their cells differ."""
    ran = [c for c in executed.cells if "injected-parameters" not in c.metadata.get("tags", [])]
    if [c.source for c in ran] != [c.source for c in source.cells]:
        raise ValueError("its source is not what was run; run `make reproduce` first")
    count = 0
    for cell, done in zip(source.cells, ran, strict=True):
        if cell.cell_type != "code":
            continue
        count += bool(cell.source.strip())
        cell.execution_count = count if cell.source.strip() else None
        cell.outputs = done.outputs
        cell.metadata.pop("execution", None)
        for output in cell.outputs:
            if output.output_type == "execute_result":
                output.execution_count = count
    source.metadata = nbformat.from_dict(
        {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        }
    )
    return source


def main():
    if len(sys.argv) != 2:
        sys.exit("usage: python tools/refresh_notebooks.py FOLDER")
    for path in sorted((ROOT / "notebooks").glob("[0-9A][0-9]*.ipynb")):
        executed = nbformat.read(Path(sys.argv[1], path.name), as_version=4)
        given = dict(executed.metadata.papermill.parameters)
        if "scheduler" in given:
            given["scheduler"] = ""  # where it ran decides no result
        if given != declared(path):
            differ = [k for k, v in declared(path).items() if given.get(k) != v]
            sys.exit(
                f"{path.name}: run with other values of {', '.join(differ)} than its own literals"
            )
        try:
            notebook = refreshed(nbformat.read(path, as_version=4), executed)
        except ValueError as error:
            sys.exit(f"{path.name}: {error}")
        times = path.stat()
        nbformat.write(notebook, path)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))  # what make runs has not changed
        print(f"{path.name}: outputs refreshed")


if __name__ == "__main__":
    main()
