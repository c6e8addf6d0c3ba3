"""The words that options of a few words can have."""

from __future__ import annotations

from typing import Literal, get_args

Normalization = Literal["LayerNorm", "RMSNorm"]
PositionEmbedding = Literal["learned_absolute", "rope", "none"]
DecayStyle = Literal["linear", "cosine", "constant", "WSD"]
WsdDecayStyle = Literal["exponential", "linear", "cosine", "minus_sqrt"]
Device = Literal["auto", "cpu", "cuda"]
TokenizerType = Literal["ByteTokenizer", "HuggingFaceTokenizer"]

NORMALIZATIONS: tuple[str, ...] = get_args(Normalization)
POSITION_EMBEDDINGS: tuple[str, ...] = get_args(PositionEmbedding)
DECAY_STYLES: tuple[str, ...] = get_args(DecayStyle)
WSD_DECAY_STYLES: tuple[str, ...] = get_args(WsdDecayStyle)
DEVICES: tuple[str, ...] = get_args(Device)
TOKENIZER_TYPES: tuple[str, ...] = get_args(TokenizerType)
