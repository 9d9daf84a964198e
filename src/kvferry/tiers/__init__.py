"""Where chunks rest: host memory, files, object storage; what leaves when there is no more room."""
