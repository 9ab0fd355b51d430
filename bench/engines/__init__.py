"""The engines that benches time, and what they are given: models of random weights, texts."""
