"""What a pod asks for: quantities as Kubernetes writes them, defaults, and a sentence for every invalid request."""

from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vgpu import names
from vgpu.allocation import Kind
from vgpu.resources import (
    GpuRequest,
    RequestError,
    ResourceNames,
    Rules,
    containers_of,
    parse_quantity,
    read_container,
    read_pod,
)

GPU, MEMORY, PERCENT, CORES, PRIORITY = (
    names.RESOURCE_GPU,
    names.RESOURCE_MEMORY,
    names.RESOURCE_MEMORY_PERCENTAGE,
    names.RESOURCE_CORES,
    names.RESOURCE_PRIORITY,
)


def container(limits: dict[str, Any], name: str = "main", **more: Any) -> dict[str, Any]:
    return {"name": name, "resources": {"limits": limits}, **more}


def request(limits: dict[str, Any], rules: Rules = Rules()) -> GpuRequest | None:  # noqa: B008 - frozen
    return read_container("spec.containers[main]", container(limits), rules)


def pod(*containers: dict[str, Any], annotations: dict[str, str] | None = None, **spec: Any) -> dict[str, Any]:
    return {"metadata": {"annotations": annotations or {}}, "spec": {"containers": list(containers), **spec}}


class TestQuantity:
    @pytest.mark.parametrize(
        ("text", "value"),
        [
            ("0", 0),
            ("3000", 3000),
            (3000, 3000),
            (3000.0, 3000),
            ("60k", 60_000),
            ("1Ki", 1024),
            ("1.5Ki", 1536),
            ("2M", 2_000_000),
            ("2Mi", 2 * 2**20),
            ("1G", 10**9),
            ("1Gi", 2**30),
            ("1T", 10**12),
            ("1Ti", 2**40),
            ("1P", 10**15),
            ("1Pi", 2**50),
            ("1E", 10**18),
            ("1Ei", 2**60),
            ("1e3", 1000),
            ("1E3", 1000),
            ("12e-1", Fraction(6, 5)),
            ("1e+3", 1000),
            ("500m", Fraction(1, 2)),
            ("3000000m", 3000),
            ("5u", Fraction(5, 10**6)),
            ("7n", Fraction(7, 10**9)),
            (".5", Fraction(1, 2)),
            ("5.", 5),
            ("+5", 5),
            ("-5", -5),
            ("0.1", Fraction(1, 10)),
        ],
    )
    def test_exact_value(self, text: object, value: Fraction | int) -> None:
        assert parse_quantity(text) == value

    @pytest.mark.parametrize(
        "text",
        [
            *("", " ", "abc", "1 k", " 1", "1 ", "1\n", "1K", "1kb", "1KiB", "1mi", "1,5", "1_000", "--1", "+-1"),
            *("1e", "e3", "0x10", "1/2", "٣", "nan", "inf", "-inf", "1e3k", "1Kii", ".", "-", "1e9999"),
            *(True, False, None, [], {}, float("nan"), float("inf")),
        ],
    )  # fmt: skip
    def test_all_else_is_refused(self, text: object) -> None:
        with pytest.raises(ValueError, match="not a quantity"):
            parse_quantity(text)

    @given(st.integers(0, 2**60))
    def test_whole_numbers(self, number: int) -> None:
        assert parse_quantity(str(number)) == parse_quantity(number) == number

    @given(st.integers(0, 10**6), st.sampled_from(["m", "", "k", "M", "G", "Ki", "Mi", "Gi"]))
    def test_order_is_kept(self, number: int, suffix: str) -> None:
        assert parse_quantity(f"{number}{suffix}") < parse_quantity(f"{number + 1}{suffix}")

    @given(st.text(max_size=8))
    def test_any_text_is_a_number_or_refused(self, text: str) -> None:
        try:
            assert isinstance(parse_quantity(text), Fraction)
        except ValueError as error:
            assert str(error) == "not a quantity"  # noqa: PT017 - both outcomes are fine


