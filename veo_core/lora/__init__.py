"""Low-rank adapters: formats that people have, and their injection beside the base weights."""
