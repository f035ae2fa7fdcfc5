"""Shows what this process sees of its GPUs: `vgpu probe`, or `python3 -m vgpu.probe` in a container; one JSON line.

The probe is a client like any other: it uses the driver API by ctypes on libcuda.so.1, and NVML by nvidia-ml-py. It
knows neither regions nor limits, so it prints what every program would see.
"""

import argparse
import ctypes
import json
import os
import re
import sys
import time
from collections.abc import Sequence
from typing import Any, Final

MIB: Final = 1 << 20
_NS: Final = {"ns": 1, "us": 1_000, "ms": 1_000_000}
LONGEST: Final = 31_536_000.0  #: longest duration of any kind, seconds: a year
LARGEST: Final = 16_777_216  #: MiB, as for gpumem (vgpu.names.MAX_MEMORY_MIB)
IN_FLIGHT: Final = 4  #: launches queued on the card: enough to keep it busy, few enough to stop quickly
WARM_UP: Final = 0.3  #: seconds of launches before the measurement, which use up the credit of an idle time

WHOLE: Final = (
    "--fill allocates one block, which is either on the card or in host memory as a whole: "
    "use --blocks to fill the free memory of both"
)

# Spins until the card's nanosecond clock has advanced by the parameter. The simulator uses the number in the name.
# Source: PTX ISA, "Special Registers: %globaltimer".
PTX: Final = """\
.version 6.0
.target sm_50
.address_size 64
.visible .entry spin_{name}(.param .u64 duration)
{{
    .reg .pred %go;
    .reg .b64 %t<5>;
    ld.param.u64 %t0, [duration];
    mov.u64 %t1, %globaltimer;
again:
    mov.u64 %t2, %globaltimer;
    sub.u64 %t3, %t2, %t1;
    setp.lt.u64 %go, %t3, %t0;
    @%go bra again;
    ret;
}}
"""


class CudaError(Exception):
    """A driver call failed."""

    def __init__(self, call: str, status: str) -> None:
        super().__init__(f"{call}: {status}")
        self.status = status


class Cuda:
    """libcuda.so.1 by name; raises OSError where it does not exist."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")

    def status(self, name: str, *arguments: Any) -> str:
        """Calls `name` and returns the name of its status, "CUDA_SUCCESS" or "CUDA_ERROR_…"."""
        code = int(getattr(self._library, name)(*arguments))
        if code == 0:
            return "CUDA_SUCCESS"
        text = ctypes.c_char_p()
        self._library.cuGetErrorName(code, ctypes.byref(text))
        return text.value.decode() if text.value else f"CUDA error {code}"

    def call(self, name: str, *arguments: Any) -> None:
        status = self.status(name, *arguments)
        if status != "CUDA_SUCCESS":
            raise CudaError(name, status)

    def devices(self) -> list[ctypes.c_int]:
        self.call("cuInit", 0)
        count = ctypes.c_int()
        self.call("cuDeviceGetCount", ctypes.byref(count))
        handles = [ctypes.c_int() for _ in range(count.value)]
        for ordinal, handle in enumerate(handles):
            self.call("cuDeviceGet", ctypes.byref(handle), ordinal)
        return handles

    def allocate(self, size: int) -> tuple[str, ctypes.c_uint64]:
        pointer = ctypes.c_uint64()
        return self.status("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(size)), pointer

    def memory(self) -> tuple[int, int]:
        """(free, total) bytes of the current context's card."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self.call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value, total.value


class Kernel:
    """A kernel of a known duration in the current context."""

    def __init__(self, cuda: Cuda, duration: str) -> None:
        self._cuda = cuda
        self.duration_ns = nanoseconds(duration)
        module = ctypes.c_void_p()
        self._function = ctypes.c_void_p()
        cuda.call("cuModuleLoadData", ctypes.byref(module), PTX.format(name=duration).encode())
        cuda.call("cuModuleGetFunction", ctypes.byref(self._function), module, f"spin_{duration}".encode())
        length = ctypes.c_uint64(self.duration_ns)
        self._keep = length
        self._parameters = (ctypes.c_void_p * 1)(ctypes.addressof(length))
        self._marks = [(self._event(), self._event()) for _ in range(IN_FLIGHT)]

    def _event(self) -> ctypes.c_void_p:
        event = ctypes.c_void_p()
        self._cuda.call("cuEventCreate", ctypes.byref(event), 0)
        return event

    def run(self, seconds: float) -> dict[str, Any]:
        """Launches in a loop; `core_share` is the share of the time (%) in which the card ran these launches.

        Each launch counts with its known duration, because an event pair also includes the time for which a core limit
        holds the launch back. The shortest pair is `kernel_ms`: without a limit, it shows whether the duration is
        correct.
        """
        self._loop(WARM_UP)
        launches, took, shortest = self._loop(seconds)
        return {
            "core_share": round(100 * launches * self.duration_ns / 1e9 / took, 2),
            "kernel_ms": round(shortest, 4),
            "launches": launches,
        }

    def _loop(self, seconds: float) -> tuple[int, float, float]:
        launches, shortest = 0, float("inf")
        elapsed = ctypes.c_float()
        begin = time.monotonic()
        while time.monotonic() - begin < seconds or launches < IN_FLIGHT:
            first, last = self._marks[launches % IN_FLIGHT]
            if launches >= IN_FLIGHT:
                self._cuda.call("cuEventSynchronize", last)
                self._cuda.call("cuEventElapsedTime", ctypes.byref(elapsed), first, last)
                shortest = min(shortest, elapsed.value)
            self._cuda.call("cuEventRecord", first, None)
            self._cuda.call("cuLaunchKernel", self._function, 1, 1, 1, 1, 1, 1, 0, None, self._parameters, None)
            self._cuda.call("cuEventRecord", last, None)
            launches += 1
        self._cuda.call("cuCtxSynchronize")
        return launches, time.monotonic() - begin, shortest


