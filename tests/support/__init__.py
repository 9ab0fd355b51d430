"""What tests share: tiny models and texts, folders they are kept in, and ways to call the library."""
