"""Sessions: caches of ended requests, kept in memory and on disk, so that a later request reads only what is new."""