def nanoseconds(duration: str) -> int:
    """The value of "2ms", "100us" …; raises ValueError."""
    match = re.fullmatch(r"([1-9][0-9]*)(ns|us|ms)", duration)
    value = int(match[1]) * _NS[match[2]] if match and len(match[1]) < 20 else 0
    if not 1 <= value <= LONGEST * 1_000_000_000:
        raise ValueError(
            f"{duration!r} must be a whole number with ns, us or ms, such as 2ms, and at most {LONGEST:.0f} s"
        )
    return value


def probe_card(cuda: Cuda, device: ctypes.c_int, options: argparse.Namespace) -> dict[str, Any]:
    """Everything about one card; an "error" in place of what could not be measured."""
    name = ctypes.create_string_buffer(256)
    cuda.call("cuDeviceGetName", name, len(name), device)
    total = ctypes.c_size_t()
    cuda.call("cuDeviceTotalMem_v2", ctypes.byref(total), device)
    card: dict[str, Any] = {"uuid": uuid_of(cuda, device), "name": name.value.decode(), "device_total": total.value}
    try:
        context = ctypes.c_void_p()
        cuda.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        cuda.call("cuCtxSetCurrent", context)
        kernel = Kernel(cuda, options.kernel) if options.cores else None
        if options.allocate:
            card["allocate"], _ = cuda.allocate(options.allocate * MIB)
        card["cuda_free"], card["cuda_total"] = cuda.memory()
        if options.expect_memory and card["cuda_total"] != options.expect_memory * MIB:
            card["error"] = f"found {card['cuda_total'] / MIB:.0f} MiB, expected {options.expect_memory} MiB"
        if options.fill:
            card["fill"], _ = cuda.allocate(card["cuda_free"])
        if options.blocks:
            card |= fill_in_blocks(cuda, options.blocks * MIB)
        if options.over:
            card["over"], _ = cuda.allocate(cuda.memory()[0] + 1)
        if kernel:
            card |= kernel.run(options.seconds)
    except CudaError as error:
        card["error"] = str(error)
    return card


def fill_in_blocks(cuda: Cuda, size: int) -> dict[str, Any]:
    """Allocates the free memory in blocks of `size` bytes, writes both ends of each block, and then reads all of them.

    `blocks` is the number of allocated blocks, `fill` the status of the last allocation, `data` "right" or the wrong
    block.
    """
    found: list[tuple[ctypes.c_uint64, int]] = []
    status = "CUDA_SUCCESS"
    while status == "CUDA_SUCCESS" and (free := cuda.memory()[0]):
        status, pointer = cuda.allocate(min(size, free))
        if status == "CUDA_SUCCESS":
            found.append((pointer, min(size, free)))
    word = ctypes.c_uint64()
    ends = [(at, pointer.value + end) for at, (pointer, length) in enumerate(found) for end in (0, length - 8)]
    for at, address in ends:
        word.value = address ^ at
        cuda.call("cuMemcpyHtoD_v2", ctypes.c_uint64(address), ctypes.byref(word), ctypes.c_size_t(8))
    for at, address in ends:
        cuda.call("cuMemcpyDtoH_v2", ctypes.byref(word), ctypes.c_uint64(address), ctypes.c_size_t(8))
        if word.value != address ^ at:
            return {"blocks": len(found), "fill": status, "data": f"block {at} is wrong"}
    return {"blocks": len(found), "fill": status, "data": "right"}


def uuid_of(cuda: Cuda, device: ctypes.c_int) -> str:
    """The UUID as NVML prints it."""
    raw = ctypes.create_string_buffer(16)
    try:
        cuda.call("cuDeviceGetUuid_v2", raw, device)
    except AttributeError:  # drivers before CUDA 11.4
        cuda.call("cuDeviceGetUuid", raw, device)
    text = raw.raw.hex()
    return f"GPU-{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"


