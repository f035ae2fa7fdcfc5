"""A stand-in for the API server: the Kubernetes wire protocol, with objects in memory."""

from vgpu.standin.apiserver.server import ApiServer
from vgpu.standin.apiserver.store import Store

__all__ = ["ApiServer", "Store"]
