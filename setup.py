"""The one thing `pyproject.toml` cannot say: which C extension to build."""

from setuptools import setup

setup(cffi_modules=["native/build.py:ffi"])
