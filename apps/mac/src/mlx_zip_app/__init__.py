"""The program inside mlx_zip.app."""
