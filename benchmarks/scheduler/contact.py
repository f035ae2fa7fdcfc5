"""Cost of the scheduler's connections to 5,000 agents.

Measures memory, processor time, and the delay until a kill of all agents shows.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Final

from scheduler.contact import Contact
from vgpu.sockets import allow_files
from vgpu.standin.services import free_port

AGENTS: Final = 5000
QUIET_SECONDS: Final = 10
#: all agents: one process on every address of the loopback network
PROGRAM: Final = """
import asyncio, sys
from vgpu.sockets import allow_files

async def answer(reader, writer):
    while True:
        await reader.readuntil(b"\\r\\n\\r\\n")
        writer.write(b"HTTP/1.1 200 OK\\r\\nContent-Length: 3\\r\\n\\r\\nok\\n")

async def main():
    server = await asyncio.start_server(answer, "0.0.0.0", int(sys.argv[1]), backlog=4096)
    print("here", flush=True)
    await server.serve_forever()

allow_files(20_000)
asyncio.run(main())
"""


def resident() -> float:
    """MiB."""
    with open("/proc/self/status") as file:
        return int(file.read().partition("VmRSS:")[2].split()[0]) / 1024


def until(condition: Callable[[], bool]) -> float:
    """Seconds until the condition is true."""
    begun = time.monotonic()
    while not condition():
        time.sleep(0.01)  # a poll
    return time.monotonic() - begun


def main() -> None:
    allow_files(20_000)
    port = free_port()
    agents = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(port)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert agents.stdout is not None
    agents.stdout.readline()
    changed: list[str] = []
    contact = Contact(port, changed.append)
    memory, busy = resident(), time.process_time()
    contact.start()
    uids = [f"agent-{number}" for number in range(AGENTS)]
    for number, uid in enumerate(uids):
        contact.follow(uid, f"127.1.{number // 250}.{number % 250 + 1}")
    took = until(lambda: sum(line._reached for line in contact._lines.copy().values()) == AGENTS)
    print(
        f"{AGENTS} agents connected after {took:.1f} s, {time.process_time() - busy:.1f} s of processor time, "
        f"{resident() - memory:.0f} MiB"
    )
    busy = time.process_time()
    time.sleep(QUIET_SECONDS)  # the time over which processor time is measured
    print(f"then {(time.process_time() - busy) / QUIET_SECONDS:.1%} of a processor while nothing happens")
    agents.kill()
    took = until(lambda: all(contact.obstacle(uid) for uid in uids))
    print(f"all of them killed at once: known after {took:.1f} s")
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
