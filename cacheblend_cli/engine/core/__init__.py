"""The loop that generates answers: scheduler, executor, output processor, and the state of requests."""
