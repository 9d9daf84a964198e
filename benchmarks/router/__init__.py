"""CPU time of a router per request: kvferry's, and the Rust router of the package `vllm-router`."""
