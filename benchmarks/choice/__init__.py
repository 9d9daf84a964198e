"""Compare the policies for choosing a source of KV, on a replayed workload."""
