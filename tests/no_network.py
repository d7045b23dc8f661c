"""Python without a network: as `sitecustomize` on PYTHONPATH, in every process of a pipeline.

A look-up of a name or a connection beyond this machine is refused, and noted in the file `attempts`
beside this one; `watched` lists the processes. What stays on the machine (the loopback interface, Unix sockets) is what Jupyter uses.
"""

import ipaddress
import os
import sys
from pathlib import Path

ATTEMPTS = Path(__file__).with_name("attempts")


def here(host):
    """Whether an address, or a name that would be looked up, is this machine's own."""
    if isinstance(host, bytes):
        host = host.decode("ascii", "replace")
    if host in (None, "", "localhost"):
        return True
    try:
        return ipaddress.ip_address(host.split("%")[0]).is_loopback
    except ValueError:
        return False


def watch(event, arguments):
    if event in ("socket.connect", "socket.sendto", "socket.sendmsg"):
        address = arguments[1]
        host = address[0] if isinstance(address, tuple) else None  # else a Unix socket
    elif event in ("socket.getaddrinfo", "socket.gethostbyname", "socket.gethostbyaddr"):
        host = arguments[0]
    else:
        return
    if not here(host):
        with open(ATTEMPTS, "a") as file:
            file.write(f"{event} {host} by process {os.getpid()}: {' '.join(sys.argv[:3])}\n")
        raise OSError(f"no network in this test: {event} {host}")


sys.addaudithook(watch)
with open(ATTEMPTS.with_name("watched"), "a") as file:
    file.write(" ".join(sys.orig_argv) + "\n")
