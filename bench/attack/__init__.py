"""The attack of FL-GLM section 4.3.3 and stronger ones: ``python -m bench.attack``."""
