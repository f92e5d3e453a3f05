"""The demonstration: three generated institutions, from nothing to results."""
