"""Models that cannot be read, by model_type, and why."""

from __future__ import annotations

RECURRENT = (
    "some of its layers are recurrent or linear attention: a state of all tokens before takes the place of K and V, and "
    "composing it is not implemented"
)
LEARNED = "its positions are learned and added to the tokens: K and V cannot be moved to another place"
ENCODER = "it is an encoder: it writes no text"
CROSS = "its decoder attends to an encoder (cross attention), which is not implemented"
ASSISTANT = "it drafts for another model, and attends to that model's K and V: it has none of its own"
SPARSE = (
    "each of its rows attends only to the keys that an indexer picks for it (sparse attention, DSA), which is not implemented: "
    "stored KV would need the indexer's own keys, and a reused row picks by a context that it did not see"
)
LATENT = "it keeps K and V as a latent vector (MLA) in a form that is not implemented"

_TYPES = {
    RECURRENT: """
        qwen3_next qwen3_5 qwen3_5_text qwen3_5_moe qwen3_5_moe_text lfm2 lfm2_moe lfm2_vl falcon_h1 nemotron_h
        granitemoehybrid bamba jamba mamba mamba2 falcon_mamba zamba zamba2 rwkv recurrent_gemma minimax kimi_linear xlstm
        olmo_hybrid bailing_hybrid
    """,
    LEARNED: "gpt2 opt gpt_bigcode gpt_neo openai-gpt xglm biogpt ctrl",
    ENCODER: """
        bert roberta xlm-roberta modernbert deberta deberta-v2 distilbert electra albert camembert nomic_bert mpnet eurobert
        roformer
    """,
    CROSS: "t5 mt5 umt5 bart mbart pegasus marian m2m_100 whisper mllama t5gemma t5gemma2 led longt5 blenderbot bert-generation",
    ASSISTANT: "gemma4_assistant gemma4_unified_assistant",
    SPARSE: "deepseek_v32 glm_moe_dsa",
    LATENT: "kimi_k25 longcat_flash axk1",
}
UNSUPPORTED = {model_type: reason for reason, types in _TYPES.items() for model_type in types.split()}
