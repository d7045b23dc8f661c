"""Language model decomposition: what the notebooks of this repository share.

A language model is read as a vector-valued function of text, u(x) = mean over
the tokens of x of one hidden layer.  A *target* model is written as a linear
combination of *basis* models by regularised least squares, and R² says how much
of the target the basis explains (Zhang, EMNLP 2022, arXiv 2210.10289).

Shapes: B texts in a batch, N texts in all, T tokens, d dimensions of one model,
D dimensions of all models together, p dimensions of a basis.
"""

from __future__ import annotations

import copy
import copyreg
import hashlib
import inspect
import json
import logging
import os
import platform
import re
import shutil
import uuid
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, partial
from importlib.metadata import version
from itertools import pairwise
from numbers import Integral
from pathlib import Path
from tempfile import NamedTemporaryFile, TemporaryDirectory
from threading import Lock

import numpy as np
import pandas as pd
from scipy import linalg

ROOT = Path(__file__).resolve().parent
CODE_SHA256 = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()  # of what was imported

WEIGHT_FILES = ("config.json", "*.safetensors", "pytorch_model*.bin")
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.txt", "vocab.json", "merges.txt", "*.model",
)  # fmt: skip


# --- files ---------------------------------------------------------------------------------------


def clean_name(name: str) -> str:
    """A model's name as a single, safe part of a path: ``a/b`` becomes ``a--b``."""
    cleaned = re.sub(r"[^\w.\-]", "_", name.replace("/", "--")).strip(".")
    if not cleaned:
        raise ValueError(f"model name {name!r} leaves nothing that can name a file; give it a name")
    return cleaned


@contextmanager
def atomic(path: str | Path):
    """Yield a temporary path; move it to `path` on success, remove it on any error.

    Serves files and folders.  `path` holds the old content or the new, never a part (a
    folder is absent for the moment of the swap); a killed run leaves only a name that
    nothing reads.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        aside = path.with_name(f".{path.name}.{os.getpid()}.old")
        if path.is_dir():
            os.replace(path, aside)
        try:
            os.replace(temporary, path)
        except OSError:
            if aside.is_dir():
                os.replace(aside, path)
            raise
        shutil.rmtree(aside, ignore_errors=True)
    finally:
        if temporary.is_dir():
            shutil.rmtree(temporary, ignore_errors=True)
        else:
            temporary.unlink(missing_ok=True)


def content_hash(path: str | Path, patterns: Sequence[str] = ("**/*",)) -> str:
    """SHA-256 (hex) of a file, or of names and bytes of a folder's files that match `patterns`."""
    path = Path(path)
    digest = hashlib.sha256()
    found = {f for p in patterns for f in path.glob(p) if f.is_file()}
    files = [path] if path.is_file() else sorted(found)
    if not files:
        raise FileNotFoundError(f"{path}: no file matches {', '.join(patterns)}")
    for file in files:
        if path.is_dir():
            digest.update(f"{file.relative_to(path).as_posix()}\0{file.stat().st_size}\0".encode())
        with file.open("rb") as stream:
            while chunk := stream.read(1 << 20):
                digest.update(chunk)
    return digest.hexdigest()


def documents_path(profile: str) -> Path:
    """Where 01_corpus keeps the documents: doc_id, split, text, one row each."""
    return ROOT / "build" / clean_name(profile) / "documents.parquet"


def sequences_path(profile: str, T: int) -> Path:
    """Where 01_corpus keeps the sequences of T tokens."""
    return ROOT / "build" / clean_name(profile) / "sequences" / f"T{T:03d}.parquet"


def embeddings_path(profile: str, T: int, name: str) -> Path:
    """Where 02_embeddings keeps the vectors of one model."""
    folder = ROOT / "build" / clean_name(profile) / "embeddings" / f"T{T:03d}"
    return folder / f"{clean_name(name)}.zarr"


def _results_path(profile: str, name: str) -> Path:
    return ROOT / "data" / "results" / clean_name(profile) / f"{name}.csv"


