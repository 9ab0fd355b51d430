"""AdaptBPE: cuts a tokenizer's merge list down and adapts it to texts; the tokens that are kept keep their ids."""
