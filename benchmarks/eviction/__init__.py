"""Compare eviction policies with each other, and with a bound on what any policy could save."""