def save_sequences(path: str | Path, frame: pd.DataFrame, record: Mapping) -> None:
    """Write sequences (seq_id, doc_id, split, text) as parquet, with a record in its metadata.

    The record kept is `record` and `sequences_sha256`, a hash of the texts in their order.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    texts = "\0".join(frame["text"]).encode()
    record = dict(record) | {"sequences_sha256": hashlib.sha256(texts).hexdigest()}
    table = pa.Table.from_pandas(frame[["seq_id", "doc_id", "split", "text"]], preserve_index=False)
    table = table.replace_schema_metadata({"lmd": json.dumps(record, sort_keys=True)})
    with atomic(path) as temporary:
        pq.write_table(table, temporary)


def load_sequences(path: str | Path) -> tuple[pd.DataFrame, dict]:
    """Read what `save_sequences` wrote: the table, and the record of how it was made."""
    import pyarrow.parquet as pq

    if not Path(path).exists():
        raise FileNotFoundError(f"no sequences at {path}: run 01_corpus for this profile first")
    table = pq.read_table(path)
    return table.to_pandas(), json.loads(table.schema.metadata[b"lmd"])


def open_embeddings(path: str | Path):
    """Open the embeddings of one model, a float32 zarr array [N, d]; `.attrs` is its record."""
    import zarr

    if not Path(path).exists():
        raise FileNotFoundError(
            f"no embeddings at {path}: run 02_embeddings for this profile first"
        )
    array = zarr.open_array(str(path), mode="r")
    if array.nchunks_initialized != array.nchunks:
        raise ValueError(
            f"{os.path.relpath(path, ROOT)} has {array.nchunks_initialized} of {array.nchunks} "
            "chunks: delete it and run 02_embeddings again"
        )
    return array


def open_vectors(profile: str, T: int, names: Sequence[str]) -> tuple[pd.DataFrame, dict]:
    """The sequences of length T of a run, and {name: zarr array [N, d]}, row i for sequence i.

    Raises ValueError for vectors that were made from other sequences than those there now.
    """
    frame, source = load_sequences(sequences_path(profile, T))
    arrays = {name: open_embeddings(embeddings_path(profile, T, name)) for name in names}
    for name, array in arrays.items():
        made_from = array.attrs["record"]["sequences_sha256"]
        if made_from != source["sequences_sha256"] or len(frame) != array.shape[0]:
            raise ValueError(f"{name}, T = {T}: made from other sequences; run 02_embeddings again")
    return frame, arrays


def write_results(profile: str, name: str, table: pd.DataFrame) -> None:
    """Write data/results/<profile>/<name>.csv, nine decimals; equal tables give equal bytes."""
    with atomic(_results_path(profile, name)) as temporary:
        table.to_csv(temporary, index=False, float_format="%.9f", lineterminator="\n")


def read_results(profile: str, name: str) -> pd.DataFrame:
    """Read a table that an earlier notebook wrote."""
    if not (path := _results_path(profile, name)).exists():
        shown = path.relative_to(ROOT)
        raise FileNotFoundError(f"no table {shown}: run the earlier notebooks for {profile!r}")
    names = dict.fromkeys(["basis", "target", "name"], str)  # a model may be called 100 or NA
    return pd.read_csv(path, dtype=names, keep_default_na=False, na_values=[""])


def save_figure(figure, profile: str, name: str) -> None:
    """Write figures/<profile>/<name>.pdf and .png; equal figures give equal bytes."""
    undated = {"pdf": {"CreationDate": None}, "png": {"Software": None}}
    for kind, metadata in undated.items():
        with atomic(ROOT / "figures" / clean_name(profile) / f"{name}.{kind}") as temporary:
            figure.savefig(temporary, format=kind, metadata=metadata)


# --- many processes ------------------------------------------------------------------------------

GREETING = 10  # seconds in which a scheduler must answer
# What cannot be sent to another process is made anew there: a cache is empty, a lock is free.
_MADE_ANEW = {
    type(lru_cache(len)): lambda f: (_cached, (f.__wrapped__, f.cache_parameters()["maxsize"])),
    type(Lock()): lambda lock: (Lock, ()),
}


def _cached(function: Callable, maxsize: int | None) -> Callable:
    return lru_cache(maxsize)(function)


@contextmanager
def dask_map(function: Callable, scheduler: str):
    """Yield `each`: each(tasks) gives function(task) in the order of the tasks, made by Dask workers.

    `scheduler` is "local:N", N processes of one thread on this machine, which end with this
    one, or "tcp://host:port", the scheduler of a cluster, whose workers have this environment
    and see this folder, build/ included, at the same path.  `function` goes to each worker
    once, with the globals that it uses, and its caches last there.  A task whose worker dies
    is given to another one, three times at most; `function` must not write.

    Raises ConnectionError where no scheduler answers, RuntimeError for workers of another
    version or folder, and what `function` raises.
    """
    from distributed import Client, LocalCluster, WorkerPlugin

    with ExitStack() as stack:
        where = scheduler
        if scheduler.startswith("local:"):
            stack.enter_context(_environment_of_workers())
            folder = stack.enter_context(
                TemporaryDirectory(prefix="lmd-", ignore_cleanup_errors=True)
            )
            options = {"host": "127.0.0.1", "dashboard_address": None, "local_directory": folder}
            options |= {"n_workers": int(scheduler[6:]), "threads_per_worker": 1, "memory_limit": 0}
            where = LocalCluster(**options, silence_logs=logging.ERROR)
            stack.enter_context(where)
        else:
            _greet(scheduler)
        client = stack.enter_context(Client(where, timeout=GREETING, set_as_default=False))
        seen = stack.enter_context(NamedTemporaryFile(dir=ROOT / "build", prefix=".workers-"))
        plugin, name = WorkerPlugin(), f"lmd-{uuid.uuid4()}"
        plugin.function = partial(_on_worker, _same(), seen.name, function)

        @stack.callback
        def forget():
            with suppress(Exception):  # the cluster may be gone
                client.unregister_worker_plugin(name)

        for kind, reduce in _MADE_ANEW.items():
            copyreg.pickle(kind, reduce)
        try:
            client.register_plugin(plugin, name)
        except Exception as error:  # of many kinds, of the workers
            raise RuntimeError(
                f"the workers of {scheduler} cannot load what they are to run ({error}): "
                "start them with this environment, in this folder"
            ) from None
        finally:
            for kind in _MADE_ANEW:
                copyreg.dispatch_table.pop(kind)

        def run(task):  # all that the scheduler must know
            from distributed import get_worker

            return get_worker().plugins[name].function(task)

        def each(tasks: Iterable):
            futures = deque(client.map(run, list(tasks), pure=False))
            while futures:
                yield futures.popleft().result()

        yield each


def _greet(scheduler: str) -> None:
    """Raise ConnectionError unless a Dask scheduler answers; a client would wait for ever for another program."""
    import asyncio

    from distributed.comm import connect

    async def greet():
        comm = await asyncio.wait_for(connect(scheduler, timeout=GREETING), GREETING)
        await comm.close()

    try:
        with ThreadPoolExecutor(1) as thread:  # a notebook has a running loop of its own
            thread.submit(asyncio.run, greet()).result()
    except Exception as error:
        raise ConnectionError(
            f"no Dask scheduler answers at {scheduler} ({type(error).__name__})"
        ) from None


@contextmanager
def _environment_of_workers():
    """One thread each; a new process takes its environment from this one's, which is put back."""
    before = dict(os.environ)
    one = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    os.environ.update(dict.fromkeys(one, "1"))
    try:
        yield
    finally:
        for name in set(os.environ) - set(before):
            del os.environ[name]
        os.environ.update(before)


def _same() -> dict[str, str]:
    """What a worker must have in common with the process that it works for."""
    packages = ("numpy", "torch", "transformers", "tokenizers")
    same = {"lmd_utils.py": CODE_SHA256[:16], "Python": platform.python_version()}
    return same | {name: version(name) for name in packages}


def _on_worker(same: Mapping[str, str], seen: str, function: Callable, task):
    """Run a task of `dask_map` in a Dask worker that has all in common that it must."""
    here = _same()
    if differ := [f"{k} {here[k]}, not {v}" for k, v in same.items() if here[k] != v]:
        raise RuntimeError(f"a worker has {differ[0]}: start the workers anew, like this process")
    if not Path(seen).exists():
        raise RuntimeError(
            f"a worker does not see {Path(seen).parent}: it must be one folder for all"
        )
    return function(task)


# --- models --------------------------------------------------------------------------------------


def find_model(
    source: str, revision: str | None = None, allow_bin: bool = False, weights: bool = True
) -> Path:
    """The local folder of a model: `source` is a folder or a Hugging Face hub id.

    A relative folder is looked for under the repository, then under the working
    directory; a folder goes before a hub id of the same name.  From the hub, only
    config, tokenizer and safetensors files are fetched (pytorch_model.bin too with
    `allow_bin`, if there are no safetensors); `weights=False` fetches no weights.

    Raises
    ------
    FileNotFoundError  no such folder, or the hub cannot be reached or lacks the id
    ValueError         the folder is no model, has no weights that may be read, or no revision
    """
    for folder in (ROOT / source, Path(source).expanduser()):
        if folder.is_dir():
            if revision:
                raise ValueError(f"{source!r} is a folder and has no revision {revision!r}")
            break
    else:
        folder = _fetch(source, revision, allow_bin, weights)
    if not (folder / "config.json").is_file():
        raise ValueError(
            f"folder {source!r} has no config.json, so it is not a model; "
            "rename it if you meant the hub id of that name"
        )
    try:
        json.loads((folder / "config.json").read_text(encoding="utf-8"))["model_type"]
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"the config.json of model {source!r} is no model configuration") from None
    if weights and not any(folder.glob("*.safetensors")):
        found = ", ".join(sorted(f.name for f in folder.glob("*.bin"))) or "none"
        if not (allow_bin and any(folder.glob("pytorch_model*.bin"))):
            raise ValueError(
                f"model {source!r} has no safetensors weights (.bin files: {found}); convert it "
                "with save_pretrained, or set allow_bin to read pytorch_model.bin without unpickling"
            )
    return folder


def _fetch(source: str, revision: str | None, allow_bin: bool, weights: bool) -> Path:
    from huggingface_hub import snapshot_download

    if not re.fullmatch(r"[\w\-][\w.\-]*(/[\w\-][\w.\-]*)?", source) or source.startswith("build/"):
        raise FileNotFoundError(f"model folder {source!r} does not exist")
    wanted = ["config.json", *TOKENIZER_FILES] + ["*.safetensors*"] * weights
    options = {"revision": revision or None, "ignore_patterns": ["*/*"]}
    try:
        folder = Path(snapshot_download(source, allow_patterns=wanted, **options))
        if weights and allow_bin and not any(folder.glob("*.safetensors")):
            wanted.append("pytorch_model*.bin*")
            folder = Path(snapshot_download(source, allow_patterns=wanted, **options))
    except Exception as error:  # the hub client raises many kinds; all mean "not to be had"
        raise FileNotFoundError(
            f"model {source!r} is neither a folder nor to be had from the hub ({_first_line(error)})"
        ) from None
    return folder