def add_nvml(cards: Sequence[dict[str, Any]]) -> str:
    """Adds NVML's figures for the same cards; returns why there are none, empty on success."""
    try:
        import pynvml
    except ImportError:
        return "nvidia-ml-py is not installed"
    try:
        pynvml.nvmlInit()
        for card in cards:
            memory = pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByUUID(card["uuid"]))
            card["nvml_total"], card["nvml_used"] = int(memory.total), int(memory.used)
    except pynvml.NVMLError as error:
        return str(error)
    return ""


def probe(options: argparse.Namespace) -> dict[str, Any]:
    """The report that `main` prints; "error" names what went wrong as a whole."""
    report: dict[str, Any] = {"pid": os.getpid(), "cards": []}
    try:
        cuda = Cuda()
        for device in cuda.devices():
            report["cards"].append(probe_card(cuda, device, options))
    except OSError:
        report["error"] = "cannot find libcuda.so.1: no NVIDIA driver here"
    except CudaError as error:
        report["error"] = str(error)
    else:
        if not report["cards"]:
            report["error"] = "the driver lists no card for this process"
    for card in report["cards"]:
        card |= {"nvml_total": None, "nvml_used": None}
    reason = add_nvml(report["cards"])
    if reason:
        report["nvml_error"] = reason
    return report


def table(report: dict[str, Any]) -> str:
    """The report for people: one line per card, memory in MiB."""
    head = ("card", "name", "total", "free", "NVML total", "NVML used", "fill", "over", "cores")
    rows = [head]
    for card in report["cards"]:
        share = card.get("core_share")
        rows.append(
            (
                card["uuid"],
                card["name"],
                *(_mib(card.get(key)) for key in ("cuda_total", "cuda_free", "nvml_total", "nvml_used")),
                card.get("fill", card.get("error", "-")),
                card.get("over", "-"),
                "-" if share is None else f"{share:.1f} %",
            )
        )
    widths = [max(len(row[at]) for row in rows) for at in range(len(head))]
    return "\n".join("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)) for row in rows)


def _mib(size: int | None) -> str:
    return "-" if size is None else f"{size / MIB:.0f} MiB"


def _duration(text: str) -> str:
    try:
        nanoseconds(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value <= LONGEST:
        raise argparse.ArgumentTypeError(f"{text!r} must be more than 0, and at most {LONGEST:.0f}")
    return value


def _mebibytes(text: str) -> int:
    value = int(text) if text.isascii() and text.isdecimal() else 0
    if not 1 <= value <= LARGEST:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number of MiB from 1 to {LARGEST}")
    return value


def parser(program: str) -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(program, description="Print the GPUs that this process gets, as one JSON object.")
    result.add_argument("--allocate", type=_mebibytes, metavar="MIB", help="allocate this much on each card first")
    result.add_argument("--fill", action="store_true", help="then allocate exactly the free memory, as one block")
    result.add_argument(
        "--blocks",
        type=_mebibytes,
        metavar="MIB",
        help="then allocate the free memory in blocks of this size, and use them",
    )
    result.add_argument("--over", action="store_true", help="then allocate one byte more than the free memory")
    result.add_argument(
        "--expect-memory", type=_mebibytes, metavar="MIB", help="fail unless each card has exactly this much"
    )
    result.add_argument("--cores", action="store_true", help="measure the share of the card's time that launches get")
    result.add_argument("--seconds", type=_positive, default=2.0, help="how long to measure on each card (default 2)")
    result.add_argument("--kernel", type=_duration, default="2ms", help="duration of one launch (default 2ms)")
    result.add_argument("--hold", type=_positive, metavar="SECONDS", help="keep everything allocated for this long")
    return result


def main(arguments: Sequence[str] | None = None, program: str = "python3 -m vgpu.probe") -> int:
    """Prints the report, on a terminal also a table; 0 when every card answered everything."""
    options = parser(program).parse_args(arguments)
    report = probe(options)
    print(json.dumps(report), flush=True)
    if sys.stdout.isatty() and report["cards"]:
        print(table(report), flush=True)
    errors = [text for text in (report.get("error"), *(card.get("error") for card in report["cards"])) if text]
    for text in errors:
        print(f"{program}: {text}", file=sys.stderr)
    refused = any(card.get("fill") == "CUDA_ERROR_OUT_OF_MEMORY" and not options.blocks for card in report["cards"])
    if refused and os.environ.get("CUDA_OVERSUBSCRIBE") == "true":
        print(f"{program}: {WHOLE}", file=sys.stderr)
    if options.hold:
        time.sleep(options.hold)
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
