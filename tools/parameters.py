"""Turn a profile and its overrides into one checked parameter file per notebook.

    python tools/parameters.py write [NOTEBOOK]      # build/RUN/params/NOTEBOOK.yaml, each only when it changes
    python tools/parameters.py preflight [NOTEBOOK]  # what the hub must deliver and how much space it takes
    python tools/parameters.py zoo FOLDER            # FOLDER/params/A1_MODEL.yaml, one per model of the zoo
    python tools/parameters.py list                  # every parameter of every notebook, with its meaning

NOTEBOOK: only what this one needs. The first two read PROFILE, RUN, MODELS, CORPUS, SET and
SCHEDULER, as `make` exports them:

    PROFILE  name of a file in notebooks/profiles (without .yaml)
    RUN      name of the run: the folder under build/, data/results/ and figures/
    MODELS   "id-or-folder name=folder ...", instead of the profile's models
    CORPUS   a .txt, .jsonl or .parquet file, or hub:ID, instead of the profile's corpus
    SET      "key=value ...", values as in YAML
    SCHEDULER  where shards and moments are made; checked here and handed on by run_notebook.py, so
               that it makes no parameter file new: the results are the same

The third reads ZOO_PROFILE, whose documents are read, and ZOO_SET, like SET, for A1_pretrain_zoo.

Names and types are checked against the literals of the notebooks' parameters cells. Anything
wrong ends the program with one line and a non-zero status.
"""

import ast
import csv
import difflib
import hashlib
import io
import json
import math
import os
import re
import shlex
import shutil
import socket
import sys
import textwrap
import tokenize
from pathlib import Path
from urllib.parse import urlsplit

import yaml
from get_checkpoints import listed, verify, verify_files
from lock import lives, to_the_end

ROOT = Path(__file__).resolve().parent.parent
PROFILES = ROOT / "notebooks" / "profiles"
PRETRAIN = "A1_pretrain_zoo"
NEEDED = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
NEEDED += ("record.json", "README.md")  # the files of a model of the zoo
HUB_ID = re.compile(r"[\w\-][\w.\-]*(/[\w\-][\w.\-]*)?")
NAME = re.compile(r"[\w\-][\w.\-]*(/[\w\-][\w.\-]*)?")
# folders of build/, data/results/ or figures/ that belong to no run
SHARED = (
    "bench",
    "coupling",
    "coupling-custom",
    "models",
    "packages",
    "published",
    "reliability",
    "tiny",
    "zoo",
    "zoo-custom",
)
CORPUS_FILES = (".txt", ".jsonl", ".parquet")
LEFT = re.compile(r"\..*\.(\d+)\.(?:tmp|old|tmp\.ipynb)")
SAVED = re.compile(r'^lmd\.save_figure\(.*, profile, "([^"]+)"\)', re.MULTILINE)

# tables that 05_how_sure writes for any profile
HOW_SURE = ("coverage", "ranks", "groups", "curves", "published", "permutations", "nulls")

CHOICES = {
    "sequences": ("spans", "decoded"),
    "selection": ("sampled", "first"),
    "split_by": ("shuffled", "position"),
    "pooling": ("mean", "padded_mean"),
    "dtype": ("float32", "bfloat16"),
}
LEAST = {"max_documents": 0, "n_train": 2, "n_validation": 2, "n_test": 2, "seed": 0} | {
    "batch_size": 1,
    "alpha": 0.0,
    "draws": 100,
    "repetitions": 2,
    "permutations": 2,
    "extra_tokens": 1,
    "extra_models": 2,
}
ENTRY = dict.fromkeys(("name", "source", "revision", "init", "role", "after"), str) | {"layer": int}
# of A1_pretrain_zoo: what a value must be a multiple of, and its least
SIZES = {"steps": (1, 1), "layers": (2, 2), "hidden_size": (16, 16), "vocabulary": (1, 1000)} | {
    "batch_tokens": (256, 256),
    "positions": (1, 256),
    "seed": (1, 0),
}
RESTORE = "`git checkout -- data/{}` restores it"

# float32 weights of the paper's checkpoints, GB; each has 768 dimensions
WEIGHTS = {
    "bert-base-uncased": 0.44,
    "xlm-roberta-base": 1.12,
    "bert-base-multilingual-cased": 0.71,
    "allenai/longformer-base-4096": 0.60,
    "microsoft/deberta-base": 0.56,
    "distilbert-base-multilingual-cased": 0.54,
    "roberta-base": 0.50,
    "xlnet-base-cased": 0.47,
    "google/electra-base-discriminator": 0.44,
    "distilroberta-base": 0.33,
    "distilbert-base-uncased": 0.27,
    "albert-base-v2": 0.05,
}