def load_tokenizer(folder: str | Path):
    """The tokenizer of a model folder; its ids are those of the shipped tokenizer.json.

    transformers 5 rebuilds some tokenizers from their vocabulary and then splits
    text differently (transformers #45920), so the file itself is loaded whenever
    there is one, with the special tokens and input names of the model's own class.
    Raises ValueError for a folder without a usable tokenizer, or whose files are not
    as a MANIFEST.json beside it lists them.
    """
    from tokenizers import Regex, models, pre_tokenizers
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    _verify(folder := Path(folder))
    vocabularies = ("tokenizer.json", "vocab.txt", "vocab.json", "*.model")
    if not any(True for pattern in vocabularies for _ in folder.glob(pattern)):
        raise ValueError(f"folder {folder} has no tokenizer ({', '.join(vocabularies)})")
    with _quiet_transformers():
        try:
            options = {"local_files_only": True, "trust_remote_code": False}  # None would ask
            tokenizer = AutoTokenizer.from_pretrained(str(folder), **options)
        except Exception as error:
            raise ValueError(f"no usable tokenizer in {folder} ({_first_line(error)})") from None
    if (folder / "tokenizer.json").is_file():
        names = list(tokenizer.model_input_names)
        # XLNet was trained with <cls> in a segment of its own; transformers 5 leaves it out.
        names += ["token_type_ids"] * ("XLNet" in type(tokenizer).__name__)
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_file=str(folder / "tokenizer.json"),
            model_input_names=names,
            model_max_length=tokenizer.model_max_length,
            **tokenizer.special_tokens_map,
        )
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None and isinstance(backend.model, models.Unigram):
        # Unigram vocabularies hold "</s>" as a piece: cut a spelled one so that it cannot match.
        specials = [token for token in tokenizer.all_special_tokens if len(token) > 1]
        cut = Regex("|".join(f"{re.escape(t[0])}(?={re.escape(t[1:])})" for t in specials))
        steps = [backend.pre_tokenizer] + [pre_tokenizers.Split(cut, "isolated")] * bool(specials)
        backend.pre_tokenizer = pre_tokenizers.Sequence([step for step in steps if step])
    return tokenizer


def load_model(
    folder: str | Path,
    seed: int | None = None,
    allow_bin: bool = False,
    trust_remote_code: bool = False,
):
    """The bare encoder (or decoder) of a model folder as a torch module in eval mode.

    `seed` given: weights are drawn at random by the architecture's own initialisation,
    nothing but config.json is read.  Weights are float32 whatever the checkpoint holds.
    Of an encoder-decoder model, the encoder.

    Raises ValueError when a weight is missing (other than a pooler, which is not used), of
    another shape, unreadable or not finite: no weight is ever filled in at random.
    Also when a file is not as a MANIFEST.json beside the folder lists it.
    """
    import torch
    from transformers import AutoConfig, AutoModel

    _verify(folder)
    options = {"local_files_only": True, "trust_remote_code": trust_remote_code}
    with torch.random.fork_rng(devices=[]), _quiet_transformers():
        if seed is not None:
            torch.manual_seed(seed)
            config = AutoConfig.from_pretrained(str(folder), **options)
            model = AutoModel.from_config(config, trust_remote_code=trust_remote_code).float()
        else:
            options |= {"use_safetensors": None if allow_bin else True}
            options |= {"ignore_mismatched_sizes": True, "output_loading_info": True}
            try:
                model, report = AutoModel.from_pretrained(
                    str(folder), dtype=torch.float32, **options
                )
            except Exception as error:
                reason = _first_line(error)
                if "weights_only" in str(error):
                    reason = "pytorch_model.bin holds more than tensors; convert it to safetensors"
                if "custom code" in str(error):
                    reason = "it brings code of its own; read that, then set trust_remote_code"
                raise ValueError(f"cannot load the model in {folder}: {reason}") from None
            wrong = [f"{key} is missing" for key in report["missing_keys"] if "pooler." not in key]
            wrong += [f"{key[0]} has another shape" for key in report["mismatched_keys"]]
            if wrong:
                raise ValueError(
                    f"the model in {folder} does not fit its config.json, {len(wrong)} weights would "
                    f"be random numbers: {sorted(wrong)[0]}"
                )
            if bad := [k for k, v in model.named_parameters() if not v.isfinite().all()]:
                raise ValueError(f"the model in {folder}: {bad[0]} is not finite; get it anew")
    if model.config.is_encoder_decoder:
        model = model.get_encoder()
    return model.eval()


def _verify(folder: str | Path) -> None:
    """Raise ValueError unless a model's files are what MANIFEST.json beside its folder lists.

    That of data/zoo is {"models": {name: …}, "files": {"name/file": SHA-256}}, and must
    be there; other folders beside no such file, or beside a MANIFEST.json of another
    kind, are not checked.
    """
    folder = Path(folder).resolve()
    manifest, shipped = folder.parent / "MANIFEST.json", folder.is_relative_to(ROOT / "data")

    def wrong(file, what, remedy=""):
        shown, of = (f.relative_to(ROOT) if shipped else f for f in (file, folder))
        lost = manifest.relative_to(ROOT) if file == manifest and shipped else of
        restore = f"`git checkout -- {lost}` restores it" if shipped else f"copy {of} anew"
        return ValueError(f"{shown}: {what}; {remedy or restore}")

    try:
        content = json.loads(manifest.read_text(encoding="utf-8"))
        models, files = dict(content["models"]), content["files"].items()
    except FileNotFoundError:
        if folder.parent == ROOT / "data" / "zoo":
            raise wrong(manifest, "is missing") from None
        return
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        if not shipped:  # nothing says that it is a list of models
            return
        raise wrong(manifest, f"is damaged ({_first_line(error)})") from None
    if folder.name not in models:
        raise wrong(manifest, f"does not list {folder.name}", "keep models of your own elsewhere")
    listed = {folder.parent / name: sha256 for name, sha256 in files}
    listed = {file: sha256 for file, sha256 in listed.items() if file.parent == folder}
    for file in (f for p in (*WEIGHT_FILES, *TOKENIZER_FILES) for f in sorted(folder.glob(p))):
        if file not in listed:
            raise wrong(file, "is not listed in MANIFEST.json", "delete it")
    for file, sha256 in listed.items():
        if not file.is_file():
            raise wrong(file, "is missing")
        if (found := content_hash(file)) != sha256:
            found, sha256 = (f"{str(h)[:16]}…" for h in (found, sha256))
            raise wrong(
                file, f"SHA-256 is {found}, MANIFEST.json says {sha256}; the file is damaged"
            )
    if not listed:
        raise wrong(manifest, f"lists no file of {folder.name}")


