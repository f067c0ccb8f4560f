"""The objectives, one file each, found by the heads that a backbone allows."""
