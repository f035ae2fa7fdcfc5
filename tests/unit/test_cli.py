"""The frame of the command line: how commands are found, what they import, how errors are reported."""

import os
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

import vgpu.cli
from vgpu import cli, names, probe
from vgpu.cli.run import Memory, Seconds
from vgpu.errors import UserError

ROOT = Path(__file__).parents[2]


def vgpu_command(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    found = {**os.environ, "PYTHONPATH": str(ROOT), **environ}
    return subprocess.run(
        [sys.executable, "-m", "vgpu", *arguments], capture_output=True, text=True, env=found, check=False
    )


def group() -> click.Group:
    return vgpu.cli._group


@pytest.mark.parametrize("name", ["run", "ps", "top", "where", "probe", "doctor"])
def test_every_module_is_a_command_with_help(name: str) -> None:
    done = CliRunner().invoke(group(), [name, "--help"])
    assert done.exit_code == 0
    assert "usage" in done.output.lower()


def test_the_commands_are_the_modules_of_the_package() -> None:
    files = {path.stem for path in (ROOT / "vgpu/cli").glob("*.py")} - {"__init__"}
    assert set(group().list_commands(click.Context(group()))) == files
    done = CliRunner().invoke(group(), ["--help"])
    assert done.exit_code == 0
    assert all(f"\n  {name} " in done.output for name in files)


def test_an_unknown_command_names_those_that_exist() -> None:
    done = CliRunner().invoke(group(), ["frobnicate"])
    assert done.exit_code == 2
    assert "no command 'frobnicate'; the commands are: " in done.output
    assert "run" in done.output


def test_a_users_mistake_is_one_line_and_its_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise UserError("the moon is full: wait until it is not", 75)

    monkeypatch.setattr(cli.Commands, "get_command", lambda *_: click.Command("where", callback=fail))
    done = CliRunner().invoke(group(), ["where"], prog_name="vgpu")
    assert done.exit_code == 75
    assert done.output == "vgpu where: the moon is full: wait until it is not\n"


def test_what_the_system_refuses_is_one_line_with_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        Path("/nonexistent/x").read_text()

    monkeypatch.setattr(cli.Commands, "get_command", lambda *_: click.Command("where", callback=fail))
    done = CliRunner().invoke(group(), ["where"], prog_name="vgpu")
    assert done.exit_code == 1
    assert done.output == "vgpu where: /nonexistent/x: No such file or directory\n"


def test_kubectl_finds_the_same_commands_under_its_own_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["/usr/bin/kubectl-vgpu", "--help"])
    with pytest.raises(SystemExit):
        cli.main()
    assert "Usage: kubectl vgpu " in capsys.readouterr().out


@pytest.mark.parametrize("closed", ["0", "1", "2", "0 1 2"])
def test_a_closed_standard_stream_is_no_reason_to_fail(closed: str, tmp_path: Path) -> None:
    """The command gets /dev/null there, never a file that was opened first by chance."""
    redirections = " ".join(f"{number}>&-" for number in closed.split())
    script = (
        "import os, sys; open(sys.argv[1], 'w').write(' '.join(os.readlink(f'/proc/self/fd/{n}') for n in (0, 1, 2)))"
    )
    arguments = [
        "run",
        "--simulate",
        "T4",
        "--gpumem",
        "200",
        "--",
        sys.executable,
        "-c",
        script,
        str(tmp_path / "out"),
    ]
    done = subprocess.run(
        ["bash", "-c", f'"$@" {redirections}', "-", sys.executable, "-m", "vgpu", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), names.ENV_STATE_DIR: str(tmp_path / "state")},
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    found = (tmp_path / "out").read_text().split()
    assert [found[int(number)] for number in closed.split()] == [os.devnull] * len(closed.split())


def test_text_outside_the_encoding_of_stdout_is_printed_with_question_marks() -> None:
    script = (
        "import sys; sys.argv = ['vgpu', 'where', 'libvgpu']\n"
        "from vgpu import cli; import click\n"
        "cli.Commands.get_command = lambda *_: click.Command('where', callback=lambda: print('Größe'))\n"
        "sys.argv[2:] = []; cli.main()"
    )
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environ, check=False)
    assert (done.stdout, done.returncode) == ("Gr??e\n", 0), done.stderr


