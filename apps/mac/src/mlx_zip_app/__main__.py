"""Runs `mlx_zip app --window`. Opening mlx_zip.app runs this module."""

from __future__ import annotations

import runpy
import sys

if __name__ == "__main__":
    sys.argv[1:1] = ["app", "--window"]
    runpy.run_module("mlx_zip", run_name="__main__", alter_sys=True)
