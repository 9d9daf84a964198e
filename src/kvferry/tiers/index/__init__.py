"""Which chunks each tier has, and which it lost lately, answered from memory."""
