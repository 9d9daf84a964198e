"""The connector's half on each rank: it carries out loads, and copies between KV blocks and host memory."""
