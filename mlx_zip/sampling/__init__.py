"""How an id is chosen: options, penalties over base tokens, canonical ids; on MLX `canonical` and `processors`."""
