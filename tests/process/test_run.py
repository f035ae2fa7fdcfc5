"""`vgpu run`: what the command gets, and how it starts and ends."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from run_machine import PROBE, ROOT, Machine, end

MIB = 1 << 20
T4 = 14912  #: MiB that programs can have of the card's 15360


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    found = Machine(tmp_path / "state", "T4x2")
    yield found
    found.stop()


@pytest.mark.parametrize("code", [0, 7, 75])
def test_the_exit_code_is_the_commands(machine: Machine, code: int) -> None:
    assert machine.run("--gpumem", "1000", command=("sh", "-c", f"exit {code}")).returncode == code


def test_death_by_a_signal_is_the_commands_too(machine: Machine) -> None:
    assert machine.run("--gpumem", "1000", command=("sh", "-c", "kill -9 $$")).returncode == -signal.SIGKILL


def test_a_signal_to_the_runner_reaches_the_command(machine: Machine) -> None:
    process = machine.start("--gpumem", "1000", command=("sh", "-c", "trap 'echo term; exit 3' TERM; echo on; read x"))
    assert process.stdout is not None
    assert process.stdout.readline() == "on\n"
    process.send_signal(signal.SIGTERM)
    out, _ = end(process)
    assert (out, process.returncode) == ("term\n", 3)


def test_the_command_takes_the_runners_place(machine: Machine) -> None:
    script = "import os; print(os.getpid(), os.getpgid(0))"
    process = machine.start("--gpumem", "1000", command=(sys.executable, "-c", script))
    out, err = process.communicate(timeout=60)
    assert out == f"{process.pid} {os.getpgid(0)}\n", err


def test_a_broken_pipe_ends_the_command_quietly(machine: Machine) -> None:
    pipeline = '"$@" | head -1; echo "${PIPESTATUS[0]}"'
    runner = (sys.executable, "-m", "vgpu", "run", "--simulate", "T4x2", "--gpumem", "200", "--", "yes")
    command = ["bash", "-c", pipeline, "-", *runner]
    done = subprocess.run(command, capture_output=True, text=True, env=machine.environ, check=True)
    assert done.stdout == f"y\n{128 + signal.SIGPIPE}\n"
    assert done.stderr == ""


def test_the_command_sees_its_slice_and_nothing_above_it(machine: Machine) -> None:
    (card,) = machine.probe("--gpumem", "3000", probe=("--fill", "--over"))["cards"]
    assert card["cuda_total"] == card["device_total"] == card["nvml_total"] == 3000 * MIB
    assert card["fill"] == "CUDA_SUCCESS"
    assert card["over"] == "CUDA_ERROR_OUT_OF_MEMORY"


def test_the_command_cannot_switch_its_limits_off(machine: Machine) -> None:
    command = (*PROBE, "--fill", "--over")
    done = machine.run("--gpumem", "500", command=command, CUDA_DISABLE_CONTROL="true")
    (card,) = json.loads(done.stdout)["cards"]
    assert (card["cuda_total"], card["over"]) == (500 * MIB, "CUDA_ERROR_OUT_OF_MEMORY")


def test_the_command_can_switch_its_limits_off_where_the_configuration_allows_it(
    machine: Machine, tmp_path: Path
) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("devicePlugin: {allowDisableControl: true}\n")
    environ = {"CUDA_DISABLE_CONTROL": "true", "VGPU_CONFIG": str(config)}
    done = machine.run("--gpumem", "500", command=PROBE, **environ)
    assert json.loads(done.stdout)["cards"][0]["cuda_total"] == T4 * MIB


def test_less_memory_than_a_context_takes_is_told(machine: Machine) -> None:
    done = machine.run("--gpumem", "100", command=("true",))
    assert done.returncode == 0
    assert done.stderr == (
        "vgpu run: warning: 100 MiB are less than one context takes on Tesla T4 (105 MiB): "
        "every CUDA program will run out of memory\n"
    )
    assert machine.run("--gpumem", "105", command=("true",)).stderr == ""


@pytest.mark.parametrize("command", [("env", "-i", "sh", "-c", "exit 7"), ("sh", "-c", "env -u LD_PRELOAD sh; exit 7")])
def test_a_command_whose_program_limits_do_not_reach_is_told(machine: Machine, command: tuple[str, ...]) -> None:
    done = machine.run("--gpumem", "1000", command=command)
    assert done.returncode == 7
    assert "starts its program without LD_PRELOAD: the program gets the whole card, without limits" in done.stderr
    assert machine.run("--gpumem", "1000", command=("env", "A=1", "true")).stderr == ""


def test_two_commands_on_one_card_see_only_their_own(machine: Machine) -> None:
    options = ("--policy", "binpack")
    machine.hold(*options, "--gpumem", "7000")
    (mine,) = machine.probe(*options, "--gpumem", "3g", probe=("--fill",))["cards"]
    (record,) = machine.ps()
    assert record["slices"][0]["uuid"] == mine["uuid"]
    assert mine["cuda_total"] == 3072 * MIB
    assert mine["fill"] == "CUDA_SUCCESS"


def test_two_cards_have_one_limit_each(machine: Machine) -> None:
    cards = machine.probe("--gpus", "2", "--gpumem", "2000", probe=("--fill", "--over"))["cards"]
    assert len({card["uuid"] for card in cards}) == 2
    assert [(card["cuda_total"], card["fill"], card["over"]) for card in cards] == [
        (2000 * MIB, "CUDA_SUCCESS", "CUDA_ERROR_OUT_OF_MEMORY")
    ] * 2


def test_a_share_of_the_card_and_the_whole_card(machine: Machine) -> None:
    (half,) = machine.probe("--gpumem-percentage", "50")["cards"]
    assert half["cuda_total"] == T4 // 2 * MIB
    (whole,) = machine.probe()["cards"]
    assert whole["cuda_total"] == T4 * MIB


def test_processes_that_the_command_starts_share_its_slice(machine: Machine) -> None:
    script = (
        "import subprocess, sys\n"
        f"first = subprocess.Popen({[*PROBE, '--allocate', '2000', '--hold', '60']!r}, stdout=subprocess.PIPE)\n"
        "print(first.stdout.readline().decode(), end='', flush=True)\n"
        f"subprocess.run({[*PROBE, '--allocate', '2000']!r})\n"
        "first.kill()"
    )
    done = machine.run("--gpumem", "3000", command=(sys.executable, "-c", script))
    first, second = (json.loads(line)["cards"][0] for line in done.stdout.splitlines())
    assert (first["allocate"], second["allocate"]) == ("CUDA_SUCCESS", "CUDA_ERROR_OUT_OF_MEMORY")


def test_the_environment_of_the_command(machine: Machine) -> None:
    script = "import json, os; print(json.dumps(dict(os.environ)))"
    options = ("--gpumem", "3000", "--gpucores", "30", "--priority", "1", "--gpus", "2")
    done = machine.run(*options, command=(sys.executable, "-c", script), CUDA_DEVICE_MEMORY_LIMIT_5="1g")
    found = json.loads(done.stdout)
    assert found["LD_PRELOAD"].endswith("libvgpu.so")
    assert found["CUDA_DEVICE_MEMORY_LIMIT_0"] == found["CUDA_DEVICE_MEMORY_LIMIT_1"] == "3000m"
    assert "CUDA_DEVICE_MEMORY_LIMIT_5" not in found
    assert found["CUDA_DEVICE_SM_LIMIT"] == "30"
    assert found["CUDA_TASK_PRIORITY"] == "1"
    assert found["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert found["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert found["VGPU_SIM_DIR"] == str(machine.simulator)


#: Prints which card a typical program gets: CUDA's first device, and NVML's device of the number in the variable.
COUNT = """
import ctypes, os, pynvml
from vgpu.probe import Cuda, uuid_of
pynvml.nvmlInit()
cuda = Cuda()
for at, device in enumerate(cuda.devices()):
    number = int(os.environ["CUDA_VISIBLE_DEVICES"].split(",")[at])
    handle = pynvml.nvmlDeviceGetHandleByIndex(number)
    limit = os.environ[f"CUDA_DEVICE_MEMORY_LIMIT_{at}"]
    print(uuid_of(cuda, device), pynvml.nvmlDeviceGetUUID(handle), pynvml.nvmlDeviceGetMemoryInfo(handle).total, limit)
