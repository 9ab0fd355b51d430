"""Which steps read a hypertoken before its input row is in the table, told from the ids alone."""

from mlx_zip.codec import Codebook
from mlx_zip.models.two_part_step import INPUT_ROWS_TOGETHER


def steps_without_row(model, prompts, emitted):
    """Returns how many of the steps that run ahead must run their body a second time.

    prompts: the ids that each of B sequences has read. emitted [steps][B]: the ids of the steps that follow. Rows are
    encoded together once enough of them are missing; entries that several sequences have share one row.
    """
    books, missing, encoded, found = [], set(), set(), 0
    for prompt in prompts:
        books.append(Codebook(model.config.codec_params))
        missing |= {entry_of(books[-1], slot) for slot in books[-1].push(prompt).slots.tolist()}
        encoded |= {tuple(books[-1].expand([one]).tolist()) for one in prompt if model.layout.is_hyper(one)}
    missing -= encoded
    for ids in emitted:
        if len(missing) >= INPUT_ROWS_TOGETHER:
            encoded, missing = encoded | missing, set()
        without = False
        for book, one in zip(books, ids, strict=True):
            slot = one - model.layout.vocab_size
            installed = slot < len(book)
            new = {entry_of(book, at) for at in book.push(one).slots.tolist()}
            if slot >= 0:
                entry = tuple(book.expand([one]).tolist())
                without |= not installed or entry in missing
                encoded |= {entry}
            missing |= new
        missing -= encoded
        found += without
    return found


def entry_of(book, slot):
    """Returns the base ids of the entry in a slot."""
    base_ids, lengths = book.padded_entries(slot, 1)
    return tuple(base_ids[0, : lengths[0]].tolist())