@contextmanager
def _quiet_transformers():
    """Loading without bars and reports; what matters of them is raised by the caller."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), 'no message')}"


def max_tokens(model, tokenizer=None, max_length: int | None = None) -> int | None:
    """Most tokens that `model` can take, special tokens included; None if unlimited.

    The smallest of `max_length`, the tokenizer's limit (if it states a real one) and
    the number of usable positions.  RoBERTa-likes number positions from
    padding_idx + 1, so that 514 position vectors serve 512 tokens.
    """
    import torch

    if max_length is not None and max_length < 1:
        raise ValueError(f"max_length is a number of tokens, 1 or more, not {max_length}")
    limits = [getattr(model.config, "max_position_embeddings", None), max_length]
    for name, module in model.named_modules():
        if name.endswith("position_embeddings") and isinstance(module, torch.nn.Embedding):
            reserved = 0 if module.padding_idx is None else module.padding_idx + 1
            limits.append(module.num_embeddings - reserved)
    if tokenizer is not None and tokenizer.model_max_length < 10**9:
        limits.append(tokenizer.model_max_length)
    return min((int(limit) for limit in limits if limit and limit > 0), default=None)


def tokenize(texts: Sequence[str], tokenizer, max_length: int | None = None) -> dict[str, list]:
    """Token ids and masks per text, unpadded, cut at `max_length` tokens.

    Special tokens come from the model's single-sentence template alone: a text that
    spells one ("[SEP]", "</s>") is split like any other text.  Raises ValueError for
    a `max_length` that special tokens alone would fill.
    """
    special = tokenizer.num_special_tokens_to_add()
    if max_length is not None and max_length <= special:
        raise ValueError(
            f"max_length {max_length} leaves no room for text beside {special} special tokens"
        )
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        options = {"return_attention_mask": True, "split_special_tokens": True, "verbose": False}
        cut = max_length is not None
        return dict(tokenizer(list(texts), truncation=cut, max_length=max_length, **options))
    # What the call above does, without the offsets, which take longer than the ids.
    backend.encode_special_tokens = True
    backend.no_padding()
    if max_length is None:
        backend.no_truncation()
    else:
        backend.enable_truncation(max_length, direction=tokenizer.truncation_side)
    rows = backend.encode_batch_fast(list(texts))
    tokens = {"input_ids": [row.ids for row in rows]}
    if "token_type_ids" in tokenizer.model_input_names:
        tokens["token_type_ids"] = [row.type_ids for row in rows]
    return tokens | {"attention_mask": [[1] * len(ids) for ids in tokens["input_ids"]]}


# --- embeddings ----------------------------------------------------------------------------------

# Of one forward pass, on a GPU and on a CPU, where what fits the processor's cache is fastest.
BATCH_TOKENS = 65_536, 2_048


def mean_pool(hidden_states, attention_mask, divisor: str = "tokens"):
    """Mean of the token vectors of each text, [B, T, d] and [B, T] -> float32 [B, d].

    u = Σ_i m_i h_i / Σ_i m_i   (``divisor="tokens"``, m the attention mask)
    u = Σ_i m_i h_i / T         (``divisor="length"``: padding pulls the mean to zero,
                                 as in the code published with the paper)

    Raises ValueError for other shapes or divisors, and for a text without tokens.
    """
    if hidden_states.ndim != 3 or hidden_states.shape[:2] != attention_mask.shape:
        raise ValueError(
            f"hidden_states {tuple(hidden_states.shape)} and attention_mask "
            f"{tuple(attention_mask.shape)} should be [B, T, d] and [B, T]"
        )
    if divisor not in ("tokens", "length"):
        raise ValueError(f'divisor is "tokens" or "length", not {divisor!r}')
    mask = attention_mask.bool()
    counts = mask.sum(1)
    if not bool((counts > 0).all()):
        rows = (counts == 0).nonzero().flatten().tolist()
        raise ValueError(f"no real token in row {_some(rows)}: the mean is undefined")
    # masked_fill, not a product: a padded position may hold NaN, and 0 * NaN is NaN.
    total = hidden_states.float().masked_fill(~mask.unsqueeze(-1), 0.0).sum(1)
    return total / (counts.unsqueeze(1) if divisor == "tokens" else hidden_states.shape[1])


def embed(
    texts: Sequence[str],
    model,
    *,
    max_length: int | None,
    tokenizer=None,
    layer: int | Sequence[int] = -1,
    pooling: str = "mean",
    batch_size: int = 32,
    device: str | None = None,
    dtype: str = "float32",
    progress: bool = True,
    tokens: Mapping[str, list] | None = None,
) -> np.ndarray:
    """Pooled hidden states of each text, float32 [N, d], row i for text i.

    Parameters
    ----------
    texts       N strings, none of them blank
    model       hub id, folder, or a loaded torch module (then `tokenizer` is needed)
    max_length  tokens kept of a text, special tokens included; clamped to what the
                model can take (`max_tokens`); None for just that limit
    layer       -1: last layer; 0: input embeddings; k: after block k.  A sequence of
                layers is read in one pass and gives [len(layer), N, d]
    pooling     "mean" over real tokens, or "padded_mean": their sum over max_length (clamped)
    batch_size  most texts in a forward pass; long ones go in smaller batches, of at most
                BATCH_TOKENS tokens with the padding, and of half as many where memory is short
    dtype       "float32", or "bfloat16": autocast, faster where the processor has it
    tokens      what `tokenize` gives for these texts and this limit, if you have it

    Texts are padded on the right whatever the tokenizer prefers: with a mask, neither
    encoders nor decoders see the padding, and positions count from the first token.
    Longformer runs with local attention only (no global token), its default.  Float32
    products are float32 throughout: TF32 is off meanwhile, whatever the caller has set.

    Raises ValueError naming the rows that are blank, have no token, or come out
    non-finite, and for a layer or pooling that does not exist.
    """
    import torch

    if isinstance(texts, str):
        raise TypeError("texts is one string: give a list of texts")
    texts = list(texts)
    blank = [i for i, text in enumerate(texts) if not isinstance(text, str) or not text.strip()]
    if blank:
        raise ValueError(
            f"{len(blank)} of {len(texts)} texts are blank or no text: row {_some(blank)}"
        )
    if pooling not in ("mean", "padded_mean"):
        raise ValueError(f'pooling is "mean" or "padded_mean", not {pooling!r}')
    if dtype not in ("float32", "bfloat16"):
        raise ValueError(f'dtype is "float32" or "bfloat16", not {dtype!r}')
    if isinstance(model, (str, Path)):
        folder = find_model(str(model))
        model, tokenizer = load_model(folder), tokenizer or load_tokenizer(folder)
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    elif tokenizer is None:
        raise ValueError("a loaded model needs its tokenizer: embed(texts, model, tokenizer=…)")
    if any(p.dtype != torch.float32 for p in model.parameters()):
        model = copy.deepcopy(model).float()
    if dtype == "bfloat16" and model.config.model_type == "deberta":
        model = _with_rough_biases(model)
    device = torch.device(device) if device else next(model.parameters()).device
    one_layer = isinstance(layer, Integral)
    layers = [layer] if one_layer else list(layer)
    depth = model.config.num_hidden_layers
    if wrong := [k for k in layers if not -1 <= k <= depth]:
        raise ValueError(f"layer {wrong[0]} does not exist: the model has blocks 1 to {depth}")

    limit = max_tokens(model, tokenizer, max_length)
    if pooling == "padded_mean" and limit is None:
        raise ValueError("padded_mean divides by max_length: give one")
    rows = tokens or (tokenize(texts, tokenizer, limit) if texts else {"input_ids": []})
    accepted = inspect.signature(model.forward).parameters
    fills = {"input_ids": _pad_id(tokenizer, model), "attention_mask": 0, "token_type_ids": 0}
    fills = {k: v for k, v in fills.items() if k in rows and k in accepted}
    lengths = np.array([len(ids) for ids in rows["input_ids"]], dtype=int)
    if len(lengths) != len(texts) or limit is not None and lengths.max(initial=0) > limit:
        raise ValueError("tokens are not those of these texts, cut at what the model takes")
    if (lengths == 0).any():
        raise ValueError(
            f"the tokenizer finds no token in row {_some(np.flatnonzero(lengths == 0))}"
        )
    vocabulary = model.get_input_embeddings().num_embeddings
    if texts and (largest := max(map(max, rows["input_ids"]))) >= vocabulary:
        raise ValueError(f"the tokenizer gives id {largest}, the model has {vocabulary} embeddings")
    order, most = np.argsort(-lengths, kind="stable"), BATCH_TOKENS[device.type == "cpu"]

    out = np.empty((len(layers), len(texts), model.config.hidden_size), np.float32)
    divisor = "tokens" if pooling == "mean" else "length"
    modes = {module: module.training for module in model.modules()}
    model.eval().to(device)
    options = {"output_hidden_states": layers != [-1], "use_cache": False}
    options = {k: v for k, v in options.items() if k in accepted or k == "output_hidden_states"}
    try:
        with (
            progress_bar(len(texts), type(model).__name__, progress) as bar,
            torch.inference_mode(),
            _without_tf32,
        ):
            while len(order):
                width = limit if pooling == "padded_mean" else lengths[order[0]]
                size = min(batch_size, max(1, most // width))
                chosen, rest = order[:size], order[size:]
                inputs = {
                    key: torch.tensor(
                        [rows[key][i] + [fill] * (width - lengths[i]) for i in chosen],
                        device=device,
                    )
                    for key, fill in fills.items()
                }
                try:
                    with torch.autocast(device.type, torch.bfloat16, enabled=dtype == "bfloat16"):
                        states = model(**inputs, **options)
                except torch.OutOfMemoryError:
                    if len(chosen) == 1:
                        raise
                    most = len(chosen) * width // 2
                    continue
                for j, k in enumerate(layers):
                    hidden = states.last_hidden_state if k == -1 else states.hidden_states[k]
                    pooled = mean_pool(hidden, inputs["attention_mask"], divisor)
                    out[j, chosen] = pooled.cpu().numpy()
                order = rest
                bar.update(len(chosen))
    finally:
        for module, mode in modes.items():
            module.training = mode
    if not np.isfinite(out).all():
        bad = np.flatnonzero(~np.isfinite(out).all(axis=(0, 2)))
        raise ValueError(f"{len(bad)} of {len(texts)} embeddings are not finite: row {_some(bad)}")
    return out[0] if one_layer else out


class _WithoutTF32:
    """Products of float32 numbers are float32 while any thread is inside; then as they were.

    On a GPU that is no TF32, on a CPU no bfloat16 inside a product.
    """

    def __init__(self):
        self.lock, self.inside, self.before = Lock(), 0, []

    def __enter__(self):
        from torch import backends as b

        operations = (b.cuda.matmul, b.cudnn.conv, b.mkldnn.matmul, b.mkldnn.conv)
        with self.lock:
            if not self.inside:
                self.before = [(operation, operation.fp32_precision) for operation in operations]
                for operation in operations:
                    operation.fp32_precision = "ieee"
            self.inside += 1

    def __exit__(self, *error):
        with self.lock:
            self.inside -= 1
            if not self.inside:
                for operation, precision in self.before:
                    operation.fp32_precision = precision


_without_tf32 = _WithoutTF32()


def _with_rough_biases(deberta):
    """A copy that autocast can run: it masks bfloat16 scores with the least number of its biases' type."""
    import torch

    deberta = copy.deepcopy(deberta)
    for name, parameter in deberta.named_parameters():
        if name.endswith((".q_bias", ".v_bias")):
            parameter.data = parameter.data.to(torch.bfloat16)
    return deberta


