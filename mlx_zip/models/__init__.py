"""Models with a growing vocabulary: mlx-lm's decoder blocks, with an embedding and a head that also use hyper rows."""
