"""What the demo says of pods that have not succeeded."""

from pathlib import Path
from typing import Any

import pytest

from vgpu.standin.demo import read_pods, unfinished

RUNNING = {"name": "main", "state": {"running": {"startedAt": "…"}}}
LOOP = {
    "name": "main",
    "state": {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 10s"}},
    "lastState": {"terminated": {"exitCode": 3}},
}
ENDED = {"name": "first", "state": {"terminated": {"exitCode": 137, "reason": "Error"}}}
DONE = {"name": "second", "state": {"terminated": {"exitCode": 0}}}


@pytest.mark.parametrize(
    ("status", "sentence"),
    [
        ({"containerStatuses": [RUNNING]}, "main still runs; the demo waits 45 s for its end"),
        ({"containerStatuses": [LOOP]}, "main: CrashLoopBackOff, back-off 10s, it ended with 3"),
        ({"initContainerStatuses": [DONE], "containerStatuses": [ENDED]}, "first ended with 137"),
        ({"phase": "Pending"}, "none of its containers started within 45 s"),
        ({"phase": "Failed"}, "the cluster reports no reason"),
    ],
)
def test_the_reason_comes_from_the_containers(status: dict[str, Any], sentence: str) -> None:
    assert unfinished({"status": status}) == sentence


def test_no_file_of_pods_is_passed_over(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no \*\.yaml or \*\.yml with a pod"):
        read_pods(tmp_path)
    for name in ("b.yaml", "a.yml", "notes.txt"):
        text = f"kind: Pod\nmetadata: {{name: {name}}}\nspec: {{restartPolicy: Never}}\n"
        (tmp_path / name).write_text(text)
    assert [pod["metadata"]["name"] for pod in read_pods(tmp_path)] == ["a.yml", "b.yaml"]
