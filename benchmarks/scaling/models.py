"""The shapes of published models, by their label in the tables."""

from __future__ import annotations

from transformers import LlamaConfig, PretrainedConfig, Qwen2Config, Qwen3Config

CONFIGS: dict[str, tuple[str, PretrainedConfig]] = {
    "0.5B": (
        "Qwen/Qwen2.5-0.5B-Instruct",
        Qwen2Config(
            vocab_size=151936,
            hidden_size=896,
            intermediate_size=4864,
            num_hidden_layers=24,
            num_attention_heads=14,
            num_key_value_heads=2,
            tie_word_embeddings=True,
        ),
    ),
    "1.5B": (
        "Qwen/Qwen2.5-1.5B-Instruct",
        Qwen2Config(
            vocab_size=151936,
            hidden_size=1536,
            intermediate_size=8960,
            num_hidden_layers=28,
            num_attention_heads=12,
            num_key_value_heads=2,
            tie_word_embeddings=True,
        ),
    ),
    "7B": (
        "Qwen/Qwen2.5-7B-Instruct",
        Qwen2Config(
            vocab_size=152064,
            hidden_size=3584,
            intermediate_size=18944,
            num_hidden_layers=28,
            num_attention_heads=28,
            num_key_value_heads=4,
            tie_word_embeddings=False,
        ),
    ),
    "Llama-8B": (
        "meta-llama/Llama-3.1-8B-Instruct",
        LlamaConfig(
            vocab_size=128256,
            hidden_size=4096,
            intermediate_size=14336,
            num_hidden_layers=32,
            num_attention_heads=32,
            num_key_value_heads=8,
            tie_word_embeddings=False,
        ),
    ),
    "8B": (
        "Qwen/Qwen3-8B",
        Qwen3Config(
            vocab_size=151936,
            hidden_size=4096,
            intermediate_size=12288,
            num_hidden_layers=36,
            num_attention_heads=32,
            num_key_value_heads=8,
            head_dim=128,
            tie_word_embeddings=False,
        ),
    ),
    "32B": (
        "Qwen/Qwen3-32B",
        Qwen3Config(
            vocab_size=151936,
            hidden_size=5120,
            intermediate_size=25600,
            num_hidden_layers=64,
            num_attention_heads=64,
            num_key_value_heads=8,
            head_dim=128,
            tie_word_embeddings=False,
        ),
    ),
    "70B": (
        "meta-llama/Llama-3.1-70B-Instruct",
        LlamaConfig(
            vocab_size=128256,
            hidden_size=8192,
            intermediate_size=28672,
            num_hidden_layers=80,
            num_attention_heads=64,
            num_key_value_heads=8,
            tie_word_embeddings=False,
        ),
    ),
}