WORDS = {str: "text", int: "a whole number", float: "a number", bool: "true or false"} | {
    list: "a list",
    dict: "a mapping",
}
HINTS = {
    "[Errno 28]": "; the disk is full: free space and run the same command again",
    "[Errno 30]": "; the folder cannot be written to",
    "[Errno 13]": "; it may not be read, or written to",
    "Kernel died": "; out of memory? a lower batch_size needs less",
}


def hint(reason):
    """What to do about an error that says `reason`, or nothing."""
    return next((advice for sign, advice in HINTS.items() if sign in reason), "")


# --- what the notebooks declare ------------------------------------------------------------------


def parameters_code(notebook):
    """The code of a notebook's cells with the tag parameters."""
    cells = json.loads(Path(notebook).read_text(encoding="utf-8"))["cells"]
    tagged = [c for c in cells if "parameters" in c["metadata"].get("tags", [])]
    return "".join("".join(c["source"]) + "\n" for c in tagged)


def declared(notebook):
    """{name: literal} of a notebook's parameters cell, in order; {} when it has none."""
    literals = {}
    for statement in ast.parse(parameters_code(notebook)).body:
        try:
            (target,) = statement.targets
            literals[target.id] = ast.literal_eval(statement.value)
        except (AttributeError, ValueError):
            raise ValueError(
                f"{Path(notebook).name}: the parameters cell may hold only name = literal, "
                f"not: {ast.unparse(statement)}"
            ) from None
    return literals


def described(notebook):
    """[(name, type, default, meaning)] of a notebook's parameters, in words; the meaning is their comment."""
    code, literals, found = parameters_code(notebook), declared(notebook), []
    comments = {
        token.start[0]: token.string.lstrip("# ")
        for token in tokenize.generate_tokens(io.StringIO(code).readline)
        if token.type == tokenize.COMMENT
    }
    for statement in ast.parse(code).body:
        name = statement.targets[0].id
        value = literals[name]
        kind = WORDS[type(value)]
        if isinstance(value, list) and value:
            kind += f" of {len(value)}: {WORDS[type(value[0])]}"
        shown = json.dumps(value, ensure_ascii=False)
        lines = range(statement.lineno, statement.end_lineno + 1)
        meaning = " ".join(comments[line] for line in lines if line in comments)
        found.append((name, kind, textwrap.shorten(shown, 44, placeholder=" …"), meaning))
    return found


def numbered(apart):
    """{notebook stem: its literals} of the numbered notebooks that stand apart from profiles, or do not.

    07 does, whose tables are of no run, and so do those that take no name of a run.
    """
    found = {p.stem: declared(p) for p in sorted((ROOT / "notebooks").glob("[0-9]*.ipynb"))}
    return {
        name: literals
        for name, literals in found.items()
        if (name.startswith("07_") or "profile" not in literals) == apart
    }


def appendices():
    """{notebook stem: its literals} of those that run with the default profile alone, and as they are."""
    return numbered(apart=True) | {
        p.stem: declared(p) for p in sorted((ROOT / "notebooks").glob("A[0-9]*.ipynb"))
    }


def all_declared():
    """{notebook stem: its literals}, and the union of all literals: what a profile may set."""
    notebooks = numbered(apart=False)
    if not notebooks:
        raise ValueError(f"no notebooks in {ROOT / 'notebooks'}")
    return notebooks, {k: v for literals in notebooks.values() for k, v in literals.items()}


def overview():
    """Lines that say what each notebook's parameters are."""
    for path in sorted((ROOT / "notebooks").glob("[0-9A][0-9]*.ipynb")):
        yield path.stem
        rows = described(path)
        width = max((len(row[0]) for row in rows), default=0)
        for name, kind, default, meaning in rows:
            yield f"  {name:<{width}}  {kind}, {default}"
            yield textwrap.fill(meaning, 100, initial_indent=" " * 6, subsequent_indent=" " * 6)
    yield (
        f'A profile or SET="key=value" sets those of {", ".join(all_declared()[0])}; ZOO_SET those of '
        f"{PRETRAIN}. Others are set in the notebook, or by papermill's -p."
    )


# --- checks --------------------------------------------------------------------------------------


def nearest(name, names):
    close = difflib.get_close_matches(name, names, 1)
    return f"; did you mean {close[0]!r}?" if close else f"; known are {', '.join(names)}"


def check_type(where, value, literal):
    """Raise ValueError unless `value` is of the type of `literal` (an int may stand for a float)."""
    kind, found = type(literal), type(value)
    if found is kind or (kind is float and found is int):
        if found is float and not math.isfinite(value):
            raise ValueError(f"{where}: {value} is not a finite number")
        if kind is list and literal:
            if not value:
                raise ValueError(f"{where}: the list is empty")
            for i, item in enumerate(value, 1):
                check_type(f"{where}, item {i}", item, literal[0])
        return
    hint = ""
    if found is str and kind in (int, float):
        try:
            mantissa, _, exponent = value.lower().partition("e")
            float(value)
            hint = f"; write {mantissa if '.' in mantissa else mantissa + '.0'}e{exponent}"
            hint = hint if exponent else "; write it without quotes"
        except ValueError:
            pass
    raise ValueError(
        f"{where}: {value!r} is {WORDS.get(found, 'empty')}, {WORDS[kind]} is needed{hint}"
    )


