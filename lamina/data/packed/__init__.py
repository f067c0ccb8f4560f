"""Token blocks packed once and cached on disk."""
