"""In-memory indexes of the chunks that each tier has, or had recently."""
