"""One run at a time on the same folders: who waits, who is refused, what frees a lock."""

import os
import signal
import subprocess
import sys
import time

import lock
import pytest
from clone import environment
from conftest import ROOT


@pytest.fixture
def locked(tmp_path):
    """Start tools/lock.py of a tree of its own with a command; the processes end with the test."""
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "lock.py").write_bytes((ROOT / "tools" / "lock.py").read_bytes())
    begun = []

    def begin(*wanted, command=("sleep", "60"), **settings):
        process = subprocess.Popen(
            [sys.executable, tmp_path / "tools" / "lock.py", *wanted, "--", *command],
            env=environment(**settings), cwd=tmp_path, start_new_session=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        begun.append(process)
        return process

    yield begin
    for process in begun:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.communicate()


def held(tmp_path, name):
    """Wait until a lock has its holder written down."""
    file = tmp_path / "build" / ".locks" / name
    end = time.monotonic() + 30
    while not (file.is_file() and file.read_text().count("\n") == 3):
        assert time.monotonic() < end
        time.sleep(0.02)


def told(process):
    out, _ = process.communicate(timeout=60)
    return process.returncode, out


def test_a_second_run_is_refused_in_one_line_that_names_the_first(locked, tmp_path):
    first = locked("mine", LMD_GOALS="reproduce", RUN="mine")
    held(tmp_path, "mine")
    status, out = told(locked("mine", command=["touch", "written"], RUN="mine"))
    assert status == 1 and out.count("\n") == 1 and not (tmp_path / "written").exists()
    assert out.startswith(
        f"lock: build/mine is in use by process {first.pid} (make reproduce, since 20"
    )
    assert f"`kill {first.pid}`" in out and out.endswith("another RUN=name\n")
    assert first.poll() is None


def test_another_name_is_not_refused(locked, tmp_path):
    locked("mine")
    held(tmp_path, "mine")
    assert told(locked("other", command=["echo", "done"])) == (0, "done\n")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_lock_ends_with_its_holder(locked, tmp_path, number):
    first = locked("mine")
    held(tmp_path, "mine")
    first.send_signal(number)
    first.wait()
    begin = time.monotonic()
    assert told(locked("mine", command=["echo", "done"])) == (0, "done\n")
    assert time.monotonic() - begin < lock.GRACE


def test_a_program_that_outlives_make_keeps_the_lock(locked, tmp_path):
    """make alone is killed: the notebook that it had begun still writes."""
    first = locked("mine", command=["sh", "-c", "sleep 61 & wait"])
    held(tmp_path, "mine")
    time.sleep(0.3)
    first.kill()
    first.wait()
    status, out = told(locked("mine", command=["echo", "done"]))
    assert status == 1 and f"a program that outlived process {first.pid}" in out
    assert "`lsof build/.locks/mine`" in out
    os.killpg(first.pid, signal.SIGKILL)
    assert told(locked("mine", command=["echo", "done"])) == (0, "done\n")


def test_a_make_inside_a_make_does_not_lock_itself_out(locked):
    again = [sys.executable, "tools/lock.py", "mine", "--", "echo", "done"]
    assert told(locked("mine", command=again)) == (0, "done\n")


def test_set_up_waits_and_is_not_done_twice(locked, tmp_path):
    first = locked("--once", "file", command=["sh", "-c", "sleep 1; echo one >> file"])
    held(tmp_path, ".setup")
    status, out = told(locked("--once", "file", command=["sh", "-c", "echo two >> file"]))
    assert status == 0 and out.startswith(f"setup: waiting for process {first.pid} (")
    assert (tmp_path / "file").read_text() == "one\n"


def test_nothing_is_cleaned_away_under_a_run(locked, tmp_path):
    first = locked("mine")
    held(tmp_path, "mine")
    clean = {"command": ["touch", "cleaned"]}
    status, out = told(locked("--alone", **clean))
    assert status == 1 and "build/mine is in use by process" in out
    assert not (tmp_path / "cleaned").exists()
    first.kill()
    first.wait()
    assert told(locked("--alone", **clean))[0] == 0 and (tmp_path / "cleaned").exists()


def test_a_lock_whose_file_was_removed_is_a_new_one(tmp_path):
    path = tmp_path / "locks" / "mine"
    old = lock.attempt(path)
    assert lock.attempt(path) is None
    path.unlink()
    new = lock.attempt(path)
    assert new is not None and lock.attempt(path) is None
    os.close(old)
    assert lock.attempt(path) is None
    os.close(new)


@pytest.mark.parametrize("name", ["../x", "a b", "it's", ".hidden", "", "a/b", "$(touch x)"])
def test_a_name_that_is_no_folder_is_one_line(locked, tmp_path, name):
    status, out = told(
        locked(name, command=["touch", "written"], RUN=name or " .", PROFILE="smoke")
    )
    assert status == 1 and out.count("\n") == 1 and out.startswith("parameters: RUN=")
    assert not (tmp_path / "written").exists() and not (tmp_path / "build").exists()


def test_a_command_that_is_not_there_is_one_line(locked):
    status, out = told(locked("mine", command=["no-such-command"]))
    assert status == 1 and out == "lock: no-such-command: No such file or directory\n"
