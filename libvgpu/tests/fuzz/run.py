"""Builds the fuzz target with a simulated driver and a library of its own below build/fuzz, and runs it.

`python libvgpu/tests/fuzz/run.py [--libfuzzer] [--seconds N] [--runs N] [--seed N] [--replay FILE ...]`
Inputs that break something are left in build/fuzz/found, with the stacks of all threads where one hung; the exit
status is 1 then.
"""

import argparse
import fcntl
import os
import re
import shlex
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

HERE = Path(__file__).resolve().parent
LIBVGPU = HERE.parents[1]
BUILD = LIBVGPU.parent / "build/fuzz"
CORPUS = HERE / "corpus"
sys.path.insert(0, str(LIBVGPU))
import build  # noqa: E402  (of libvgpu, which is no package)

#: libFuzzer counts what runs in the library and in the driver; a program that is fuzzed without it needs no clang
COVERED = "-fsanitize=fuzzer-no-link"


def compile_all(libfuzzer: bool, flags: str = "") -> Path:
    """The fuzz program, beside the libraries that it runs with; compiled with `flags` too."""
    folder = BUILD / ("libfuzzer" if libfuzzer else "plain" + "".join(c for c in flags if c.isalnum()))
    compiler = [
        "clang" if libfuzzer else os.environ.get("CC", "cc"),
        "-std=gnu11",
        "-O1",
        "-g",
        "-pthread",
        "-Wall",
        "-Wextra",
        "-Werror",
    ]
    compiler += shlex.split(flags)
    includes = [
        f"-I{d}" for d in (LIBVGPU / "include", LIBVGPU / "src", LIBVGPU / "simulator", HERE, *build.header_dirs())
    ]
    shared = [*compiler, "-fPIC", "-fvisibility=hidden", *includes, *([COVERED] if libfuzzer else [])]
    program = [*compiler, *includes]

    def objects(command: list[str], sources: list[Path]) -> list[Path]:
        made = [folder / command_name(command) / source.relative_to(LIBVGPU).with_suffix(".o") for source in sources]
        for target in made:
            target.parent.mkdir(parents=True, exist_ok=True)
        jobs = [[*command, "-c", "-o", str(t), str(s)] for t, s in zip(made, sources, strict=True) if stale(t, s)]
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda job: subprocess.run(job, check=True), jobs))
        return made

    def command_name(command: list[str]) -> str:
        return "shared" if "-fPIC" in command else "program"

    newest_header = max(
        h.stat().st_mtime for d in ("include", "src", "simulator", "tests/fuzz") for h in (LIBVGPU / d).rglob("*.[hd]*")
    )

    def stale(target: Path, source: Path) -> bool:
        made = target.stat().st_mtime if target.exists() else 0
        return made <= max(source.stat().st_mtime, newest_header)

    def link(output: str, *arguments: str | Path) -> None:
        subprocess.run([*compiler, "-o", folder / output, *arguments, "-ldl", "-lpthread", "-lrt", "-lm"], check=True)

    driver = objects(shared, build.sources_of("simulator/common", "simulator/cuda"))
    management = objects(shared, build.sources_of("simulator/nvml"))
    library = objects(shared, build.library_sources())
    common = [o for o in driver if "common" in o.parts]
    link("libcuda.so.1", "-shared", "-Wl,-Bsymbolic", "-Wl,-soname,libcuda.so.1", *driver)
    link("libnvidia-ml.so.1", "-shared", "-Wl,-Bsymbolic", "-Wl,-soname,libnvidia-ml.so.1", *common, *management)
    exports = (LIBVGPU / "src/exports.map").read_text()
    if flags:  # sanitizers call dlsym before they are ready for a library that they watch
        exports = re.sub(r"\bdlv?sym;", "", exports)
    (folder / "exports.map").write_text(exports)
    script = f"-Wl,--version-script={folder / 'exports.map'}"
    link("libvgpu.so", "-shared", "-Wl,-Bsymbolic", script, "-Wl,-soname,libvgpu.so", *library)
    own = sorted(HERE.glob("*.c"))
    sources = [source for source in own if not (libfuzzer and source.name == "driver.c")]
    sources += build.agent_sources() + build.sources_of("simulator/common")
    # libFuzzer starts shells, and a sanitizer must come first: there the library is linked in front of the driver
    first = ["-Wl,--no-as-needed", "-l:libvgpu.so"] if libfuzzer or flags else []
    first += ["-fsanitize=fuzzer"] if libfuzzer else []
    link("fuzz", *objects(program, sources), f"-L{folder}", *first, "-l:libcuda.so.1")
    return folder / "fuzz"