def _pad_id(tokenizer, model) -> int:
    """An id that the vocabulary already has; the mask hides it, so that any would do."""
    pad = getattr(model.config, "pad_token_id", None)
    ids = (tokenizer.pad_token_id, pad, tokenizer.eos_token_id)
    return next((i for i in ids if i is not None), 0)


def _some(rows: Sequence[int], most: int = 8) -> str:
    more = f" … ({len(rows)} in all)" if len(rows) > most else ""
    return ", ".join(str(int(row)) for row in rows[:most]) + more


@contextmanager
def progress_bar(total: int, label: str, progress: bool = True):
    """A tqdm bar on the terminal that LMD_PROGRESS names: never in a notebook's output."""
    from tqdm import tqdm

    terminal = os.environ.get("LMD_PROGRESS")
    options = {
        "total": total,
        "desc": label,
        "unit": "text",
        "disable": not (progress and terminal),
    }
    with open(terminal or os.devnull, "w") as stream, tqdm(file=stream, **options) as bar:
        yield bar


# --- moments -------------------------------------------------------------------------------------


class Moments:
    """Joint mean and covariance of several models over the same texts.

    Blocks are centred on their own mean before they are multiplied, in float64, and
    merged exactly (Chan, Golub and LeVeque 1983):

        S = S_a + S_b + δ δᵀ n_a n_b / n,   δ = mean_b - mean_a,   n = n_a + n_b

    Memory is D² numbers plus one block, whatever the number of rows.  Of S, only the
    blocks [a, b] of models a <= b are kept; what lies below them is not read.

    names : list of models, in the order of their dimensions
    n     : rows seen
    mean  : float64 [D]
    cov   : float64 [D, D], divisor n - 1
    """

    def __init__(self, dims: Mapping[str, int]):
        if not dims:
            raise ValueError("moments need at least one model")
        self.names = list(dims)
        ends = np.cumsum([0, *dims.values()]).tolist()
        self._slices = {
            name: slice(a, b) for name, (a, b) in zip(self.names, pairwise(ends), strict=True)
        }
        self.n = 0
        self.mean = np.zeros(ends[-1])
        self._scatter = np.zeros((ends[-1], ends[-1]))

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray], block_size: int = 4096) -> Moments:
        """Moments of {name: [N, d_k]} arrays (numpy, zarr, memory maps), `block_size` rows at a time."""
        if wrong := [name for name, array in arrays.items() if array.ndim != 2]:
            raise ValueError(f"model {wrong[0]!r} is no [N, d] array: {arrays[wrong[0]].shape}")
        if block_size < 1:
            raise ValueError(f"block_size is a number of rows, 1 or more, not {block_size}")
        rows = {name: array.shape[0] for name, array in arrays.items()}
        if len(set(rows.values())) > 1:
            raise ValueError(f"models have different numbers of rows: {rows}")
        moments = cls({name: array.shape[1] for name, array in arrays.items()})
        for start in range(0, max(rows.values()), block_size):
            moments.update({k: array[start : start + block_size] for k, array in arrays.items()})
        return moments

    def slice(self, name: str) -> slice:
        """Where the dimensions of `name` lie in `mean` and `cov`."""
        if name not in self._slices:
            raise KeyError(f"no model {name!r} in these moments: {', '.join(self.names)}")
        return self._slices[name]

    def dim(self, *names: str) -> int:
        """Number of dimensions of the named models together."""
        return sum(self.slice(name).stop - self.slice(name).start for name in names)

    def index(self, names: Sequence[str]) -> np.ndarray:
        """Dimensions of the named models, in the order of `names`."""
        return np.concatenate([np.arange(self.mean.size)[self.slice(name)] for name in names])

    def select(self, names: Sequence[str]) -> Moments:
        """The moments of some of the models (of all in their order: these, not a copy)."""
        if list(names) == self.names:
            return self
        chosen = Moments({name: self.dim(name) for name in names})
        chosen.n, chosen.mean = self.n, self.mean[self.index(names)]
        chosen._scatter = self._between(names, names)
        return chosen

    @property
    def cov(self) -> np.ndarray:
        return self.cov_block(self.names, self.names)

    def cov_block(self, rows: Sequence[str], columns: Sequence[str]) -> np.ndarray:
        """`cov` between two lists of models, as a new array."""
        if self.n < 2:
            raise ValueError(f"a covariance needs two rows, not {self.n}")
        return self._between(rows, columns) / (self.n - 1)

    def _between(self, rows: Sequence[str], columns: Sequence[str]) -> np.ndarray:
        s, at, to = self._scatter, *([self.slice(k) for k in names] for names in (rows, columns))
        return np.block([[s[a, b] if a.start <= b.start else s[b, a].T for b in to] for a in at])

    def update(self, block: Mapping[str, np.ndarray]) -> Moments:
        """Take in a block of rows {name: [n, d_k]} of all models; returns self."""
        if set(block) != set(self.names):
            raise ValueError(f"block has models {sorted(block)}, moments have {sorted(self.names)}")
        shapes = {name: np.shape(block[name]) for name in self.names}
        n = shapes[self.names[0]][0]
        if any(shape != (n, self.dim(name)) for name, shape in shapes.items()):
            raise ValueError(f"blocks do not fit: {shapes}")
        if n == 0:
            return self
        x = np.empty((n + 1, self.mean.size))  # one row more, for _absorb
        for name in self.names:
            x[:n, self.slice(name)] = block[name]
        mean = x[:n].mean(axis=0)
        if not np.isfinite(mean).all():
            row = int(np.flatnonzero(~np.isfinite(x[:n]).all(axis=1))[0])
            name = next(k for k in self.names if not np.isfinite(x[row, self.slice(k)]).all())
            raise ValueError(f"model {name!r} has a non-finite value in row {self.n + row}")
        x[:n] -= mean
        self._absorb(n, mean, x)
        return self

    def merge(self, other: Moments) -> Moments:
        """Take in moments of further rows of the same models; returns self."""
        if other._slices != self._slices:
            raise ValueError(f"cannot merge moments of {other.names} into those of {self.names}")
        if other.n:
            self._scatter += other._scatter
            self._absorb(other.n, other.mean, np.empty((1, self.mean.size)))
        return self

    def _absorb(self, n: int, mean: np.ndarray, x: np.ndarray) -> None:
        """Add xᵀx: centred rows, and the step between the two means as the last row."""
        import torch  # its float64 products are as fast as those of scipy's BLAS, or twice so

        delta, total = mean - self.mean, self.n + n
        x[-1] = delta * np.sqrt(self.n * n / total)
        s, x = torch.from_numpy(self._scatter), torch.from_numpy(x)
        for at in self._slices.values():
            s[at, at.start :].addmm_(x[:, at].T, x[:, at.start :])
        self.mean, self.n = self.mean + delta * (n / total), total

    def save(self, path: str | Path) -> None:
        """Write to one safetensors file."""
        from safetensors.numpy import save_file

        dims = {name: self.dim(name) for name in self.names}
        tensors = {"mean": self.mean, "scatter": self._scatter}
        with atomic(path) as temporary:
            save_file(tensors, temporary, {"n": str(self.n), "dims": json.dumps(dims)})

    @classmethod
    def load(cls, path: str | Path) -> Moments:
        """Read what `save` wrote."""
        from safetensors import safe_open

        with safe_open(path, framework="numpy") as file:
            moments = cls(json.loads(file.metadata()["dims"]))
            moments.n = int(file.metadata()["n"])
            moments.mean, moments._scatter = file.get_tensor("mean"), file.get_tensor("scatter")
        return moments


