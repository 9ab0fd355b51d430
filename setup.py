"""What `pyproject.toml` cannot say, or only with a warning: which C extension to build, and for which Pythons."""

from setuptools import setup

setup(cffi_modules=["native/build.py:ffi"], options={"bdist_wheel": {"py_limited_api": "cp311"}})
