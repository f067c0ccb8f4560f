"""A corpus packed into token blocks once, and kept on disk."""