# --- decomposition -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Decomposition:
    """A target model as a linear combination of basis models: u_t ≈ Σ_s W_s u_s + b.

    weights : {basis: float64 [d_t, d_s]};  bias : float64 [d_t]
    n, p    : rows of the fit, dimensions of the basis (n <= p: in-sample R² means nothing)
    """

    target: str
    basis: tuple[str, ...]
    alpha: float
    n: int
    p: int
    weights: dict[str, np.ndarray]
    bias: np.ndarray
    moments: Moments = field(repr=False, compare=False)

    @cached_property
    def rank(self) -> int:
        """Numerical rank of the basis covariance (at most p, and at most n - 1)."""
        if self.moments.n != self.n:
            raise ValueError("the moments of this fit have taken in rows since; fit again")
        covariance = self.moments.cov_block(self.basis, self.basis)
        return int(np.linalg.matrix_rank(covariance, hermitian=True))

    def predict(self, arrays: Mapping[str, np.ndarray]) -> np.ndarray:
        """The target as the basis gives it, {basis: [N, d_s]} -> float64 [N, d_t]."""
        parts = (np.asarray(arrays[s], np.float64) @ w.T for s, w in self.weights.items())
        return sum(parts) + self.bias

    def score(self, moments: Moments) -> float:
        """R² on the rows of `moments`, pooled over the target's dimensions.

        R² = 1 - SSR / SST,  SSR = Σ |u_t - W u_S - b|²,  SST = Σ |u_t - ū_t|²,
        ū_t the mean of these rows.
        """
        dims = {self.target: len(self.bias)} | {s: w.shape[1] for s, w in self.weights.items()}
        weights = np.hstack([self.weights[s] for s in self.basis]).T
        return _scores(weights, self.bias, moments, dims, self.basis)[self.target]


def fit(
    moments: Moments, target: str, basis: str | Sequence[str], alpha: float = 1e-6
) -> Decomposition:
    """Write `target` as a linear combination of `basis` by regularised least squares.

    W = C_tS (C_SS + alpha I)⁻¹,   b = mu_t - W mu_S      (Zhang 2022, equation 3 and alpha)

    `alpha` is added to the covariance (divisor n - 1), in its units; 0 gives the
    minimum-norm solution even where C_SS is singular.  Warns when n <= p.

    Raises ValueError for a target in its own basis, an empty or repeated basis, a
    negative alpha, fewer than two rows; KeyError for a name the moments do not have.
    """
    basis = (basis,) if isinstance(basis, str) else tuple(basis)
    if not basis or len(set(basis)) < len(basis) or target in basis:
        raise ValueError(f"basis {basis} of {target!r} is empty, repeats a model or has the target")
    p = moments.dim(*basis)
    _check(moments, p, alpha)
    weights, bias = _solve(moments, basis, [target], alpha)
    parts = np.split(weights.T, np.cumsum([moments.dim(s) for s in basis])[:-1], axis=1)
    weights = dict(zip(basis, parts, strict=True))
    return Decomposition(target, basis, alpha, moments.n, p, weights, bias, moments)


def pair_scores(
    train: Moments, evaluate: Moments | Mapping[str, Moments], alpha: float = 1e-6
) -> pd.DataFrame | dict[str, pd.DataFrame]:
    """R² of every model (column) on every other (row); NaN on the diagonal.

    Fitted on `train`, scored on `evaluate`; several evaluation sets {split: Moments}
    share the fits and give {split: table}.  One factorisation per basis model
    serves all its targets.
    """
    splits = evaluate if isinstance(evaluate, Mapping) else {"": evaluate}
    names = train.names
    _check(train, max(train.dim(name) for name in names), alpha)
    tables = {split: pd.DataFrame(np.nan, index=names, columns=names) for split in splits}
    for basis in names:
        targets = [name for name in names if name != basis]
        if not targets:
            continue
        dims = {name: train.dim(name) for name in (*targets, basis)}
        fitted = _solve(train, [basis], targets, alpha)
        for split, moments in splits.items():
            for target, r2 in _scores(*fitted, moments, dims, [basis]).items():
                tables[split].loc[basis, target] = r2
    return tables if isinstance(evaluate, Mapping) else tables[""]


