"""What an engine keeps of ended requests, in memory and on disk, so that a later one reads only what is new."""
