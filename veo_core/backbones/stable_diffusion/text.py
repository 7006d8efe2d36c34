"""Prompts to what the UNet reads, by the checkpoint's own text encoders."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor, nn

from ...style.prompts import weighted_parts

CHUNK = 75


@dataclass(frozen=True)
class TextEmbedding:
    """A prompt as the UNet reads it.

    Attributes:
        tokens: ``[1, 77 k, D]``. pooled: ``[1, P]``, for SDXL.
        image: tokens of style pictures ``[1, n, D]`` where an IP-Adapter gives them.
    """

    tokens: Tensor
    pooled: Tensor | None = None
    image: Tensor | None = None

    @staticmethod
    def mix(parts: list[tuple[TextEmbedding, float]]) -> TextEmbedding:
        """Embeddings in shares that sum to 1; shorter ones are repeated to the longest."""
        if len(parts) == 1:
            return parts[0][0]
        together = TextEmbedding.batch([e for e, _ in parts])
        shares = torch.tensor([share for _, share in parts], device=together.tokens.device)
        tokens = torch.einsum("b,bnd->nd", shares.to(together.tokens), together.tokens)[None]
        pooled = None if together.pooled is None else (shares.to(together.pooled) @ together.pooled)[None]
        return TextEmbedding(tokens, pooled)

    @staticmethod
    def batch(entries: list[TextEmbedding]) -> TextEmbedding:
        """One embedding an entry of a batch ``[B, ...]``; shorter ones are repeated to the longest."""
        longest = max(e.tokens.shape[1] for e in entries)
        tokens = torch.cat([e.tokens.repeat(1, -(-longest // e.tokens.shape[1]), 1)[:, :longest] for e in entries])
        pooled = None if entries[0].pooled is None else torch.cat([e.pooled for e in entries])
        image = None if entries[0].image is None else torch.cat([e.image for e in entries])
        return TextEmbedding(tokens, pooled, image)


@cache
def _tokenizer():
    """open_clip's byte-pair encoder; its vocabulary, which comes with that package, is the one of Stable Diffusion."""
    from open_clip.tokenizer import SimpleTokenizer

    return SimpleTokenizer()


def tokenise(text: str, padding: int) -> tuple[Tensor, Tensor]:
    """Token ids and weights in chunks of 77: start, 75 words, end.

    Args:
        text: with weights in brackets.
        padding: id after the end.

    Returns:
        int64 and float32 ``[k, 77]``.
    """
    tokenizer = _tokenizer()
    begin, end = (tokenizer.encoder[t] for t in ("<start_of_text>", "<end_of_text>"))
    words = [(i, weight) for part, weight in weighted_parts(text) for i in tokenizer.encode(part)]
    rows = []
    for first in range(0, max(1, len(words)), CHUNK):
        piece = words[first : first + CHUNK]
        row = [(begin, 1.0), *piece, (end, 1.0)]
        rows.append(row + [(padding, 1.0)] * (CHUNK + 2 - len(row)))
    ids, weights = (torch.tensor([[pair[i] for pair in row] for row in rows]) for i in (0, 1))
    return ids, weights.float()


class TextEncoders(nn.Module):
    """The text encoders of a checkpoint: CLIP ViT-L for SD 1.5, with OpenCLIP ViT-bigG beside it for SDXL.

    Args:
        models: transformers' CLIPTextModel, and for SDXL CLIPTextModelWithProjection.
        skip: hidden layers left out at the end: 0 for SD 1.5, 1 for SDXL.
    """

    def __init__(self, models: list[nn.Module], skip: int):
        super().__init__()
        self.models, self.skip = nn.ModuleList(models), skip

    @torch.no_grad()
    def encode(self, text: str) -> TextEmbedding:
        """A prompt of any length; what is beyond 75 tokens goes into further chunks."""
        tokens, pooled = [], None
        for i, model in enumerate(self.models):
            # SDXL's second tokeniser pads with zeros, the others with the end token.
            padding = 0 if i else _tokenizer().encoder["<end_of_text>"]
            ids, weights = tokenise(text, padding)
            hidden, pooled = self._hidden(model, ids)
            if (weights != 1).any():
                empty, _ = self._hidden(model, tokenise("", padding)[0])
                hidden = torch.lerp(empty, hidden, weights[..., None].to(hidden))
            tokens.append(hidden.flatten(0, 1)[None])
        return TextEmbedding(torch.cat(tokens, -1), pooled)

    def _hidden(self, model: nn.Module, ids: Tensor) -> tuple[Tensor, Tensor | None]:
        device = next(model.parameters()).device
        out = model(ids.to(device), output_hidden_states=True)
        pooled = out.text_embeds[:1] if "text_embeds" in out else None
        return out.hidden_states[-1 - self.skip] if self.skip else out.last_hidden_state, pooled