def group_scores(
    train: Moments, evaluate: Moments | Mapping[str, Moments], alpha: float = 1e-6
) -> pd.Series | dict[str, pd.Series]:
    """R² of every model on all the others together, indexed by target.

    One inverse gives all fits: with P = (C + alpha I)⁻¹ the residual of target t is
    u_t - W u_S - b = (P_tt)⁻¹ P_t: (u - mu), since W = -(P_tt)⁻¹ P_tS.
    """
    splits = evaluate if isinstance(evaluate, Mapping) else {"": evaluate}
    names = train.names
    if len(names) < 2:
        raise ValueError(f"a group score needs two models, there is only {names[0]!r}")
    _check(train, train.mean.size - min(train.dim(name) for name in names), alpha)
    residual, fits, tables = _residuals(train, alpha), {}, {}
    if residual is None:
        fits = {t: fit(train, t, [k for k in names if k != t], alpha) for t in names}
    for split, moments in splits.items():
        r2 = {t: one.score(moments) for t, one in fits.items()}
        if not fits:
            _same_models({name: train.dim(name) for name in names}, moments)
            scored = moments.select(names)
            errors = _squares(residual, scored)
            errors += scored.n * (residual @ (scored.mean - train.mean)) ** 2
            r2 = {t: _r2(errors[train.slice(t)].sum(), scored, t) for t in names}
        tables[split] = pd.Series(r2)
    return tables if isinstance(evaluate, Mapping) else tables[""]


def adjusted_r2(r2_train, n: int, p: int):
    """1 - (1 - R²)(n - 1)/(n - p - 1): train R² without the credit for p free dimensions.

    NaN where n <= p + 1, since nothing is left to judge by.
    """
    if n <= p + 1:
        return np.full_like(r2_train, np.nan, dtype=float)[()]
    return 1 - (1 - np.asarray(r2_train, dtype=float))[()] * (n - 1) / (n - p - 1)


def _check(moments: Moments, p: int, alpha: float) -> None:
    if not 0 <= alpha < np.inf:
        raise ValueError(f"alpha is a finite number >= 0, not {alpha!r}")
    if moments.n <= p:
        warnings.warn(
            f"n = {moments.n} rows for p = {p} basis dimensions: R² on these rows is no evidence "
            "of dependence; read a held-out score",
            stacklevel=3,
        )
    moments.cov_block(moments.names[:1], moments.names[:1])  # refuses what has no covariance


def _factor(c: np.ndarray, alpha: float) -> np.ndarray | None:
    """Cholesky factor of C + alpha I, in the place of C; None where alpha is lost in its rounding.

    Of C the upper triangle is read; the factor is the lower one of what is returned.
    """
    if alpha <= len(c) * np.finfo(float).eps * np.trace(c):
        return None
    c[np.diag_indices(len(c))] += alpha
    try:
        return linalg.cho_factor(c.T, lower=True, overwrite_a=True)[0]
    except linalg.LinAlgError:
        return None


def _cho_solve(factor: np.ndarray, b: np.ndarray) -> np.ndarray:
    import torch  # three times as fast as scipy's

    return torch.cholesky_solve(torch.from_numpy(b), torch.from_numpy(factor)).numpy()


def _solve(moments: Moments, basis: Sequence[str], targets: Sequence[str], alpha: float):
    """Weights [p, q], (C_SS + alpha I)⁻¹ C_St, and bias [q] of all `targets` on one basis.

    Where alpha is lost in rounding, or 0, minimum-norm: directions in which C_SS is only
    rounding are left out, C_St has nothing to give there either.
    """
    c, weights = moments.cov_block(basis, basis), moments.cov_block(basis, targets)
    if (factor := _factor(c.copy(), alpha)) is not None:
        weights = _cho_solve(factor, weights)
    else:
        values, vectors = linalg.eigh(c)
        kept = values > len(c) * np.finfo(float).eps * values[-1]
        weights = (vectors[:, kept] / (values[kept] + alpha)) @ (vectors[:, kept].T @ weights)
    mean = moments.mean
    return weights, mean[moments.index(targets)] - mean[moments.index(basis)] @ weights


def _scores(weights, bias, scored: Moments, dims: Mapping[str, int], basis) -> dict[str, float]:
    """{target: R²} for u_S @ `weights` + `bias`, the targets being the other models of `dims`.

    SSR = tr(S_tt - 2 W S_St + W S_SS Wᵀ) + n' |mu'_t - W mu'_S - b|²
    """
    _same_models(dims, scored)
    targets = [name for name in dims if name not in basis]
    errors = scored._between(basis, basis) @ weights
    errors -= 2 * scored._between(basis, targets)
    drift = scored.mean[scored.index(targets)] - scored.mean[scored.index(basis)] @ weights - bias
    errors = np.einsum("ij,ij->j", weights, errors) + scored.n * drift**2
    parts = np.split(errors, np.cumsum([dims[t] for t in targets])[:-1])
    return {t: _r2(e.sum(), scored, t, 1) for t, e in zip(targets, parts, strict=True)}


def _residuals(train: Moments, alpha: float) -> np.ndarray | None:
    """(P_tt)⁻¹ P_t: of every target, [D, D]; None where alpha is lost in rounding."""
    r = _factor(train._scatter / max(train.n - 1, 1), alpha)
    if r is None:
        return None
    r = linalg.lapack.dpotri(r, lower=1, overwrite_c=1)[0].T  # P, on and above the diagonal
    for at in reversed(train._slices.values()):  # the rows above still hold their part of P
        p_tt = np.triu(r[at, at])
        p_tt += np.triu(p_tt, 1).T
        row = np.hstack([r[: at.start, at].T, p_tt, r[at, at.stop :]])
        r[at] = _cho_solve(linalg.cho_factor(p_tt, lower=True)[0], row)
    return r


def _squares(residual: np.ndarray, scored: Moments) -> np.ndarray:
    """Σ (r (u - ū))² over the scored rows, for each row r of `residual`, in D³ operations."""
    import torch

    total, r = np.zeros(len(residual)), torch.from_numpy(residual)
    for at in scored._slices.values():
        column = torch.from_numpy(scored._scatter[: at.stop, at]).clone()
        column[: at.start] *= 2  # for the blocks below the diagonal
        total += torch.einsum("ij,ij->i", r[:, : at.stop] @ column, r[:, at]).numpy()
    return total


def _same_models(dims: Mapping[str, int], scored: Moments) -> None:
    for name, dim in dims.items():
        if scored.dim(name) != dim:
            raise ValueError(
                f"model {name!r} has {dim} dimensions in the fit, {scored.dim(name)} here"
            )


def _r2(errors: float, scored: Moments, target: str, whole: int = 0) -> float:
    """1 - SSR/SST, SSR being `errors` + `whole` SST."""
    at = scored.slice(target)
    total, rounding = np.trace(scored._scatter[at, at]), 64 * np.finfo(float).eps
    if total <= scored.n * (rounding * np.linalg.norm(scored.mean[at])) ** 2:
        raise ValueError(
            f"target {target!r} does not vary over the {scored.n} scored rows: R² is undefined"
        )
    return float(1 - whole - errors / total)


# --- how sure ------------------------------------------------------------------------------------


