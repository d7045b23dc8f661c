"""Settings and fixtures that the whole suite shares."""

import fcntl
import os
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ.setdefault("TQDM_DISABLE", "1")

import hypothesis
import numpy as np
import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

hypothesis.settings.register_profile(
    "lmd", derandomize=True, deadline=None, database=None, max_examples=25
)
hypothesis.settings.load_profile("lmd")


@pytest.fixture(scope="session")
def tiny_models():
    """Folder with one tiny seeded checkpoint per architecture of the paper, and gpt2 (made in build/tiny once)."""
    from tiny_models import build

    (ROOT / "build").mkdir(exist_ok=True)
    with open(ROOT / "build" / ".tiny-of-the-tests", "w") as lock:  # several files at a time
        fcntl.flock(lock, fcntl.LOCK_EX)
        return build(ROOT / "build" / "tiny")


@pytest.fixture
def rng():
    return np.random.default_rng(0)
