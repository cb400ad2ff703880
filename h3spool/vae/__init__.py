"""The two H3 decoder networks, their tiling and their checkpoints. Imports torch; the rest of h3spool does not."""