def clean_name(name):
    """lmd_utils.clean_name for names that NAME matches; that module takes longer to import than this runs."""
    return name.replace("/", "--").strip(".")


def check_models(where, models):
    taken = {}
    for i, entry in enumerate(models, 1):
        here = f"{where}, item {i}"
        for key, value in entry.items():
            if key not in ENTRY:
                raise ValueError(f"{here}: unknown key {key!r}{nearest(str(key), ENTRY)}")
            check_type(f"{here}, {key}", value, ENTRY[key]())
        for key in ("name", "source"):
            if not entry.get(key):
                raise ValueError(f"{here}: {key} is missing")
        name = entry["name"]
        if not NAME.fullmatch(name):
            raise ValueError(
                f"{here}: the name {name!r} cannot name a file and a column; use letters, digits, "
                "'.', '_', '-', and at most one '/'"
            )
        file = clean_name(name).lower()
        if file in taken:
            raise ValueError(f"{where}: two models are named {name!r}; give each its own name")
        taken[file] = entry
        if entry.get("init", "random") != "random":
            raise ValueError(f"{here}: init is {entry['init']!r}; only 'random' is known")
        if entry.get("role", "model") not in ("model", "control"):
            raise ValueError(f"{here}: role is {entry['role']!r}, not 'model' or 'control'")
        if (after := entry.get("after")) and after not in WEIGHTS:
            raise ValueError(
                f"{here}: after is {after!r}, no published model{nearest(after, WEIGHTS)}"
            )
    stands_for = [entry.get("after") or entry["name"] for entry in models]
    if twice := [name for name in WEIGHTS if stands_for.count(name) > 1]:
        raise ValueError(f"{where}: two models stand for the published {twice[0]!r}")
    if sum(entry.get("role", "model") == "model" for entry in models) < 2:
        raise ValueError(
            f"{where}: at least two with role model are needed to decompose one on the other"
        )


def check_scheduler(where, value):
    try:
        url = urlsplit(value)
        cluster = url.scheme == "tcp" and url.hostname and url.port and not (url.path or url.query)
    except ValueError:  # a port that is no port
        cluster = False
    if not cluster and not re.fullmatch(r"local:[1-9]\d?", value):
        raise ValueError(
            f"{where}: {value!r} is not local:N, N from 1 to 99 processes here, or tcp://host:port, "
            "where a Dask scheduler listens"
        )


def answers(value, seconds=5):
    """Raise ValueError unless something listens at the address of a scheduler."""
    if value.startswith("tcp:"):
        try:
            url = urlsplit(value)
            socket.create_connection((url.hostname, url.port), seconds).close()
        except OSError as error:
            raise ValueError(
                f"SCHEDULER: nobody listens at {value} ({error.strerror or error}); "
                "start `dask scheduler` there, or leave SCHEDULER empty"
            ) from None


def check(where, values, literals):
    """Raise ValueError, naming `where`, for the first value, or pair of values, that no notebook could use."""
    for key, value in values.items():
        if key == "profile":
            raise ValueError(
                f"{where}: 'profile' is the name of the run and cannot be set; use RUN=name"
            )
        if key not in literals:
            raise ValueError(
                f"{where}: unknown parameter {key!r}{nearest(str(key), list(literals))}"
            )
        here = f"{where}: {key}"
        check_type(here, value, literals[key])
        if key in CHOICES and value not in CHOICES[key]:
            raise ValueError(f"{here}: {value!r} is not one of {', '.join(CHOICES[key])}")
        if key in LEAST and value < LEAST[key]:
            raise ValueError(f"{here}: {value} is below {LEAST[key]}")
        if key == "seed" and value >= 2**32:
            raise ValueError(f"{here}: {value} is not below 2**32")
        if key == "device" and not re.fullmatch(r"(cpu|cuda(:\d+)?)?", value):
            raise ValueError(
                f"{here}: {value!r} is not cpu, cuda or cuda:N; leave it empty for any"
            )
        if key == "scheduler" and value:
            check_scheduler(here, value)
        if key == "corpus" and not (
            value == "gensim-enwiki" or value.startswith("hub:") or value.endswith(CORPUS_FILES)
        ):
            kinds = ", ".join(CORPUS_FILES)
            raise ValueError(f"{here}: {value!r} is not a {kinds} file, hub:ID or gensim-enwiki")
        if key == "lengths" and (min(value) < 1 or len(set(value)) < len(value)):
            raise ValueError(f"{here}: {value} must be different numbers of tokens, each 1 or more")
        if key == "models":
            check_models(here, value)
    shares = [values[k] for k in ("validation_share", "test_share") if k in values]
    if shares and (min(shares) <= 0 or sum(shares) >= 1):
        raise ValueError(
            f"{where}: validation_share and test_share must be above 0 and leave room for training"
        )
    if values.get("sequences") == "decoded" and min(values.get("lengths", [3])) < 3:
        raise ValueError(
            f"{where}: lengths: {values['lengths']}: decoded text is cut at T tokens, two of them special, "
            "so each T must be 3 or more"
        )
    if values.get("pooling") == "padded_mean" and values.get("sequences", "decoded") != "decoded":
        raise ValueError(f"{where}: padded_mean divides by T: set sequences=decoded, too")


