"""Compare transfers for several memory layouts, parallel sizes and strategies."""