def test_where_imports_nothing_heavy() -> None:
    script = (
        "import sys; sys.argv = ['vgpu', 'where', '--help']\n"
        "from vgpu.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "from vgpu.native import paths\n"
        "heavy = {'numpy', 'kubernetes', 'grpc', 'rich', 'yaml', 'flask', 'pynvml', 'vgpu.native._region'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_the_probe_needs_nothing_but_the_standard_library_and_nvml() -> None:
    script = (
        "import sys; before = set(sys.modules); import vgpu.probe\n"
        "names = {name.partition('.')[0] for name in set(sys.modules) - before}\n"
        "print(sorted(names - set(sys.stdlib_module_names)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout == "['vgpu']\n"


@pytest.mark.parametrize(
    ("text", "mib"),
    [
        ("3000", 3000),
        ("3000m", 3000),
        ("3000M", 3000),
        ("3g", 3072),
        ("3G", 3072),
        ("1048576k", 1024),
        ("16777216", 16777216),
    ],
)
def test_memory_is_mib_or_a_size_with_its_unit(text: str, mib: int) -> None:
    assert Memory().convert(text, None, None) == mib


@pytest.mark.parametrize(
    "text", ["0", "-1", "1.5", "abc", "", "3000MiB", "8Gi", "1k", "1025k", "16777217", "20000g", "٣"]
)
def test_other_sizes_are_refused_with_what_is_allowed(text: str) -> None:
    with pytest.raises(click.BadParameter, match="write MiB from 1 to 16777216, such as 3000, or a size such as 3g"):
        Memory().convert(text, None, None)


@pytest.mark.parametrize("text", ["-1", "nan", "python"])
def test_a_time_to_wait_is_a_number_of_seconds(text: str) -> None:
    with pytest.raises(click.BadParameter, match="write seconds"):
        Seconds().convert(text, None, None)
    assert Seconds().convert("2.5", None, None) == 2.5
    assert Seconds().convert("inf", None, None) == float("inf")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpumem", "8Gi", "--", "true"], "'--gpumem': '8Gi': write MiB"),
        (["--gpumem-percentage", "101", "--", "true"], "'--gpumem-percentage': 101 is not in the range 1<=x<=100"),
        (["--gpucores", "101", "--", "true"], "'--gpucores': 101 is not in the range 0<=x<=100"),
        (["--gpus", "0", "--", "true"], "'--gpus': 0 is not in the range 1<=x<=16"),
        (["--priority", "2", "--", "true"], "'--priority': 2 is not in the range 0<=x<=1"),
        (["--policy", "best", "--", "true"], "'best' is not one of 'spread', 'binpack'"),
        (
            ["--wait", "true"],
            "'--wait': 'true': write seconds, or nothing to wait without end; put -- before the command",
        ),
        (["--gpumem", "100"], "Missing argument '-- COMMAND...'"),
    ],
)
def test_bad_arguments_of_run(arguments: list[str], message: str) -> None:
    done = CliRunner().invoke(group(), ["run", *arguments])
    assert done.exit_code == 2
    assert message in " ".join(done.output.split())


def test_a_probe_without_a_driver_says_so() -> None:
    done = vgpu_command("probe", LD_LIBRARY_PATH="")
    if "cannot find libcuda.so.1" not in done.stdout:
        pytest.skip("this machine has a driver")
    assert done.returncode == 1
    assert done.stderr == "vgpu probe: cannot find libcuda.so.1: no NVIDIA driver here\n"


@pytest.mark.parametrize(("text", "expected"), [("2ms", 2_000_000), ("100us", 100_000), ("500ns", 500)])
def test_durations_of_probe_kernels(text: str, expected: int) -> None:
    assert probe.nanoseconds(text) == expected


@pytest.mark.parametrize("text", ["0ms", "2", "2s", "1.5ms", "ms", ""])
def test_other_durations_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="whole number with ns, us or ms"):
        probe.nanoseconds(text)
