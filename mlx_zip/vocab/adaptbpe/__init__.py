"""AdaptBPE: a tokenizer's merge list cut down and adapted to a corpus, with the ids it already has."""
