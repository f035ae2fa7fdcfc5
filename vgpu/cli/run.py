"""`vgpu run`: a command with a slice of this machine's cards."""

import re
from typing import Any, NoReturn

import click

from vgpu import names
from vgpu.errors import UserError

_UNITS = {"k": 1, "m": 1024, "g": 1024**2}  # KiB


class Memory(click.ParamType[int]):
    """MiB as a bare number, as in `nvidia.com/gpumem`; or with a unit, as in CUDA_DEVICE_MEMORY_LIMIT."""

    name = "memory"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        allowed = f"write MiB from 1 to {names.MAX_MEMORY_MIB}, such as 3000, or a size such as 3g, 3000m, 3072000k"
        match = re.fullmatch(r"([0-9]+)([kmg]?)", str(value).lower(), re.ASCII)
        if match is None:
            self.fail(f"{value!r}: {allowed}.", param, ctx)
        mib, rest = divmod(int(match[1]) * _UNITS[match[2] or "m"], 1024)
        if rest or not 1 <= mib <= names.MAX_MEMORY_MIB:
            self.fail(f"{value!r}: {allowed}.", param, ctx)
        return mib


class Seconds(click.ParamType[float]):
    """A time to wait, not negative."""

    name = "seconds"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        try:
            seconds = float(value)
        except ValueError:
            seconds = -1
        if not seconds >= 0:
            self.fail(
                f"{value!r}: write seconds, or nothing to wait without end; put -- before the command.", param, ctx
            )
        return seconds


