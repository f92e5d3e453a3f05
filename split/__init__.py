"""Split learning (FL-GLM), knowing nothing of Flower."""
