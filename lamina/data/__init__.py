"""Text in, packed token blocks out."""
