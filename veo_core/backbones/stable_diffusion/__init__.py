"""Stable Diffusion 1.5 and SDXL through diffusers: files to models, prompts, style sites, and the backbone."""
