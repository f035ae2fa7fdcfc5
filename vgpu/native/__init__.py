"""Regions for the agent, `vgpu run` and tests: limits and usage of one container, through the C code of libvgpu.

Importing this package needs nothing compiled; the first region does (see binding.py).
"""

from vgpu.native.region import CardLimit, CardUsage, Limits, ProcessUsage, Region, Usage

__all__ = ["CardLimit", "CardUsage", "Limits", "ProcessUsage", "Region", "Usage"]