# --- profile and overrides -----------------------------------------------------------------------


class Loader(yaml.SafeLoader):
    """YAML in which a repeated key is an error."""

    def construct_mapping(self, node, deep=False):
        seen = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.MarkedYAMLError(problem="a key is no text", problem_mark=key.start_mark)
            text = str(key.value)
            if text in seen:
                raise yaml.MarkedYAMLError(problem=f"{text!r} twice", problem_mark=key.start_mark)
            seen.add(text)
        return super().construct_mapping(node, deep)


def load_profile(name):
    path = PROFILES / f"{name}.yaml"
    if not path.is_file():
        names = sorted(p.stem for p in PROFILES.glob("*.yaml"))
        raise ValueError(f"PROFILE={name}: no such profile{nearest(name, names)}")
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), Loader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # no UTF-8, no date: ValueError
        mark = getattr(error, "problem_mark", None)
        line = f" line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or " ".join(str(error).split())
        raise ValueError(f"{path.relative_to(ROOT)}{line}: {problem}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path.relative_to(ROOT)}: 'name: value' lines are needed")
    return values


def words(variable, text):
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ValueError(f"{variable}: {error}: {text}") from None


def find(variable, path, callers):
    """The path as the caller wrote it, seen from where `make` was called; None when it is not there."""
    for base in callers:
        found = Path(os.path.abspath(base / Path(path).expanduser()))
        if found.exists():
            return found
    if path.startswith(("/", "./", "../", "~", "build/")):
        raise ValueError(f"{variable}: {path} does not exist")
    return None


def parse_models(text, callers):
    """MODELS="id-or-folder name=folder ..." as entries of the profile's list `models`."""
    entries = []
    for item in words("MODELS", text):
        name, equals, source = item.partition("=")
        source = source if equals else name
        if not source:
            raise ValueError(f"MODELS: {item!r} names no folder and no hub id")
        folder = find("MODELS", source, callers)
        if folder is None and not HUB_ID.fullmatch(source):
            raise ValueError(f"MODELS: {source!r} is neither a folder nor a hub id")
        if folder and not (folder / "config.json").is_file():
            raise ValueError(
                f"MODELS: {folder} has no config.json, so it is not a model; "
                "rename it if you meant the hub id of that name"
            )
        inside = folder and folder.is_relative_to(ROOT)
        entry = {"name": name if equals else folder.name if folder else source}
        entry["source"] = str(folder.relative_to(ROOT) if inside else folder or source)
        if any(entry["name"] == other["name"] for other in entries):
            raise ValueError(
                f"MODELS: two models are named {entry['name']!r}; name them: first={source} second=..."
            )
        entries.append(entry)
    return entries


def parse_corpus(text, callers):
    """CORPUS=path, hub:ID or gensim-enwiki as parameters of 01_corpus."""
    neutral = {"corpus_config": "", "corpus_revision": ""}
    if text == "gensim-enwiki" or (text.startswith("hub:") and HUB_ID.fullmatch(text[4:])):
        return {"corpus": text} | neutral
    path = find("CORPUS", text, callers)
    if path is None:
        raise ValueError(f"CORPUS: {text} does not exist")
    if not path.is_file() or path.suffix not in CORPUS_FILES:
        raise ValueError(f"CORPUS: {text} is not a {', '.join(CORPUS_FILES)} file")
    return {"corpus": str(path)} | neutral


def parse_set(text, variable="SET"):
    """SET="key=value ..." as {key: value}, values as in YAML."""
    values = {}
    for item in words(variable, text):
        key, equals, value = item.partition("=")
        if not equals:
            raise ValueError(f"{variable}: {item!r} is not key=value")
        if key in values:
            raise ValueError(f"{variable}: {key} is given twice")
        try:
            values[key] = yaml.load(value, Loader)
        except (yaml.YAMLError, ValueError, RecursionError):
            raise ValueError(f"{variable}: {key}: {value!r} is not YAML; quote it") from None
    return values


