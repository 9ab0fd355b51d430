"""How a step's attention divides the keys of a sequence among programs; read without Triton, also to count launches."""

KEYS = 64  # keys of a round; a program has at least these
PROGRAMS = 1024  # wanted for the largest length: several for each multiprocessor of a large GPU
MOST_PARTS = 64  # of one sequence and key head


def part_count(pairs: int, keys: int) -> int:
    """Returns how many parts the keys of each of `pairs` sequences and key heads are divided into, at most `keys`."""
    return max(1, min(-(-keys // KEYS), PROGRAMS // pairs, MOST_PARTS))
