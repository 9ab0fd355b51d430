"""One step of training: a batch of samples, its losses and their gradients, and the optimizer."""