def check_same_run(run, values):
    """Raise ValueError where `run` was begun with other models or text than it would now go on with."""
    for path in sorted((ROOT / "build" / run / "params").glob("*.yaml")):
        begun = yaml.safe_load(path.read_text(encoding="utf-8"))
        for key in ("models", "corpus"):
            if key in begun and begun[key] != values[key]:
                raise ValueError(
                    f"RUN={run} was begun with other {key}: give the same PROFILE, MODELS, CORPUS and SET "
                    "again, or another RUN"
                )


def read(environment):
    """(run, {notebook: parameters}, all parameters) of what `make` exports."""
    keys = ("PROFILE", "RUN", "MODELS", "CORPUS", "SET", "SCHEDULER")
    given = {k: environment.get(k, "").strip() for k in keys}
    callers = [Path(p) for p in (environment.get("CALLER"), ROOT) if p]
    notebooks, literals = all_declared()
    profile = given["PROFILE"] or literals["profile"]
    values = load_profile(profile)
    check(f"profile {profile}", values, literals)
    if given["SCHEDULER"]:
        check_scheduler("SCHEDULER", given["SCHEDULER"])

    overrides = {}
    if given["MODELS"]:
        overrides["models"] = parse_models(given["MODELS"], callers)
        check("MODELS", overrides, literals)
    if given["CORPUS"]:
        overrides |= parse_corpus(given["CORPUS"], callers)
    if given["SET"]:
        single = parse_set(given["SET"])
        check("SET", single, literals)
        # a revision belongs to the source that it was written for
        of = {"tokenizer": ["tokenizer_revision"], "corpus": ["corpus_config", "corpus_revision"]}
        overrides |= {name: "" for key in of if key in single for name in of[key]} | single
    values = {k: v for k, v in literals.items() if k != "profile"} | values | overrides
    check(f"profile {profile} with its overrides", values, literals)
    check_code(f"profile {profile} with its overrides", values)
    check_revisions(f"profile {profile} with its overrides", values)

    run = given["RUN"] or ("custom" if overrides else profile)
    if not re.fullmatch(r"[\w\-][\w.\-]*", run):
        raise ValueError(f"RUN={run}: use letters, digits, '.', '_' and '-'")
    if run in SHARED:
        raise ValueError(f"RUN={run}: that folder has another use here; choose another name")
    if run != profile and (PROFILES / f"{run}.yaml").is_file():
        raise ValueError(f"RUN={run} would overwrite that profile's results; choose another name")
    if overrides and run == profile:
        raise ValueError(
            f"RUN={run} would overwrite the profile's own results; choose another name"
        )
    if run != profile and not overrides:
        check_same_run(run, values)
    values["profile"] = run
    parameters = {n: {k: values[k] for k in names} for n, names in notebooks.items()}
    return run, parameters | (appendices() if run == literals["profile"] else {}), values


# --- parameter files -----------------------------------------------------------------------------


def local_sources(values):
    """Folders and files of this machine that the parameters name."""
    sources = [m["source"] for m in values.get("models", [])] + values.get("sources", [])
    sources += [values[k] for k in ("tokenizer", "corpus", "zoo", "text_file") if values.get(k)]
    return [p for p in dict.fromkeys(ROOT / Path(s).expanduser() for s in sources) if p.exists()]


def hub_sources(values):
    """(hub ids of models with their revisions, hub id of the corpus or '') that the parameters name."""
    wanted = [(m["source"], m.get("revision", "")) for m in values.get("models", [])]
    if values.get("tokenizer"):
        wanted.append((values["tokenizer"], values.get("tokenizer_revision", "")))
    ids = {s: r for s, r in wanted if not (ROOT / Path(s).expanduser()).is_dir()}
    return ids, values.get("corpus", "").removeprefix("hub:") * values.get("corpus", "").startswith(
        "hub:"
    )


def check_code(where, values):
    """Raise ValueError for trust_remote_code and a model of the hub: nobody has read what would run."""
    ids = hub_sources(values)[0]
    for source in (
        m["source"] for m in values.get("models", []) if values.get("trust_remote_code")
    ):
        if source in ids:
            raise ValueError(
                f"{where}: trust_remote_code is for folders, and {source} is a hub id; "
                "download the model to a folder you have read, and name the folder"
            )


def check_revisions(where, values):
    """Raise ValueError for a revision of something that is not on the hub: it would decide nothing."""
    given = [(m["source"], "revision", m.get("revision")) for m in values.get("models", [])]
    given += [(values.get("tokenizer"), "tokenizer_revision", values.get("tokenizer_revision"))]
    local = [g for g in given if g[2] and (ROOT / Path(g[0]).expanduser()).is_dir()]
    if not values.get("corpus", "").startswith("hub:"):
        keys = ("corpus_revision", "corpus_config")
        local += [(values.get("corpus"), k, values[k]) for k in keys if values.get(k)]
    for source, key, value in local:
        raise ValueError(
            f"{where}: {key} is {value!r}, but {source} is not from the hub; remove it"
        )


