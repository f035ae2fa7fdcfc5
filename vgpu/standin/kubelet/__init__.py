"""A stand-in for the kubelet and its container runtime: real gRPC protocols, containers as local processes."""

from vgpu.standin.kubelet.node import Kubelet

__all__ = ["Kubelet"]