class DocumentSums:
    """Sums over the rows of each scored document: R² and its intervals follow, without refitting.

    Rows of one document are alike, so that documents, not rows, are what a sample of text
    draws.  With v = u_t - (train mean of the target), kept of each of m documents d are

        n_d,   Σ v,   Σ |v|²,   and for each fit   SSR_d = Σ |u_t - W u_S - b|².

    Documents taken w_d times each then have

        R² = 1 - Σ_d w_d SSR_d / SST,   SST = Σ_d w_d Σ |v|² - |Σ_d w_d Σ v|² / Σ_d w_d n_d,

    so that each resample is compared with its own mean.  What is estimated is the R² of these
    maps, held as they are, on the population of documents; not how another fit would score.

    fits      : list of Decomposition
    documents : the m labels
    n         : rows [m];  errors : SSR_d [len(fits), m]
    """

    def __init__(self, fits: Sequence[Decomposition], documents: Sequence):
        self.fits, self.documents = list(fits), list(dict.fromkeys(documents))
        m, self._at = len(self.documents), {d: i for i, d in enumerate(self.documents)}
        self.n, self.errors = np.zeros(m), np.zeros((len(self.fits), m))
        one = {fit.target: fit for fit in self.fits}
        self._mean = {t: f.moments.mean[f.moments.slice(t)] for t, f in one.items()}
        self._first = {t: np.zeros((m, len(mean))) for t, mean in self._mean.items()}
        self._second = {t: np.zeros(m) for t in self._mean}

    def update(self, documents: Sequence, block: Mapping[str, np.ndarray]) -> DocumentSums:
        """Take in rows {name: [n, d_k]} and the label of each row's document; returns self."""
        if unknown := set(documents) - set(self._at):
            raise KeyError(f"document {next(iter(unknown))!r} was not named at the start")
        at, m = np.array([self._at[d] for d in documents], dtype=int), len(self.documents)
        if wrong := [k for k, rows in block.items() if len(rows) != len(at)]:
            raise ValueError(f"model {wrong[0]!r} has {len(block[wrong[0]])} rows, not {len(at)}")
        self.n += np.bincount(at, minlength=m)
        for target, mean in self._mean.items():
            v = np.asarray(block[target], np.float64) - mean
            np.add.at(self._first[target], at, v)
            self._second[target] += np.bincount(at, (v**2).sum(axis=1), m)
        for fit, errors in zip(self.fits, self.errors, strict=True):
            residual = np.asarray(block[fit.target], np.float64) - fit.predict(block)
            errors += np.bincount(at, (residual**2).sum(axis=1), m)
        return self

    def _spread(self, target: str, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """SST [B] of documents taken `weights` [B, m] times, and without one copy of each [B, m]."""
        v, second = self._first[target], self._second[target]
        total, n, square = weights @ v, weights @ self.n, weights @ second
        whole = square - (total**2).sum(axis=1) / n
        left = (total**2).sum(axis=1)[:, None] - 2 * total @ v.T + (v**2).sum(axis=1)
        with np.errstate(divide="ignore", invalid="ignore"):  # where one document is all there is
            return whole, square[:, None] - second - left / (n[:, None] - self.n)

    def r2(self, weights: np.ndarray | None = None) -> np.ndarray:
        """R² of each fit, [len(fits)], or [B, len(fits)] with documents taken `weights` [B, m] times."""
        w = np.ones((1, len(self.documents))) if weights is None else weights
        total = {target: self._spread(target, w)[0] for target in self._mean}
        scores = 1 - (w @ self.errors.T) / np.stack([total[f.target] for f in self.fits], axis=1)
        return scores[0] if weights is None else scores

    def resample(self, draws: int, seed: int = 0) -> np.ndarray:
        """How often each document is drawn, in `draws` samples of m with replacement, [draws, m]."""
        m = len(self.documents)
        return np.random.default_rng(seed).multinomial(m, np.full(m, 1 / m), draws).astype(float)

    def intervals(
        self, level: float = 0.95, draws: int = 2000, seed: int = 0
    ) -> tuple[np.ndarray, np.ndarray]:
        """Lower and upper ends of the interval of each fit's R², [len(fits)] each.

        Symmetric bootstrap-t over documents of log(1 - R²), with the jackknife's standard error
        and correction of bias, in each resample too (Hall 1992, section 3.6; Efron and
        Tibshirani 1993, chapters 11 and 12).  NaN for fewer than five documents.
        """
        ends = np.full((2, len(self.fits)), np.nan)
        for target in self._mean:
            own = [i for i, fit in enumerate(self.fits) if fit.target == target]
            low, high = self._bootstrap_t(target, self.errors[own], np.log, level, draws, seed)
            ends[:, own] = 1 - np.exp(high), 1 - np.exp(low)
        return ends[0], ends[1]

    def compare(
        self, a: int, b: int, level: float = 0.95, draws: int = 2000, seed: int = 0
    ) -> dict[str, tuple[float, float, float]]:
        """Two fits of one target on the same documents: value, lower and upper end of

        difference : R²_a - R²_b
        ratio      : (1 - R²_b) / (1 - R²_a), above 1 where `a` is better; SST cancels, so that
                     this decides more often.  Intervals as in `intervals`, of its logarithm here.
        """
        (of_a, of_b), target = self.errors[[a, b]], self.fits[a].target
        if self.fits[b].target != target:
            other = self.fits[b].target
            raise ValueError(f"{target!r} and {other!r}: only fits of one target compare")
        how, gain = (level, draws, seed), (of_b - of_a)[None]
        (low,), (high,) = self._bootstrap_t(target, gain, np.array, *how)
        (least,), (most,) = self._bootstrap_t(target, of_b[None], np.log, *how, against=of_a)
        total = self._spread(target, np.ones((1, len(of_a))))[0][0]
        with np.errstate(divide="ignore", invalid="ignore"):  # a perfect fit leaves nothing
            ratio = of_b.sum() / of_a.sum()
        return {
            "difference": (float(gain.sum() / total), float(low), float(high)),
            "ratio": (float(ratio), float(np.exp(least)), float(np.exp(most))),
        }

    def _bootstrap_t(self, target, numerators, scale, level, draws, seed, against=None):
        """Ends [2, k] of the intervals of scale(Σ N_d / SST), or of / Σ `against`, for rows N [k, m]."""
        m, ends = len(self.documents), []
        if m < 5:
            return np.full((2, len(numerators)), np.nan)

        def jackknife(weights):
            """Value, value corrected for bias, standard error, [3, B] for each row N."""
            if against is None:
                total, without = self._spread(target, weights)
            else:
                total = weights @ against
                without = total[:, None] - against
            for numerator in numerators:
                whole = weights @ numerator
                value = scale(whole / total)
                left = scale((whole[:, None] - numerator) / without)
                left = np.where(weights > 0, left, 0)
                mean = (weights * left).sum(axis=1) / m
                error = (weights * (left - mean[:, None]) ** 2).sum(axis=1) * (m - 1) / m
                yield np.array([value, m * value - (m - 1) * mean, np.sqrt(error)])

        blocks = np.array_split(self.resample(draws, seed), max(1, draws * m // 1_000_000))
        with np.errstate(divide="ignore", invalid="ignore"):  # draws of one document alone
            drawn = zip(*(jackknife(block) for block in blocks))
            for numerator, whole, parts in zip(numerators, jackknife(np.ones((1, m))), drawn):
                if not numerator.any():  # a perfect fit, or two equal ones
                    ends.append(np.full(2, scale(0.0)))
                    continue
                (value,), (centre,), (error,) = whole
                _, corrected, errors = np.hstack(parts)
                t = abs(corrected - value) / errors
                t = t[np.isfinite(t)]
                reach = error * np.quantile(t, level) if len(t) else np.nan if error else 0.0
                ends.append((centre - reach, centre + reach))
        return np.transpose(ends)