class TestContainer:
    @pytest.mark.parametrize(
        ("limits", "expected"),
        [
            ({}, None),
            ({"cpu": "1"}, None),
            ({GPU: "0"}, None),
            ({GPU: "0", CORES: "0"}, None),
            ({PRIORITY: "1"}, None),
            ({GPU: "1"}, GpuRequest(1)),
            ({GPU: 2}, GpuRequest(2)),
            ({MEMORY: "3000"}, GpuRequest(1, memory=3000)),
            ({MEMORY: "60k"}, GpuRequest(1, memory=60_000)),
            ({GPU: "2", MEMORY: "3000", CORES: "30"}, GpuRequest(2, memory=3000, cores=30)),
            ({PERCENT: "25"}, GpuRequest(1, percent=25)),
            ({MEMORY: "3000", PERCENT: "25"}, GpuRequest(1, memory=3000)),
            ({CORES: "100"}, GpuRequest(1, cores=100)),
            ({CORES: "0"}, GpuRequest(1)),
            ({GPU: "1", PRIORITY: "0"}, GpuRequest(1, priority=0)),
            ({GPU: "1", PRIORITY: "1"}, GpuRequest(1, priority=1)),
            ({GPU: "1", MEMORY: str(names.MAX_MEMORY_MIB)}, GpuRequest(1, memory=names.MAX_MEMORY_MIB)),
        ],
    )
    def test_request(self, limits: dict[str, Any], expected: GpuRequest | None) -> None:
        assert request(limits) == expected

    @pytest.mark.parametrize("value", ["abc", "-1", "1.5", "", "0.5", 1.5, True])
    @pytest.mark.parametrize("name", [GPU, MEMORY, PERCENT, CORES, PRIORITY])
    def test_no_resource_takes_what_is_not_a_whole_number(self, name: str, value: object) -> None:
        with pytest.raises(RequestError) as error:
            request({GPU: "1", name: value})
        assert error.value.field == f"spec.containers[main].resources.limits[{name}]"
        assert error.value.value == value

    @pytest.mark.parametrize(
        ("limits", "sentence"),
        [
            ({GPU: "1.5"}, f'[{GPU}] is "1.5": must be a whole number of cards, 1 or more'),
            ({GPU: "-1"}, f'[{GPU}] is "-1": must be a whole number of cards, 1 or more'),
            ({GPU: "0", MEMORY: "3000"}, f"[{GPU}] is 0: must be 1 or more if the container asks for memory or cores"),
            ({GPU: "0", PERCENT: "5"}, f"[{GPU}] is 0: must be 1 or more if the container asks for memory or cores"),
            ({GPU: "0", CORES: "5"}, f"[{GPU}] is 0: must be 1 or more if the container asks for memory or cores"),
            (
                {GPU: "1", MEMORY: "0"},
                f'[{MEMORY}] is "0": must be a whole number of MiB from 1 to 16777216; '
                "the unit is MiB: write 8192, not 8Gi",
            ),
            (
                {MEMORY: "8Gi"},
                f'[{MEMORY}] is "8Gi": must be a whole number of MiB from 1 to 16777216; '
                "the unit is MiB: write 8192, not 8Gi",
            ),
            ({PERCENT: "0"}, f'[{PERCENT}] is "0": must be a whole number from 1 to 100 (% of the card\'s memory)'),
            ({PERCENT: "101"}, f'[{PERCENT}] is "101": must be a whole number from 1 to 100 (% of the card\'s memory)'),
            ({CORES: "101"}, f'[{CORES}] is "101": must be a whole number from 0 to 100 (% of the card\'s time)'),
            ({CORES: 101}, f"[{CORES}] is 101: must be a whole number from 0 to 100 (% of the card's time)"),
            ({GPU: "1", PRIORITY: "2"}, f'[{PRIORITY}] is "2": must be 0 (high) or 1 (low)'),
        ],
    )  # fmt: skip
    def test_denial_says_field_value_and_what_is_allowed(self, limits: dict[str, Any], sentence: str) -> None:
        with pytest.raises(RequestError) as error:
            request(limits)
        assert str(error.value) == f"spec.containers[main].resources.limits{sentence}"

    def test_long_values_are_cut_in_the_sentence(self) -> None:
        with pytest.raises(RequestError) as error:
            request({MEMORY: "9" * 5000 + "x"})
        assert len(str(error.value)) < 400
        assert "999..." in str(error.value)

    def test_requests_are_read_where_limits_lack_the_key(self) -> None:
        asked = {"name": "main", "resources": {"limits": {MEMORY: "3000"}, "requests": {GPU: "2", MEMORY: "1"}}}
        assert read_container("c", asked, Rules()) == GpuRequest(2, memory=3000)
        with pytest.raises(RequestError, match=r"^c\.resources\.requests\[nvidia\.com/gpu\] is"):
            read_container("c", {"resources": {"requests": {GPU: "x"}}}, Rules())

    @pytest.mark.parametrize("resources", [None, {}, {"limits": None, "requests": None}])
    def test_no_resources_at_all(self, resources: Any) -> None:
        assert read_container("c", {"name": "main", "resources": resources}, Rules()) is None

    def test_defaults_of_the_cluster(self) -> None:
        rules = Rules(default_memory=5000, default_cores=20)
        assert request({GPU: "1"}, rules) == GpuRequest(1, memory=5000, cores=20)
        assert request({PERCENT: "50"}, rules) == GpuRequest(1, percent=50, cores=20)
        assert request({MEMORY: "1", CORES: "0"}, rules) == GpuRequest(1, memory=1)
        assert request({}, rules) is None

    def test_names_of_the_cluster(self) -> None:
        rules = Rules(names=ResourceNames(gpu="example.com/gpu", memory="example.com/mem"))
        assert request({"example.com/gpu": "2", "example.com/mem": "7"}, rules) == GpuRequest(2, memory=7)
        assert request({GPU: "1"}, rules) is None

    @given(st.integers(1, 64), st.integers(1, names.MAX_MEMORY_MIB), st.integers(0, 100))
    def test_what_is_asked_is_what_is_read(self, count: int, memory: int, cores: int) -> None:
        limits = {GPU: str(count), MEMORY: str(memory), CORES: str(cores)}
        assert request(limits) == GpuRequest(count, memory=memory, cores=cores)

    @given(st.dictionaries(st.sampled_from([GPU, MEMORY, PERCENT, CORES, PRIORITY]), st.text(max_size=6)))
    def test_any_input_is_a_request_or_a_sentence(self, limits: dict[str, Any]) -> None:
        try:
            found = request(limits)
        except RequestError as error:
            found = None
            assert str(error).startswith("spec.containers[main].resources.limits[")  # noqa: PT017 - both outcomes are fine
        if found is not None:
            assert found.count >= 1
            assert found.memory >= 0
            assert 1 <= found.percent <= 100
            assert 0 <= found.cores <= 100

    def test_memory_on_a_card(self) -> None:
        assert GpuRequest(1).memory_on(15_360) == 15_360
        assert GpuRequest(1, percent=25).memory_on(15_360) == 3840
        assert GpuRequest(1, percent=33).memory_on(1000) == 330
        assert GpuRequest(1, memory=3000).memory_on(15_360) == 3000

    def test_whole_card(self) -> None:
        assert GpuRequest(1).whole_card
        assert not GpuRequest(1, percent=99).whole_card
        assert not GpuRequest(1, memory=15_360).whole_card


