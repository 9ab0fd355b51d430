"""`mlx_zip prepare`: text to compressed shards, which `mlx_zip train` reads."""
