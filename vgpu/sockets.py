"""Settings of the kernel and the C library for a program that serves many clients."""

import contextlib
import ctypes
import resource
import socket
from typing import Final

_M_MMAP_THRESHOLD: Final = -3  # malloc.h of glibc
_LARGE: Final = 2**20  #: bytes


def bound(address: str, port: int, backlog: int, unsent: int) -> socket.socket:
    """A listening socket; on `::` it accepts IPv4, too, where the kernel can do that.

    `unsent`: size of the send buffer of each connection (SO_SNDBUF), bytes.

    Raises OSError when the address is not free.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    found = socket.socket(family)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6 and socket.has_dualstack_ipv6():
            found.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, unsent)  # accepted connections inherit this
        found.bind((address, port))
        found.listen(backlog)
        found.setblocking(False)
    except BaseException:
        found.close()
        raise
    return found


def allow_files(count: int) -> None:
    """Raises the limit of open files; each connection is one.

    Container runtimes allow 1024 files at first, and more to a process that asks.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def return_large_blocks() -> None:
    """Returns memory of large blocks to the kernel when they are freed, also between small blocks that stay.

    Without this, glibc keeps more and more such memory in its heaps (mallopt(3), "dynamic mmap threshold").
    """
    with contextlib.suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _LARGE)
