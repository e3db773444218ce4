"""Build rapidmoe_jax.host_kernels._host, the C++ extension. All other settings are in pyproject.toml."""

from pathlib import Path

import jaxlib
from pybind11.setup_helpers import ParallelCompile, Pybind11Extension
from setuptools import setup

# The extension uses jaxlib's FFI headers. A handler runs on the jaxlib it was built with or a newer one, so an
# isolated build takes the oldest supported jaxlib (build-system.requires in pyproject.toml).
JAXLIB_HEADERS = Path(jaxlib.__file__).parent / "include"
SOURCES = sorted(str(p) for p in Path("host_kernels").glob("*.cc"))
HEADERS = sorted(str(p) for p in Path("host_kernels").glob("*.h"))

ParallelCompile("RAPIDMOE_BUILD_JOBS", default=2).install()
setup(
    ext_modules=[
        Pybind11Extension(
            "rapidmoe_jax.host_kernels._host",
            SOURCES,
            depends=HEADERS,
            include_dirs=["host_kernels", str(JAXLIB_HEADERS)],
            cxx_std=17,
            # -Wno-*uninitialized: false alarms of GCC 12 inside its own AVX-512 intrinsics.
            extra_compile_args=["-O3", "-Wall", "-Wno-maybe-uninitialized", "-Wno-uninitialized"],
        )
    ]
)
