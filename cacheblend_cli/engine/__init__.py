"""Running of requests: schedule, load, prefill, decode, sample."""
