"""Run a command while no other run may write the same folders of build/.

    python tools/lock.py NAME... -- COMMAND...      # refused in one line while another process holds a NAME
    python tools/lock.py --once FILE -- COMMAND...  # waits its turn; does nothing if FILE is there by then
    python tools/lock.py --alone -- COMMAND...      # refused while anything is held

A NAME is a folder of build/: two runs with different ones share nothing but what set-up makes, for
which the second form waits. COMMAND takes this process's place and inherits the locks (flock on
build/.locks/NAME), as do the programs that it starts: the system frees a lock when the last of them
has ended, however it ended. (A notebook's kernel inherits none; one whose notebook is killed ends
itself within a second or so.) LMD_HELD tells a make inside a make which names it holds already.
"""

import errno
import fcntl
import os
import re
import sys
import time
from contextlib import suppress
from pathlib import Path

LOCKS = Path(__file__).resolve().parent.parent / "build" / ".locks"
SETUP = ".setup"
GRACE = 3  # seconds: programs of a killed run end that soon after it


def attempt(path):
    """A file descriptor that holds the lock, or None while another process does."""
    path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                os.close(descriptor)
                return None
            print(
                f"lock: no locks on this file system ({error.strerror}): see that nothing else runs here",
                file=sys.stderr,
            )
        try:
            if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                return descriptor
        except FileNotFoundError:  # make clean has removed it since
            path.parent.mkdir(parents=True, exist_ok=True)
        os.close(descriptor)


def lives(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def holder(path):
    """(words for who holds a lock and since when, its process id or 0), as the file says."""
    pid, since, command = (path.read_text(encoding="utf-8").split("\n") + ["", "", ""])[:3]
    if not pid.isdigit():
        return "another process", 0
    if lives(int(pid)):
        return f"process {pid} ({command}, since {since})", int(pid)
    return f"a program that outlived process {pid} ({command}, since {since})", 0


def take(name, wait=False, or_else=""):
    """Hold the lock `name` until this process, and all that inherit the lock, have ended.

    SystemExit, in one line that ends in `or_else`, if another process keeps it for longer than
    GRACE; with `wait`, wait.
    """
    path, begin, told = LOCKS / name, time.monotonic(), False
    while (descriptor := attempt(path)) is None:
        who, pid = holder(path)
        if wait and not told:
            print(f"setup: waiting for {who}", flush=True)
            told = True
        elif not wait and time.monotonic() - begin > GRACE:
            stop = (
                f"stop it with `kill {pid}`" if pid else f"find it with `lsof build/.locks/{name}`"
            )
            what = "the set-up" if name == SETUP else f"build/{name}"
            sys.exit(f"lock: {what} is in use by {who}; wait for it, or {stop}{or_else}")
        time.sleep(0.2)
    os.set_inheritable(descriptor, True)
    goals = os.environ.get("LMD_GOALS") or " ".join(map(os.path.basename, sys.argv[-1:]))
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    os.ftruncate(descriptor, 0)
    with suppress(OSError):  # on a full disk the lock holds without these words
        os.write(descriptor, f"{os.getpid()}\n{since}\nmake {goals}\n".encode())


def to_the_end(main, name):
    """Run the main of a program; Ctrl-C ends it in one line."""
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(f"{name}: interrupted")


def main():
    if "--" not in sys.argv[2:]:
        sys.exit("usage: python tools/lock.py NAME...|--once FILE|--alone -- COMMAND...")
    end = sys.argv.index("--")
    wanted, command = sys.argv[1:end], sys.argv[end + 1 :]
    held = os.environ.get("LMD_HELD", "").split()
    try:
        if wanted[0] == "--once":
            wanted, file = [SETUP], wanted[1]
            if SETUP not in held:
                take(SETUP, wait=True)
            if os.path.exists(file):
                return
        elif wanted[0] == "--alone":
            wanted = sorted({path.name for path in LOCKS.glob("*")} - {*held})
            for name in wanted:
                take(name)
        else:
            profile, run = (os.environ.get(k, "").strip() for k in ("PROFILE", "RUN"))
            wanted = " ".join(wanted).split()
            if any(not re.fullmatch(r"[\w\-][\w.\-]*", name) for name in [run, *wanted] if name):
                sys.exit(
                    f"parameters: PROFILE={profile}: no such profile"
                    if run == profile
                    else f"parameters: RUN={run}: use letters, digits, '.', '_' and '-'"
                )
            for name in sorted({*wanted} - {*held}):
                take(name, or_else=", or give this run another RUN=name" * (name == run))
    except OSError as error:
        full = "; the disk is full: free space and run the same command again"
        sys.exit(f"lock: {error}{full if error.errno == errno.ENOSPC else ''}")
    os.environ["LMD_HELD"] = " ".join(dict.fromkeys([*held, *wanted]))
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"lock: {command[0]}: {error.strerror}")


if __name__ == "__main__":
    to_the_end(main, "lock")
