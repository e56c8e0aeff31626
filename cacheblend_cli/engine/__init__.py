"""What runs requests: schedule, load, prefill, decode, sample."""
