"""One node: which cards a container and a pod get, and the sentences when they get none."""

import pytest

from vgpu.allocation import Held, Kind
from vgpu.devices import Gpu, GpuSlice
from vgpu.placement import policy
from vgpu.placement.fit import CardState, Reason, Rejection, fit_container, fit_pod
from vgpu.placement.selection import accepts_model, matches
from vgpu.resources import CardSelector, ContainerRequest, GpuRequest, PodRequest

SPREAD, BINPACK = policy("spread"), policy("binpack")


def card(index: int = 0, memory: int = 8000, held: Held | None = None, **more: object) -> CardState:
    cordoned = bool(more.pop("cordoned", False))
    gpu = Gpu(uuid=f"dev-{index}", index=index, model=str(more.pop("model", "NVIDIA T4")), memory=memory)
    for field, value in more.items():
        gpu = Gpu(**{name: getattr(gpu, name) for name in gpu.__struct_fields__} | {field: value})
    return CardState(gpu, held or Held(), cordoned)


def ask(count: int = 1, memory: int = 0, percent: int = 100, cores: int = 0) -> GpuRequest:
    return GpuRequest(count, memory, percent, cores)


def fit(cards: list[CardState], request: GpuRequest, **selector: object) -> list[str] | Rejection:
    found = fit_container(cards, request, CardSelector(**selector), SPREAD)  # type: ignore[arg-type]  # test shorthand
    return found if isinstance(found, Rejection) else [piece.uuid for piece in found]


# The field's public table of what fits (device unit tests of HAMi), as inputs and outputs. Ours differs on purpose in
# two places: among equal cards the lowest index wins (not the last one), and cores above 100 never get here because
# admission denies them with a sentence (not clamped).
@pytest.mark.parametrize(
    ("cards", "request_", "selector", "expected"),
    [
        ([card(0, 128), card(1, 128)], ask(1, 64, cores=50), {}, ["dev-0"]),
        ([card(0, 128, slots=100)], ask(1, 512, cores=50), {}, Reason.MEMORY),
        ([card(0, 1024, Held(1, 0, 0, 100))], ask(1, 512, cores=50), {}, Reason.CORES),
        ([card(0, 1280)], ask(1, 512, cores=50), {"use_types": ("OtherType",)}, Reason.TYPE),
        ([card(1, 1280)], ask(1, 512, cores=50), {"use_uuids": ("dev-0",)}, Reason.UUID),
        ([card(0, 1280)], ask(1, 512, cores=50), {"nouse_uuids": ("dev-0",)}, Reason.UUID),
        ([card(0, 1280, Held(100), slots=100)], ask(1, 512, cores=50), {}, Reason.SLOTS),
        ([card(0, 1280, Held(20), slots=100)], ask(1, 512, cores=100), {}, Reason.UNUSED),
        ([card(0, 1280, Held(20, cores=100), slots=100)], ask(1, 512, cores=0), {}, Reason.CORES),
        ([card(0, 1280)], ask(2, 512, cores=20), {}, Reason.COUNT),
        ([card(0, 1280), card(1, 1280)], ask(3, 512, cores=20), {}, Reason.COUNT),
        ([card(0, 1280, Held(20, cores=10), slots=100)], ask(1, percent=10, cores=20), {}, ["dev-0"]),
        ([card(0, 1280, healthy=False)], ask(1, percent=10, cores=20), {}, Reason.HEALTH),
        ([card(0, 1280, cordoned=True)], ask(1, 512), {}, Reason.CORDON),
        ([card(0, 1280, Held(1, 512, 512, 100, 1), cores=200)], ask(1, 512, cores=50), {}, Reason.ALONE),
        # Used by others: another plugin's pod, a display server, any process
        ([card(0, 1280, others=1000)], ask(1, 280, cores=50), {}, ["dev-0"]),
        ([card(0, 1280, others=1000)], ask(1, 281, cores=50), {}, Reason.MEMORY),
        ([card(0, 1280, others=1000)], ask(1, 280, cores=100), {}, Reason.UNUSED),
        ([card(0, 1280, foreign=True)], ask(1, 280, cores=100), {}, Reason.UNUSED),
        ([card(0, 1280, foreign=True)], ask(1), {}, Reason.MEMORY),
        ([card(0, 2560, physical=1280, others=1280)], ask(1, 512), {}, Reason.GUARANTEE),
        ([card(0, 1280, others=512), card(1, 1280, Held(1, 500, 500))], ask(1, 512), {}, ["dev-1"]),
    ],
)
def test_what_the_field_expects(
    cards: list[CardState], request_: GpuRequest, selector: dict[str, object], expected: list[str] | Reason
) -> None:
    found = fit(cards, request_, **selector)
    if isinstance(expected, Reason):
        assert isinstance(found, Rejection)
        assert set(found.reasons) == {expected}
    else:
        assert found == expected


