"""The smallest CUDA program: what one container sees of its cards, at less cost than `vgpu probe`."""

from typing import Final

from tests.cluster.kubectl import Object

#: A shell command: prints the size of each card in MiB, one line with commas.
SEEN: Final = (
    "python3 -S -c '"
    'import ctypes as c; cuda = c.CDLL("libcuda.so.1"); n = c.c_int(); size = c.c_size_t(); '
    "cuda.cuInit(0); cuda.cuDeviceGetCount(c.byref(n)); "
    'print(*((cuda.cuDeviceTotalMem_v2(c.byref(size), i), size.value >> 20)[1] for i in range(n.value)), sep=",")'
    "'"
)


def last_words(found: Object) -> str:
    """The termination message of the only container of a pod."""
    return str(found["status"]["containerStatuses"][0]["state"]["terminated"].get("message"))
