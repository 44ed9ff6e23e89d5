"""Where the pass and the op meet a host: Inductor itself, sglang."""
