"""Graphs with memory nodes for test scripts, beside `driver_client`."""

from ctypes import Structure, byref, c_int, c_size_t, c_uint64, c_ulonglong, c_void_p

from driver_client import PoolProperties, cu, ok

AUTO_FREE = 1  # CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH
USED, USED_HIGH, RESERVED, RESERVED_HIGH = range(4)  # CUgraphMem_attribute


class AllocationNode(Structure):
    """CUDA_MEM_ALLOC_NODE_PARAMS of cuda.h."""

    _fields_ = [
        ("pool", PoolProperties),
        ("access", c_void_p),
        ("access_count", c_size_t),
        ("size", c_size_t),
        ("pointer", c_uint64),
    ]


def make_stream() -> c_void_p:
    made = c_void_p()
    ok(cu.cuStreamCreate(byref(made), 1))
    return made


def make_graph() -> c_void_p:
    made = c_void_p()
    ok(cu.cuGraphCreate(byref(made), 0))
    return made


def add_alloc(graph: c_void_p, size: int, where: int = 0) -> int:
    """The address of a new allocation node."""
    node, parameters = c_void_p(), AllocationNode(size=size)
    parameters.pool.type, parameters.pool.location.type, parameters.pool.location.id = 1, 1, where
    ok(cu.cuGraphAddMemAllocNode(byref(node), graph, None, c_size_t(0), byref(parameters)))
    return parameters.pointer


def add_free(graph: c_void_p, pointer: int) -> int:
    node = c_void_p()
    return cu.cuGraphAddMemFreeNode(byref(node), graph, None, c_size_t(0), c_uint64(pointer))


def instance(graph: c_void_p, flags: int = 0) -> c_void_p:
    made = c_void_p()
    ok(cu.cuGraphInstantiateWithFlags(byref(made), graph, c_ulonglong(flags)))
    return made


def taking(size: int, *, keeps: bool = False, where: int = 0) -> c_void_p:
    """An executable graph that allocates, and frees unless it keeps."""
    graph = make_graph()
    pointer = add_alloc(graph, size, where)
    if not keeps:
        ok(add_free(graph, pointer))
    return instance(graph)


def memory(attribute: int, where: int = 0) -> int:
    value = c_uint64()
    ok(cu.cuDeviceGetGraphMemAttribute(c_int(where), attribute, byref(value)))
    return value.value


def reset(attribute: int, where: int = 0) -> int:
    return cu.cuDeviceSetGraphMemAttribute(c_int(where), attribute, byref(c_uint64(0)))


def trim(where: int = 0) -> int:
    return cu.cuDeviceGraphMemTrim(c_int(where))
