"""A copy of the repository in which make may run without touching this one."""

import os
import shutil
import subprocess
import sys

from conftest import ROOT

SETTINGS = (
    "PROFILE",
    "RUN",
    "MODELS",
    "CORPUS",
    "SET",
    "SCHEDULER",
    "CALLER",
    "ZOO",
    "ZOO_PROFILE",
    "ZOO_SET",
    "COUPLING_SET",
    "REPOSITORY",
    "CHROMIUM",
    "MAKEFLAGS",
    "MFLAGS",
    "MAKELEVEL",
    "LMD_GOALS",
    "LMD_HELD",
    "PYTHONPATH",
)


def environment(**changes):
    """This process's environment without what a make above it has exported."""
    return {k: v for k, v in os.environ.items() if k not in SETTINGS} | changes


def link(source, target):
    """A hard link where the file system allows one, else a copy."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def clone(target, *extra, copy=link):
    """Copy what git tracks or would track to `target`, commit it there, and add the folders `extra` of build/."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)
    git = [
        "git",
        "-c",
        "user.name=test",
        "-c",
        "user.email=test@example.invalid",
        "-c",
        "core.hooksPath=/dev/null",
    ]
    for arguments in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "copy"]):
        subprocess.run([*git, *arguments], cwd=target, check=True, env=environment())
    for name in extra:
        if (ROOT / "build" / name).is_dir():
            shutil.copytree(ROOT / "build" / name, target / "build" / name, copy_function=copy)
    return target


def changes(folder):
    """What git sees changed in a clone."""
    command = ["git", "status", "--porcelain"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout


def make(folder, *arguments, timeout=1200, **settings):
    """Run make in a clone with this interpreter's environment; (status, lines of output)."""
    given = [
        f"{k}={v}"
        for k, v in ({"VENV": sys.prefix, "READY": "requirements.txt"} | settings).items()
    ]
    done = subprocess.run(
        ["make", *arguments, *given],
        cwd=folder,
        env=environment(PWD=str(folder)),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
    )
    return done.returncode, done.stdout.splitlines()
