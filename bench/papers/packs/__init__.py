"""What codebook packs bring and cost: compression, bits per byte, transfer to other texts."""