def test_exact_fit_and_one_mebibyte_more() -> None:
    used = card(0, 8000, Held(1, 5000, 5000, 0))
    assert fit([used], ask(1, 3000)) == ["dev-0"]
    assert isinstance(fit([used], ask(1, 3001)), Rejection)


@pytest.mark.parametrize(
    ("cards", "request_", "selector", "text"),
    [
        (
            [card(n, 8000, Held(1, 6000, 6000) if n > 1 else None) for n in range(8)],
            ask(4, 3000),
            {},
            "2 of 8 cards have 3000 MiB free, 4 needed",
        ),
        ([card(0)], ask(2, 10), {}, "the node has 1 card, 2 needed"),
        ([], ask(1, 10), {}, "the node has no cards"),
        ([card(0, held=Held(1, 100))], ask(1), {}, "0 of 1 cards have 100 % of their memory free, 1 needed"),
        ([card(0, held=Held(1))], ask(1, 5, cores=100), {}, "0 of 1 cards are unused, as gpucores 100 needs, 1 needed"),
        (
            [card(0, cordoned=True), card(1, healthy=False), card(2, held=Held(1, 7999)), card(3)],
            ask(2, 3000),
            {},
            "1 of 4 cards fit, 2 needed: 1 unhealthy, 1 cordoned, 1 without 3000 MiB free",
        ),
        (
            [card(0, numa=0), card(1, numa=1)],
            ask(2, 3000),
            {"numa_bind": True},
            "2 of 2 cards fit, 2 needed on one NUMA node, but these cards are on different NUMA nodes",
        ),
    ],
)
def test_sentences(cards: list[CardState], request_: GpuRequest, selector: dict[str, object], text: str) -> None:
    found = fit(cards, request_, **selector)
    assert isinstance(found, Rejection)
    assert found.sentence == text


@pytest.mark.parametrize(
    ("model", "pattern", "expected"),
    [
        ("NVIDIA A10", "A10", True),
        ("NVIDIA A100-SXM4-40GB", "A10", False),
        ("NVIDIA A100-SXM4-40GB", "a100", True),
        ("NVIDIA A100-SXM4-40GB", "nvidia a100-sxm4-40gb", True),
        ("NVIDIA A100-SXM4-40GB", "*A100*", True),
        ("NVIDIA A100-SXM4-40GB", "A1?0", False),
        ("NVIDIA H100 80GB HBM3", "H100 80GB", True),
        ("Tesla T4", "T4", True),
        ("NVIDIA T400", "T4", False),
        ("NVIDIA GeForce RTX 4090", "(4090", False),
        # as node labels spell models, and as other drivers name them
        ("Tesla T4", "Tesla-T4", True),
        ("Tesla T4", "tesla_t4", True),
        ("Tesla T4", "NVIDIA-T4", True),
        ("Tesla T4", "NVIDIA Tesla T4", True),
        ("NVIDIA T4", "Tesla-T4", True),
        ("Tesla T4", "Tesla-T4-SHARED", True),
        ("NVIDIA A100-SXM4-40GB", "NVIDIA-A100-SXM4-40GB-SHARED", True),
        ("NVIDIA A100-SXM4-40GB", "A10-SHARED", False),
        ("Tesla T4", "SHARED", False),
        ("NVIDIA T400", "Tesla-T4", False),
        ("NVIDIA A100-SXM4-40GB", "NVIDIA-A100-SXM4-40GB", True),
        ("NVIDIA A100-SXM4-40GB", "A100_SXM4", True),
        ("NVIDIA A100-SXM4-40GB", "Tesla-A100", True),
        ("NVIDIA H100 80GB HBM3", "H100-80GB-HBM3", True),
        ("NVIDIA GeForce RTX 4090", "RTX-4090", True),
        ("NVIDIA GeForce RTX 4090", "NVIDIA-GeForce-RTX-4090", True),
        ("NVIDIA GeForce RTX 4090", "NVIDIA RTX 4090", True),
        ("NVIDIA GeForce RTX 4090", "GeForce*", True),
        ("NVIDIA GeForce RTX 4090", "RTX-40*", True),
        ("NVIDIA GeForce RTX 4090", "NVIDIA-GeForce-*", True),
        ("NVIDIA GeForce RTX 4090", "GeForce", True),
        ("NVIDIA GeForce RTX 4090", "nvidia", True),
        ("NVIDIA GeForce RTX 4090", "Tesla", False),
        ("NVIDIA GeForce RTX 4090", "Quadro-RTX-4090", False),
        ("Quadro RTX 4000", "NVIDIA-Quadro-RTX-4000", True),
        ("NVIDIA RTX 4000 Ada Generation", "Quadro-RTX-4000", False),
        ("NVIDIA RTX 4000 Ada Generation", "Quadro-RTX-4000*", False),
        ("NVIDIA T1000", "Quadro T1000", True),
        ("Tesla V100-SXM2-16GB", "A1[0-9]0*", False),
        ("NVIDIA A100-SXM4-40GB", "NVIDIA A1[0-9]0*", True),
    ],
)
def test_models_match_as_a_whole_name_a_glob_or_a_word(model: str, pattern: str, expected: bool) -> None:
    assert matches(model, pattern) is expected