def environment(program: Path, tier: str) -> dict[str, str]:
    """Preloaded as in a container, without anything that limits or simulates by itself."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("CUDA_", "VGPU_", "LD_", "NVIDIA_", "GPU_CORE"))}
    preload = {} if program.parent.name != "plain" else {"LD_PRELOAD": str(program.parent / "libvgpu.so")}
    # a forked child finds its parent's threads ended, and nobody could join them there; the parent joins its own
    sanitizer = {"TSAN_OPTIONS": "report_thread_leaks=0 halt_on_error=1"}
    return clean | preload | sanitizer | {"FUZZ_TIER": tier} | {"LD_LIBRARY_PATH": str(program.parent)}


def main() -> int:
    """Exit status of the fuzz program."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--libfuzzer", action="store_true", help="clang's fuzzer instead of the own driver")
    parser.add_argument("--flags", default="", help="added to every compilation, such as -fsanitize=address")
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--runs", type=int, default=2**62)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--hang", type=int, default=120, help="seconds after which a program hangs")
    parser.add_argument("--found", type=Path, default=BUILD / "found", help="folder of what breaks something")
    parser.add_argument("--bare", action="store_true", help="without the library: everything must be found")
    parser.add_argument(
        "--tier", choices=("static", "movable"), default="", help="half of each limit is in host memory"
    )
    parser.add_argument("--save", type=Path, help="keep the inputs that did something new in this folder")
    parser.add_argument("--replay", nargs="+", type=Path, help="play these inputs 100 times each, nothing else")
    options = parser.parse_args()
    BUILD.mkdir(parents=True, exist_ok=True)
    with open(BUILD / "lock", "w") as lock:  # of several runs at once, one compiles
        fcntl.flock(lock, fcntl.LOCK_EX)
        program = compile_all(options.libfuzzer, options.flags)
    found = options.found.resolve()
    found.mkdir(parents=True, exist_ok=True)
    if options.libfuzzer:
        grown = BUILD / "grown"
        grown.mkdir(exist_ok=True)
        command = [
            f"-max_total_time={options.seconds}",
            f"-artifact_prefix={found}/",
            "-max_len=644",
            "-fork=1",
            "-ignore_crashes=1",
        ]
        command += [
            f"-timeout={options.hang}",
            *([f"-seed={options.seed}"] if options.seed is not None else []),
            str(grown),
            str(CORPUS),
        ]
        command = [str(f) for f in options.replay] if options.replay else command
    elif options.replay:
        command = ["-times", "100", "-out", str(found), "-hang", str(options.hang), *map(str, options.replay)]
    else:
        command = [
            "-seconds",
            str(options.seconds),
            "-runs",
            str(options.runs),
            "-out",
            str(found),
            "-hang",
            str(options.hang),
        ]
        if options.save:
            options.save.mkdir(parents=True, exist_ok=True)
            command += ["-save", str(options.save)]
        command += ["-seed", str(options.seed)] if options.seed is not None else []
        command += [str(CORPUS)] if CORPUS.is_dir() else []
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the program too
    with TemporaryDirectory(prefix="vgpu-fuzz-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as scratch:
        variables = environment(program, options.tier) | {"TMPDIR": scratch}
        if options.bare:
            variables.pop("LD_PRELOAD", None)
        return subprocess.run([program, *command], env=variables, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
