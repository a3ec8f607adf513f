from pathlib import Path

from setuptools import Extension, setup

package = Path("src/outrider")
for name in ("engine", "engine_core", "cython_ext", "kernels", "frontend", "models"):
    if not (package / name).is_dir():
        raise SystemExit(f"{package / name} is not a directory: clone with core.symlinks=true")

extensions = [
    Extension(
        f"outrider.{folder}.{source.stem}",
        [str(source)],
        depends=[str(header) for header in sorted(package.glob(f"{folder}/*.h"))],
        extra_compile_args=["-O3", "-g0", "-Wno-psabi"],
    )
    for folder in ("cython_ext", "kernels")
    for source in sorted(package.glob(f"{folder}/*.pyx"))
]
for extension in extensions:
    # kernels/ is a namespace package, whose .pxd files are found from here alone.
    extension.cython_include_dirs = ["src"]

setup(ext_modules=extensions)
