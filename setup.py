"""Compiles the C parts: libvgpu.so, the simulator's two libraries and the cffi binding (see libvgpu/build.py)."""

import os
import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.build_ext import build_ext

sys.path.insert(0, str(Path(__file__).parent / "libvgpu"))
import build  # libvgpu/build.py


class BuildNative(build_ext):
    """Builds the shared libraries into `vgpu/native/lib` before setuptools compiles the binding.

    VGPU_BUILD=later: not now, where they are built in place; the Makefile does it after the install, and shows what is
    compiled.
    """

    def run(self) -> None:
        in_place = bool(self.inplace or self.editable_mode)
        if os.environ.get("VGPU_BUILD") == "later" and in_place:
            return
        lib = Path("vgpu/native/lib")
        with build.alone():
            # never in a wheel, whatever the environment says: see libvgpu/simulator/runtime_check
            check = in_place and os.environ.get("SIM_RUNTIME_CHECK") == "1"
            build.build_libraries(lib, runtime_check=check)
            super().run()
        if not self.inplace:
            self.copy_tree(str(lib), str(Path(self.build_lib) / lib))


setup(cffi_modules=["libvgpu/build.py:ffibuilder"], cmdclass={"build_ext": BuildNative})