class TestPod:
    def test_containers_come_in_the_order_of_their_start(self) -> None:
        spec = {
            "containers": [{"name": "main"}],
            "initContainers": [{"name": "prepare"}, {"name": "proxy", "restartPolicy": "Always"}],
        }
        assert [(path, kind) for path, kind, _ in containers_of(spec)] == [
            ("spec.initContainers[prepare]", Kind.INIT),
            ("spec.initContainers[proxy]", Kind.SIDECAR),
            ("spec.containers[main]", Kind.APP),
        ]

    def test_only_gpu_containers_are_in_the_request(self) -> None:
        found = read_pod(
            pod(
                container({"cpu": "1"}, "plain"),
                container({GPU: "1"}),
                initContainers=[container({MEMORY: "1000"}, "prepare")],
            ),
            Rules(),
        )
        assert found is not None
        assert [(part.name, part.kind, part.gpu.memory) for part in found.containers] == [
            ("prepare", Kind.INIT, 1000),
            ("main", Kind.APP, 0),
        ]

    @pytest.mark.parametrize(
        "found", [{}, {"spec": {}}, {"spec": None}, pod(), pod({"name": "x"}), {"metadata": None, "spec": {}}]
    )
    def test_no_gpu_no_request(self, found: dict[str, Any]) -> None:
        assert read_pod(found, Rules()) is None

    def test_annotations_of_a_pod_without_gpu_are_nobodys_business(self) -> None:
        assert read_pod(pod({"name": "x"}, annotations={names.GPU_POLICY: "nonsense"}), Rules()) is None

    def test_wishes(self) -> None:
        found = read_pod(
            pod(
                container({GPU: "1"}),
                annotations={
                    names.USE_GPU_TYPE: "T4, A100-* ,",
                    names.NOUSE_GPU_TYPE: "H100",
                    names.USE_GPU_UUID: "GPU-1,GPU-2",
                    names.NOUSE_GPU_UUID: "GPU-3",
                    names.NUMA_BIND: "true",
                    names.NODE_POLICY: "binpack",
                    names.GPU_POLICY: "binpack",
                    names.CORE_POLICY: "elastic",
                    names.CORES_LIMIT: "80",
                    names.OVERSUBSCRIBE: "false",
                    names.MEMORY_MODE: "movable",
                    names.VGPU_MODE: "share",
                },
            ),
            Rules(),
        )
        assert found is not None
        selector = found.selector
        assert (selector.use_types, selector.nouse_types) == (("T4", "A100-*"), ("H100",))
        assert (selector.use_uuids, selector.nouse_uuids) == (("GPU-1", "GPU-2"), ("GPU-3",))
        assert selector.numa_bind
        assert (found.node_policy, found.gpu_policy, found.core_policy) == ("binpack", "binpack", "elastic")
        assert (found.cores_limit, found.oversubscribe, found.memory_mode) == (80, False, "movable")

    def test_policies_of_the_cluster_where_the_pod_says_none(self) -> None:
        rules = Rules(node_policy="binpack", gpu_policy="binpack", core_policy="none")
        found = read_pod(pod(container({GPU: "1"})), rules)
        assert found is not None
        assert (found.node_policy, found.gpu_policy, found.core_policy) == ("binpack", "binpack", "none")
        assert (found.cores_limit, found.oversubscribe, found.selector.numa_bind) == (None, None, False)
        assert found.memory_mode is None

    @pytest.mark.parametrize(
        ("annotation", "value", "allowed"),
        [
            (names.NODE_POLICY, "scatter", "must be one of spread, binpack"),
            (names.GPU_POLICY, "", "must be one of spread, binpack"),
            (names.CORE_POLICY, "soft", "must be one of fixed, elastic, none"),
            (names.OVERSUBSCRIBE, "yes", "must be one of true, false"),
            (names.MEMORY_MODE, "managed", "must be one of static, movable"),
            (names.NUMA_BIND, "True", "must be one of true, false"),
            (names.VGPU_MODE, "mig", "must be one of share, hami-core"),
            (names.CORES_LIMIT, "0", "must be a whole number from 1 to 100 (%)"),
            (names.CORES_LIMIT, "101", "must be a whole number from 1 to 100 (%)"),
            (names.CORES_LIMIT, "-1", "must be a whole number from 1 to 100 (%)"),
            (names.CORES_LIMIT, "half", "must be a whole number from 1 to 100 (%)"),
        ],
    )
    def test_unknown_values_are_denied(self, annotation: str, value: str, allowed: str) -> None:
        with pytest.raises(RequestError) as error:
            read_pod(pod(container({GPU: "1"}), annotations={annotation: value}), Rules())
        assert str(error.value) == f'metadata.annotations[{annotation}] is "{value}": {allowed}'

    def test_the_container_is_named_in_the_denial(self) -> None:
        with pytest.raises(RequestError, match=r"^spec\.initContainers\[prepare\]\.resources\.limits"):
            read_pod(pod(initContainers=[container({CORES: "200"}, "prepare")]), Rules())