def check_sources(values):
    """Raise ValueError for a missing folder or file, or a checkpoint whose bytes are not as listed."""
    for source in hub_sources(values)[0]:
        if source.startswith("build/models/") and Path(source).name in listed():
            raise ValueError(
                f"{source} is not there; make {source}/.complete installs it from the packages"
            )
        if source.startswith(("data/zoo/", "data/extras/")):
            raise ValueError(f"{source} is not there; {RESTORE.format(source.split('/')[1])}")
        if source.startswith("build/") or not HUB_ID.fullmatch(source):
            raise ValueError(f"model {source}: no such folder, and not a hub id")
    corpus = values.get("corpus", "")
    if corpus.endswith(CORPUS_FILES) and not (ROOT / corpus).is_file():
        raise ValueError(f"corpus {corpus}: no such file")
    for folder in local_sources(values):
        if folder.parent == ROOT / "build" / "models" and folder.name in listed():
            verify(folder.name, folder.parent)
        if folder.parent in (ROOT / "data" / "zoo", ROOT / "data" / "extras"):
            verify_zoo(folder)


def verify_zoo(folder):
    """Before any notebook runs, what lmd_utils checks when it loads a model of data/zoo or data/extras."""
    manifest, restore = folder.parent / "MANIFEST.json", RESTORE.format(folder.parent.name)
    try:
        files = json.loads(manifest.read_text(encoding="utf-8"))["files"].items()
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = getattr(error, "strerror", None) or "is no list of models"
        raise ValueError(f"{manifest.relative_to(ROOT)}: {reason}; {restore}") from None
    files = {
        k.removeprefix(f"{folder.name}/"): v for k, v in files if k.startswith(f"{folder.name}/")
    }
    if not files:
        raise ValueError(
            f"{folder.relative_to(ROOT)}: MANIFEST.json lists no such model; keep models of your own elsewhere"
        )
    verify_files(folder, files, restore)
    for file in sorted(folder.iterdir()):
        if file.name not in files and not file.name.startswith("."):
            raise ValueError(f"{file.relative_to(ROOT)}: is not listed in MANIFEST.json; delete it")


