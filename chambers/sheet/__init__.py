"""Human evaluation (FedJudge 4.3.3): blinded sheets, and the table of what annotators scored."""
