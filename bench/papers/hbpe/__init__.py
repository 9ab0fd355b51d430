"""What the hierarchical BPE paper measures, repeated: patches and models over them."""