class MemoryMode(click.Choice[str]):
    """Where memory that does not fit on the card stays."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if value not in self.choices:
            self.fail(
                f"{value!r}: write static or movable, or nothing for static; put -- before the command.", param, ctx
            )
        return str(value)


def _list(texts: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(part.strip() for text in texts for part in text.split(",") if part.strip())


@click.command(context_settings={"allow_interspersed_args": False})
@click.option(
    "--gpumem",
    type=Memory(),
    metavar="MIB",
    help="Memory on each card, MiB or a size such as 3g. Default: the whole card.",
)
@click.option(
    "--gpumem-percentage",
    type=click.IntRange(1, 100),
    metavar="PERCENT",
    help="Memory in % of each card; --gpumem wins.",
)
@click.option(
    "--gpucores",
    type=click.IntRange(0, 100),
    metavar="PERCENT",
    help="Share of each card's time; 0: no limit, 100: no other command on the card.",
)
@click.option(
    "--core-policy",
    type=click.Choice(["fixed", "elastic", "none"]),
    help="How --gpucores limits: always; unless others are idle; not at all. Default: fixed.",
)
@click.option(
    "--cores-limit",
    type=click.IntRange(1, 100),
    metavar="PERCENT",
    help="With elastic: never above this share. Default: 100.",
)
@click.option(
    "--fills-on",
    type=click.Choice(["sms", "engine"]),
    help="Unit that makes fills (cuMemset…) on these cards: --gpucores limits multiprocessors, not engines. "
    "Default: devicePlugin.fillsOn of the configuration, else sms.",
)
@click.option(
    "--copies-on",
    type=click.Choice(["engine", "sms"]),
    help="Unit that makes copies within a card. Default: devicePlugin.copiesOn of the configuration, else engine.",
)
@click.option(
    "--oversubscribe",
    type=MemoryMode(["static", "movable"]),
    is_flag=False,
    flag_value="static",
    metavar="[static|movable]",
    help="Put memory that does not fit on the card into host memory. static: it comes up once, when there is room; "
    "movable: it moves both ways.",
)
@click.option(
    "--host-memory",
    type=Memory(),
    metavar="MIB",
    help="With --oversubscribe: limit of host memory. "
    "Default: half of the available memory that is not promised to other commands.",
)
@click.option(
    "--guarantee",
    type=Memory(),
    metavar="MIB",
    help="With --oversubscribe: memory guaranteed on each card, at least a quarter of it. Default: as much as fits.",
)
@click.option(
    "--gpus", type=click.IntRange(1, 16), default=1, metavar="N", help="Number of different cards. Default: 1."
)
@click.option("--priority", type=click.IntRange(0, 1), metavar="0|1", help="0 high, 1 low.")
@click.option(
    "--policy", type=click.Choice(["spread", "binpack"]), help="Least or most loaded card first. Default: spread."
)
@click.option("--use-gputype", multiple=True, metavar="MODELS", help="Only these models, such as T4 or *A100*.")
@click.option("--nouse-gputype", multiple=True, metavar="MODELS", help="None of these models.")
@click.option("--use-gpuuuid", multiple=True, metavar="UUIDS", help="Only these cards.")
@click.option("--nouse-gpuuuid", multiple=True, metavar="UUIDS", help="None of these cards.")
@click.option("--numa-bind", is_flag=True, help="All cards from one NUMA node.")
@click.option(
    "--wait",
    type=Seconds(),
    is_flag=False,
    flag_value="inf",
    metavar="[SECONDS]",
    help="Wait in a queue when no card has room.",
)
@click.option(
    "--strict",
    is_flag=True,
    help="Also limit programs that lose their environment (env -i), by a mount namespace with its own /etc.",
)
@click.option(
    "--simulate",
    envvar=names.ENV_SIMULATE,
    metavar="PROFILE[xN][@CUDA]",
    help="Simulated cards instead of the driver's, such as T4x2.",
)
@click.argument("command_line", nargs=-1, required=True, metavar="-- COMMAND...", type=click.UNPROCESSED)
def command(command_line: tuple[str, ...], **options: Any) -> NoReturn:
    """Run COMMAND with a slice of this machine's cards: memory and compute limits that hold.

    The exit code is that of COMMAND. If no card has room, the exit code is 75, with the reason per card; see --wait.
    """
    import msgspec

    from vgpu import config as configuration
    from vgpu.resources import CardSelector, GpuRequest
    from vgpu.workstation.place import LEAST, Demand
    from vgpu.workstation.run import run

    try:
        config = configuration.load()
    except configuration.ConfigError as error:
        raise UserError(str(error)) from None
    for name in ("host_memory", "guarantee"):
        if options[name] and not options["oversubscribe"]:
            raise UserError(f"--{name.replace('_', '-')} has no effect without --oversubscribe", 2)
    said = {"fillsOn": options["fills_on"], "copiesOn": options["copies_on"]}
    plugin = msgspec.structs.replace(config.device_plugin, **{name: on for name, on in said.items() if on})
    config = msgspec.structs.replace(config, device_plugin=plugin)
    rules = configuration.rules(config)
    memory, percent, cores = options["gpumem"], options["gpumem_percentage"], options["gpucores"]
    if memory is None and percent is None:
        memory = rules.default_memory or None
    guarantee = options["guarantee"]
    if guarantee and memory and not memory <= LEAST * guarantee <= LEAST * memory:
        allowed = f"from {-(-memory // LEAST)} MiB, a quarter of --gpumem, to {memory}"
        raise UserError(f"--guarantee is {guarantee} MiB; allowed: {allowed}", 2)
    demand = Demand(
        request=GpuRequest(
            count=options["gpus"],
            memory=memory or 0,
            percent=100 if memory or percent is None else percent,
            cores=rules.default_cores if cores is None else cores,
            priority=options["priority"],
        ),
        selector=CardSelector(
            use_types=_list(options["use_gputype"]),
            nouse_types=_list(options["nouse_gputype"]),
            use_uuids=_list(options["use_gpuuuid"]),
            nouse_uuids=_list(options["nouse_gpuuuid"]),
            numa_bind=options["numa_bind"],
        ),
        policy=options["policy"] or rules.gpu_policy,
        core_policy=options["core_policy"] or config.core_policy,
        cores_limit=options["cores_limit"],
        memory_mode=options["oversubscribe"] or "",
        guarantee=guarantee,
        host_memory=options["host_memory"],
    )
    simulate = options["simulate"] or config.simulate
    run(command_line, demand, config, simulate=simulate, wait=options["wait"], strict=options["strict"])
