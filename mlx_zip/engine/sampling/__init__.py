"""How the next id is chosen: options, penalties over base tokens, canonical ids. `canonical`, `processors` need MLX."""
