"""The demo and the storm as a user starts them: every expectation in them holds, and is able to fail."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from vgpu.workstation import host_memory

EXAMPLES = Path(__file__).parents[2] / "examples"


def demo(*arguments: str, timeout: float = 110) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).with_name("vgpu")), "demo", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)


def test_every_example_gets_what_it_asks_for() -> None:
    done = demo()
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all checks passed" in done.stdout
    for path in EXAMPLES.glob("*.yaml"):
        assert f"{yaml.safe_load(path.read_text())['metadata']['name']}/" in done.stdout
    assert 'vgpu_container_memory_limit_bytes{container="main",pod="share"' in done.stdout


@pytest.mark.skipif(host_memory.read().available < 16_000, reason="half of the cards' memory is that of this machine")
def test_a_pod_has_more_memory_than_the_card_and_finds_what_it_wrote() -> None:
    done = demo("--oversubscribe")
    assert done.returncode == 0, done.stdout + done.stderr
    host = re.findall(r'host_memory_bytes\{container="main",pod="(\w+)",[^ ]* (\S+)', done.stdout)
    assert [pod for pod, _ in host] == ["large"], "and of the other one nothing"
    assert float(host[0][1]) >= (23859 - 14912) * 2**20
    assert re.search(r"large/main .* 23859 MiB +23859 MiB +23859 MiB +granted +refused", done.stdout)


@pytest.mark.skipif(host_memory.read().available < 16_000, reason="half of the cards' memory is that of this machine")
def test_generated_pods_fill_their_slices_of_a_scaled_card() -> None:
    done = demo("--oversubscribe", "--pods", "3")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 of 3 pods succeeded" in done.stdout


def test_a_broken_expectation_is_told_and_ends_with_1(tmp_path: Path) -> None:
    pod = yaml.safe_load((EXAMPLES / "share.yaml").read_text())
    pod["spec"]["containers"][0]["command"] = ["true"]
    (tmp_path / "pod.yaml").write_text(yaml.safe_dump(pod))
    done = demo("--examples", str(tmp_path))
    assert done.returncode == 1
    assert "pod share, main: printed no report" in done.stdout
    assert "a check failed" in done.stdout


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("kind: Deployment\n", "objects of kind Pod only"),
        ("[1, 2]\n", "objects of kind Pod only"),
        ("a: [\n", "not YAML"),
        ("kind: Pod\nmetadata: null\nspec: {}\n", "metadata must be a mapping"),
        ("kind: Pod\nmetadata: {name: a}\nspec: {}\n", "restartPolicy is Always, which is the default: the pod would"),
        ("kind: Pod\nmetadata: {name: a}\nspec: {restartPolicy: Always}\n", "write Never or OnFailure"),
        ("kind: Pod\nmetadata: {name: a}\nspec: {restartPolicy: [1]}\n", "spec.restartPolicy is [1]: the pod would"),
    ],
)
def test_other_objects_are_refused_with_a_sentence(tmp_path: Path, text: str, sentence: str) -> None:
    (tmp_path / "other.yaml").write_text(text)
    done = demo("--examples", str(tmp_path))
    assert done.returncode == 1
    assert sentence in done.stderr
    assert "Traceback" not in done.stdout + done.stderr


def test_a_pod_that_fails_again_and_again_is_told_with_its_exit_code(tmp_path: Path) -> None:
    pod = yaml.safe_load((EXAMPLES / "share.yaml").read_text())
    pod["spec"] |= {"restartPolicy": "OnFailure"}
    pod["spec"]["containers"][0]["command"] = ["sh", "-c", "exit 3"]
    (tmp_path / "pod.yaml").write_text(yaml.safe_dump(pod))
    done = demo("--examples", str(tmp_path))
    assert done.returncode == 1
    assert "pod share is Running: main: CrashLoopBackOff" in done.stdout
    assert "it ended with 3" in done.stdout


def test_denied_and_pending_pods_are_told_with_their_reasons(tmp_path: Path) -> None:
    def pod(name: str, limits: dict[str, object]) -> dict[str, object]:
        container = {"name": "main", "command": ["true"], "resources": {"limits": limits}}
        return {
            "kind": "Pod",
            "metadata": {"name": name},
            "spec": {"containers": [container], "restartPolicy": "Never"},
        }

    pods = [pod("plain", {}), pod("half", {"nvidia.com/gpumem": 1.5}), pod("four", {"nvidia.com/gpu": 4})]
    (tmp_path / "pods.yaml").write_text(yaml.safe_dump_all(pods))
    done = demo("--examples", str(tmp_path))
    assert done.returncode == 1
    assert 'spec.containers[main].resources.limits[nvidia.com/gpumem] is "1500m": must be a whole number' in done.stdout
    assert "pod four is Pending: 0/1 nodes are available" in done.stdout
    assert "plain" not in done.stdout


def test_pods_that_ask_for_no_card_are_told_as_such(tmp_path: Path) -> None:
    container = {"name": "main", "command": ["true"]}
    pod = {"kind": "Pod", "metadata": {"name": "a"}, "spec": {"containers": [container], "restartPolicy": "Never"}}
    (tmp_path / "pod.yaml").write_text(yaml.safe_dump(pod))
    done = demo("--examples", str(tmp_path))
    assert done.returncode == 1
    assert "no container of these pods asks for nvidia.com/gpu: nothing to compare" in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_nothing_is_given_twice_while_agent_and_scheduler_are_killed() -> None:
    done = demo("--pods", "50", "--kills", "20", "--seed", "7", timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "50 of 50 pods succeeded" in done.stdout
