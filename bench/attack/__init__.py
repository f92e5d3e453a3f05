"""The attack of FL-GLM section 4.3.3 and stronger attacks: ``python -m bench.attack``."""
