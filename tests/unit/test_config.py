"""The configuration file: defaults, round trip, and errors that say where and what is allowed."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vgpu import config, names
from vgpu.config import Config, ConfigError, DevicePlugin, Global, NodeSettings, Scheduler
from vgpu.native import simulator

CONFIGS = st.builds(
    Config,
    resource_name=st.sampled_from(["nvidia.com/gpu", "example.com/GPU_1"]),
    core_policy=st.sampled_from(["fixed", "elastic", "none"]),
    simulate=st.sampled_from(["", "T4", "A100-40x8"]),
    global_=st.builds(Global, gpu_hook_path=st.sampled_from(["/usr/local", "/opt"])),
    scheduler=st.builds(
        Scheduler,
        default_mem=st.integers(0, 2**40),
        default_cores=st.integers(0, 100),
        gpu_policy=st.sampled_from(["spread", "binpack"]),
        privileged=st.sampled_from(["deny", "allow"]),
        reconcile_seconds=st.integers(1, 10**6),
    ),
    device_plugin=st.builds(
        DevicePlugin,
        deviceSplitCount=st.integers(1, 1000),
        deviceMemoryScaling=st.floats(0.01, 64),
        disablecorelimit=st.booleans(),
        hostMemory=st.sampled_from([0, 4096, "64Gi"]),
        memoryMode=st.sampled_from(["static", "movable"]),
        nodeOverrides=st.sampled_from([{}, {"big-*": NodeSettings(hostMemory="1Ti", deviceMemoryScaling=2.0)}]),
        deviceListStrategy=st.sampled_from(["auto", "cdi", "envvar", "device-specs"]),
    ),
)


@settings(deadline=None)
@given(CONFIGS)
def test_round_trip(found: Config) -> None:
    assert config.decode(config.encode(found)) == found


@pytest.mark.parametrize("text", ["", "{}", "# only a comment", "scheduler: {}\nglobal: {}"])
def test_an_empty_file_is_the_defaults(text: str) -> None:
    assert config.decode(text) == Config()


def test_names_are_those_of_the_chart() -> None:
    found = config.decode(
        "resourceMem: example.com/mem\nglobal: {gpuHookPath: /opt}\nscheduler: {defaultMem: 5000}\n"
        "devicePlugin: {deviceSplitCount: 4, deviceMemoryScaling: 2}\n"
    )
    assert found.resource_mem == "example.com/mem"
    assert found.global_.gpu_hook_path == "/opt"
    assert found.scheduler.default_mem == 5000
    assert (found.device_plugin.deviceSplitCount, found.device_plugin.deviceMemoryScaling) == (4, 2.0)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("resourceNam: a/b", r"unknown field `resourceNam`"),
        ("scheduler: {defaultMemory: 1}", r"unknown field `defaultMemory` - at `\$.scheduler`"),
        ("scheduler: {defaultMem: -1}", r">= 0 - at `\$.scheduler.defaultMem`"),
        ("scheduler: {defaultCores: 101}", r"<= 100 - at `\$.scheduler.defaultCores`"),
        (
            "scheduler: {gpuPolicy: scatter}",
            r"'scatter' - at `\$.scheduler.gpuPolicy`: must be one of spread, binpack$",
        ),
        ("corePolicy: strict", r"'strict' - at `\$.corePolicy`: must be one of fixed, elastic, none$"),
        (
            "simulate: T5",
            r"at `\$.simulate`: must be a profile of T4, A100-40, A100-80, H100, GB10, A100-40-1g.5gb; xN",
        ),
        ("simulate: T4x17", r"at `\$.simulate`: must be a profile of T4"),
        ("simulate: 't4'", r"at `\$.simulate`: must be a profile of T4"),
        ("scheduler: {defaultMem: '1'}", r"Expected `int`, got `str` - at `\$.scheduler.defaultMem`"),
        ("devicePlugin: {deviceSplitCount: 0}", r">= 1 - at `\$.devicePlugin.deviceSplitCount`"),
        ("devicePlugin: {deviceMemoryScaling: 0}", r"> 0(.0)? - at `\$.devicePlugin.deviceMemoryScaling`"),
        ("devicePlugin: {hostMemory: 64Gb}", r"at `\$.devicePlugin.hostMemory`: must be a number of MiB or a quantity"),
        ("devicePlugin: {hostMemory: 1Ki}", r"quantity with its unit, such as 64Gi; 0, or from 10M to 99Ti$"),
        ("devicePlugin: {hostMemory: 1000k}", r"0, or from 10M to 99Ti$"),
        ("devicePlugin: {hostMemory: 100Ti}", r"0, or from 10M to 99Ti$"),
        ("devicePlugin: {hostMemory: 99999999999Ti}", r"0, or from 10M to 99Ti$"),
        ("devicePlugin: {hostMemory: 100000000}", r"<= 99999999 - at `\$.devicePlugin.hostMemory`"),
        ("devicePlugin: {nodeOverrides: {a: {hostMemory: 1Ki}}}", r"\^\(0\+"),
        ("devicePlugin: {deviceMemoryScaling: .inf}", r"<= 64(.0)? - at `\$.devicePlugin.deviceMemoryScaling`"),
        ("devicePlugin: {deviceMemoryScaling: .nan}", r"- at `\$.devicePlugin.deviceMemoryScaling`"),
        ("devicePlugin: {deviceMemoryScaling: 1000000}", r"<= 64(.0)? - at `\$.devicePlugin.deviceMemoryScaling`"),
        ("devicePlugin: {hostMemory: -1}", r">= 0 - at `\$.devicePlugin.hostMemory`"),
        (
            "devicePlugin: {deviceMemoryScalingByModel: {T4: 0}}",
            r"> 0(.0)? - at `\$.devicePlugin.deviceMemoryScalingBy",
        ),
        ("devicePlugin: {memoryMode: moving}", r"at `\$.devicePlugin.memoryMode`: must be one of static, movable"),
        ("devicePlugin: {fillsOn: dma}", r"'dma' - at `\$.devicePlugin.fillsOn`: must be one of sms, engine$"),
        ("devicePlugin: {copiesOn: true}", r"at `\$.devicePlugin.copiesOn`: must be one of sms, engine$"),
        ("devicePlugin: {nodeOverrides: {a: {fillsOn: dma}}}", r"\[...\].fillsOn`: must be one of sms, engine$"),
        ("devicePlugin: {nodeOverrides: {a: {memoryMode: up}}}", r"memoryMode`: must be one of static, movable$"),
        ("devicePlugin: {deviceMemoryScalingByModel: {T4: x}}", r"ByModel\[...\]`$"),
        ("devicePlugin: {nodeOverrides: {a: {driverRoot: /}}}", r"unknown field `driverRoot`"),
        ("devicePlugin: {migStrategy: mixed}", r"'mixed' - at `\$.devicePlugin.migStrategy`"),
        ("resourceName: gpu", r"at `\$.resourceName`: must be a qualified name: domain/name$"),
        ("[]", "Expected `object`, got `array`"),
        ("text", "Expected `object`, got `str`"),
        ("a: [", "not YAML"),
    ],
)
def test_errors_say_where_and_what_is_allowed(text: str, why: str) -> None:
    with pytest.raises(ConfigError, match=rf"(?s)^the\.yaml: .*{why}"):
        config.decode(text, "the.yaml")


@pytest.mark.parametrize(
    ("amount", "mib"),
    [
        (0, 0),
        ("0Ki", 0),
        ("10M", 9),
        ("1Mi", 1),
        ("10240Ki", 10),
        ("64Gi", 65536),
        ("99Ti", 99 << 20),
        (99999999, 99999999),
    ],
)
def test_host_memory_is_read_in_mebibytes(amount: int | str, mib: int) -> None:
    found = config.decode(f"devicePlugin: {{hostMemory: {amount}}}").device_plugin.hostMemory
    assert config.mebibytes(found) == mib


def test_load_prefers_the_argument_to_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named, ambient = tmp_path / "named.yaml", tmp_path / "ambient.yaml"
    named.write_text("simulate: T4x2")
    ambient.write_text("simulate: H100x8")
    monkeypatch.setenv(names.ENV_CONFIG, str(ambient))
    assert config.load(named).simulate == "T4x2"
    assert config.load().simulate == "H100x8"


def test_load_without_any_file_is_the_defaults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(names.ENV_CONFIG, raising=False)
    monkeypatch.setattr(names, "CONFIG_PATH", str(tmp_path / "absent.yaml"))
    assert config.load() == Config()


def test_a_named_file_must_exist(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.yaml: No such file"):
        config.load(tmp_path / "absent.yaml")


def test_a_file_that_is_not_utf_8_is_named(tmp_path: Path) -> None:
    (tmp_path / "the.yaml").write_bytes("# Größe\n".encode("latin-1"))
    with pytest.raises(ConfigError, match=r"the\.yaml: byte 4 is not UTF-8: save the file as UTF-8"):
        config.load(tmp_path / "the.yaml")


@pytest.mark.parametrize("spec", ["T4", "T4x16", "A100-40x8@12.4", "H100@13.0"])
def test_simulated_cards_that_are_allowed(spec: str) -> None:
    assert config.decode(f"simulate: {spec}").simulate == spec


def test_the_profiles_are_those_of_the_simulator() -> None:
    assert list(config.SIMULATOR_PROFILES) == simulator.profiles()


def test_rules_of_requests() -> None:
    found = config.rules(
        config.decode(
            "resourceName: example.com/gpu\nresourcePriority: example.com/priority\ncorePolicy: none\n"
            "scheduler: {defaultMem: 7, defaultCores: 9, nodePolicy: binpack, gpuPolicy: binpack}"
        )
    )
    assert (found.names.gpu, found.names.priority) == ("example.com/gpu", "example.com/priority")
    assert found.names.memory == names.RESOURCE_MEMORY
    assert (found.default_memory, found.default_cores) == (7, 9)
    assert (found.node_policy, found.gpu_policy, found.core_policy) == ("binpack", "binpack", "none")


def test_what_makes_fills_and_copies_can_be_another_thing_on_some_nodes() -> None:
    found = config.decode("devicePlugin: {fillsOn: engine, nodeOverrides: {old-*: {fillsOn: sms, copiesOn: sms}}}")
    said = [config.for_node(found, name).device_plugin for name in ("new-1", "old-1")]
    assert [(one.fillsOn, one.copiesOn) for one in said] == [("engine", "engine"), ("sms", "sms")]
