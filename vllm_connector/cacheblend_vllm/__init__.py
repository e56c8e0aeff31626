"""vLLM connector that loads prompts prefilled by `cacheblend serve --decode-url`."""
