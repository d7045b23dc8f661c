"""The committed notebooks, executed again: every printed result must be what is committed."""

import json
import re
import subprocess
import sys
import warnings

import pytest
from clone import clone, environment
from conftest import ROOT

pytestmark = pytest.mark.notebook
# What these embed for themselves takes minutes; they are checked where `make reproduce` has made it.
OWN_VECTORS = {"05_how_sure": "how_sure", "06_structure": "layers"}


def test_committed_outputs_are_what_the_notebooks_print(tmp_path):
    """All notebooks in order under nbval, in a copy; embeddings of an earlier run are used if they still fit."""
    folder = clone(tmp_path / "copy", "models", "course")
    notebooks = sorted((folder / "notebooks").glob("[0-9A][0-9]*.ipynb"))
    for name, vectors in OWN_VECTORS.items():
        if not (ROOT / "build" / "course" / vectors).is_dir():
            notebooks.remove(folder / "notebooks" / f"{name}.ipynb")
            warnings.warn(f"{name} was left out: its vectors are not there", stacklevel=1)
    command = [sys.executable, "-m", "pytest", "-q", "--nbval", "--nbval-current-env"]
    command += ["--nbval-cell-timeout=1800", *map(str, notebooks)]
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment(PYTHONPATH=str(folder), HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-20000:]
    cells = [
        c for p in notebooks for c in json.loads(p.read_text())["cells"] if c["cell_type"] == "code"
    ]
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) == len(cells) > 0
    assert not (ROOT / "notebooks" / "build").exists()