def test_both_type_lists_apply() -> None:
    selector = CardSelector(use_types=("A100", "H100"), nouse_types=("*40GB",))
    assert accepts_model(selector, "NVIDIA H100 80GB HBM3")
    assert not accepts_model(selector, "NVIDIA A100-SXM4-40GB")
    assert not accepts_model(selector, "Tesla T4")


def test_numa_bind_takes_all_cards_from_one_node_even_if_better_cards_are_elsewhere() -> None:
    cards = [card(0, numa=0), card(1, numa=1, held=Held(1, 10)), card(2, numa=1, held=Held(1, 10))]
    assert fit(cards, ask(2, 100), numa_bind=True) == ["dev-1", "dev-2"]
    assert fit(cards, ask(2, 100)) == ["dev-0", "dev-1"]


def test_percentage_is_of_physical_memory_and_phys_is_written_only_on_scaled_cards() -> None:
    plain = fit_container([card(0, 8000)], ask(percent=50), CardSelector(), SPREAD)
    assert plain == [GpuSlice("dev-0", 4000)]
    scaled = card(0, 16000, physical=8000)
    assert fit_container([scaled], ask(percent=50), CardSelector(), SPREAD) == [GpuSlice("dev-0", 4000, phys=2000)]
    physical = fit_container([scaled], ask(percent=50), CardSelector(), SPREAD, oversubscribe=False)
    assert physical == [GpuSlice("dev-0", 4000)]


@pytest.mark.parametrize(
    ("memory", "guarantee"), [(2000, 1000), (1024, 512), (1000, 512), (513, 512), (512, None), (9, None)]
)
def test_contexts_and_modules_of_a_slice_have_room_on_the_card(memory: int, guarantee: int | None) -> None:
    scaled = card(0, 16000, physical=8000)
    assert fit_container([scaled], ask(1, memory), CardSelector(), SPREAD) == [
        GpuSlice("dev-0", memory, phys=guarantee)
    ]


def test_guarantees_never_exceed_the_card_itself() -> None:
    scaled = card(0, 16000, Held(2, 8000, 6001), physical=8000)
    found = fit_container([scaled], ask(1, 2000), CardSelector(), SPREAD, oversubscribe=False)
    assert isinstance(found, Rejection)
    assert found.reasons == {Reason.GUARANTEE: 1}
    assert fit([scaled], ask(1, 2000)) == ["dev-0"]


def test_a_whole_card_fits_where_slices_may_have_less_than_the_card() -> None:
    reserved = card(0, 7200, physical=8000)
    assert fit_container([reserved], ask(), CardSelector(), SPREAD) == [GpuSlice("dev-0", 7200)]


