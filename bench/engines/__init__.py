"""The engines that benches time, and their inputs: models with random weights, and texts."""
