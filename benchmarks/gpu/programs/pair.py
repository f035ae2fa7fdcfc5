"""Processes of one slice against each other; runs with tests/native on its path.

`pair.py both TRIALS MIB`: two processes ask for MIB each at the same moment; prints for each trial how many got it.
`pair.py killed MIB`: a process that holds MIB is killed with -9; prints when another process could have as much.
`pair.py seen`: a process holds a context and runs nvidia-smi; prints the answers.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from crew import crew

from vgpu.native import Region

PATIENCE_S = 20.0


def say(**what):
    print(json.dumps(what), flush=True)


def begin(members):
    for member in members:
        error = member.do("mine = start()")
        if error is not None:
            raise SystemExit(f"a process did not start: {error}")


def both(trials, size):
    members = crew(2)
    begin(members)
    winners = []
    for _ in range(trials):
        for member in members:
            member.send("do", f"status, pointer = alloc({size} * MIB)")
        for member in members:
            member.answer()
        answers = [member.ask("status") for member in members]
        winners.append([answers.count(0), answers.count(2)])
        for member, status in zip(members, answers, strict=True):
            if status == 0:
                member.do("ok(free(pointer))")
    say(winners=winners)


def killed(size):
    holder, other = crew(2)
    begin([holder, other])
    took = holder.ask(f"alloc({size} * MIB)[0]")
    refused = other.ask(f"alloc({size} * MIB)[0]")
    with Region.open(Path(os.environ["VGPU_DIR"])) as region:
        before = region.usage().cards[0].used
        holder.kill()
        ended = time.monotonic()
        status = -1
        while status != 0 and time.monotonic() < ended + PATIENCE_S:
            status = other.ask(f"alloc({size} * MIB)[0]")
        say(
            took=took, refused=refused, status=status, ms=(time.monotonic() - ended) * 1000,
            before=before, after=region.usage().cards[0].used,
        )  # fmt: skip


def seen():
    (member,) = crew(1)
    begin([member])
    answers = []
    for query in ("--query-gpu=memory.total", "--query-compute-apps=pid"):
        command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        if done.returncode:
            raise SystemExit(f"nvidia-smi {query}: {done.returncode}: {done.stdout}{done.stderr}")
        answers.append([line.strip() for line in done.stdout.splitlines()])
    say(total=answers[0], pids=answers[1], own=[os.getpid(), member.pid])


if sys.argv[1] == "both":
    both(int(sys.argv[2]), int(sys.argv[3]))
elif sys.argv[1] == "killed":
    killed(int(sys.argv[2]))
else:
    seen()