def test_a_whole_card_is_all_of_it_where_memory_is_scaled() -> None:
    scaled = card(0, 16000, physical=8000)
    for asked in (ask(), GpuRequest(1, cores=100)):
        assert fit_container([scaled], asked, CardSelector(), SPREAD) == [GpuSlice("dev-0", 8000, asked.cores)]
    assert fit_container([scaled], GpuRequest(1, percent=50), CardSelector(), SPREAD) == [
        GpuSlice("dev-0", 4000, phys=2000)
    ]
    found = fit_container([card(0, 16000, Held(1, 1000, 500), physical=8000)], ask(), CardSelector(), SPREAD)
    assert isinstance(found, Rejection)
    assert found.reasons == {Reason.GUARANTEE: 1}


def pod(*containers: tuple[str, Kind, GpuRequest]) -> PodRequest:
    return PodRequest(tuple(ContainerRequest(*each) for each in containers))


def uuids(cards: list[CardState], wanted: PodRequest, policy_: object = SPREAD) -> dict[str, list[str]]:
    found = fit_pod(cards, wanted, policy_)  # type: ignore[arg-type]  # modules stand for the protocol
    assert not isinstance(found, Rejection), found.sentence
    return {name: [piece.uuid for piece in slices] for name, slices in found.containers.items()}


def test_containers_spread_over_cards_or_share_one_by_policy() -> None:
    wanted = pod(("a", Kind.APP, ask(1, 3000)), ("b", Kind.APP, ask(1, 3000)))
    assert uuids([card(0), card(1)], wanted) == {"a": ["dev-0"], "b": ["dev-1"]}
    assert uuids([card(0), card(1)], wanted, BINPACK) == {"a": ["dev-0"], "b": ["dev-0"]}
    assert uuids([card(0)], wanted) == {"a": ["dev-0"], "b": ["dev-0"]}


def test_an_init_container_lends_its_room_to_the_app() -> None:
    wanted = pod(("warm", Kind.INIT, ask(1, 8000)), ("main", Kind.APP, ask(1, 8000)))
    assert uuids([card(0)], wanted) == {"warm": ["dev-0"], "main": ["dev-0"]}


def test_the_app_takes_the_card_that_its_init_container_holds_anyway() -> None:
    fuller = card(0, held=Held(1, 5000, 5000))
    wanted = pod(("warm", Kind.INIT, ask(1, 4000)), ("main", Kind.APP, ask(1, 1000)))
    assert uuids([fuller, card(1)], wanted, BINPACK) == {"warm": ["dev-1"], "main": ["dev-1"]}


def test_a_sidecar_stays_beside_init_and_app() -> None:
    side = ("side", Kind.SIDECAR, ask(1, 4000))
    fits = pod(side, ("warm", Kind.INIT, ask(1, 4000)), ("main", Kind.APP, ask(1, 4000)))
    assert set(uuids([card(0)], fits)) == {"side", "warm", "main"}
    over = pod(side, ("warm", Kind.INIT, ask(1, 4001)))
    found = fit_pod([card(0)], over, SPREAD)
    assert isinstance(found, Rejection)
    assert found.sentence == "container warm: 0 of 1 cards have 4001 MiB free, 1 needed"


def test_the_first_choice_is_revised_when_it_leaves_no_room_for_the_next_container() -> None:
    cards = [card(0, 8000), card(1, 4000)]
    wanted = pod(("small", Kind.APP, ask(1, 3000)), ("large", Kind.APP, ask(1, 8000)))
    assert uuids(cards, wanted) == {"small": ["dev-1"], "large": ["dev-0"]}


def test_two_containers_that_want_cards_alone_get_different_ones() -> None:
    alone = ask(1, 1000, cores=100)
    wanted = pod(("a", Kind.APP, alone), ("b", Kind.APP, alone))
    assert uuids([card(0), card(1)], wanted, BINPACK) == {"a": ["dev-0"], "b": ["dev-1"]}
    assert isinstance(fit_pod([card(0)], wanted, BINPACK), Rejection)


def test_an_unknown_policy_is_named_with_the_known_ones() -> None:
    with pytest.raises(KeyError, match="spread, binpack"):
        policy("best")
