"""Runs `mlx_zip app --window`; this is what mlx_zip.app starts."""

from __future__ import annotations

import runpy
import sys

if __name__ == "__main__":
    sys.argv[1:1] = ["app", "--window"]
    runpy.run_module("mlx_zip", run_name="__main__", alter_sys=True)
