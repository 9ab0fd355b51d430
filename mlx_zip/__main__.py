"""`python -m mlx_zip` is the `mlx_zip` command."""

import sys

from mlx_zip.cli import main

sys.exit(main())
