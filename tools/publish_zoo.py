"""Put trained models where the repository keeps them, with a list of their SHA-256 sums.

    python tools/publish_zoo.py FROM TO   # as `make zoo` does: build/zoo/models data/zoo

FROM must hold every model of profile course that lies in data/zoo, whole. Each file of TO is replaced
by renaming, and only if it differs; TO/MANIFEST.json, which loading checks, comes last. A file or
folder that the old list named and the new one does not is removed; others in TO are left alone.
"""

import hashlib
import json
import os
import sys
from pathlib import Path

from parameters import NEEDED, zoo_models
from safetensors import SafetensorError, safe_open

REFUSED = (".bin", ".pt", ".pkl", ".py")  # pickles and code
LARGEST = 5_000_000  # bytes of a file that the repository takes


def files_of(folder):
    """Files of a model's folder, in order; ValueError in one line for one that is missing or no good."""
    for name in NEEDED:
        if not (folder / name).is_file():
            raise ValueError(f"{folder / name} is missing; make zoo trains what is not there")
        try:
            if name.endswith(".json"):
                json.loads((folder / name).read_text(encoding="utf-8"))
            elif name.endswith(".safetensors"):
                with safe_open(folder / name, framework="numpy") as weights:
                    weights.keys()
        except (ValueError, SafetensorError) as error:
            raise ValueError(f"{folder / name} cannot be read: {error}") from None
    record = json.loads((folder / "record.json").read_text(encoding="utf-8"))
    weights = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    if record.get("weights_sha256") != weights:
        raise ValueError(f"{folder}: the weights are not those of record.json; delete the folder")
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    for path in files:
        if path.suffix in REFUSED or path.name.startswith(".") or path.parent != folder:
            raise ValueError(f"{path} does not belong into a published model; delete it")
        if path.stat().st_size > LARGEST:
            raise ValueError(f"{path} has more than {LARGEST:,} bytes")
    return files


def put(data, path):
    """Write bytes to a path by way of a temporary name, if they are not there already; whether they were not."""
    if path.is_file() and path.read_bytes() == data:
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(data)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return True


def listed(folder):
    """Files that the list in a folder names; none when there is no list of ours."""
    try:
        return list(json.loads((folder / "MANIFEST.json").read_text(encoding="utf-8"))["files"])
    except (OSError, ValueError, KeyError, TypeError):
        return []


def check_teachers(source, models):
    """ValueError when a student or heir comes of other weights than those that are published with it."""
    for name in models:
        recipe = json.loads((source / name / "record.json").read_text(encoding="utf-8"))["recipe"]
        if teacher := recipe.get("teacher"):
            weights = (source / teacher / "model.safetensors").read_bytes()
            if recipe["teacher_sha256"] != hashlib.sha256(weights).hexdigest():
                raise ValueError(f"{source / name} was not trained from this {teacher}; delete it")


def publish(source, target, models=None):
    """Make `target` hold the models of `source` and their list; a line that says what was done.

    `models` is {name: the model that it comes after}, of the zoo's if it is left out.
    """
    models = models or zoo_models()
    data = {
        path.relative_to(source).as_posix(): path.read_bytes()
        for name in models
        for path in files_of(source / name)
    }
    check_teachers(source, models)
    manifest = {
        "models": {name: {"after": after} for name, after in models.items()},
        "files": {name: hashlib.sha256(content).hexdigest() for name, content in data.items()},
    }
    gone = [target / name for name in listed(target) if name not in data]
    changed = sum(put(content, target / name) for name, content in data.items())
    for path in gone:
        if path.resolve().is_relative_to(target.resolve()):
            path.unlink(missing_ok=True)
            if path.parent.is_dir() and not any(path.parent.iterdir()):
                path.parent.rmdir()
    changed += put(f"{json.dumps(manifest, indent=1)}\n".encode(), target / "MANIFEST.json")
    size = sum(map(len, data.values())) / 1e6
    done = f"{changed} files changed" if changed else "nothing changed"
    return f"{target}: {len(models)} model{'s' * (len(models) > 1)}, {size:.1f} MB; {done}"


def main():
    if len(sys.argv) != 3:
        sys.exit("usage: python tools/publish_zoo.py FROM TO")
    try:
        print(publish(Path(sys.argv[1]), Path(sys.argv[2])))
    except (OSError, ValueError) as error:
        sys.exit(f"publish_zoo: {error}")


if __name__ == "__main__":
    main()
