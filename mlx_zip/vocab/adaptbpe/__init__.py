"""AdaptBPE: shortens a tokenizer's merge list and adapts it to texts; kept tokens get new ids in the old order."""