"""


@pytest.mark.parametrize("busy", [0, 1])
@pytest.mark.parametrize("cards", [1, 2])
def test_cuda_nvml_and_the_labels_count_cards_alike(machine: Machine, busy: int, cards: int) -> None:
    uuids = [card["uuid"] for card in machine.probe("--gpus", "2")["cards"]]
    machine.hold("--gpumem", "3000", "--use-gpuuuid", uuids[busy])  # so that spread takes the other card first
    done = machine.run("--gpus", str(cards), "--gpumem", "2000", command=(sys.executable, "-c", COUNT))
    expected = uuids if cards == 2 else [uuids[1 - busy]]
    assert done.stdout.splitlines() == [f"{uuid} {uuid} {2000 * MIB} 2000m" for uuid in expected], done.stderr


@pytest.mark.parametrize("environ", [{}, {"COLUMNS": "60"}, {"FORCE_COLOR": "1"}], ids=["plain", "columns", "color"])
def test_ps_in_a_pipe_cuts_nothing_beside_a_long_command(machine: Machine, environ: dict[str, str]) -> None:
    long = machine.start("--gpumem", "3000", command=("sh", "-c", "echo running; read line", "x" * 230))
    assert long.stdout is not None
    assert long.stdout.readline() == "running\n"
    head, line = machine.vgpu("ps", **environ).stdout.splitlines()
    assert head.split() == ["ID", "PID", "CARD", "MODEL", "LIMIT", "USED", "HOST", "CORES", "SINCE", "COMMAND"]
    assert f"  {long.pid}  0 (simulated)  Tesla T4  3000 MiB  0 MiB  0 MiB      -     " in line
    assert line.endswith(f"sh -c 'echo running; read line' {'x' * 230}")


def test_slices_are_spread_and_free_again_after_the_end(machine: Machine) -> None:
    first, second = machine.hold("--gpumem", "8000"), machine.hold("--gpumem", "8000")
    runs = machine.ps()
    assert len({run["slices"][0]["uuid"] for run in runs}) == 2
    assert [run["pid"] for run in runs] == [first.pid, second.pid]
    refused = machine.run("--gpumem", "8000", command=("true",))
    assert refused.returncode == os.EX_TEMPFAIL
    end(first)
    assert machine.run("--gpumem", "8000", command=("true",)).returncode == 0
    end(second)
    assert machine.ps() == []
    assert list((machine.state / "slices").iterdir()) == []


def test_a_refusal_names_the_reason_per_card(machine: Machine) -> None:
    machine.hold("--gpumem", "10000", "--gpucores", "60", "--gpus", "2")
    done = machine.run("--gpumem", "8000", command=("true",))
    first, *cards = done.stderr.splitlines()
    assert first == "vgpu run: no room now (--wait waits for it): 0 of 2 cards have 8000 MiB free, 1 needed"
    assert [line.split(",")[0].strip() for line in cards] == ["card 0", "card 1"]
    assert all(
        "4912 of 14912 MiB, 40 of 100 % and 9 of 10 slices free: too little memory free" in line for line in cards
    )
    assert done.returncode == os.EX_TEMPFAIL


def test_what_can_never_fit_is_refused_even_with_wait(machine: Machine) -> None:
    done = machine.run("--gpumem", "20000", "--wait", command=("true",))
    assert done.returncode == 1
    assert done.stderr.startswith("vgpu run: this can never fit here: 0 of 2 cards have 20000 MiB free, 1 needed; with")
    assert machine.run("--gpus", "3", command=("true",)).returncode == 1


def test_100_percent_of_cores_is_alone_on_the_card(machine: Machine) -> None:
    machine.hold("--gpumem", "1000", "--gpucores", "100")
    machine.hold("--gpumem", "1000", "--gpucores", "100")
    done = machine.run("--gpumem", "1000", command=("true",))
    assert done.returncode == os.EX_TEMPFAIL
    assert "taken by a command with 100 % of cores" in done.stderr


def test_chosen_cards(machine: Machine) -> None:
    both = machine.probe("--gpus", "2", "--gpumem", "100")["cards"]
    for wanted in (card["uuid"] for card in both):
        (seen,) = machine.probe("--use-gpuuuid", wanted, "--gpumem", "100")["cards"]
        assert seen["uuid"] == wanted
        (seen,) = machine.probe("--nouse-gpuuuid", wanted, "--gpumem", "100")["cards"]
        assert seen["uuid"] != wanted
    assert machine.run("--use-gputype", "T4", command=("true",)).returncode == 0
    done = machine.run("--use-gputype", "H100,A10", command=("true",))
    assert done.returncode == 1
    assert done.stderr.endswith("another model\n")


def test_an_outer_choice_of_cards_holds(machine: Machine) -> None:
    uuid = machine.probe("--gpus", "2", "--gpumem", "100")["cards"][1]["uuid"]
    script = "import os; print(os.environ['CUDA_VISIBLE_DEVICES'])"
    done = machine.run("--gpumem", "105", command=(sys.executable, "-c", script), CUDA_VISIBLE_DEVICES=uuid)
    assert done.stdout == "1\n"
    done = machine.run("--gpus", "2", command=("true",), CUDA_VISIBLE_DEVICES=uuid)
    assert done.returncode == 1
    done = machine.run(command=("true",), CUDA_VISIBLE_DEVICES="7")
    assert done.stderr == "vgpu run: CUDA_VISIBLE_DEVICES is '7': it selects no card of this machine\n"


@pytest.mark.parametrize(
    ("name", "code", "text"),
    [
        ("no-such-program", 127, "no such program"),
        ("./data", 126, "not executable"),
        ("./broken", 126, "Exec format error"),
    ],
)
def test_a_program_that_cannot_be_started_leaves_no_slice(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, code: int, text: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("data").write_text("x")
    Path("broken").write_bytes(b"\x7fELF nonsense")
    Path("broken").chmod(0o755)
    done = machine.run(command=(name,))
    assert (done.returncode, done.stderr) == (code, f"vgpu run: {name}: {text}\n")
    assert not (machine.state / "slices").exists() or list((machine.state / "slices").iterdir()) == []


def test_a_command_without_a_name_is_named_as_such(machine: Machine) -> None:
    done = machine.run(command=("",))
    assert (done.returncode, done.stderr) == (127, "vgpu run: the command's name is empty: write it after --\n")


def test_a_slice_cannot_be_divided(machine: Machine) -> None:
    inner = (sys.executable, "-m", "vgpu", "run", "--simulate", "T4x2", "--", "true")
    done = machine.run("--gpumem", "1000", command=inner)
    assert done.returncode == 1
    assert "vgpu cannot divide a slice" in done.stderr


def test_without_cards_the_sentence_says_what_to_do(machine: Machine) -> None:
    done = machine.vgpu("run", "--", "true")
    if done.returncode == 0:
        pytest.skip("this machine has a driver")
    assert done.returncode == 1
    assert done.stderr.startswith("vgpu run: no NVIDIA driver on this machine")
    assert done.stderr.endswith("to try it on simulated cards, write: vgpu run --simulate T4 -- COMMAND\n")


@pytest.mark.parametrize("spec", ["RIVA128", "T4x0", "T4x", "../T4", "..", "T4@1", ""])
def test_an_unknown_profile(machine: Machine, spec: str) -> None:
    done = machine.vgpu("run", "--simulate", spec or " ", "--", "true")
    assert done.returncode == 2
    assert done.stderr.startswith(f"vgpu run: --simulate is {spec or ' '!r}: ")
    assert len(done.stderr.splitlines()) == 1


def test_every_profile_that_is_listed_is_taken_or_its_board_is_named(machine: Machine) -> None:
    """With a driver's version and a point in its name as well."""
    done = machine.vgpu("run", "--simulate", "T4@12.4", "--", "sh", "-c", "echo $VGPU_SIM_DIR")
    assert (done.returncode, done.stdout.strip()) == (0, str(machine.state / "simulator" / "T4@12.4")), done.stderr
    for spec, said in (
        ("A100-40-1g.5gb", "there is no card that can be shared: 1 in MIG mode\n"),
        (
            "GB10",
            "vgpu run: card 0 (NVIDIA GB10) has no memory of its own and uses the machine's;"
            " vgpu cannot share the card\n",
        ),
    ):
        done = machine.vgpu("run", "--simulate", spec, "--", "true")
        assert done.returncode == 1
        assert done.stderr.endswith(said), done.stderr