def fingerprint(values):
    """Digest of names, sizes and times of the local inputs: they may change in place.

    The documents that 01_corpus writes are none: make knows what follows from that notebook, and
    what a run writes must not make its own parameters new.
    """
    digest = hashlib.sha256()
    for source in local_sources(values):
        if source.match(f"{ROOT}/build/*/documents.parquet"):
            continue
        for file in sorted(source.rglob("*")) if source.is_dir() else [source]:
            if file.is_file() and not file.name.startswith("."):
                stat = file.stat()
                digest.update(f"{file.name} {stat.st_size} {stat.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:16]


def saved_figures(notebook):
    """Names that a notebook gives to save_figure outside of any loop or condition."""
    cells = json.loads((ROOT / "notebooks" / f"{notebook}.ipynb").read_text("utf-8"))["cells"]
    return {n for c in cells for n in SAVED.findall("".join(c["source"]))}


def array_file(array):
    """The file whose absence says that a zarr array is not whole: its metadata, or a lost chunk."""
    try:
        metadata = json.loads((array / "zarr.json").read_text(encoding="utf-8"))
        rows, size = metadata["shape"][0], metadata["chunk_grid"]["configuration"]["chunk_shape"][0]
    except (OSError, ValueError, KeyError):
        return array / "zarr.json"
    chunks = [array / "c" / str(i) / "0" for i in range(math.ceil(rows / size))]
    return next((chunk for chunk in chunks if not chunk.is_file()), array / "zarr.json")


def has_counterparts(values):
    """Whether two or more models stand for published ones, at a T that was published."""
    with open(
        ROOT / "data" / "published" / "zhang2022_r2.csv", encoding="utf-8", newline=""
    ) as file:
        rows = list(csv.DictReader(file))
    own = [m for m in values["models"] if m.get("role") != "control"]
    found = {m.get("after") or m["name"] for m in own} & {row["target"] for row in rows}
    return len(found) > 1 and not {row["T"] for row in rows}.isdisjoint(map(str, values["lengths"]))


def products(run, notebooks, values):
    """{notebook: files it must have left}: a run whose products are gone is made again."""
    build, results, figures = (ROOT / part / run for part in ("build", "data/results", "figures"))
    names = [clean_name(m["name"]) for m in values["models"]]
    folders = [f"T{t:03d}" for t in values["lengths"]]
    arrays = [build / "embeddings" / t / f"{n}.zarr" for t in folders for n in names]
    files = {
        "01_corpus": [results / "corpus.csv"]
        + [build / "documents.parquet"] * values.get("keep_documents", False)
        + [build / "sequences" / f"{t}.parquet" for t in folders],
        "02_embeddings": [results / "models.csv"] + [array_file(array) for array in arrays],
        "03_decomposition": [results / "scores.csv"],
        "04_figures": [results / "agreement.csv"] * has_counterparts(values),
        "05_how_sure": [results / f"how_sure_{table}.csv" for table in HOW_SURE],
        "06_structure": [results / f"structure_{t}.csv" for t in ("ladder", "measures")],
    }
    saved = {notebook: saved_figures(notebook) for notebook in notebooks}
    others = set().union(*(s for notebook, s in saved.items() if notebook != "04_figures"))
    # Which others 04 draws depends on its tables; each that is there in one format must be in both.
    drawn = {
        p.stem
        for p in figures.glob("*.p[dn][fg]")
        if not p.stem.startswith(("how_sure_", "structure_"))
    }
    saved["04_figures"] = saved.get("04_figures", set()) | drawn - others
    for notebook, stems in saved.items():
        files.setdefault(notebook, []).extend(
            figures / f"{stem}.{kind}" for stem in stems for kind in ("pdf", "png")
        )
    return files


def pins():
    """Digest of the requirement lines: another version of a package may give other results."""
    lines = [r.split("#")[0].strip() for r in (ROOT / "requirements.txt").read_text().splitlines()]
    return hashlib.sha256("\n".join(filter(None, lines)).encode()).hexdigest()[:16]


def sweep(run, *folders):
    """Remove what killed processes left half-written in a run's folders: `.NAME.PID.tmp` and `.old`."""
    own = [ROOT / part / run for part in ("build", "data/results", "figures") if run]
    for folder in (*own, *folders):
        for path in [p for depth in (".*", "*/.*", "*/*/.*") for p in folder.glob(depth)]:
            if (dead := LEFT.fullmatch(path.name)) and not lives(int(dead[1])):
                if path.is_dir():
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    path.unlink(missing_ok=True)


def write(run, notebooks, values):
    """Write build/RUN/params/NOTEBOOK.yaml where the content is new or the products are gone."""
    sweep(run)
    left = products(run, notebooks, values)
    for notebook, parameters in notebooks.items():
        note = f"{notebook}, run {run}; pins {pins()}; local inputs {fingerprint(parameters)}"
        write_one(ROOT / "build" / run, notebook, parameters, note, left[notebook])


def write_one(build, name, parameters, note, left):
    """Write build/params/NAME.yaml if its text is new, or if build/notebooks/NAME.ipynb ran and `left` is gone."""
    path, executed = build / "params" / f"{name}.yaml", build / "notebooks" / f"{name}.ipynb"
    text = f"# {note}\n" + yaml.safe_dump(parameters, sort_keys=False, allow_unicode=True)
    lost = executed.exists() and not all(file.exists() for file in left)
    if lost or not path.is_file() or path.read_text(encoding="utf-8") != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{name}.{os.getpid()}.tmp")
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)


# --- the zoo -------------------------------------------------------------------------------------


def zoo_models():
    """{name: name of the published model that it stands for, or ''} of the folders of data/zoo in profile course."""
    models = {}
    for entry in load_profile("course")["models"]:
        if entry["source"].startswith("data/zoo/"):
            name = entry["source"].removeprefix("data/zoo/")
            models[name] = models.get(name) or entry.get("after", "")
    return models


def write_zoo(folder, environment):
    """Write FOLDER/params/A1_MODEL.yaml for each model; only a change of what decides its weights is new text."""
    profile = environment.get("ZOO_PROFILE", "").strip() or "course"
    notebook = ROOT / "notebooks" / f"{PRETRAIN}.ipynb"
    if not notebook.is_file():
        raise ValueError(f"{notebook.relative_to(ROOT)} is not there: it is what trains")
    literals = declared(notebook)
    given = parse_set(environment.get("ZOO_SET", ""), "ZOO_SET")
    for key, value in given.items():
        if key in ("profile", "zoo", "train"):
            raise ValueError(f"ZOO_SET: {key!r} is set by make; use ZOO_PROFILE and ZOO")
        if key not in literals:
            raise ValueError(f"ZOO_SET: unknown parameter {key!r}{nearest(key, list(literals))}")
        check_type(f"ZOO_SET: {key}", value, literals[key])
        step, least = SIZES.get(key, (1, 0))
        if isinstance(value, int) and (value < least or value % step):
            more = f" and a multiple of {step}" * (step > 1)
            raise ValueError(f"ZOO_SET: {key} is {value}; it must be at least {least}{more}")
    documents = ROOT / "build" / profile / "documents.parquet"
    if not documents.is_file():
        raise ValueError(
            f"{documents.relative_to(ROOT)} is not there: 01_corpus writes it, with keep_documents"
        )
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    decisive = [pins(), *("".join(c["source"]) for c in cells if c["cell_type"] == "code")]
    for shared in ("tiny_models.py", "pretraining.py"):  # tokenizers; hint, batches, loss
        decisive.append((ROOT / "tools" / shared).read_text(encoding="utf-8"))
    digest = hashlib.sha256("\0".join(decisive).encode() + documents.read_bytes()).hexdigest()
    build, models = ROOT / folder, Path(folder, "models")
    for name in zoo_models():
        own = {"profile": profile, "zoo": models.as_posix(), "train": [name]}
        note = f"{PRETRAIN} {name}; pins, code and documents {digest[:16]}"
        left = [ROOT / models / name / file for file in NEEDED]
        write_one(build, f"A1_{name}", literals | given | own, note, left)


