"""Text in, packed token blocks out; images in, tensors out."""
