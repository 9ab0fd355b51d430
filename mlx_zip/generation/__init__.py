"""One request after another in the caller's thread: prompt, decode loop, choice of ids, text."""