# --- preflight -----------------------------------------------------------------------------------


def dimensions(source):
    """Width of a local model's states; 768 for a hub id, as of the paper's checkpoints."""
    try:
        config = json.loads((ROOT / Path(source).expanduser() / "config.json").read_text())
    except OSError:
        return 768
    return next(
        (config[k] for k in ("hidden_size", "d_model", "dim", "n_embd") if k in config), 768
    )


def needs(values):
    """Lines that say what a run downloads and how much disk and memory it takes."""
    models, corpus = hub_sources(values)
    size = sum(WEIGHTS.get(m, 0.5) for m in models if m in {e["source"] for e in values["models"]})
    n = sum(values[f"n_{split}"] for split in ("train", "validation", "test"))
    widths = [dimensions(m["source"]) for m in values["models"]]
    disk = n * sum(widths) * 4 * len(values["lengths"]) / 1e9
    # of one T: a covariance per split, and what inverting one takes
    moments = sum(widths) ** 2 * 8 * (3 + 4) / 1e9
    yield f"This run needs, of the model hub: {len(models)} models, about {size:.1f} GB of weights"
    for source, revision in models.items():
        yield f"  {source}" + (f" at {revision[:12]}" if revision else ", its current revision")
    if corpus:
        yield f"and the corpus {corpus} {values['corpus_config']} (for wikicorpus raw_en some GB)."
    yield (
        f"It embeds {n:,} sequences x {len(values['lengths'])} lengths x {len(widths)} models: "
        f"about {disk:.1f} GB of disk; {moments:.1f} GB of memory for the moments of one length. "
        "A GPU is advisable."
    )


def cached(source, revision):
    from huggingface_hub import try_to_load_from_cache

    return isinstance(try_to_load_from_cache(source, "config.json", revision=revision or None), str)


def ask_hub(values):
    """Raise ValueError in one line unless the hub has (or the cache holds) all that a run needs."""
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

    models, corpus = hub_sources(values)
    missing = [(s, r) for s, r in models.items() if not cached(s, r)]
    folder = Path(os.environ.get("HF_DATASETS_CACHE", Path(constants.HF_HOME, "datasets")))
    calls = [(HfApi().model_info, f"model {s}", s, r) for s, r in missing]
    if corpus and not (folder / corpus.replace("/", "___")).is_dir():
        calls.append((HfApi().dataset_info, f"corpus {corpus}", corpus, values["corpus_revision"]))
    for ask, what, source, revision in calls:
        try:
            ask(source, revision=revision or None, timeout=10)
        except (RepositoryNotFoundError, RevisionNotFoundError):
            at = f" at revision {revision}" if revision else ""
            raise ValueError(f"the hub has no {what}{at}, and no such folder exists") from None
        except Exception as error:  # the client raises many kinds; all mean "no answer"
            reason = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else type(error).__name__
            raise ValueError(
                f"the model hub cannot be reached ({reason}), and this run needs {what} from it; "
                "nothing was run"
            ) from None


def main():
    try:
        command, *rest = sys.argv[1:] or [""]
        if command == "zoo" and len(rest) == 1:
            write_zoo(rest[0], os.environ)
            return
        if command == "list" and not rest:
            print(*overview(), sep="\n")
            return
        if command not in ("write", "preflight") or len(rest) > 1:
            raise ValueError(
                "usage: python tools/parameters.py write|preflight [NOTEBOOK], zoo FOLDER, or list"
            )
        run, notebooks, values = read(os.environ)
        used = values
        if rest:
            notebooks = {name: notebooks[name] for name in rest}
            used = notebooks[rest[0]]
        if command == "write":
            check_sources(used)
            if "scheduler" in used:
                answers(os.environ.get("SCHEDULER", "").strip() or used["scheduler"])
            write(run, notebooks, values)
        elif any(hub_sources(used)):
            print(*needs(values), sep="\n", flush=True)
            ask_hub(used)
    except (ValueError, OSError) as error:
        sys.exit(f"parameters: {error}{hint(str(error))}")


if __name__ == "__main__":
    to_the_end(main, "parameters")
