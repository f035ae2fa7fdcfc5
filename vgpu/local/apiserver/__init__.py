"""A stand-in for the API server: the Kubernetes wire protocol, with objects in memory."""

from vgpu.local.apiserver.server import ApiServer
from vgpu.local.apiserver.store import Store

__all__ = ["ApiServer", "Store"]
