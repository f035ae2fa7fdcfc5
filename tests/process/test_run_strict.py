"""`vgpu run --strict`: limits hold for programs that have lost their environment."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from run_machine import DEADLINE, PROBE, ROOT, Machine

from vgpu.native import paths

MIB = 1 << 20
#: a user other than root, because root may do more
AS_ANOTHER = ("unshare", "--user", "--map-user=1234", "--map-group=1234")


def allowed(*command: str) -> bool:
    return subprocess.run([*command, "true"], capture_output=True, check=False).returncode == 0


pytestmark = pytest.mark.skipif(
    not allowed("unshare", "--user", "--map-root-user", "--mount"), reason="no user namespaces on this machine"
)


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    found = Machine(tmp_path / "state", "T4x2")
    yield found
    found.stop()


def strict(
    machine: Machine, *command: str, by: tuple[str, ...] = (), **environ: str
) -> subprocess.CompletedProcess[str]:
    runner = [sys.executable, "-m", "vgpu", "run", "--strict", "--simulate", "T4x2", "--gpumem", "3000", "--"]
    return subprocess.run(
        [*by, *runner, *command],
        capture_output=True,
        text=True,
        env={**machine.environ, **environ},
        timeout=DEADLINE,
        check=False,
    )


def bare(machine: Machine) -> tuple[str, ...]:
    """The probe with only the environment that it needs to find the simulated driver."""
    needed = (f"LD_LIBRARY_PATH={paths.simulator()}", f"VGPU_SIM_DIR={machine.simulator}", f"PYTHONPATH={ROOT}")
    return ("env", "-i", *needed, *PROBE, "--fill", "--over")


def limited(done: subprocess.CompletedProcess[str]) -> None:
    cards: list[dict[str, Any]] = json.loads(done.stdout)["cards"]
    mine, *others = [card for card in cards if card["device_total"]]
    assert (mine["cuda_total"], mine["fill"]) == (3000 * MIB, "CUDA_SUCCESS"), done.stderr
    assert mine["over"] == "CUDA_ERROR_OUT_OF_MEMORY"
    assert not others  # without the variable, the program sees the other card, and gets no memory of it


@pytest.mark.parametrize("by", [(), AS_ANOTHER], ids=["root", "another"])
def test_a_program_without_environment_keeps_to_its_limits(machine: Machine, by: tuple[str, ...]) -> None:
    done = strict(machine, *bare(machine), by=by)
    limited(done)
    assert "warning" not in done.stderr


@pytest.mark.parametrize("by", [(), AS_ANOTHER], ids=["root", "another"])
def test_a_program_that_drops_the_library_s_variables_keeps_to_its_limits(
    machine: Machine, by: tuple[str, ...]
) -> None:
    limited(strict(machine, "sh", "-c", 'unset LD_PRELOAD VGPU_DIR CUDA_DEVICE_MEMORY_LIMIT_0; exec "$@"', "-",
                   *PROBE, "--fill", "--over", by=by))  # fmt: skip


def test_without_strict_it_has_the_whole_card(machine: Machine) -> None:
    """Shows what the option is for."""
    done = machine.run("--gpumem", "3000", command=bare(machine))
    assert json.loads(done.stdout)["cards"][0]["cuda_total"] > 14000 * MIB
    assert "; --strict limits it" in done.stderr


@pytest.mark.parametrize("by", [(), AS_ANOTHER], ids=["root", "another"])
def test_what_the_command_sees_is_as_before(machine: Machine, tmp_path: Path, by: tuple[str, ...]) -> None:
    script = "pwd; id -u; id -g; cat /etc/hostname /etc/hosts /etc/passwd; echo $LD_PRELOAD; echo x > ./written; exit 7"
    folder = tmp_path / "with, a comma: and blanks"
    folder.mkdir()
    inside = strict(machine, "sh", "-c", f"cd '{folder}'; {script}", by=by, LD_PRELOAD="")
    outside = subprocess.run(
        [*by, "sh", "-c", f"cd '{folder}'; {script}"], capture_output=True, text=True, env=machine.environ, check=False
    )
    assert (inside.returncode, inside.stdout) == (7, outside.stdout), inside.stderr
    assert (folder / "written").read_text() == "x\n"


def test_nothing_is_mounted_outside_and_nothing_stays(machine: Machine) -> None:
    before = Path("/proc/self/mountinfo").read_text()
    assert strict(machine, "true").returncode == 0
    assert Path("/proc/self/mountinfo").read_text() == before
    assert machine.ps() == []
    assert list((machine.state / "slices").iterdir()) == []


def test_a_state_whose_path_has_a_meaning_in_options_of_mounts_is_no_obstacle(tmp_path: Path) -> None:
    machine = Machine(tmp_path / "a,b:c" / "state", "T4x2")
    limited(strict(machine, *bare(machine)))


def test_a_region_that_is_lost_is_a_refusal(machine: Machine) -> None:
    done = strict(machine, "sh", "-c", 'rm -rf "$VGPU_DIR"/limits "$VGPU_DIR"/usage; exec "$@"', "-", *bare(machine))
    assert "/etc/vgpu-slice/limits: missing" in done.stderr
    assert json.loads(done.stdout)["cards"] == []


@pytest.mark.skipif(shutil.which("setpriv") is None or os.geteuid() != 0, reason="needs root and setpriv")
def test_where_the_kernel_forbids_it_the_command_does_not_start(machine: Machine) -> None:
    done = strict(machine, "echo", "started", by=("setpriv", "--bounding-set=-sys_admin", "--inh-caps=-sys_admin"))
    assert (done.returncode, done.stdout) == (1, "")
    assert "--strict: this machine does not let user 0 create a mount namespace" in done.stderr
    assert machine.ps() == []


@pytest.mark.parametrize("by", [(), AS_ANOTHER], ids=["root", "another"])
def test_the_region_leads_nowhere_else(machine: Machine, by: tuple[str, ...]) -> None:
    """A command that removes its region recursively must not reach the machine's own /etc through it."""
    mounts = strict(machine, "cat", "/proc/self/mountinfo", by=by).stdout.splitlines()
    places = [line.split()[4] for line in mounts]
    assert "/etc/vgpu-slice" in places
    assert [place for place in places if place.startswith(str(machine.state))] == []


def test_etc_cannot_be_written(machine: Machine) -> None:
    done = strict(
        machine, "sh", "-c", "rm /etc/vgpu-slice.test; echo x > /etc/vgpu-slice.test; mount | grep -c ' on /etc '"
    )
    assert "Read-only file system" in done.stderr
    assert not Path("/etc/vgpu-slice.test").exists()