def test_a_broken_configuration_is_named(machine: Machine, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("scheduler: {defaultMem: lots}\n")
    done = machine.run(command=("true",), VGPU_CONFIG=str(tmp_path / "config.yaml"))
    assert done.returncode == 1
    assert str(tmp_path / "config.yaml") in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_defaults_come_from_the_configuration(machine: Machine, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("scheduler: {defaultMem: 1234, defaultCores: 20, gpuPolicy: binpack}\n")
    machine.environ["VGPU_CONFIG"] = str(tmp_path / "config.yaml")
    machine.hold()
    machine.hold()
    first, second = (run["slices"][0] for run in machine.ps())
    assert first["memory_limit_bytes"] == 1234 * MIB
    assert first["cores"] == 20
    assert first["uuid"] == second["uuid"]


#: Prints what a loop of fills and a loop of copies within the card did in a second: launches, and whether they waited
FILLS_AND_COPIES = """
import os, time
from ctypes import byref, c_size_t, c_uint64
from driver_client import *
from vgpu.native import Region
start()
a, b, size = c_uint64(), c_uint64(), c_size_t(65536)
ok(cu.cuMemAlloc_v2(byref(a), size)); ok(cu.cuMemAlloc_v2(byref(b), size))
fill = lambda: cu.cuMemsetD8Async(a, 7, size, None)
copy = lambda: cu.cuMemcpyDtoDAsync_v2(b, a, size, None)
for call in (fill, copy):
    with Region.open(os.environ["VGPU_DIR"]) as region:
        before = region.usage().cards[0]
        until = time.monotonic() + 1
        while time.monotonic() < until:
            ok(call()); ok(cu.cuCtxSynchronize())
        after = region.usage().cards[0]
    print(after.launches > before.launches, after.throttled_ns > before.throttled_ns)
"""
PACED, FREE = "True True", "False False"


@pytest.mark.parametrize(
    ("options", "settings", "fills", "copies"),
    [
        ((), "", PACED, FREE),
        (("--fills-on", "engine", "--copies-on", "sms"), "", FREE, PACED),
        ((), "{fillsOn: engine, copiesOn: sms}", FREE, PACED),
        (("--fills-on=sms",), "{fillsOn: engine, copiesOn: sms}", PACED, PACED),
    ],
)
def test_what_makes_fills_and_copies_is_paced_where_it_is_said_to_be_multiprocessors(
    machine: Machine, tmp_path: Path, options: tuple[str, ...], settings: str, fills: str, copies: str
) -> None:
    (tmp_path / "config.yaml").write_text(f"devicePlugin: {settings or '{}'}\n")
    environ = {
        "VGPU_CONFIG": str(tmp_path / "config.yaml"),
        "PYTHONPATH": f"{ROOT}:{ROOT}/tests/native",
        "VGPU_SIM_TIME": "memory=100MB/s",
    }
    command = (sys.executable, "-c", FILLS_AND_COPIES)
    done = machine.run("--gpumem", "1000", "--gpucores", "10", *options, command=command, **environ)
    assert done.stdout.splitlines() == [fills, copies], done.stderr


def test_what_can_make_fills_is_said_where_it_is_misspelt(machine: Machine) -> None:
    done = machine.run("--fills-on", "dma", command=("true",))
    assert done.returncode == 2
    assert "--fills-on" in done.stderr
    assert "sms" in done.stderr
    assert "engine" in done.stderr


def test_a_core_limit_holds(machine: Machine) -> None:
    (card,) = machine.probe("--gpumem", "1000", "--gpucores", "30", probe=("--cores", "--seconds", "1.5"))["cards"]
    assert 0 < card["core_share"] < 50
    (free,) = machine.probe("--gpumem", "1000", probe=("--cores", "--seconds", "0.5"))["cards"]
    assert free["core_share"] > card["core_share"]


def test_the_installed_paths_exist(machine: Machine) -> None:
    for part, inside in (("libvgpu", ""), ("simulator", "libcuda.so.1"), ("include", "vgpu/region.h")):
        done = machine.vgpu("where", part)
        assert (Path(done.stdout.rstrip("\n")) / inside).exists() if inside else Path(done.stdout.strip()).is_file()
    assert machine.vgpu("where", "moon").returncode == 2


def test_limits_hold_from_a_checkout_whose_path_ld_preload_cannot_carry(machine: Machine, tmp_path: Path) -> None:
    """By `vgpu run` and by the line with `vgpu where`."""
    checkout = tmp_path / "my $programs"
    shutil.copytree(ROOT / "vgpu", checkout / "vgpu", ignore=shutil.ignore_patterns("__pycache__"))
    machine.environ |= {"PYTHONPATH": str(checkout), "PYTHONSAFEPATH": "1"}
    (card,) = machine.probe("--gpumem", "3000", probe=("--over",))["cards"]
    assert card["cuda_total"] == 3000 * MIB
    path = Path(machine.vgpu("where", "libvgpu").stdout.strip())
    assert path.is_relative_to(machine.state / "lib")
    assert path.read_bytes() == (checkout / "vgpu/native/lib/libvgpu.so").read_bytes()


def test_the_library_alone_limits_any_command_by_its_environment(machine: Machine, tmp_path: Path) -> None:
    """The line that `vgpu where` is for; no runner, no agent."""
    region = tmp_path / "region"
    region.mkdir()
    line = (
        'LD_PRELOAD=$(vgpu where libvgpu) CUDA_DEVICE_MEMORY_LIMIT_0=3000m VGPU_DIR="$REGION" '
        'LD_LIBRARY_PATH=$(vgpu where simulator) exec "$@"'
    )
    shell = f'vgpu() {{ "{sys.executable}" -m vgpu "$@"; }}; {line}'
    environ = {**machine.environ, "REGION": str(region), "VGPU_SIMULATE": "T4", "VGPU_SIM_DIR": str(tmp_path / "sim")}
    command = [*PROBE, "--fill", "--over"]
    done = subprocess.run(
        ["bash", "-c", shell, "-", *command], capture_output=True, text=True, env=environ, check=False
    )
    assert done.returncode == 0, done.stderr
    (card,) = json.loads(done.stdout)["cards"]
    assert card["cuda_total"] == 3000 * MIB
    assert (card["fill"], card["over"]) == ("CUDA_SUCCESS", "CUDA_ERROR_OUT_OF_MEMORY")
    assert {path.name for path in region.iterdir()} >= {"limits", "usage"}
