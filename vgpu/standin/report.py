"""Runs the demo or the storm on a scratch cluster and prints the results for a person."""

import logging
import re
import shutil
import signal
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from vgpu import columns
from vgpu.columns import Columns
from vgpu.config import Config
from vgpu.standin.cluster import LocalCluster, scratch
from vgpu.standin.demo import MIB, Demo, DemoResult, read_pods, truth_lines
from vgpu.standin.storm import Storm, StormResult

METRICS_SHOWN = (
    "memory_limit_bytes", "memory_used_bytes", "host_memory_bytes", "core_limit_ratio", "gpu_seconds_total",
)  # fmt: skip
WORDS = {"CUDA_SUCCESS": "granted", "CUDA_ERROR_OUT_OF_MEMORY": "refused"}


def table_of(result: DemoResult) -> Columns:
    table = Columns(
        "POD/CONTAINER", "CARD", ">SLICE", ">CUDA TOTAL", ">NVML TOTAL", "THE REST", "1 BYTE MORE", ">CORES", "",
        shrinking=("CARD", "POD/CONTAINER"),
    )  # fmt: skip
    for finding in result.findings:
        cores = f" {finding.slice_.cores} %" if finding.slice_.cores else ""
        table.add(
            f"{finding.pod}/{finding.container}",
            finding.card,
            f"{finding.slice_.mem} MiB{cores}",
            "-" if finding.cuda_total is None else f"{finding.cuda_total // MIB} MiB",
            "-" if finding.nvml_total is None else f"{finding.nvml_total // MIB} MiB",
            WORDS.get(finding.exact, finding.exact or "-"),
            WORDS.get(finding.over, finding.over or "-"),
            "-" if finding.core_share is None else f"{finding.core_share:.1f} %",
            "✗" if finding.problems else "✓",
        )
    return table


def metric_lines(metrics: list[str]) -> list[str]:
    """The relevant lines, pod by pod, without the label that is the same everywhere."""
    shown = [line for line in metrics if any(f"vgpu_container_{name}{{" in line for name in METRICS_SHOWN)]
    shown = [line for line in shown if "_host_memory_" not in line or not line.endswith(" 0.0")]
    plain = [re.sub(r'node="[^"]*",|namespace="[^"]*",', "", line) for line in shown]
    pods = [re.search(r'pod="([^"]*)"', line) for line in plain]
    return [line for _, line in sorted(zip((pod[1] if pod else "" for pod in pods), plain, strict=True))]


def print_demo(console: Console, result: DemoResult) -> None:
    console.print("[bold]What each container sees of its cards[/] (the cards are simulated):\n")
    console.print(table_of(result))
    console.print(f"\n[bold]/metrics of the node[/] while they ran (some of {len(result.metrics)} container series):")
    for line in metric_lines(result.metrics):
        console.print(f"  {line}", style="dim", highlight=False)
    for finding in result.findings:
        for problem in finding.problems:
            console.print(f"[red]✗[/] {escape(f'pod {finding.pod}, {finding.container}: {problem}')}")
    for problem in result.problems:
        console.print(f"[red]✗[/] {escape(problem)}")


def print_storm(console: Console, result: StormResult) -> None:
    kills = ", ".join(f"{name} {count}" for name, count in result.kills.items())
    console.print(
        f"{result.succeeded} of {result.pods} pods succeeded in {result.seconds:.0f} s; kill -9: {kills}; "
        f"{result.replaced} recreated, since the kubelet refused them while no agent served"
    )
    for uuid, peak in result.peak_mib.items():
        console.print(
            f"  {uuid}: at most {peak} MiB allocated in {result.samples} samples; "
            f"the simulator saw at most {result.peak_bytes.get(uuid, 0) // MIB} MiB in use"
        )
    for problem in (*result.violations, *(f"pod {name} failed" for name in result.failed)):
        console.print(f"[red]✗[/] {escape(problem)}")
    if result.unfinished:
        console.print(f"[red]✗[/] not finished: {', '.join(result.unfinished)}")


def run(
    simulate: str, folder: Path, pods: int | None, kills: int, seed: int, keep: bool, config: Config | None = None
) -> bool:
    """Runs the pods of `folder`, or `pods` generated pods with `kills` × kill -9.

    Returns whether every expectation held.
    """
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda received, _frame: sys.exit(128 + received))  # so that all processes are ended
    console = columns.console(soft_wrap=True)
    manifests = read_pods(folder) if pods is None else []
    directory = Path(tempfile.mkdtemp(prefix="vgpu-demo-", dir=scratch()))
    (directory / "logs").mkdir()
    logging.basicConfig(filename=directory / "logs" / "stand-ins.log", format="%(asctime)s %(name)s: %(message)s")
    good = interrupted = False
    try:
        with (
            console.status("starting agent, scheduler and stand-ins") as status,
            LocalCluster(directory, simulate=simulate, config=config) as cluster,
        ):
            if pods is None:
                outcome = Demo(cluster, manifests).run(lambda text: status.update(text))
                good = outcome.good
            else:
                storm = Storm(cluster, pods=pods, kills=kills, seed=seed)
                stormy = storm.run(
                    lambda r: status.update(f"{r.succeeded} of {r.pods} pods done, {sum(r.kills.values())} kills")
                )
                good = stormy.good
            truth = truth_lines(cluster.simulator_dir)
        if pods is None:
            print_demo(console, outcome)
        else:
            print_storm(console, stormy)
        console.print("\n[bold]The simulator's own account[/] of its cards:")
        for line in truth:
            console.print(f"  {line}", highlight=False)
    except RuntimeError as error:
        console.print(f"[red]✗[/] {escape(str(error))}", highlight=False)
    except (KeyboardInterrupt, SystemExit):
        interrupted = True
        raise
    finally:
        if keep or not (good or interrupted):
            console.print(f"logs: {directory}")
        else:
            shutil.rmtree(directory, ignore_errors=True)
    console.print("[green]all checks passed[/]" if good else "[red]a check failed[/]")
    return good
