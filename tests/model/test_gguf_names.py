"""Which GGUF file of a repository a name stands for."""

from __future__ import annotations

import pytest

from cacheblend_cli.errors import CacheBlendError
from cacheblend_cli.model.hub import HubName, choose

ID = "owner/name"
QWEN = ["README.md", *(f"qwen-{q}.gguf" for q in ("fp16", "iq4_nl", "q4_0", "q4_0_4_4", "q4_k_m", "q8_0"))]
GEMMA = ["mmproj-F16.gguf", "imatrix.gguf", "gemma.Q6_K.gguf", "gemma.UD-Q4_K_XL.gguf", "gemma.Q8_0.gguf"]
LARGE = ["BF16/large-BF16-00001-of-00002.gguf", "BF16/large-BF16-00002-of-00002.gguf", "large-IQ4_XS.gguf"]
TWO = ["a-0.5b-Q4_K_M.gguf", "a-7b-Q4_K_M.gguf"]
OUTSIDE = ["../a-Q4_K_M.gguf", "a/../../b-Q4_K_M.gguf", "/c-Q4_K_M.gguf", "d-Q8_0.gguf"]
OLD = ["ggml-model-Q4_0_4_4.gguf", "ggml-model.gguf"]


@pytest.mark.parametrize(
    ("files", "tag", "file"),
    [
        (QWEN, "", "qwen-q4_k_m.gguf"),
        (QWEN, ":Q8_0", "qwen-q8_0.gguf"),
        (QWEN, "@v1:q4_0", "qwen-q4_0.gguf"),
        (QWEN, ":FP16", "qwen-fp16.gguf"),
        (QWEN, ":qwen-iq4_nl.gguf", "qwen-iq4_nl.gguf"),
        (GEMMA, "", "gemma.Q8_0.gguf"),
        (GEMMA, ":Q4_K_XL", "gemma.UD-Q4_K_XL.gguf"),
        (GEMMA, ":UD-Q4_K_XL", "gemma.UD-Q4_K_XL.gguf"),
        (LARGE, "", "large-IQ4_XS.gguf"),
        (OLD, "", "ggml-model.gguf"),
        (OUTSIDE, "", "d-Q8_0.gguf"),
    ],
)
def test_one_file_is_found(files: list[str], tag: str, file: str) -> None:
    assert choose(HubName.parse(ID + tag), files) == file


@pytest.mark.parametrize(
    ("files", "tag", "code", "hint"),
    [
        (QWEN, ":Q5_K_M", 3, "FP16, IQ4_NL, Q4_0, Q4_K_M, Q8_0"),
        (QWEN, ":Q4_0_4_4", 2, "FP16, IQ4_NL, Q4_0, Q4_K_M, Q8_0"),
        (QWEN, ":qwen-q4_0_4_4.gguf", 2, "Q4_K_M"),
        (QWEN, ":other.gguf", 3, "Q4_K_M"),
        (QWEN, ":README.md", 3, "Q4_K_M"),
        (GEMMA, ":F16", 3, "Q6_K, Q4_K_XL, Q8_0"),
        (LARGE, ":BF16", 2, "IQ4_XS"),
        (TWO, "", 2, f"{ID}:a-0.5b-Q4_K_M.gguf, {ID}:a-7b-Q4_K_M.gguf"),
        (TWO, "@v1:Q4_K_M", 2, f"{ID}@v1:a-0.5b-Q4_K_M.gguf"),
        (["README.md"], ":Q4_K_M", 3, "no GGUF file"),
        (OLD[:1], "", 3, "no GGUF file"),
    ],
)
def test_the_others_are_listed(files: list[str], tag: str, code: int, hint: str) -> None:
    with pytest.raises(CacheBlendError) as refused:
        choose(HubName.parse(ID + tag), files)
    assert refused.value.exit_code == code
    assert hint in (refused.value.hint or "")


@pytest.mark.parametrize("prefix", ["", "hf.co/", "huggingface.co/", "https://huggingface.co/", "hf://"])
def test_names_are_read_as_other_programs_write_them(prefix: str) -> None:
    name = HubName.parse(f"{prefix}{ID}@v1.0:Q4_K_M")
    assert (name.id, name.revision, name.tag) == (ID, "v1.0", "Q4_K_M")


@pytest.mark.parametrize(
    "text", ["", "a/b/c", "a/b@", "a/b:", "a/b:c d", "../a/b", "a/b@../../c", "https://example.org/a/b"]
)
def test_other_texts_are_not_names(text: str) -> None:
    with pytest.raises(CacheBlendError) as refused:
        HubName.parse(text)
    assert refused.value.exit_code == 3
